"""The errors of a call that the ranks make together."""


class CollectiveError(RuntimeError):
    """Ranks made calls that do not belong together; raised alike on every rank, before anything was written."""


class CollectiveTimeout(CollectiveError):
    """A collective waited too long, or torch's failed; its communicator cannot be used any more."""

"""The errors of a call that the ranks make together."""

FORKED = (
    "this process was forked from a rank and is no rank: only the rank itself communicates. Pass NumPy arrays to the "
    "process, or start it before {}"
)


class CollectiveError(RuntimeError):
    """Ranks made calls that do not belong together; raised alike on every rank, before anything was written."""


class CollectiveTimeout(CollectiveError):
    """A collective waited too long, or torch's failed; its communicator cannot be used any more."""

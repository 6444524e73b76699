"""The errors of a call that the ranks make together, how an error gets to another rank, and ranks in messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from pce_mpi.text import grouped

Error = TypeVar("Error", bound=Exception)

FORKED = (
    "this process was forked from a rank and is no rank: only the rank itself communicates. Pass NumPy arrays to the "
    "process, or start it before {}"
)


class CollectiveError(RuntimeError):
    """Ranks made calls that do not belong together; raised alike on every rank, before anything was written."""

    __module__ = "pce_mpi"  # the name that users import it by, in tracebacks and pickles


class CollectiveTimeout(CollectiveError):
    """A collective waited too long, or torch's failed; its communicator cannot be used any more."""

    __module__ = "pce_mpi"


_RAISED: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(IndexError, TypeError, ValueError, MemoryError, NotImplementedError, OverflowError, CollectiveError),
        *(OSError, FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError),
        *(ImportError, RuntimeError),
    )
}


def kind_of(error: BaseException) -> str:
    """Name the nearest type of `error` that every rank can raise."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _RAISED), "RuntimeError")


def text_of(error: BaseException) -> str:
    """Return `str(error)`, after the name of its type if no rank can raise that one.

    It is the name alone if `str` raises: the other ranks wait for a text.
    """
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        return name
    is_raised = any(kind.__name__ in _RAISED for kind in type(error).__mro__)
    return text if is_raised else f"{name}: {text}" if text else name


def error_of(kind: str, text: str) -> Exception:
    """Return the error that another rank has told."""
    return _RAISED[kind](text)


def named(error: Error) -> Error:
    """Return `error`, marked as one whose text names the ranks that have found it."""
    vars(error)["names_ranks"] = True
    return error


def agreed(error: Error, ranks: int) -> Error:
    """Return `error`, marked as one that so many ranks raise together."""
    vars(error)["ranks"] = ranks
    return error


def names_ranks(error: BaseException) -> bool:
    """Tell whether the text of `error` names the ranks that have found it."""
    return "names_ranks" in vars(error)


class RanksAlong(str):
    """The dims of a mesh as the name of a communicator, with the number in COMM_WORLD of each of its ranks."""

    __slots__ = ("world_rank",)

    def __new__(cls, dims: str, world_rank: Callable[[int], int]) -> RanksAlong:
        """Make the name of the communicator along `dims`."""
        over = super().__new__(cls, dims)
        over.world_rank = world_rank
        return over

    world_rank: Callable[[int], int]

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """A copy is the text alone."""
        return str, (str(self),)


def text_by_rank(values: Mapping[int, str], over: str = "comm", between: str = ", ") -> str:
    """Return `values` by rank of the communicator `over` as text, equal ones together: 'a (ranks 0, 2), b (rank 1)'."""
    ranks = grouped((value, rank) for rank, value in values.items())
    return between.join(f"{value} ({ranks_text(who, over)})" for value, who in ranks.items())


def ranks_text(ranks: Sequence[int], over: str = "comm") -> str:
    """Name `ranks` of `over`: 'ranks 0, 2', 'rank 1 of batch_comm', or as ranks of COMM_WORLD 'rank 3 along data'."""
    where = {"comm": "", "batch_comm": " of batch_comm"}.get(over, f" along {over}")
    names: Iterable[int] = map(over.world_rank, ranks) if isinstance(over, RanksAlong) else ranks
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, names))}{where}"

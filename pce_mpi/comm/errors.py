"""The errors of a call that the ranks make together, how an error gets to another rank, and ranks in messages."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
import sys
from typing import Any, TypeVar

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


def _is_made_from_text(kind: Any) -> bool:
    is_error = isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception
    if not is_error or issubclass(kind, Warning | StopIteration | StopAsyncIteration):
        return False
    with suppress(TypeError):
        return isinstance(kind("text"), kind)
    return False


# The builtin errors that are made from a text, and our own.
_RAISED: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (*filter(_is_made_from_text, vars(builtins).values()), CollectiveError, CollectiveTimeout)
}


def kind_of(error: BaseException) -> str:
    """Name the nearest type of `error` that every rank can raise."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _RAISED), "RuntimeError")


def text_of(error: BaseException) -> str:
    """Return `str(error)`, after the name of its type if no rank can raise that one.

    It is the name alone if `str` raises: the other ranks wait for a text.
    """
    name, text = type(error).__name__, _str(error)
    if text is None:
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


def agreed(error: Error, peers: object, ranks: int, before: BaseException | None = None) -> Error:
    """Return `error`, marked as one that so many ranks of `peers` raise together, after an agreement of others."""
    earlier = vars(before).get("agreed", {}) if before else {}
    vars(error)["agreed"] = {**earlier, peers: max(ranks, earlier.get(peers, 0))}
    return error


def names_ranks(error: BaseException) -> bool:
    """Tell whether the text of `error` names the ranks that have found it."""
    return "names_ranks" in vars(error)


# The classes of an error, the nearest first, by module and name, and its text.
Described = tuple[list[str], str]

# Longer messages might not be sent without waiting.
_MOST_CHARACTERS = 1000


def described(error: BaseException, over: str, rank: int) -> Described:
    """Describe an error for other ranks, in a text that names the rank of `over` that has raised it."""
    text = (_str(error) or "")[:_MOST_CHARACTERS]
    if not isinstance(error, Exception):
        name = type(error).__name__
        return [], text_by_rank({rank: f"{name}: {text}" if text else name}, over)
    kinds = (kind for kind in type(error).__mro__ if issubclass(kind, Exception))
    names = [f"{kind.__module__}:{kind.__qualname__}" for kind in kinds]
    return names, text if names_ranks(error) else text_by_rank({rank: text}, over).lstrip()


def remade(names: Sequence[str], text: str, origin: int | None = None, first: int = 0) -> Exception:
    """Make the error that a rank has described, or one of the nearest class that can be made from a text here.

    `origin` is the rank in COMM_WORLD that it was heard from, and `first` the first of `names` that may be taken.
    """
    error: Exception = CollectiveError(text)
    for index, name in enumerate(names[first:], first):
        with suppress(Exception):  # of modules that make their names as they are asked for, and of classes
            if (kind := _class_of(name)) is not None:
                error = kind(text if index == 0 else f"{names[0].rpartition(':')[2].rpartition('.')[2]}: {text}")
                vars(error)["class_index"] = index
                break
    if origin is not None:
        vars(error)["origin"] = origin
    return named(error)


def _class_of(name: str) -> type[Exception] | None:
    module, _, path = name.partition(":")
    kind: Any = sys.modules.get(module)
    for part in path.split("."):
        kind = getattr(kind, part, None)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else None


def _str(error: BaseException) -> str | None:
    """Return `str(error)`; None if that raises: other ranks wait for a text."""
    try:
        return str(error)
    except Exception:
        return None


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

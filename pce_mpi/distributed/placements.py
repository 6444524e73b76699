"""Placements, and how a length is split into balanced blocks.

A placement says, for one dim of a mesh, how the ranks along that dim hold a global array. Placements are frozen values:
compare them, hash them, print them. They know nothing of arrays or communicators.
"""

from dataclasses import dataclass
import operator
from typing import Literal, get_args

ReduceOperator = Literal["sum", "avg", "max", "min"]
_OPERATORS = get_args(ReduceOperator)


@dataclass(frozen=True, repr=False)
class Shard:
    """Each rank along the dim holds one block of an axis of the global array.

    Parameters
    ----------
    axis : int
        An axis of the array, counted from 0, or from the end if it is negative.
    """

    axis: int

    def __post_init__(self) -> None:
        if not isinstance(self.axis, int) or isinstance(self.axis, bool):
            raise TypeError(f"the axis of Shard must be an int, got {self.axis!r}")

    def __repr__(self) -> str:
        return f"Shard({self.axis})"


@dataclass(frozen=True, repr=False)
class Replicate:
    """Each rank along the dim holds the whole array, the same bits everywhere."""

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, repr=False)
class Partial:
    """Each rank along the dim holds a partial array of the global shape; the global array is their reduction.

    Parameters
    ----------
    operator : {"sum", "avg", "max", "min"}
        The reduction.
    """

    operator: ReduceOperator = "sum"

    def __post_init__(self) -> None:
        if not isinstance(self.operator, str) or self.operator not in _OPERATORS:
            raise ValueError(f"Partial takes one of {_OPERATORS}, got {self.operator!r}")

    def __repr__(self) -> str:
        return f"Partial({self.operator!r})"


Placement = Shard | Replicate | Partial


def shard_range(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return the range of block `index` when `length` items are split into `parts` balanced blocks.

    Blocks differ by at most one item and the longer ones come first, as in `numpy.array_split`. With more parts than
    items the last blocks are empty.

    Parameters
    ----------
    length : int
        The number of items, at least 0.
    parts : int
        The number of blocks, at least 1.
    index : int
        The block, in [0, parts).

    Returns
    -------
    tuple of int
        The half-open range [start, stop).

    Raises
    ------
    TypeError
        If an argument is no integer.
    ValueError
        If an argument is out of range.

    Notes
    -----
    Communicates nothing.

    Examples
    --------
    >>> [shard_range(10, 4, index) for index in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    >>> [shard_range(2, 3, index) for index in range(3)]
    [(0, 1), (1, 2), (2, 2)]
    """
    try:
        length, parts, index = map(operator.index, (length, parts, index))
    except TypeError:
        raise TypeError(f"shard_range takes three integers, got {length!r}, {parts!r}, {index!r}") from None
    if length < 0 or parts < 1 or not 0 <= index < parts:
        raise ValueError(
            f"shard_range needs length >= 0, parts >= 1 and 0 <= index < parts, got {length}, {parts}, {index}"
        )
    quotient, longer = divmod(length, parts)
    start = index * quotient + min(index, longer)
    return start, start + quotient + (index < longer)

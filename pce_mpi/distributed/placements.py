"""Placements, the sizes of dims, and how a length is split into balanced blocks.

A placement says, for one dim of a mesh, how the ranks along that dim hold a global array. Placements are frozen values:
compare them, hash them, print them. They know nothing of arrays or communicators.
"""

from collections.abc import Mapping
from dataclasses import dataclass
import math
import operator
from typing import Literal, get_args

from pce_mpi.validation import integer

ReduceOperator = Literal["sum", "avg", "max", "min"]
_OPERATORS = get_args(ReduceOperator)
# The other named arguments of functions that take placements by dim.
_TAKEN = ("dtype", "high", "loc", "low", "requires_grad", "scale", "seed", "shape", "src_rank", "xp")


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
Placements = Mapping[str, Placement]


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


def checked_dims(dims: Mapping[str, int], ranks: int | None = None) -> dict[str, int]:
    """Return the sizes of the dims of a mesh, as int; their product must be `ranks` if that is given."""
    if not dims:
        raise ValueError("a mesh needs at least one dim, such as data=2")
    sizes = {}
    for dim, size in dims.items():
        if dim in _TAKEN:
            raise ValueError(f"a dim of a mesh cannot be called {dim!r}: functions take an argument of that name")
        sizes[dim] = integer(size, f"the size of dim {dim!r}")
        if sizes[dim] < 1:
            raise ValueError(f"the size of dim {dim!r} must be at least 1, got {size}")
    product = math.prod(sizes.values())
    if ranks is not None and product != ranks:
        named = ", ".join(f"{dim}={size}" for dim, size in sizes.items())
        count = f"{' * '.join(map(str, sizes.values()))} = {product}" if len(sizes) > 1 else f"{product}"
        raise ValueError(
            f"a mesh with {named} has {count} ranks, but comm.size is {ranks}: "
            f"give other sizes, or start {product} ranks"
        )
    return sizes

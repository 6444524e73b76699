"""Operations that move elements and compute nothing: reshape, transpose, join and cut.

They are linear, and even what is Partial of "max" or "min" passes through them unharmed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
import math
import operator
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace
from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.op import Op, Shardings
from pce_mpi.autograd.rules import Axes, Axis, Rule
from pce_mpi.distributed.array import DistArray

__all__ = ["concatenate", "getitem", "normalized_axis", "reshape", "split", "swapaxes", "transpose", "whole_numbers"]

Array = Any  # numpy.ndarray or cupy.ndarray
Shape = tuple[int, ...]


def normalized_axis(axis: Any, ndim: int) -> int:
    """`axis`, counted from the front; `ValueError` if there is none like it."""
    index = operator.index(axis)
    if not -ndim <= index < ndim:
        raise ValueError(f"axis {index} is out of bounds for an array of {ndim} dimensions")
    return index % ndim


def whole_numbers(value: Any) -> list[int]:
    """The numbers in a sequence or an array of one axis; a number alone."""
    return [operator.index(each) for each in (value if np.ndim(value) else (value,))]


# ------------------------------------------------------------------------------------------------------- reshape


def _reshape_rule(before: Shape, shape: Shape) -> Rule:
    """The first axis of each group of axes that become one another keeps its shards, if they end where rows end."""
    operand: list[Axis | None] = [None] * len(before)
    result: list[Axis | None] = [None] * len(shape)
    for label, (mine, theirs) in enumerate(_groups(before, shape)):
        operand[mine[0]] = Axis(label, math.prod(before[axis] for axis in mine[1:]))
        result[theirs[0]] = Axis(label, math.prod(shape[axis] for axis in theirs[1:]))
    return Rule((tuple(operand),), tuple(result), shape, linear=((0,),), moves_data=True)


def _groups(before: Shape, after: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Axes of `before` and of `after` with the same elements, as few as possible; those of length 1 are left out."""
    if 0 in before:
        return
    waiting = [axis for axis, length in enumerate(after) if length != 1]
    mine: list[int] = []
    theirs: list[int] = []
    for axis in (axis for axis, length in enumerate(before) if length != 1):
        mine.append(axis)
        size = math.prod(before[each] for each in mine)
        while waiting and math.prod(after[each] for each in theirs) < size:
            theirs.append(waiting.pop(0))
        if math.prod(after[each] for each in theirs) == size:
            yield mine, theirs
            mine, theirs = [], []


def _reshape(x: Array, shape: Shape, shardings: Shardings) -> Array:
    return x.reshape(shardings.shape)


_RESHAPE = Op(
    "reshape",
    _reshape,
    (lambda g, y, x, shape: reshape(g, x.shape),),
    _reshape_rule,
    uses=[()],
    takes_shardings=True,
    relays=True,
)


def reshape(x: DistArray, shape: int | Sequence[int]) -> DistArray:
    """The same elements in C order, in `shape`, in which one length may be -1.

    A sharded axis stays where it is if it leads a group of axes that are merged, or if each shard has whole rows of
    those that it is split into. Otherwise the array is redistributed first. What is Partial, of "max" and "min" too,
    stays so. Lengths are those of the global array; `ValueError` if `shape` has another number of elements.

    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.arange(6.0), mesh, data=pce.Shard(0))
    >>> y = pce.reshape(x, (3, -1))
    >>> y.shape, y.placements
    ((3, 2), {'data': Shard(0)})
    """
    lengths = whole_numbers(shape)
    if lengths.count(-1) == 1:
        rest = -math.prod(lengths)
        lengths[lengths.index(-1)] = x.size // rest if rest else 0
    if any(length < 0 for length in lengths) or math.prod(lengths) != x.size:
        raise ValueError(f"cannot reshape {x.shape} to {tuple(whole_numbers(shape))}")
    return apply(_RESHAPE, x, shape=tuple(lengths))


# ----------------------------------------------------------------------------------------------------- transpose


def _transpose_rule(before: Shape, axes: tuple[int, ...]) -> Rule:
    labels = tuple(Axis(axis) for axis in range(len(before)))
    after = tuple(labels[axis] for axis in axes)
    return Rule((labels,), after, tuple(before[axis] for axis in axes), linear=((0,),), moves_data=True)


_TRANSPOSE = Op(
    "transpose",
    lambda x, axes: x.transpose(axes),
    (lambda g, y, x, axes: transpose(g, sorted(range(len(axes)), key=axes.__getitem__)),),
    _transpose_rule,
    uses=[()],
    relays=True,
    views=True,
)


def transpose(x: DistArray, axes: Sequence[int] | None = None) -> DistArray:
    """The axes of `x` in another order; reversed, if none is given.

    Shards go where their axis goes, what is Partial stays so, and nothing is sent. `ValueError` unless `axes` names
    each axis once.
    """
    order = range(x.ndim)[::-1] if axes is None else [normalized_axis(axis, x.ndim) for axis in axes]
    if sorted(order) != list(range(x.ndim)):
        raise ValueError(f"axes must name each of the {x.ndim} axes once, got {axes}")
    return apply(_TRANSPOSE, x, axes=tuple(order))


def swapaxes(x: DistArray, axis1: int, axis2: int) -> DistArray:
    """`x` with two axes in each other's place; placement as in `transpose`. `ValueError` for axes that do not exist."""
    order = list(range(x.ndim))
    one, other = normalized_axis(axis1, x.ndim), normalized_axis(axis2, x.ndim)
    order[one], order[other] = other, one
    return transpose(x, order)


# -------------------------------------------------------------------------------------------------- cut and join

Range = tuple[int, int, int]  # start, stop and step, as `range` takes them


def _sliced_axes(shape: Shape, ranges: tuple[Range, ...]) -> Axes:
    """What is cut must not be sharded; all other axes may be."""
    return tuple(
        Axis(axis) if part == (0, length, 1) else None
        for axis, (length, part) in enumerate(zip(shape, ranges, strict=True))
    )


def _slices(x: Sequence[int], ranges: tuple[Range, ...], whole: Shape) -> tuple[slice, ...]:
    """`ranges` as local slices: what is not cut may be sharded, and is all there is here."""
    return tuple(
        slice(None) if part == (0, length, 1) else slice(part[0], None if part[1] < 0 else part[1], part[2])
        for length, part in zip(whole, ranges, strict=True)
    )


def _slice_rule(shape: Shape, ranges: tuple[Range, ...]) -> Rule:
    axes = _sliced_axes(shape, ranges)
    return Rule((axes,), axes, tuple(len(range(*part)) for part in ranges), linear=((0,),), moves_data=True)


def _slice(x: Array, ranges: tuple[Range, ...], shardings: Shardings) -> Array:
    return x[_slices(x.shape, ranges, shardings.operands[0].shape)]


def _fill_rule(shape: Shape, ranges: tuple[Range, ...], whole: Shape) -> Rule:
    axes = _sliced_axes(whole, ranges)
    return Rule((axes,), axes, whole, linear=((0,),))


def _fill(x: Array, ranges: tuple[Range, ...], whole: Shape, shardings: Shardings) -> Array:
    filled = array_namespace(x).zeros(shardings.shape, x.dtype)
    filled[_slices(filled.shape, ranges, whole)] = x
    return filled


_FILL = Op("slice", _fill, rule=_fill_rule, takes_shardings=True)
_SLICE = Op(
    "slice",
    _slice,
    (lambda g, y, x, ranges: apply(_FILL, g, ranges=ranges, whole=x.shape),),
    _slice_rule,
    uses=[()],
    takes_shardings=True,
    views=True,
)


def getitem(x: DistArray, index: Any) -> DistArray:
    """`x[index]` for whole numbers, slices, `...` and None: what operator [] of a `DistArray` does.

    An axis that is left whole stays sharded; one that is cut is redistributed first. What is Partial stays so. The
    gradient is 0 elsewhere. Raises `IndexError` for indices out of bounds or too many, `TypeError` for other indices:
    True and False among them, which are masks in NumPy.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    for entry in entries:
        if isinstance(entry, bool):  # which counts as a whole number
            raise _no_index(entry)
    if sum(entry is Ellipsis for entry in entries) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    given = sum(entry is not None and entry is not Ellipsis for entry in entries)
    rest = [slice(None)] * (x.ndim - given)
    if given > x.ndim:
        raise IndexError(f"{given} indices are too many for an array of {x.ndim} dimensions")
    where = next((i for i, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    entries[where : where + 1] = rest
    ranges: list[Range] = []
    shape: list[int] = []
    for entry in entries:
        if entry is None:
            shape.append(1)
            continue
        axis = len(ranges)
        length = x.shape[axis]
        if isinstance(entry, slice):
            part = entry.indices(length)
            # Of all ranges without elements this one means the same as a slice.
            ranges.append(part if range(*part) else (0, 0, 1))
            shape.append(len(range(*ranges[-1])))
            continue
        try:
            position = operator.index(entry)
        except TypeError:
            raise _no_index(entry) from None
        if not -length <= position < length:
            raise IndexError(f"index {position} is out of bounds for axis {axis} of length {length}")
        ranges.append((position % length, position % length + 1, 1))
    found = apply(_SLICE, x, ranges=tuple(ranges))
    return found if found.shape == tuple(shape) else reshape(found, shape)


def _no_index(entry: Any) -> TypeError:
    return TypeError(
        f"an index is whole numbers, slices, ... and None, got {entry!r}; "
        "to pick elements use where, to pick rows embedding"
    )


def split(x: DistArray, indices_or_sections: int | Sequence[int], axis: int = 0) -> list[DistArray]:
    """`x` cut along `axis`: into so many equal parts, or at the given indices.

    Other axes stay sharded; along a sharded axis the array is redistributed first. What is Partial stays so.
    `ValueError` for an axis that does not exist or cannot be cut into so many.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.arange(6.0), mesh, data=pce.Shard(0))
    >>> [part.full() for part in pce.split(x, [1, 4])]
    [array([0.]), array([1., 2., 3.]), array([4., 5.])]
    """
    axis = normalized_axis(axis, x.ndim)
    length = x.shape[axis]
    if np.ndim(indices_or_sections):
        ends = [0, *whole_numbers(indices_or_sections), length]
    else:
        (sections,) = whole_numbers(indices_or_sections)
        if sections < 1 or length % sections:
            raise ValueError(f"an axis of length {length} has no {sections} equal parts")
        ends = [index * length // sections for index in range(sections + 1)]
    before = (slice(None),) * axis
    return [getitem(x, (*before, slice(start, stop))) for start, stop in pairwise(ends)]


def _concatenate_rule(*shapes: Shape, axis: int) -> Rule:
    axes = tuple(None if index == axis else Axis(index) for index in range(len(shapes[0])))
    length = sum(shape[axis] for shape in shapes)
    shape = (*shapes[0][:axis], length, *shapes[0][axis + 1 :])
    together = tuple(range(len(shapes)))
    return Rule((axes,) * len(shapes), axes, shape, linear=(together,), moves_data=True)


@cache
def _concatenate_op(count: int) -> Op:
    def vjp_of(index: int) -> Any:
        def vjp(g: DistArray, y: DistArray, *arrays: DistArray, axis: int) -> DistArray:
            start = sum(array.shape[axis] for array in arrays[:index])
            return getitem(g, ((slice(None),) * axis) + (slice(start, start + arrays[index].shape[axis]),))

        return vjp

    return Op(
        "concatenate",
        lambda *arrays, axis: array_namespace(arrays[0]).concatenate(arrays, axis),
        [vjp_of(index) for index in range(count)],
        _concatenate_rule,
        uses=[()] * count,
    )


def concatenate(arrays: Sequence[Any], axis: int | None = 0) -> DistArray:
    """`arrays` one behind the other along `axis`, their other lengths being the same; None: all elements of each.

    Dtypes promote as NumPy's do; plain arrays are Replicate. Other axes stay sharded; what is sharded along `axis` is
    redistributed first. Linear in all together: Partial beside Partial of its kind, or Replicate, is Partial.

    Raises `ValueError` for no arrays, for shapes that differ beyond `axis` and for an axis that does not exist,
    `TypeError` if none is a `DistArray`.

    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.zeros((2, 1)), mesh, data=pce.Shard(0))
    >>> y = pce.concatenate([x, np.ones((2, 1))], axis=1)
    >>> y.placements, y.full()
    ({'data': Shard(0)}, array([[0., 1.],
           [0., 1.]]))
    """
    if axis is None:
        return concatenate([reshape(each, -1) if isinstance(each, DistArray) else np.ravel(each) for each in arrays])
    shapes = [array.shape if hasattr(array, "shape") else np.shape(array) for array in arrays]
    if not shapes:
        raise ValueError("concatenate takes at least one array")
    axis = normalized_axis(axis, len(shapes[0]))
    for shape in shapes:
        if len(shape) != len(shapes[0]) or any(
            length != first for index, (length, first) in enumerate(zip(shape, shapes[0], strict=True)) if index != axis
        ):
            raise ValueError(f"shapes to concatenate differ beyond axis {axis}: {', '.join(map(str, shapes))}")
    return apply(_concatenate_op(len(shapes)), *arrays, axis=axis)

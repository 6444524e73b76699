"""Operations that pick parts of an array, or put parts together: getitem, split and concatenate.

They are linear, and keep Partial "max" and "min" as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
import operator
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace
from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.op import Op, Shardings
from pce_mpi.autograd.rules import Axes, Axis, Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.ops.shape import normalized_axis, reshape, whole_numbers

Array = Any  # numpy.ndarray or cupy.ndarray
Shape = tuple[int, ...]
Range = tuple[int, int, int]  # start, stop and step, as `range` takes them


def _sliced_axes(shape: Shape, ranges: tuple[Range, ...]) -> Axes:
    """Label the axes that are left whole; the others must not be sharded."""
    return tuple(
        Axis(axis) if part == (0, length, 1) else None
        for axis, (length, part) in enumerate(zip(shape, ranges, strict=True))
    )


def _slices(x: Sequence[int], ranges: tuple[Range, ...], whole: Shape) -> tuple[slice, ...]:
    """Return `ranges` as local slices; an axis that is left whole may be sharded, and all of the shard is meant."""
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
    """Return `x[index]` for whole numbers, slices, `...` and None; the gradient is 0 elsewhere.

    An axis that is left whole stays sharded; an array with another sharded axis is redistributed first. A Partial array
    stays Partial. Raises `IndexError` for indices that are out of bounds or too many, `TypeError` for other indices,
    such as True and False, which are masks in NumPy.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    for entry in entries:
        if isinstance(entry, bool):  # operator.index takes it for a whole number
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
            # Another empty range would mean something else as a slice.
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
    """Split an array along an axis.

    Parameters
    ----------
    x : DistArray
        The array.
    indices_or_sections : int or sequence of int
        The number of equal parts, or the indices at which to split.
    axis : int, optional
        The axis to split.

    Returns
    -------
    list of DistArray
        The parts. Other axes stay sharded, and a Partial array stays Partial.

    Raises
    ------
    ValueError
        If the axis does not exist or has no such number of equal parts.

    Notes
    -----
    An array that is sharded along `axis` is redistributed first; otherwise nothing is sent.

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
    """Concatenate arrays along an axis.

    Parameters
    ----------
    arrays : sequence of DistArray or array_like
        The arrays, at least one of them a `DistArray`; plain arrays are Replicate. Their shapes differ along `axis` at
        most, and their dtypes promote as in NumPy.
    axis : int or None, optional
        The axis; None flattens the arrays first.

    Returns
    -------
    DistArray
        The concatenated array. Other axes stay sharded. Partial arrays of one kind, also beside Replicate ones, give a
        Partial array.

    Raises
    ------
    TypeError
        If no array is a `DistArray`.
    ValueError
        If there are no arrays, other lengths differ, or the axis does not exist.

    Notes
    -----
    Arrays that are sharded along `axis` are redistributed first; otherwise nothing is sent.

    Examples
    --------
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

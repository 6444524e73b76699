"""Operations that give the same elements another shape or another order of axes.

They are linear, and keep Partial "max" and "min" as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import math
from typing import Any

from pce_mpi.arrays import Shape
from pce_mpi.autograd.apply import Op, apply, of_array, operation
from pce_mpi.autograd.rules import Axis, Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.validation import integer, integers


def normalized_axis(axis: Any, ndim: int) -> int:
    """Return `axis` counted from the front; `ValueError` if there is no such axis."""
    index = integer(axis, "axis")
    if not -ndim <= index < ndim:
        raise ValueError(f"axis {index} is out of bounds for an array of {ndim} dimensions")
    return index % ndim


# ------------------------------------------------------------------------------------------------------- reshape


def _reshape_rule(before: Shape, shape: Shape) -> Rule:
    """Return the rule: the first axis of each group stays sharded if its shards hold whole rows of the other axes."""
    operand: list[Axis | None] = [None] * len(before)
    result: list[Axis | None] = [None] * len(shape)
    for label, (mine, theirs) in enumerate(_groups(before, shape)):
        operand[mine[0]] = Axis(label, math.prod(before[axis] for axis in mine[1:]))
        result[theirs[0]] = Axis(label, math.prod(shape[axis] for axis in theirs[1:]))
    return Rule((tuple(operand),), tuple(result), shape, linear=((0,),), moves_data=True)


def _groups(before: Shape, after: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest groups of axes of `before` and `after` with the same elements, without axes of length 1."""
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


_RESHAPE = Op(
    "reshape",
    lambda call, x, shape: x.reshape(call.shape),
    (lambda g, y, x, shape: reshape(g, x.shape),),
    _reshape_rule,
    uses=[()],
    relays=True,
)


@operation
@of_array
def reshape(x: DistArray, shape: int | Sequence[int]) -> DistArray:
    """Give the elements, in C order, another shape.

    Parameters
    ----------
    x : DistArray
        The array.
    shape : int or sequence of int
        The global shape of the result; one length may be -1.

    Returns
    -------
    DistArray
        The same elements. A sharded axis stays sharded if it leads a group of axes that are merged, or if each shard
        has whole rows of the axes that it is split into. A Partial array, of "max" and "min" too, stays Partial.

    Raises
    ------
    ValueError
        If `shape` has another number of elements.

    Notes
    -----
    An array whose sharded axis cannot stay sharded is redistributed first; otherwise nothing is sent.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.arange(6.0), mesh, data=pce.Shard(0))
    >>> y = pce.reshape(x, (3, -1))
    >>> y.shape, y.placements
    ((3, 2), {'data': Shard(0)})
    """
    lengths = integers(shape, "shape")
    wanted = tuple(lengths)
    if lengths.count(-1) == 1:
        rest = -math.prod(lengths)
        lengths[lengths.index(-1)] = x.size // rest if rest else 0
    if any(length < 0 for length in lengths) or math.prod(lengths) != x.size:
        raise ValueError(f"cannot reshape {x.shape} to {wanted}")
    return apply(_RESHAPE, x, shape=tuple(lengths))


@operation
@of_array
def squeeze(x: DistArray, axis: int | Sequence[int] | None = None) -> DistArray:
    """Leave out axes of length 1.

    Parameters
    ----------
    x : DistArray
        The array.
    axis : int or sequence of int, optional
        The axis or axes to leave out; None means all of length 1.

    Returns
    -------
    DistArray
        The same elements; placement as in `reshape`.

    Raises
    ------
    ValueError
        If an axis does not exist, is named twice or has another length.
    """
    if axis is None:
        dropped = [index for index, length in enumerate(x.shape) if length == 1]
    else:
        dropped = [normalized_axis(each, x.ndim) for each in integers(axis, "axis")]
        if len(set(dropped)) < len(dropped):
            raise ValueError(f"squeeze leaves out each axis once, got axis {axis}")
    if any(x.shape[each] != 1 for each in dropped):
        raise ValueError(f"squeeze leaves out axes of length 1, got axis {axis} of shape {x.shape}")
    return reshape(x, [length for index, length in enumerate(x.shape) if index not in dropped])


@operation
@of_array
def expand_dims(x: DistArray, axis: int | Sequence[int]) -> DistArray:
    """Insert axes of length 1.

    Parameters
    ----------
    x : DistArray
        The array.
    axis : int or sequence of int
        The place of the new axis, or axes, among those of the result.

    Returns
    -------
    DistArray
        The same elements; placement as in `reshape`.

    Raises
    ------
    ValueError
        If the result has no such axis, or one is named twice.
    """
    places = integers(axis, "axis")
    ndim = x.ndim + len(places)
    new = {normalized_axis(each, ndim) for each in places}
    if len(new) < len(places):
        raise ValueError(f"axis = {axis} names an axis twice")
    lengths = iter(x.shape)
    return reshape(x, [1 if index in new else next(lengths) for index in range(ndim)])


# ----------------------------------------------------------------------------------------------------- transpose


def _transpose_rule(before: Shape, axes: tuple[int, ...]) -> Rule:
    labels = tuple(Axis(axis) for axis in range(len(before)))
    after = tuple(labels[axis] for axis in axes)
    return Rule((labels,), after, tuple(before[axis] for axis in axes), linear=((0,),), moves_data=True)


_TRANSPOSE = Op(
    "transpose",
    lambda call, x, axes: x.transpose(axes),
    (lambda g, y, x, axes: transpose(g, sorted(range(len(axes)), key=axes.__getitem__)),),
    _transpose_rule,
    uses=[()],
    relays=True,
    views=True,
)


@operation
@of_array
def transpose(x: DistArray, axes: Sequence[int] | None = None) -> DistArray:
    """Bring the axes into another order.

    Parameters
    ----------
    x : DistArray
        The array.
    axes : sequence of int, optional
        For each axis of the result the axis of `x`; the reverse order unless given.

    Returns
    -------
    DistArray
        The same elements. Sharded axes stay sharded, and a Partial array stays Partial; nothing is sent.

    Raises
    ------
    ValueError
        If `axes` does not name each axis once.
    """
    order = range(x.ndim)[::-1] if axes is None else [normalized_axis(axis, x.ndim) for axis in integers(axes, "axes")]
    if sorted(order) != list(range(x.ndim)):
        raise ValueError(f"axes must name each of the {x.ndim} axes once, got {axes}")
    return apply(_TRANSPOSE, x, axes=tuple(order))


@operation
@of_array
def swapaxes(x: DistArray, axis1: int, axis2: int) -> DistArray:
    """Exchange two axes.

    Parameters
    ----------
    x : DistArray
        The array.
    axis1, axis2 : int
        The axes.

    Returns
    -------
    DistArray
        The same elements; placement as in `transpose`.

    Raises
    ------
    ValueError
        If an axis does not exist.
    """
    order = list(range(x.ndim))
    one, other = normalized_axis(axis1, x.ndim), normalized_axis(axis2, x.ndim)
    order[one], order[other] = other, one
    return transpose(x, order)

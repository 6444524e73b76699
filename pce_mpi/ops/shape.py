"""Shapes: another shape or order of axes, broadcasting, and `sum`, which is the vjp of broadcasting and it of `sum`.

The gradient of an operand that was broadcast is summed over the axes it was broadcast along. A sum over a sharded axis
is Partial: this is how the gradients of parameters become Partial under data, sequence and context parallelism.
Operations that give the same elements another shape or order are linear, and keep Partial "max" and "min" as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import Array, Shape, array_namespace, is_floating
from pce_mpi.autograd.apply import Call, Op, apply, of_array, operation
from pce_mpi.autograd.rules import Axes, Axis, Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.placements import ReduceOperator
from pce_mpi.exact.sums import reduced, total
from pce_mpi.kernels import converted
from pce_mpi.validation import flag, integer, integers


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


def aligned(operand: Shape, shape: Shape) -> Axes:
    """Label the axes of an operand that is broadcast to `shape`, from the last; None for an axis that is stretched."""
    lengths = shape[len(shape) - len(operand) :]
    return tuple(
        Axis(index - len(operand)) if length == stretched else None
        for index, (length, stretched) in enumerate(zip(operand, lengths, strict=True))
    )


def _broadcast_rule(before: Shape, shape: Shape) -> Rule:
    axes = aligned(before, shape)
    added = (None,) * (len(shape) - len(before))
    return Rule((axes,), (*added, *axes), shape, linear=((0,),), moves_data=True)


_BROADCAST_TO = Op(
    "broadcast_to",
    lambda call, x, shape: array_namespace(x).broadcast_to(x, call.shape),
    (lambda g, y, x, shape: sum_to(g, x.shape),),
    _broadcast_rule,
    uses=[()],
    views=True,
)


@operation
@of_array
def broadcast_to(x: DistArray, shape: int | Sequence[int]) -> DistArray:
    """Broadcast an array to a shape, as NumPy does.

    Parameters
    ----------
    x : DistArray
        The array; axes of length 1 may be stretched, and new axes come first.
    shape : int or sequence of int
        The global shape of the result.

    Returns
    -------
    DistArray
        The array in that shape. A sharded axis stays sharded unless it is stretched: then `x` is redistributed first.
        A Partial array, of "max" and "min" too, stays Partial.

    Raises
    ------
    ValueError
        If `x` does not broadcast to `shape`.

    Notes
    -----
    The gradient is summed over the stretched axes; the sum over a sharded axis is Partial.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.array([[1.0], [2.0]]), mesh, data=pce.Shard(0))
    >>> pce.broadcast_to(x, (2, 3)).full()
    array([[1., 1., 1.],
           [2., 2., 2.]])
    """
    wanted = tuple(integers(shape, "shape"))
    added = len(wanted) - x.ndim
    if (
        added < 0
        or min(wanted, default=0) < 0
        or any(own not in (1, length) for own, length in zip(x.shape, wanted[added:], strict=True))
    ):
        raise ValueError(f"cannot broadcast_to {x.shape} to {wanted}")
    return apply(_BROADCAST_TO, x, shape=wanted)


def normalized_axes(axis: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Return `axis` as a sorted tuple of axes counted from the front; None means all axes."""
    if axis is None:
        return tuple(range(ndim))
    axes = sorted(normalized_axis(each, ndim) for each in (axis if isinstance(axis, Sequence) else (axis,)))
    if len(set(axes)) < len(axes):
        raise ValueError(f"axis = {axis} names an axis twice")
    return tuple(axes)


def kept_shape(shape: Shape, axes: Sequence[int]) -> Shape:
    """Return `shape` with length 1 along `axes`."""
    return tuple(1 if axis in axes else length for axis, length in enumerate(shape))


def reduction_rule(
    shape: Shape,
    axes: tuple[int, ...],
    keepdims: bool,
    reduces: ReduceOperator = "sum",
    *,
    linear: bool = True,
    merged: bool = False,
) -> Rule:
    """Return the rule of a reduction over `axes`; `merged`: the operation itself merges the results of the shards."""
    labels = tuple(Axis(axis) for axis in range(len(shape)))
    left = [(labels[axis], shape[axis]) for axis in range(len(shape)) if axis not in axes]
    result = tuple(None if axis in axes else labels[axis] for axis in range(len(shape)))
    return Rule(
        (labels,),
        result if keepdims else tuple(label for label, _ in left),
        kept_shape(shape, axes) if keepdims else tuple(length for _, length in left),
        linear=((0,),) if linear else (),
        reduces=None if merged else reduces,
        merged=frozenset(axes) if merged else frozenset(),
    )


def local_extreme(name: str, x: Array, axes: tuple[int, ...], keepdims: bool, loses: Any) -> Array:
    """Return the largest ("max") or the smallest ("min") element of `x`; `loses`, if there is no element.

    NumPy's reductions take `loses` as `initial`, CuPy's do not.
    """
    xp = array_namespace(x)
    if all(x.shape[axis] for axis in axes):
        return getattr(xp, name)(x, axis=axes, keepdims=keepdims)
    shape = kept_shape(x.shape, axes)
    return xp.full(shape if keepdims else [shape[axis] for axis in range(x.ndim) if axis not in axes], loses, x.dtype)


# NumPy adds up in pairs along an axis that is consecutive in memory, and number by number along others. There so many
# numbers are summed first, and then their sums: parts of 16 take longer, and of 128 lose two bits more.
_PART = 32


def local_sum(x: Array, axes: tuple[int, ...], keepdims: bool = False) -> Array:
    """Return the sum of `x` over axes, whose rounding error does not grow with their length."""
    if isinstance(x, np.ndarray) and is_floating(x.dtype) and not (len(axes) == x.ndim and x.flags.forc):
        for axis in axes:
            x = _summed_in_parts(x, axis)
    return x.sum(axes, keepdims=keepdims)


def _summed_in_parts(x: Array, axis: int) -> Array:
    """Return an array with the sums of `x` along `axis`, which has at most `_PART` numbers or is consecutive."""
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    while x.shape[axis] > _PART and x.strides[axis] != x.itemsize:
        end, other_axes = x.shape[axis] // _PART * _PART, (slice(None),) * axis
        parts, rest = x[*other_axes, :end], x[*other_axes, end:]
        sums = parts.reshape(*before, -1, _PART, *after).sum(axis + 1)
        x = np.concatenate([sums, rest.sum(axis, keepdims=True)], axis)
    return x


def exact_total(call: Call, x: Array, axes: tuple[int, ...]) -> Array:
    """Return the sum over shards too, in float64; the axes stay with length 1."""
    length = math.prod(call.operands[0].shape[axis] for axis in axes)
    return total(x, axes, length, call.summed_comm)


def _exact_sum(call: Call, x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
    if not is_floating(x.dtype):
        return reduced(array_namespace(x).asarray(x.sum(axes, keepdims=keepdims)), call.summed_comm)
    return converted(exact_total(call, x, axes), x.dtype).reshape(call.shape)


_SUM = Op(
    "sum",
    lambda call, x, axes, keepdims: local_sum(x, axes, keepdims),
    (lambda g, y, x, axes, keepdims: spread(g, x, axes),),
    reduction_rule,
    uses=[()],
    wide=True,
    exact=_exact_sum,
)


@operation
@of_array
def sum(x: DistArray, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> DistArray:
    """Sum over axes.

    Parameters
    ----------
    x : DistArray
        The array.
    axis : int or sequence of int, optional
        The axis or axes to sum over; None means all.
    keepdims : bool, optional
        Keep the summed axes, with length 1.

    Returns
    -------
    DistArray
        The sum, in NumPy's dtype: that of `x`, but 64 bits wide for integers and bool. Over a sharded axis the sum is
        Partial; other axes stay sharded. Halves are summed in float32, and each rank rounds its sum once.

    Raises
    ------
    ValueError
        If an axis does not exist or is named twice.

    Notes
    -----
    Communicates nothing. The sum is linear: that of a Partial "sum" or "avg" stays Partial.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.arange(6.0).reshape(3, 2), mesh, data=pce.Shard(0))
    >>> pce.sum(x, axis=0).placements, pce.sum(x, axis=0).full()
    ({'data': Partial('sum')}, array([6., 9.]))
    >>> pce.sum(x, axis=1).placements
    {'data': Shard(0)}
    """
    return apply(_SUM, x, axes=normalized_axes(axis, x.ndim), keepdims=flag(keepdims, "keepdims"))


def spread(g: DistArray, x: DistArray, axes: tuple[int, ...]) -> DistArray:
    """Broadcast the result of a reduction of `x` over `axes` back to the shape of `x`."""
    return broadcast_to(reshape(g, kept_shape(x.shape, axes)), x.shape)


def sum_to(g: DistArray, shape: Shape) -> DistArray:
    """Sum `g` over the axes along which an array of `shape` was broadcast."""
    if g.shape == shape:
        return g
    added = g.ndim - len(shape)
    stretched = [added + axis for axis, length in enumerate(shape) if length == 1 and g.shape[added + axis] != 1]
    return reshape(sum(g, (*range(added), *stretched)), shape)

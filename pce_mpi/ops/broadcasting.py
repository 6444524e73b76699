"""`sum` and `broadcast_to`: each is the other's vjp.

The gradient of an operand that was broadcast is summed over the axes it was broadcast along. A sum over a sharded axis
is Partial: this is how the gradients of parameters become Partial under data, sequence and context parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any

from pce_mpi.arrays import Array, Shape, array_namespace, is_floating
from pce_mpi.autograd.apply import Call, Op, apply, of_array, operation
from pce_mpi.autograd.rules import Axes, Axis, Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.placements import ReduceOperator
from pce_mpi.exact.sums import reduced, total
from pce_mpi.kernels import converted
from pce_mpi.ops.shape import normalized_axis, reshape
from pce_mpi.validation import flag, integers


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
    lambda call, x, axes, keepdims: x.sum(axes, keepdims=keepdims),
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

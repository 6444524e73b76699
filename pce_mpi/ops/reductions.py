"""Mean, extremes and logarithm of a sum of exponentials over any axes, and sums up to each place along one.

Over a sharded axis the mean is Partial "sum": each rank divides its sum by the length of the global axis, so shards may
have any lengths. The largest element is reduced at once. A logsumexp is merged from softmax states.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, compute_dtype_of, is_floating, numpy_dtype
from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.op import Call, Op, of_array, operation
from pce_mpi.autograd.rules import Axis, Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.placements import ReduceOperator
from pce_mpi.exact.sums import running_total
from pce_mpi.kernels import converted, standard_arithmetic
from pce_mpi.ops.broadcasting import (
    broadcast_to,
    exact_total,
    kept_shape,
    local_extreme,
    normalized_axes,
    reduction_rule,
    spread,
    sum,
)
from pce_mpi.ops.elementwise import astype, widened
from pce_mpi.ops.shape import normalized_axis, reshape
from pce_mpi.ops.softmax import Softmax, real_dtype
from pce_mpi.validation import flag

Array = Any  # numpy.ndarray or cupy.ndarray


def _rule(shape: tuple[int, ...], axis: int, backwards: bool) -> Rule:
    axes = tuple(None if index == axis else Axis(index) for index in range(len(shape)))
    return Rule((axes,), axes, shape, linear=((0,),))


def _cumsum(call: Call, x: Array, axis: int, backwards: bool) -> Array:
    xp = array_namespace(x)
    return xp.flip(xp.cumsum(xp.flip(x, axis), axis), axis) if backwards else xp.cumsum(x, axis)


def _exact_cumsum(call: Call, x: Array, axis: int, backwards: bool) -> Array:
    if not is_floating(x.dtype):
        return _cumsum(call, x, axis, backwards)
    return converted(running_total(x, axis, lambda part: _cumsum(call, part, axis, backwards)), x.dtype)


_CUMSUM: Op = Op(
    "cumsum",
    _cumsum,
    (lambda g, y, x, axis, backwards: apply(_CUMSUM, g, axis=axis, backwards=not backwards),),
    _rule,
    numpy_dtype("cumsum"),
    uses=[()],
    wide=True,
    exact=_exact_cumsum,
)


@operation
@of_array
def cumsum(x: DistArray, axis: int | None = None) -> DistArray:
    """Sum the elements up to each place along an axis.

    Parameters
    ----------
    x : DistArray
        The array.
    axis : int or None, optional
        The axis; None flattens the array first.

    Returns
    -------
    DistArray
        The sums, shaped as `x`, in the dtype of `sum`; those of halves are computed in float32 and rounded once. Other
        axes stay sharded. The sums are linear: those of a Partial "sum" or "avg" stay Partial.

    Raises
    ------
    ValueError
        If the axis does not exist.

    Notes
    -----
    An array that is sharded along `axis` is redistributed first; otherwise nothing is sent.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> pce.cumsum(pce.distribute(np.array([[1, 2], [3, 4]]), mesh, data=pce.Shard(0)), axis=1).full()
    array([[1, 3],
           [3, 7]])
    """
    if axis is None:
        return cumsum(reshape(x, -1), 0)
    return apply(_CUMSUM, x, axis=normalized_axis(axis, x.ndim), backwards=False)


Shape = tuple[int, ...]


def _mean(call: Call, x: Array, axes: tuple[int, ...], keepdims: bool, count: int) -> Array:
    total = (x if is_floating(x.dtype) else x.astype(np.float64)).sum(axes, keepdims=keepdims)
    return total / total.dtype.type(count)


def _mean_vjp(g: DistArray, y: DistArray, x: DistArray, axes: tuple[int, ...], keepdims: bool, count: int) -> DistArray:
    # The count may overflow in a half although the quotient is not 0.
    return spread(astype(widened(g) / count, g.dtype), x, axes)


def _exact_mean(call: Call, x: Array, axes: tuple[int, ...], keepdims: bool, count: int) -> Array:
    wide = x if is_floating(x.dtype) else x.astype(np.float64)
    return converted(exact_total(call, wide, axes) / np.float64(count), wide.dtype).reshape(call.shape)


_MEAN = Op(
    "mean",
    _mean,
    (_mean_vjp,),
    lambda shape, axes, keepdims, count: reduction_rule(shape, axes, keepdims),
    dtype=lambda dtype: dtype if is_floating(dtype) else np.float64,
    uses=[()],
    wide=True,
    exact=_exact_mean,
)


@operation
@of_array
def mean(x: DistArray, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> DistArray:
    """Average over axes of the global array.

    Parameters
    ----------
    x : DistArray
        The array.
    axis : int or sequence of int, optional
        The axis or axes to average over; None means all.
    keepdims : bool, optional
        Keep the reduced axes, with length 1.

    Returns
    -------
    DistArray
        The mean, in the dtype of `x`, or float64 for integers; `nan` for no elements. Halves are summed in float32.
        Over a sharded axis the mean is Partial; other axes stay sharded.

    Raises
    ------
    ValueError
        If an axis does not exist or is named twice.

    Notes
    -----
    Communicates nothing. The mean is linear: that of a Partial "sum" or "avg" stays Partial.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.array([[1, 2], [3, 4]]), mesh, data=pce.Shard(0))
    >>> pce.mean(x, axis=0).placements, pce.mean(x, axis=0).full()
    ({'data': Partial('sum')}, array([2., 3.]))
    """
    axes, keepdims = normalized_axes(axis, x.ndim), flag(keepdims, "keepdims")
    return apply(_MEAN, x, axes=axes, keepdims=keepdims, count=math.prod(x.shape[axis] for axis in axes))


def _extreme(name: str, reduces: ReduceOperator) -> Op:
    def forward(call: Call, x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
        # An empty shard gives the bound of the dtype, which no element loses against.
        lowest, highest = _bounds(x.dtype)
        loses = lowest if reduces == "max" else highest
        return local_extreme(name, x, axes, keepdims, loses)

    def exact(call: Call, x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
        # The shards and the processor decide which of two zeros is found.
        found = forward(call, x, axes, keepdims)
        return found + x.dtype.type(0) if is_floating(x.dtype) else found

    def vjp(g: DistArray, y: DistArray, x: DistArray, axes: tuple[int, ...], keepdims: bool) -> DistArray:
        largest = x == spread(y, x, axes)
        # Equal elements of all shards share the gradient; there may be more of them than a half can count.
        wide = compute_dtype_of(x.dtype)
        count = sum(astype(largest, wide), axes, keepdims=True)
        share = astype(reshape(astype(g, wide), count.shape) / count, x.dtype)
        return broadcast_to(share, x.shape) * astype(largest, x.dtype)

    def rule(shape: Shape, axes: tuple[int, ...], keepdims: bool) -> Rule:
        return reduction_rule(shape, axes, keepdims, reduces, linear=False)

    return Op(name, forward, (vjp,), rule, uses=[(0, -1)], exact=exact)


def _bounds(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    if is_floating(dtype):
        return -math.inf, math.inf
    if dtype.kind == "b":
        return False, True
    limits = np.iinfo(dtype)
    return limits.min, limits.max


_MAX, _MIN = _extreme("max", "max"), _extreme("min", "min")


def _of_some(op: Op, x: DistArray, axis: int | Sequence[int] | None, keepdims: bool) -> DistArray:
    axes = normalized_axes(axis, x.ndim)
    if math.prod(x.shape[each] for each in axes) == 0:
        raise ValueError(f"{op.name} of no elements: shape {x.shape}, axis {axis}")
    return apply(op, x, axes=axes, keepdims=flag(keepdims, "keepdims"))


@operation
@of_array
def max(x: DistArray, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> DistArray:
    """Return the largest element over axes.

    Parameters
    ----------
    x : DistArray
        The array.
    axis : int or sequence of int, optional
        The axis or axes to reduce; None means all.
    keepdims : bool, optional
        Keep the reduced axes, with length 1.

    Returns
    -------
    DistArray
        The largest element, or `nan` if an element is, in the dtype of `x`. It is Replicate over the dims that shard
        a reduced axis; other axes stay sharded.

    Raises
    ------
    ValueError
        If there are no elements, or an axis does not exist or is named twice.

    Notes
    -----
    Collective over the dims that shard a reduced axis: an Allgather of 56 bytes and one Allreduce of the result's size.
    A Partial `x` is reduced first. Equal elements of all shards share the gradient equally.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.array([1.0, 3.0, 3.0]), mesh, requires_grad=True, data=pce.Shard(0))
    >>> pce.max(x).backward()
    >>> x.grad.full()
    array([0. , 0.5, 0.5])
    """
    return _of_some(_MAX, x, axis, keepdims)


@operation
@of_array
def min(x: DistArray, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> DistArray:
    """Return the smallest element over axes.

    Parameters
    ----------
    x : DistArray
        The array.
    axis : int or sequence of int, optional
        The axis or axes to reduce; None means all.
    keepdims : bool, optional
        Keep the reduced axes, with length 1.

    Returns
    -------
    DistArray
        The smallest element, or `nan` if an element is; all else is as in `max`.
    """
    return _of_some(_MIN, x, axis, keepdims)


def _logsumexp(call: Call, x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
    shape = kept_shape(x.shape, axes) if keepdims else call.shape
    with standard_arithmetic():
        call.residuals = Softmax(call, x, axes, "logsumexp")
        return call.residuals.logsumexp().reshape(shape)


def _logsumexp_vjp(
    g: DistArray, y: DistArray, x: DistArray, axes: tuple[int, ...], keepdims: bool, residuals: Softmax
) -> DistArray:
    return spread(g, x, axes) * DistArray(residuals.probabilities(), x.mesh, x.sharding)


_LOGSUMEXP = Op(
    "logsumexp",
    _logsumexp,
    (_logsumexp_vjp,),
    lambda shape, axes, keepdims: reduction_rule(shape, axes, keepdims, linear=False, merged=math.prod(shape) > 0),
    real_dtype("logsumexp"),
    uses=[(0,)],
)


@operation
@of_array
def logsumexp(x: DistArray, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> DistArray:
    """Return log(sum(exp(x))) over axes, in nats and without overflow; its gradient is the softmax.

    Parameters
    ----------
    x : DistArray
        The array, of real numbers.
    axis : int or sequence of int, optional
        The axis or axes to reduce; None means all.
    keepdims : bool, optional
        Keep the reduced axes, with length 1.

    Returns
    -------
    DistArray
        The result, in the dtype of `x`; -inf if all elements are -inf. It is Replicate over the dims that shard a
        reduced axis; other axes stay sharded.

    Raises
    ------
    TypeError
        If `x` is of integers.
    ValueError
        If there are no elements, or an axis does not exist or is named twice.

    Notes
    -----
    Collective over the dims that shard a reduced axis: an Allgather of 56 bytes and one Allreduce of 40 bytes a row. A
    Partial `x` is reduced first.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.zeros((1, 4)), mesh, data=pce.Shard(1))
    >>> pce.logsumexp(x, axis=1).full()  # log 4
    array([1.38629436])
    """
    return _of_some(_LOGSUMEXP, x, axis, keepdims)

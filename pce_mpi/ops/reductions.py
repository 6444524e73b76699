"""Mean, largest and smallest element over any axes, and the logarithm of a sum of exponentials.

Only the sum of what shards give is a sum. A mean is divided by the number of elements of the global array, so shards
of any lengths do. The largest of all is joined at once. A logsumexp is joined from maxima and sums of exponentials.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, is_floating, is_half
from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.op import Op, Shardings
from pce_mpi.autograd.rules import Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.placements import ReduceOperator
from pce_mpi.ops.broadcasting import broadcast_to, kept_shape, local_extreme, normalized_axes, reduction_rule, sum
from pce_mpi.ops.elementwise import astype, equal, exp
from pce_mpi.ops.shape import reshape
from pce_mpi.ops.softmax import joins, maximum_and_sum

__all__ = ["logsumexp", "max", "mean", "min"]

Array = Any  # numpy.ndarray or cupy.ndarray
Shape = tuple[int, ...]


def _spread(g: DistArray, x: DistArray, axes: tuple[int, ...]) -> DistArray:
    """What was reduced over `axes` of `x`, at every element that it was reduced from."""
    return broadcast_to(reshape(g, kept_shape(x.shape, axes)), x.shape)


def _mean(x: Array, axes: tuple[int, ...], keepdims: bool, count: int) -> Array:
    if is_half(x.dtype):  # of which the sum may be too large
        return (x.astype(np.float32).sum(axes, keepdims=keepdims) / np.float32(count)).astype(x.dtype)
    total = (x if is_floating(x.dtype) else x.astype(np.float64)).sum(axes, keepdims=keepdims)
    return total / total.dtype.type(count)


def _mean_vjp(g: DistArray, y: DistArray, x: DistArray, axes: tuple[int, ...], keepdims: bool, count: int) -> DistArray:
    if is_half(g.dtype):  # in which the count may be infinite, where the quotient is not 0
        return _spread(astype(astype(g, np.float32) / count, g.dtype), x, axes)
    return _spread(g / count, x, axes)


_MEAN = Op(
    "mean",
    _mean,
    (_mean_vjp,),
    lambda shape, axes, keepdims, count: reduction_rule(shape, axes, keepdims),
    dtype=lambda dtype: dtype if is_floating(dtype) else np.float64,
    uses=[()],
)


def mean(x: DistArray, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> DistArray:
    """The sum over `axis`, one or several, or all, divided by the number of elements of the global array in it.

    The dtype of x, and float64 for integers; halves are summed in float32. Over a sharded axis the result is Partial;
    nothing is sent. Linear: what is Partial stays so. Of no elements it is `nan`. `ValueError` for axes that do not
    exist or come twice.

    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.array([[1, 2], [3, 4]]), mesh, data=pce.Shard(0))
    >>> pce.mean(x, axis=0).placements, pce.mean(x, axis=0).full()
    ({'data': Partial('sum')}, array([2., 3.]))
    """
    axes = normalized_axes(axis, x.ndim)
    return apply(_MEAN, x, axes=axes, keepdims=keepdims, count=math.prod(x.shape[axis] for axis in axes))


def _extreme(name: str, reduces: ReduceOperator) -> Op:
    def forward(x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
        # An empty shard has no element, so what loses against every element stands for it.
        lowest, highest = _bounds(x.dtype)
        loses = lowest if reduces == "max" else highest
        return local_extreme(name, x, axes, keepdims, loses)

    def vjp(g: DistArray, y: DistArray, x: DistArray, axes: tuple[int, ...], keepdims: bool) -> DistArray:
        largest = equal(x, _spread(y, x, axes))
        # Equal elements share the gradient, wherever they are; there may be more of them than a half can count.
        wide = np.dtype(np.float32) if is_half(x.dtype) else x.dtype
        count = sum(astype(largest, wide), axes, keepdims=True)
        share = astype(reshape(astype(g, wide), count.shape) / count, x.dtype)
        return broadcast_to(share, x.shape) * astype(largest, x.dtype)

    def rule(shape: Shape, axes: tuple[int, ...], keepdims: bool) -> Rule:
        return reduction_rule(shape, axes, keepdims, reduces, linear=False)

    return Op(name, forward, (vjp,), rule, uses=[(0, -1)])


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
    return apply(op, x, axes=axes, keepdims=keepdims)


def max(x: DistArray, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> DistArray:
    """The largest element over `axis`, one or several, or all, in the dtype of x; `nan`, if one is.

    Over a sharded axis the largest of all shards is found at once, and is Replicate: an Allgather of 56 bytes and one
    Allreduce of the result's size. What is Partial is reduced first. Elements that are equal share the gradient,
    wherever they are. `ValueError` for no elements, and for axes that do not exist or come twice.

    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.array([1.0, 3.0, 3.0]), mesh, requires_grad=True, data=pce.Shard(0))
    >>> pce.max(x).backward()
    >>> x.grad.full()
    array([0. , 0.5, 0.5])
    """
    return _of_some(_MAX, x, axis, keepdims)


def min(x: DistArray, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> DistArray:
    """The smallest element over `axis`; all else is as in `max`."""
    return _of_some(_MIN, x, axis, keepdims)


def _logsumexp(x: Array, axes: tuple[int, ...], keepdims: bool, shardings: Shardings) -> tuple[Array, Any]:
    largest, total = maximum_and_sum(x, axes, shardings, "logsumexp")
    xp = array_namespace(x)
    # An infinite element is the result, and so is -inf where there is nothing else.
    result = xp.where(xp.isinf(largest), largest, largest + xp.log(total)).astype(x.dtype, copy=False)
    shape = kept_shape(x.shape, axes) if keepdims else shardings.shape
    return result.reshape(shape), (largest, total.astype(largest.dtype))


def _logsumexp_vjp(
    g: DistArray, y: DistArray, x: DistArray, axes: tuple[int, ...], keepdims: bool, residuals: tuple[Array, Array]
) -> DistArray:
    # Subtracting the largest element, and not the result, keeps the bits of elements far from 0.
    def as_dist(local: Array) -> DistArray:
        flat = DistArray(local.reshape(g.local.shape), g.mesh, y.sharding)
        return _spread(flat, x, axes)

    largest, total = (as_dist(local) for local in residuals)
    return _spread(g, x, axes) * (exp(x - largest) / total)


_LOGSUMEXP = Op(
    "logsumexp",
    _logsumexp,
    (_logsumexp_vjp,),
    lambda shape, axes, keepdims: reduction_rule(shape, axes, keepdims, linear=False, merged=math.prod(shape) > 0),
    uses=[(0,)],
    takes_shardings=True,
    gives_residuals=True,
    sends=joins,
)


def logsumexp(x: DistArray, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> DistArray:
    """log sum exp(x) over `axis`, one or several, or all, in nats and in the dtype of x; its gradient is the softmax.

    Over a sharded axis what the shards give is joined as the softmax of a loss is, and is Replicate: an Allgather of
    56 bytes and one Allreduce of 32 bytes a row. What is Partial is reduced first. Of only -inf it is -inf.

    Raises `TypeError` for integers, `ValueError` for no elements and for axes that do not exist or come twice.

    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.zeros((1, 4)), mesh, data=pce.Shard(1))
    >>> pce.logsumexp(x, axis=1).full()  # log 4
    array([1.38629436])
    """
    return _of_some(_LOGSUMEXP, x, axis, keepdims)

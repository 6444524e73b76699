"""Reductions over any axes: mean, extremes, variance and logarithm of a sum of exponentials; and sums along one axis.

Over a sharded axis the mean is Partial "sum": each rank divides its sum by the length of the global axis, so shards may
have any lengths. The largest element is reduced at once. A logsumexp is merged from softmax states. Variances are
computed in float64: the mean of numbers far from 0 is rounded to a multiple of a large ulp, so the distances from it do
not sum to 0. Their sum corrects them; over a sharded axis it is sent together with the sum of their squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import Array, Shape, array_namespace, compute_dtype_of, is_floating, numpy_dtype
from pce_mpi.autograd.apply import Call, Op, apply, of_array, operation, redistributed
from pce_mpi.autograd.rules import Axis, Rule
from pce_mpi.comm.tracing import cause
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.placements import ReduceOperator, Replicate
from pce_mpi.exact.sums import running_total, total
from pce_mpi.kernels import converted, standard_arithmetic
from pce_mpi.ops.elementwise import astype, elementwise_rule, unary, widened
from pce_mpi.ops.shape import (
    broadcast_to,
    exact_total,
    kept_shape,
    local_extreme,
    local_sum,
    normalized_axes,
    normalized_axis,
    reduction_rule,
    reshape,
    spread,
    sum,
)
from pce_mpi.ops.softmax import Softmax, real_dtype
from pce_mpi.validation import flag, real


def _cumsum_rule(shape: tuple[int, ...], axis: int, backwards: bool) -> Rule:
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
    _cumsum_rule,
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


def _mean(call: Call, x: Array, axes: tuple[int, ...], keepdims: bool, count: int) -> Array:
    total = local_sum(x if is_floating(x.dtype) else x.astype(np.float64), axes, keepdims)
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
    """Return the smallest element over axes; see `pce_mpi.max`."""
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


def _terms(x: Array, *factor: Array, plain: bool) -> list[Array]:
    return ([x] if plain else []) + [x * other for other in factor]


def _sums(call: Call, x: Array, *factor: Array, axes: tuple[int, ...], plain: bool) -> Array:
    xp, shape = array_namespace(x), kept_shape(x.shape, axes)
    left = [axis for axis in range(x.ndim) if axis not in axes]
    found = [
        # NumPy adds up in pairs only along the last axis.
        xp.ascontiguousarray(term.transpose(*left, *axes)).reshape(*(x.shape[axis] for axis in left), -1).sum(-1)
        if term.size
        else xp.zeros(math.prod(shape))
        for term in _terms(x, *factor, plain=plain)
    ]
    return xp.stack([each.reshape(shape) for each in found])


def _exact_sums(call: Call, x: Array, *factor: Array, axes: tuple[int, ...], plain: bool) -> Array:
    length = count_of(call.operands[0].shape, axes)
    terms = array_namespace(x).stack(_terms(x, *factor, plain=plain))
    return total(terms, tuple(axis + 1 for axis in axes), length, call.summed_comm)


def _sums_rule(x: Shape, *factor: Shape, axes: tuple[int, ...], plain: bool) -> Rule:
    labels = tuple(map(Axis, range(len(x))))
    rows = tuple(None if axis in axes else label for axis, label in enumerate(labels))
    shape = (plain + len(factor), *kept_shape(x, axes))
    return Rule((labels,) * (1 + len(factor)), (None, *rows), shape, reduces="sum")


_IN_FLOAT64 = Op(
    "astype",
    lambda call, x: x.astype(np.float64),
    (lambda g, y, x: g,),
    elementwise_rule(),
    dtype=lambda _: np.float64,
    uses=[()],
    relays=True,
)
_SUMS = Op("sum", _sums, rule=_sums_rule, exact=_exact_sums)


def sums(x: DistArray, *factor: DistArray, axes: tuple[int, ...], plain: bool = True) -> DistArray:
    """Return the sums of `x`, if `plain`, and then of `x` times `factor`, along a new first axis.

    They are float64 and have no gradient. The summed axes stay with length 1. Sums over a sharded axis are reduced
    together.
    """
    found = apply(_SUMS, x.detach(), *(each.detach() for each in factor), axes=axes, plain=plain)
    with cause("sum", reason="the sums of all shards, together"):
        return redistributed(found, found.sharding.replacing(dict.fromkeys(found.sharding.partial_dims, Replicate())))


def count_of(shape: Shape, axes: Sequence[int]) -> int:
    """Return the number of elements along `axes`."""
    return math.prod(shape[axis] for axis in axes)


def in_float64(x: DistArray) -> DistArray:
    """Return `x` as float64; a Partial one is reduced first, while it is smaller."""
    x = widened(x)
    return x if x.dtype == np.float64 else apply(_IN_FLOAT64, x)


def deviations(x: DistArray, axes: tuple[int, ...]) -> tuple[DistArray, DistArray]:
    """Return the distances of `x` from its rounded mean, in float64, and the sums of them and of their squares.

    The mean has no gradient. Equal elements have equal distances of a few ulp: their sums are exact, so that the square
    of their mean is the mean of their squares.
    """
    near = x - sums(x, axes=axes)[0] / count_of(x.shape, axes)
    return near, sums(near, near, axes=axes)


def _root_gradient(xp: Any, g: Array, x: Array) -> Array:
    return xp.where(x == 0, g.dtype.type(0), g / (2 * xp.sqrt(x)))


_ROOT = unary("sqrt", _root_gradient)


@operation
@of_array
def var(x: DistArray, axis: int | Sequence[int] | None = None, ddof: float = 0, keepdims: bool = False) -> DistArray:
    """Compute the variance over axes of the global array: the mean of the squared distances from the mean.

    Parameters
    ----------
    x : DistArray
        The array.
    axis : int or sequence of int, optional
        The axis or axes to reduce; None means all.
    ddof : float, default 0
        The sum of the squares is divided by the number of elements minus `ddof`; 1 is the estimate from a sample.
    keepdims : bool, optional
        Keep the reduced axes, with length 1.

    Returns
    -------
    DistArray
        The variance, in the dtype of `x`, or float64 for integers; `nan` for no elements. It is Replicate over the dims
        that shard a reduced axis; other axes stay sharded.

    Raises
    ------
    ValueError
        If an axis does not exist or is named twice.

    Notes
    -----
    The variance is computed in float64 and rounded once. In float64, it, `std` and their gradients are right to 4 ulp
    of the largest term while the mean is less than 1e6 standard deviations from 0.

    If a reduced axis is sharded: one Allreduce of 8 bytes for each element of the result, and one of 16, each after an
    Allgather of 56 bytes. A Partial `x` is reduced first. Backward communicates nothing.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> pce.var(pce.distribute(np.array([1.0, 3.0, 8.0]), mesh, data=pce.Shard(0)), ddof=1).item()
    13.0
    """
    return _in_dtype_of(x, _var(x, axis, ddof, keepdims))


@operation
@of_array
def std(x: DistArray, axis: int | Sequence[int] | None = None, ddof: float = 0, keepdims: bool = False) -> DistArray:
    """Compute the standard deviation over axes, rounded once; see `pce_mpi.var`.

    If all elements are equal, the result and the gradient are 0, as in PyTorch.
    """
    return _in_dtype_of(x, apply(_ROOT, _var(x, axis, ddof, keepdims)))


def _in_dtype_of(x: DistArray, found: DistArray) -> DistArray:
    return astype(found, x.dtype) if is_floating(x.dtype) else found


def _var(x: DistArray, axis: int | Sequence[int] | None, ddof: float, keepdims: bool) -> DistArray:
    """Return the variance in float64."""
    axes, settings = normalized_axes(axis, x.ndim), {"ddof": real(ddof, "ddof"), "keepdims": flag(keepdims, "keepdims")}
    near, moments = deviations(in_float64(x), axes)
    return apply(_VARIANCE, near, moments, axes=axes, **settings)


def _divisor(shape: Shape, axes: tuple[int, ...], ddof: float) -> np.float64:
    return np.maximum(np.float64(0), count_of(shape, axes) - ddof)  # a division by 0 gives inf or nan, as in NumPy


def _variance(call: Call, near: Array, moments: Array, axes: tuple[int, ...], ddof: float, keepdims: bool) -> Array:
    first, second = moments
    shape = call.operands[0].shape
    count = np.float64(count_of(shape, axes))
    mean = first / count
    found = (second / count - mean * mean) * (count / _divisor(shape, axes, ddof))
    return found if keepdims else found.reshape(call.shape)


def _to_near(
    g: DistArray, y: DistArray, near: DistArray, moments: DistArray, axes: tuple[int, ...], ddof: float, keepdims: bool
) -> DistArray:
    # The distances from the mean sum to 0, so the gradient of the mean is 0.
    distances = near - moments[0] / count_of(near.shape, axes)
    return distances * spread(g * 2.0 / _divisor(near.shape, axes, ddof), near, axes)


def _variance_rule(near: Shape, moments: Shape, axes: tuple[int, ...], keepdims: bool, **_: Any) -> Rule:
    rule = reduction_rule(near, axes, keepdims, linear=False, merged=True)
    rows = tuple(None if axis in axes else Axis(axis) for axis in range(len(near)))
    return replace(rule, operands=(*rule.operands, (None, *rows)))


_VARIANCE = Op("var", _variance, (_to_near, None), _variance_rule, uses=[(0, 1), ()])

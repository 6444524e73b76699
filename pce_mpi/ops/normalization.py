"""Layer and root mean square normalization.

All is computed in float64. Along a sharded axis, and inside `reproducible`, sums over the axis are operations of their
own, and only they are sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import Array, Shape, array_namespace, as_array, is_floating, is_half, result_type
from pce_mpi.autograd.apply import Call, Op, apply, of_array, operation
from pce_mpi.autograd.rules import Axes, Axis, Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.exact.functions import BLOCK, BLOCK_ON_GPU
from pce_mpi.kernels import layer_loops
from pce_mpi.ops.elementwise import astype, widened
from pce_mpi.ops.reductions import deviations, in_float64, sums
from pce_mpi.ops.shape import local_sum, normalized_axis, reshape
from pce_mpi.validation import real


@operation
@of_array
def layer_norm(x: DistArray, scale: Any = None, bias: Any = None, axis: int = -1, eps: float = 1e-5) -> DistArray:
    """Normalize each row to mean 0 and variance 1, then scale and shift it.

    The result is scale (x - mean) / sqrt(variance + eps) + bias, with the mean and the variance (the mean of the
    squared deviations) of `x` along `axis`; Ba, Kiros and Hinton, Layer Normalization, 2016.

    Parameters
    ----------
    x : DistArray
        The array.
    scale : DistArray or array, optional
        Factors of shape (n,), with n the length of `axis`.
    bias : DistArray or array, optional
        Summands of shape (n,).
    axis : int, optional
        The axis to normalize along.
    eps : float, optional
        Is added to the variance.

    Returns
    -------
    DistArray
        The normalized array, sharded as `x`; float64 for integers. Equal elements are normalized to 0, or to `nan` if
        `eps` is 0.

    Raises
    ------
    TypeError
        If `eps` is no number.
    ValueError
        If `scale` or `bias` has another shape, or the axis does not exist.

    Notes
    -----
    It is computed in float64 and rounded once, and once more with a `bias`. Halves are rounded to float32 before that:
    some 60 of 1,000,000 elements in float16, and 10 in bfloat16, are the farther of their two neighbours. In float64,
    while the mean is less than 1e6 standard deviations from 0, the normalized rows are right to 4 ulp of the largest
    element of a row. So is their gradient in longer rows. In rows of 2 or 3 elements its terms cancel: there it is
    right to 8 ulp of the largest upstream gradient divided by the standard deviation.

    If rows are sharded, nothing is communicated, and the gradients of `scale` and `bias` are Partial. If `axis` is
    sharded: one Allreduce of 8 bytes a row and one of 16, and backward one of 16, each after an Allgather of 56 bytes.
    A Partial `x` is reduced first.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.array([[1.0, 3.0], [0.0, 8.0]]), mesh, data=pce.Shard(0))
    >>> pce.layer_norm(x, eps=0.0).full()
    array([[-1.,  1.],
           [-1.,  1.]])
    """
    return _norm(x, scale, bias, axis, eps, center=True)


@operation
@of_array
def rms_norm(x: DistArray, scale: Any = None, axis: int = -1, eps: float = 1e-5) -> DistArray:
    """Divide each row by its root mean square, then scale it.

    The result is scale x / sqrt(mean(x**2) + eps), with the mean along `axis`; Zhang and Sennrich, Root Mean Square
    Layer Normalization, 2019.

    Parameters
    ----------
    x : DistArray
        The array.
    scale : DistArray or array, optional
        Factors of shape (n,), with n the length of `axis`.
    axis : int, optional
        The axis to normalize along.
    eps : float, optional
        Is added to the mean square.

    Returns
    -------
    DistArray
        The normalized array; dtype and placement as in `layer_norm`.

    Raises
    ------
    TypeError
        If `eps` is no number.
    ValueError
        If `scale` has another shape, or the axis does not exist.

    Notes
    -----
    If `axis` is sharded: one Allreduce of 8 bytes a row, and backward another one, each after an Allgather of 56 bytes.
    Otherwise as in `layer_norm`.
    """
    return _norm(x, scale, None, axis, eps, center=False)


def _norm(x: DistArray, scale: Any, bias: Any, axis: int, eps: float, center: bool) -> DistArray:
    axis, eps = normalized_axis(axis, x.ndim), real(eps, "eps")
    scale, bias = (
        factor if factor is None or isinstance(factor, DistArray) else as_array(factor, name)
        for name, factor in (("scale", scale), ("bias", bias))
    )
    given = {name: factor for name, factor in (("scale", scale), ("bias", bias)) if factor is not None}
    for name, factor in given.items():
        if factor.shape != (x.shape[axis],):
            raise ValueError(f"{name} must have the length of axis {axis}, ({x.shape[axis]},), got {factor.shape}")
    wide = widened(x) if is_floating(x.dtype) else astype(x, np.float64)
    dtype = result_type(x.dtype if is_half(x.dtype) else wide.dtype, *(factor.dtype for factor in given.values()))
    norm = _composed if wide.sharding.dims_of(axis) else partial(apply, _NORM)
    y = norm(wide, *([] if scale is None else [scale]), axis=axis, eps=eps, center=center)
    if bias is not None:
        y = y + _along(axis, x.ndim, bias)
    return astype(y, dtype)


def _along(axis: int, ndim: int, vector: Any) -> Any:
    """Return `vector` in a shape in which it broadcasts along `axis`."""
    shape = (*vector.shape, *(1,) * (ndim - 1 - axis))
    if len(shape) == 1:
        return vector
    return reshape(vector, shape) if isinstance(vector, DistArray) else vector.reshape(shape)


def _mean_and_deviation(moments: Array, count: int, eps: float) -> tuple[Array, Array]:
    """Return the mean and the deviation of rows, from sums of the elements (if rows are centered) and the squares."""
    xp, square = array_namespace(moments), moments[-1] / count
    mean = moments[0] / count if len(moments) > 1 else xp.zeros_like(square)
    return mean, xp.sqrt(square - mean * mean + eps)


def _pulled(g: Array, normal: Array, deviation: Array, moments: Array, count: int) -> Array:
    """Return the gradient of rows from that of normalized rows, `g`, and its `moments`, that of `g * normal` last."""
    inner = normal * (moments[-1] / count)
    if len(moments) > 1:
        inner += moments[0] / count
    return (g - inner) / deviation


# ------------------------------------------------------------------------------------------------- rows that are whole


def _blocks(rows: Array, step: int = 0) -> Iterator[slice]:
    size = BLOCK if array_namespace(rows) is np else BLOCK_ON_GPU
    step = step or max(1, size // max(1, rows.shape[1]))
    return (slice(start, start + step) for start in range(0, len(rows), step))


def _as_rows(x: Array, axis: int) -> Array:
    """Return `x` as rows that are consecutive, in which NumPy adds up in pairs, and which the loops take."""
    xp = array_namespace(x)
    if axis < x.ndim - 1:  # moveaxis takes as long as normalizing some thousand numbers
        x = xp.moveaxis(x, axis, -1)
    if xp is np:
        x = np.ascontiguousarray(x)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _as_array(rows: Array, shape: Shape, axis: int) -> Array:
    xp, array = array_namespace(rows), rows.reshape(*shape[:axis], *shape[axis + 1 :], rows.shape[1])
    return array if axis == array.ndim - 1 else xp.ascontiguousarray(xp.moveaxis(array, -1, axis))


def _factors(scale: tuple[Array, ...], count: int) -> Array:
    """Return the scale for compiled loops."""
    return np.require(scale[0], np.float64, ("C", "A")) if scale else np.ones(count)


def _row_sums(x: Array, factor: Array, center: bool) -> Array:
    terms = [x] * center + [x * factor]
    return array_namespace(x).stack([term.sum(1, keepdims=True) for term in terms])


def _normal(x: Array, statistics: Array) -> Array:
    """Return normalized rows in float64; `statistics` has two numbers to subtract from each row, and its deviation."""
    first, second, deviation = (statistics[:, index : index + 1] for index in range(3))
    return ((x.astype(np.float64) - first) - second) / deviation


def _scaled_rows(call: Call, x: Array, *scale: Array, axis: int, eps: float, center: bool) -> Array:
    """Return the result; the residuals have the statistics of each row in the place of its elements."""
    xp, rows, count = array_namespace(x), _as_rows(x, axis), x.shape[axis]
    y = xp.empty(rows.shape, result_type(x.dtype, *(each.dtype for each in scale)))
    statistics = xp.zeros((len(rows), 3))
    if loops := layer_loops(rows, y):
        loops.normalize(rows, _factors(scale, count), y, statistics, eps, center)
    else:
        for block in _blocks(rows):
            near = rows[block].astype(np.float64)
            if center:
                statistics[block, :1] = near.sum(1, keepdims=True) / count
                near -= statistics[block, :1]
            found = _mean_and_deviation(_row_sums(near, near, center), count, eps)
            statistics[block, 1:2], statistics[block, 2:] = found
            normal = (near - found[0]) / found[1]
            y[block] = normal * scale[0] if scale else normal
    call.residuals = _as_array(statistics, x.shape, axis)
    return _as_array(y, x.shape, axis)


def _gradient(call: Call, g: Array, x: Array, statistics: Array, *scale: Array, axis: int, center: bool) -> Array:
    upstream, rows, of_rows = (_as_rows(each, axis) for each in (g, x, statistics))
    found = array_namespace(g).empty(rows.shape, x.dtype)
    if loops := layer_loops(rows, upstream):
        loops.write_norm_gradient(upstream, rows, _factors(scale, x.shape[axis]), of_rows, found, center)
    else:
        for block in _blocks(rows):
            pull, normal = upstream[block].astype(np.float64), _normal(rows[block], of_rows[block])
            if scale:
                pull *= scale[0]
            found[block] = _pulled(pull, normal, of_rows[block, 2:], _row_sums(pull, normal, center), x.shape[axis])
    return _as_array(found, x.shape, axis)


def _gradient_of_scale(call: Call, g: Array, x: Array, statistics: Array, axis: int) -> Array:
    upstream, rows, of_rows = (_as_rows(each, axis) for each in (g, x, statistics))
    loops = layer_loops(rows, upstream)
    # The loops add row by row: the error of a sum of sums grows with the square root of the number of rows.
    blocks = list(_blocks(rows, max(32, math.isqrt(len(rows))) if loops else 0))
    parts = array_namespace(g).zeros((len(blocks), rows.shape[1]))
    for part, block in zip(parts, blocks, strict=True):
        if loops:
            loops.add_scale_gradient(upstream[block], rows[block], of_rows[block], part)
        else:
            part += local_sum(upstream[block] * _normal(rows[block], of_rows[block]), (0,))
    found = parts[0] if len(blocks) == 1 else local_sum(parts, (0,))
    return found.astype(result_type(g.dtype, x.dtype))


def _rows(shape: Shape, axis: int) -> Axes:
    return tuple(None if index == axis else Axis(index) for index in range(len(shape)))


def _rule(x: Shape, *scale: Shape, axis: int, **_: Any) -> Rule:
    rows = _rows(x, axis)
    return Rule((rows, *((None,) for _ in scale)), rows, x)


def _gradient_rule(g: Shape, x: Shape, statistics: Shape, *scale: Shape, axis: int, center: bool) -> Rule:
    rows = _rows(g, axis)
    return Rule((rows, rows, rows, *((None,) for _ in scale)), rows, g)


def _scale_rule(g: Shape, x: Shape, statistics: Shape, axis: int) -> Rule:
    rows = _rows(g, axis)
    return Rule((rows, rows, rows), (None,), (g[axis],), reduces="sum")


_GRADIENT = Op("layer_norm", _gradient, rule=_gradient_rule, dtype=lambda g, x, *_: x)
_GRADIENT_OF_SCALE = Op("layer_norm", _gradient_of_scale, rule=_scale_rule, dtype=lambda g, x, _: result_type(g, x))


def _to_rows(
    g: DistArray, y: DistArray, x: DistArray, *scale: DistArray, residuals: Array, **options: Any
) -> DistArray:
    axis = options["axis"]
    statistics = DistArray(residuals, y.mesh, y.sharding.with_whole_axis(axis, 3))
    return apply(_GRADIENT, g, x, statistics, *scale, axis=axis, center=options["center"])


def _to_scale(
    g: DistArray, y: DistArray, x: DistArray, scale: DistArray, residuals: Array, **options: Any
) -> DistArray:
    axis = options["axis"]
    statistics = DistArray(residuals, y.mesh, y.sharding.with_whole_axis(axis, 3))
    return apply(_GRADIENT_OF_SCALE, g, x, statistics, axis=axis)


def _composed(x: DistArray, *scale: Any, axis: int, eps: float, center: bool) -> DistArray:
    """Compute the result from operations that sum over the axis, which ranks may share."""
    near = in_float64(x)
    if center:
        near, moments = deviations(near, (axis,))
    else:
        moments = sums(near, near, axes=(axis,), plain=False)
    y: DistArray = apply(_NORMALIZED, near, moments, axis=axis, eps=eps)
    for factor in scale:
        y = y * _along(axis, x.ndim, factor)
    return y


_NORM = Op("layer_norm", _scaled_rows, (_to_rows, _to_scale), _rule, uses=[(0, 1), (0,)], composition=_composed)

# ---------------------------------------------------------------------------------- rows that ranks share


def _from_sums(call: Call, near: Array, moments: Array, axis: int, eps: float) -> Array:
    mean, call.residuals = _mean_and_deviation(moments, call.operands[0].shape[axis], eps)
    return (near - mean) / call.residuals


def _to_near(
    g: DistArray, y: DistArray, near: DistArray, moments: DistArray, axis: int, eps: float, residuals: Array
) -> DistArray:
    deviation = DistArray(residuals, y.mesh, near.sharding.with_whole_axis(axis, 1))
    found = sums(g, y, axes=(axis,), plain=len(moments) > 1)
    return apply(_PULLED, g, y, deviation, found, count=y.shape[axis])


def _elementwise_rule(near: Shape, *others: Shape, **_: Any) -> Rule:
    """Return the rule of operands shaped as `near`, or as its rows, or as several of its rows one after the other."""
    labels = tuple(map(Axis, range(len(near))))

    def axes(shape: Shape) -> Axes:
        rows = shape[len(shape) - len(near) :]
        own = tuple(label if length == n else None for label, length, n in zip(labels, rows, near, strict=True))
        return (None,) * (len(shape) - len(near)) + own

    return Rule((labels, *map(axes, others)), labels, near)


_PULLED = Op("layer_norm", lambda call, *arrays, **count: _pulled(*arrays, **count), rule=_elementwise_rule)
_NORMALIZED = Op(
    "layer_norm", _from_sums, (_to_near, None), _elementwise_rule, dtype=lambda near, _: near, uses=[(-1,), ()]
)

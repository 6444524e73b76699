"""Layer and root mean square normalization.

Along a sharded axis they are composed of other operations, and only one number a row is sent. Inside `reproducible`
they always are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, as_array, is_floating, is_half
from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.op import Op
from pce_mpi.autograd.rules import Axes, Axis, Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.exact.mode import is_reproducible
from pce_mpi.ops.elementwise import astype, sqrt, square, widened
from pce_mpi.ops.reductions import mean
from pce_mpi.ops.shape import normalized_axis, reshape

Array = Any  # numpy.ndarray or cupy.ndarray
Shape = tuple[int, ...]


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
        The normalized array, sharded as `x`. Halves are normalized in float32 and rounded once, integers in float64.

    Raises
    ------
    ValueError
        If `scale` or `bias` has another shape, or the axis does not exist.

    Notes
    -----
    Sharded rows: communicates nothing, and the gradients of `scale` and `bias` are Partial. Sharded `axis`: two
    Allreduces of one number a row. A Partial `x` is reduced first.

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
    ValueError
        If `scale` has another shape, or the axis does not exist.

    Notes
    -----
    Sharded `axis`: one Allreduce of one number a row; otherwise as in `layer_norm`.
    """
    return _norm(x, scale, None, axis, eps, center=False)


def _norm(x: DistArray, scale: Any, bias: Any, axis: int, eps: float, center: bool) -> DistArray:
    axis = normalized_axis(axis, x.ndim)
    scale, bias = (
        factor if factor is None or isinstance(factor, DistArray) else as_array(factor, name)
        for name, factor in (("scale", scale), ("bias", bias))
    )
    given = {name: factor for name, factor in (("scale", scale), ("bias", bias)) if factor is not None}
    for name, factor in given.items():
        if factor.shape != (x.shape[axis],):
            raise ValueError(f"{name} must have the length of axis {axis}, ({x.shape[axis]},), got {factor.shape}")
    # A dtype that holds the squares of the elements.
    wide = widened(x) if is_floating(x.dtype) else astype(x, np.float64)
    if wide.sharding.dims_of(axis) or is_reproducible():
        centered = wide - mean(wide, axis, keepdims=True) if center else wide
        y = centered / sqrt(mean(square(centered), axis, keepdims=True) + eps)
        y = y if scale is None else y * _along(axis, x.ndim, scale)
    else:
        y = apply(_NORM, wide, *([] if scale is None else [scale]), axis=axis, eps=eps, center=center)
    if bias is not None:
        y = y + _along(axis, x.ndim, bias)
    dtype = np.result_type(x.dtype if is_half(x.dtype) else wide.dtype, *(factor.dtype for factor in given.values()))
    return astype(y, dtype) if is_half(dtype) else y


def _along(axis: int, ndim: int, vector: Any) -> Any:
    """Return `vector` in a shape in which it broadcasts along `axis`."""
    shape = (*vector.shape, *(1,) * (ndim - 1 - axis))
    if len(shape) == 1:
        return vector
    return reshape(vector, shape) if isinstance(vector, DistArray) else vector.reshape(shape)


def _row_mean(x: Array, axis: int) -> Array:
    return x.sum(axis, keepdims=True) / x.dtype.type(x.shape[axis])


def _scaled_rows(x: Array, *scale: Array, axis: int, eps: float, center: bool) -> tuple[Array, tuple[Array, Array]]:
    """Return the result, the normalized rows, and the deviation of each."""
    centered = x - _row_mean(x, axis) if center else x
    deviation = array_namespace(x).sqrt(_row_mean(centered * centered, axis) + eps)
    normal = centered / deviation
    return (normal * _along(axis, x.ndim, scale[0]) if scale else normal), (normal, deviation)


def _gradient(g: Array, normal: Array, deviation: Array, *scale: Array, axis: int, center: bool) -> Array:
    if scale:
        g = g * _along(axis, g.ndim, scale[0])
    inner = normal * _row_mean(g * normal, axis)
    if center:
        inner += _row_mean(g, axis)
    return (g - inner) / deviation


def _gradient_of_scale(g: Array, normal: Array, axis: int) -> Array:
    return (g * normal).sum(tuple(other for other in range(g.ndim) if other != axis))


def _rows(shape: Shape, axis: int) -> Axes:
    return tuple(None if index == axis else Axis(index) for index in range(len(shape)))


def _rule(x: Shape, *scale: Shape, axis: int, **_: Any) -> Rule:
    rows = _rows(x, axis)
    return Rule((rows, *((None,) for _ in scale)), rows, x)


def _gradient_rule(g: Shape, normal: Shape, deviation: Shape, *scale: Shape, axis: int, center: bool) -> Rule:
    rows = _rows(g, axis)
    return Rule((rows, rows, rows, *((None,) for _ in scale)), rows, g)


def _scale_rule(g: Shape, normal: Shape, axis: int) -> Rule:
    rows = _rows(g, axis)
    return Rule((rows, rows), (None,), (g[axis],), reduces="sum")


_GRADIENT = Op("layer_norm", _gradient, rule=_gradient_rule)
_GRADIENT_OF_SCALE = Op("layer_norm", _gradient_of_scale, rule=_scale_rule)


def _to_rows(
    g: DistArray, y: DistArray, x: DistArray, *scale: DistArray, residuals: tuple[Array, Array], **options: Any
) -> DistArray:
    axis = options["axis"]
    normal = DistArray(residuals[0], y.mesh, y.sharding)
    deviation = DistArray(residuals[1], y.mesh, y.sharding.with_whole_axis(axis, 1))
    return apply(_GRADIENT, g, normal, deviation, *scale, axis=axis, center=options["center"])


def _to_scale(
    g: DistArray, y: DistArray, x: DistArray, scale: DistArray, residuals: tuple[Array, Array], **options: Any
) -> DistArray:
    normal = DistArray(residuals[0], y.mesh, y.sharding)
    return apply(_GRADIENT_OF_SCALE, g, normal, axis=options["axis"])


_NORM = Op("layer_norm", _scaled_rows, (_to_rows, _to_scale), _rule, uses=[(1,), ()], gives_residuals=True)

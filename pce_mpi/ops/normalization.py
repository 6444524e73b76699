"""Layer and root mean square normalization, composed of other operations, which have the placement rules.

Over a sharded axis only one number a row is sent.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pce_mpi.arrays import is_floating, is_half
from pce_mpi.distributed.array import DistArray
from pce_mpi.ops.elementwise import astype, sqrt, square, widened
from pce_mpi.ops.reductions import mean
from pce_mpi.ops.shape import normalized_axis, reshape


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
    wide = _wide(x)
    centered = wide - mean(wide, axis, keepdims=True)
    normal = centered / sqrt(mean(square(centered), axis, keepdims=True) + eps)
    return _scaled(normal, x, scale, bias, axis)


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
    wide = _wide(x)
    normal = wide / sqrt(mean(square(wide), axis, keepdims=True) + eps)
    return _scaled(normal, x, scale, None, axis)


def _wide(x: DistArray) -> DistArray:
    """Return `x` in a dtype that holds the squares of its elements."""
    return widened(x) if is_floating(x.dtype) else astype(x, np.float64)


def _scaled(normal: DistArray, x: DistArray, scale: Any, bias: Any, axis: int) -> DistArray:
    """Return `normal` times `scale` plus `bias`, in the dtype that `x`, `scale` and `bias` promote to."""
    axis = normalized_axis(axis, x.ndim)
    y, dtype = normal, x.dtype if is_half(x.dtype) else normal.dtype
    for name, factor in (("scale", scale), ("bias", bias)):
        if factor is None:
            continue
        if factor.shape != (x.shape[axis],):
            raise ValueError(f"{name} must have the length of axis {axis}, ({x.shape[axis]},), got {factor.shape}")
        behind = (1,) * (x.ndim - 1 - axis)
        if behind:
            shape = (x.shape[axis], *behind)
            factor = reshape(factor, shape) if isinstance(factor, DistArray) else factor.reshape(shape)
        y = y * factor if name == "scale" else y + factor
        dtype = np.result_type(dtype, factor.dtype)
    return astype(y, dtype) if is_half(dtype) else y

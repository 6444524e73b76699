"""Layer normalization and its relative without a mean: formulas in other operations, which have the rules.

Over a sharded axis nothing but sums of one number a row is sent.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pce_mpi.arrays import is_floating, is_half
from pce_mpi.distributed.array import DistArray
from pce_mpi.ops.elementwise import astype, sqrt, square, widened
from pce_mpi.ops.reductions import mean
from pce_mpi.ops.shape import normalized_axis, reshape

__all__ = ["layer_norm", "rms_norm"]


def layer_norm(x: DistArray, scale: Any = None, bias: Any = None, axis: int = -1, eps: float = 1e-5) -> DistArray:
    """scale (x - mean) / sqrt(variance + eps) + bias, mean and variance of x along `axis`.

    Ba, Kiros and Hinton, Layer Normalization, 2016. The variance is divided by the number of elements. x is of real
    numbers; halves are normalized in float32. `scale` and `bias` are arrays of the length of that axis, or None; any
    other shape is a `ValueError`.

    The result lies as x does. Where rows are sharded nothing is sent, and the gradients of `scale` and `bias` are
    Partial. Over a sharded `axis`: two Allreduces of one number a row. What is Partial is reduced first.

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
    """scale x / sqrt(mean of x**2 + eps), the mean along `axis`; `scale` has the length of that axis.

    Zhang and Sennrich, Root Mean Square Layer Normalization, 2019. Dtypes, placement and errors as in `layer_norm`,
    but over a sharded axis one Allreduce of one number a row.
    """
    wide = _wide(x)
    normal = wide / sqrt(mean(square(wide), axis, keepdims=True) + eps)
    return _scaled(normal, x, scale, None, axis)


def _wide(x: DistArray) -> DistArray:
    """`x` in a dtype that the squares of its elements fit."""
    return widened(x) if is_floating(x.dtype) else astype(x, np.float64)


def _scaled(normal: DistArray, x: DistArray, scale: Any, bias: Any, axis: int) -> DistArray:
    """`normal`, of `x`, times `scale` plus `bias`; in the dtype that these three have together."""
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

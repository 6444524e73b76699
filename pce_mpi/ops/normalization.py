"""Layer normalization and its relative without a mean: formulas in other operations, which have the rules.

Over a sharded axis nothing but sums of one number a row is sent.
"""

from __future__ import annotations

from typing import Any

from pce_mpi.dist_array import DistArray
from pce_mpi.ops.elementwise import sqrt, square
from pce_mpi.ops.reductions import mean
from pce_mpi.ops.shape import normalized_axis, reshape

__all__ = ["layer_norm", "rms_norm"]


def layer_norm(x: DistArray, scale: Any = None, bias: Any = None, axis: int = -1, epsilon: float = 1e-5) -> DistArray:
    """scale (x - mean) / sqrt(variance + epsilon) + bias, mean and variance of x along `axis`.

    `scale` and `bias` have the length of that axis. Where rows are sharded their gradients are Partial.
    Ba, Kiros and Hinton, Layer Normalization, 2016.
    """
    centered = x - mean(x, axis, keepdims=True)
    return _scaled(centered / sqrt(mean(square(centered), axis, keepdims=True) + epsilon), scale, bias, axis)


def rms_norm(x: DistArray, scale: Any = None, axis: int = -1, epsilon: float = 1e-5) -> DistArray:
    """scale x / sqrt(mean of x**2 + epsilon), the mean along `axis`; `scale` has the length of that axis.

    Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    return _scaled(x / sqrt(mean(square(x), axis, keepdims=True) + epsilon), scale, None, axis)


def _scaled(x: DistArray, scale: Any, bias: Any, axis: int) -> DistArray:
    for name, factor in (("scale", scale), ("bias", bias)):
        axis = normalized_axis(axis, x.ndim)
        if factor is None:
            continue
        if factor.shape != (x.shape[axis],):
            raise ValueError(f"{name} must have the length of axis {axis}, ({x.shape[axis]},), got {factor.shape}")
        behind = (1,) * (x.ndim - 1 - axis)
        if behind:
            shape = (x.shape[axis], *behind)
            factor = reshape(factor, shape) if isinstance(factor, DistArray) else factor.reshape(shape)
        x = x * factor if name == "scale" else x + factor
    return x

"""Activations of neural networks: functions of each element that have no overflow on the way."""

from __future__ import annotations

from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, is_floating
from pce_mpi.autograd.apply import apply
from pce_mpi.distributed.array import DistArray
from pce_mpi.ops.elementwise import astype, unary

Array = Any  # numpy.ndarray or cupy.ndarray


def _sigmoid(x: Array) -> Array:
    xp = array_namespace(x)
    small = xp.exp(-xp.abs(x))  # never overflows
    return xp.where(x >= 0, 1 / (1 + small), small / (1 + small)).astype(small.dtype, copy=False)


def _sigmoid_gradient(g: Array, x: Array) -> Array:
    xp = array_namespace(x)
    small = xp.exp(-xp.abs(x))
    return g * (small / (1 + small) ** 2)


def _relu(x: Array) -> Array:
    return array_namespace(x).maximum(x, x.dtype.type(0))


# gelu(x) = x (1 + tanh(u)) / 2 = x sigmoid(v) with v = 2 u = c (x + k x**3), which does not cancel
_C, _K = 2 * (2 / np.pi) ** 0.5, 0.044715
# For |x| above this sigmoid(v) is 0 or 1, in float64 too, and x**3 may overflow.
_BENT = 32


def _gelu(x: Array) -> Array:
    z = array_namespace(x).clip(x, -_BENT, _BENT)
    return array_namespace(x).maximum(x, -_BENT) * _sigmoid(_C * (z + _K * z * z * z))


def _gelu_gradient(g: Array, x: Array) -> Array:
    z = array_namespace(x).clip(x, -_BENT, _BENT)
    v = _C * (z + _K * z * z * z)
    return g * (_sigmoid(v) * (1 + z * _sigmoid(-v) * (_C * (1 + 3 * _K * z * z))))


_TANH = unary("tanh", lambda g, x: 4 * _sigmoid_gradient(g, 2 * x))
_SIGMOID = unary("sigmoid", _sigmoid_gradient, _sigmoid)
_RELU = unary("relu", lambda g, x: g * (x > 0), _relu)
_GELU = unary("gelu", _gelu_gradient, _gelu)


def tanh(x: Any) -> DistArray:
    """Return the hyperbolic tangent, elementwise.

    Parameters
    ----------
    x : DistArray
        The array.

    Returns
    -------
    DistArray
        The hyperbolic tangents; dtype and placement as in `exp`.
    """
    return apply(_TANH, x)


def sigmoid(x: Any) -> DistArray:
    """Return 1 / (1 + exp(-x)), elementwise and without overflow.

    Parameters
    ----------
    x : DistArray
        The array.

    Returns
    -------
    DistArray
        The sigmoid, in the dtype of `x`, or float64 for integers; placement as in `exp`.
    """
    return apply(_SIGMOID, _real(x))


def relu(x: Any) -> DistArray:
    """Return max(x, 0), elementwise.

    Parameters
    ----------
    x : DistArray
        The array.

    Returns
    -------
    DistArray
        The positive part, in the dtype of `x`; the gradient at 0 is 0. Placement as in `exp`.
    """
    return apply(_RELU, x)


def gelu(x: Any) -> DistArray:
    """Return the Gaussian error linear unit in its tanh approximation, elementwise.

    The formula is x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x**3))) / 2, which approximates x times the normal
    distribution function; Hendrycks and Gimpel, Gaussian Error Linear Units, 2016. PyTorch calls it
    `gelu(approximate="tanh")`.

    Parameters
    ----------
    x : DistArray
        The array.

    Returns
    -------
    DistArray
        The result, in the dtype of `x`, or float64 for integers; placement as in `exp`.
    """
    return apply(_GELU, _real(x))


def _real(x: Any) -> Any:
    """Return `x`, integers and bool as float64."""
    return astype(x, np.float64) if isinstance(x, DistArray) and not is_floating(x.dtype) else x

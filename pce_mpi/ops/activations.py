"""Activations of neural networks: functions of each element that have no overflow on the way."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, is_floating, is_half
from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.op import Op, Shardings
from pce_mpi.distributed.array import DistArray
from pce_mpi.exact import functions
from pce_mpi.exact.mode import is_reproducible
from pce_mpi.ops.elementwise import astype, elementwise_rule, library_function, unary

Array = Any  # numpy.ndarray or cupy.ndarray


_exp, _larger = library_function("exp"), library_function("maximum")


def _sigmoid(x: Array) -> Array:
    if is_reproducible():
        return functions.sigmoid(x)
    xp = array_namespace(x)
    small = _exp(-xp.abs(x))  # never overflows
    return xp.where(x >= 0, 1 / (1 + small), small / (1 + small)).astype(small.dtype, copy=False)


def _sigmoid_gradient(g: Array, x: Array) -> Array:
    xp = array_namespace(x)
    small = _exp(-xp.abs(x))
    both = 1 + small
    return g * (small / (both * both))


def _relu(x: Array) -> Array:
    return _larger(x, x.dtype.type(0))


# gelu(x) = x (1 + tanh(u)) / 2 = x sigmoid(2 u) with u = c x (1 + k x**2), and sigmoid(2 u) = h / (h + 1 / h) with
# h = exp(u): there is one exponential, and nothing cancels.
_C, _K = math.sqrt(2 / math.pi), 0.044715
# By the size of an element: for |x| above this the sigmoid is 0 or 1, and h is still finite.
_BENT = {4: 12, 8: 24}


def _gelu(x: Array, shardings: Shardings) -> tuple[Array, Array | None]:
    """Return gelu(x), and its derivative if a gradient is wanted: most of the way to both is the same.

    The derivative is sigmoid(2 u) + 2 x u' sigmoid(2 u) sigmoid(-2 u), with u' = c (1 + 3 k x**2), and the product of
    the sigmoids is (h + 1 / h)**-2. In-place operators halve the time.
    """
    given = x.dtype
    if is_half(given):
        x = x.astype(np.float32)
    xp, bent = array_namespace(x), _BENT[x.dtype.itemsize]
    z = xp.clip(x, -bent, bent)
    slope = z * z
    u = slope * (_C * _K)
    u += _C
    u *= z
    h = _exp(u)
    both = 1 / h
    both += h
    h /= both
    y = xp.clip(x, -bent, np.inf)  # takes a third of the time of maximum
    y *= h
    y = y.astype(given, copy=False)
    if not shardings.required[0]:
        return y, None
    slope *= 6 * _C * _K
    slope += 2 * _C
    slope *= z
    both *= both
    slope /= both
    slope += h
    return y, xp.asarray(slope)


_TANH = unary("tanh", lambda g, x: 4 * _sigmoid_gradient(g, 2 * x))
_SIGMOID = unary("sigmoid", _sigmoid_gradient, _sigmoid)
_RELU = unary("relu", lambda g, x: g * (x > 0), _relu)
_GELU = Op(
    "gelu",
    _gelu,
    (lambda g, y, x, residuals: g * DistArray(residuals, y.mesh, y.sharding),),
    elementwise_rule(),
    uses=[()],
    takes_shardings=True,
    gives_residuals=True,
)


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

"""Activations of neural networks: elementwise functions whose intermediate results do not overflow."""

from __future__ import annotations

from collections.abc import Callable
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, compute_dtype_of, is_floating, is_half
from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.op import Call, Op
from pce_mpi.distributed.array import DistArray, operation
from pce_mpi.exact import functions
from pce_mpi.kernels import layer_loops
from pce_mpi.kernels.elementary import two_product, two_sum
from pce_mpi.ops.elementwise import astype, elementwise_rule, unary

Array = Any  # numpy.ndarray or cupy.ndarray


def _sigmoid(xp: Any, x: Array) -> Array:
    small = xp.exp(-xp.abs(x))  # never overflows
    return xp.where(x >= 0, 1 / (1 + small), small / (1 + small)).astype(small.dtype, copy=False)


def _exact_sigmoid(call: Call, x: Array) -> Array:
    return functions.sigmoid(x.astype(np.float32) if is_half(x.dtype) else x).astype(x.dtype, copy=False)


def _sigmoid_gradient(xp: Any, g: Array, x: Array) -> Array:
    small = xp.exp(-xp.abs(x))
    both = 1 + small
    return g * (small / (both * both))


def _relu(xp: Any, x: Array) -> Array:
    return xp.maximum(x, x.dtype.type(0))


def _constants() -> tuple[tuple[float, float], tuple[float, float]]:
    """Return a = 2 sqrt(2 / pi) and 0.044715 a, each as a head and a tail."""
    bits = 200
    a = math.isqrt((4 << 2 * bits + functions.PI_BITS) // functions.HALF_PI)

    def parts(n: int) -> tuple[float, float]:
        head = n / 2**bits
        return head, (n - int(math.ldexp(head, bits))) / 2**bits

    return parts(a), parts(a * 44715 // 10**6)


# gelu(x) = x (1 + tanh(v / 2)) / 2 = x / (1 + exp(-v)) with v = a x + b x**3, and a, b as heads and tails.
_A, _B = _constants()
# exp(-v) is 0 if |x| is above the first. If v is above the second, exp(-v) is computed as two factors, so that it keeps
# its digits until it is multiplied by x.
_BENT, _DEEP = 24.0, 600.0


def _gelu(call: Call, x: Array) -> Array:
    """Return gelu(x); if a gradient is required, keep the derivative too: both share most of the computation.

    Both are computed in float64. Compiled loops, for float32, take the exact exponential.
    """
    xp, exp, flat = array_namespace(x), call.functions(x).exp, x.reshape(-1)
    y = xp.empty(flat.shape, x.dtype)
    slope = xp.empty(flat.shape, compute_dtype_of(x.dtype)) if call.required[0] else None
    if x.dtype == np.float32 and (loops := layer_loops(flat)):
        loops.gelu(flat, y, slope, _A[0], _B[0], _BENT)
    else:
        size = functions.BLOCK if xp is np else functions.BLOCK_ON_GPU
        for start in range(0, flat.size, size):
            block = slice(start, start + size)
            _gelu_of(xp, exp, flat[block], y[block], None if slope is None else slope[block])
    call.residuals = None if slope is None else slope.reshape(x.shape)
    return y.reshape(x.shape)


def _gelu_of(xp: Any, exp: Callable[[Array], Array], x: Array, y: Array, slope: Array | None) -> None:
    """Write gelu(x) and its derivative, s (1 + x v' (1 - s)) with s = 1 / (1 + exp(-v))."""
    in_double, x = x.dtype == np.float64, x.astype(np.float64)
    z, negative = xp.clip(x, -_BENT, _BENT), x < 0
    size, square = xp.abs(z), z * z
    if in_double:  # a rounding error of v makes one of exp(-v) that is some hundred times as large
        p, p_tail = two_product(square, xp.full_like(square, _B[0]))
        p_tail += square * _B[1] + two_product(z, z)[1] * _B[0]
        p, rest = two_sum(_A[0], p)
        v, tail = two_product(size, p)
        tail += size * (p_tail + (rest + _A[1]))
        near = xp.minimum(v, _DEEP)
        e = exp(-near)
        e -= e * tail
        deep = xp.where(negative, exp(near - v), 1.0)
    else:
        e, deep = exp(size * (-_A[0] - _B[0] * square)), 1.0
    both = 1.0 + e
    # As e is from 0 to 1, maximum chooses as where(negative, e, 1) would, which takes ten times as long.
    share = xp.maximum(e, ~negative) / both
    y[...] = xp.clip(x, -_BENT, np.inf) * share * deep
    if slope is not None:
        other = xp.maximum(e, negative) / both
        slope[...] = share * (1.0 + z * (_A[0] + 3.0 * _B[0] * square) * other) * deep


_TANH = unary("tanh", lambda xp, g, x: 4 * _sigmoid_gradient(xp, g, 2 * x))
_SIGMOID = unary("sigmoid", _sigmoid_gradient, _sigmoid, _exact_sigmoid)
_RELU = unary("relu", lambda xp, g, x: g * (x > 0), _relu)
_GELU = Op(
    "gelu",
    _gelu,
    (lambda g, y, x, residuals: g * DistArray(residuals, y.mesh, y.sharding),),
    elementwise_rule(),
    uses=[()],
)


@operation
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


@operation
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


@operation
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


@operation
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

    Notes
    -----
    At any `x` the result and the derivative are those of the formula, rounded once. In float64 the error of the result
    is at most 4 ulp; that of the derivative is at most 6 ulp of the larger of the derivative and 1 / (1 + exp(-v)),
    with v = sqrt(8 / pi) (x + 0.044715 x**3).
    """
    return apply(_GELU, _real(x))


def _real(x: Any) -> Any:
    """Return `x`; integers and bool become float64."""
    return astype(x, np.float64) if isinstance(x, DistArray) and not is_floating(x.dtype) else x

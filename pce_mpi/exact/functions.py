"""Functions of each element whose bits depend on the element alone, for NumPy and CuPy arrays.

They take arrays of float32 or float64, and give a new array of the same dtype: exp, log, log1p, tanh, sigmoid, sin,
cos, power, maximum and minimum. The last two are exact; the others compute in float64. Results of float32 are rounded
once. The largest errors measured are 0.5001 ulp in float32, and in float64 0.95 ulp for tanh, 0.85 for log1p, 0.8 for
the others. Special values are NumPy's, and every nan has the same bits.

Only + - * / , comparisons, conversions and scalings by powers of two are used, each in a call of its own, so that no
compiler can fuse a product with a sum. The arithmetic is the one of the loss. If one float64 would lose an ulp, a
number is the unevaluated sum of a head and a tail.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import Array, array_namespace, is_true, result_type, to_host
from pce_mpi.kernels import converted
from pce_mpi.kernels.elementary import (
    ATANH,
    HI,
    LO,
    LOG2E,
    NEAR,
    curved,
    f64,
    i64,
    power as two_to,
    two_product,
    two_sum,
)

# The number of elements that are computed together: it fits the cache of a core, or the memory of a GPU.
BLOCK, BLOCK_ON_GPU = 2**14, 2**22


def elementwise(function: Callable[..., Array]) -> Callable[..., Array]:
    """Make a function of whole arrays from `function(library, *blocks)`, whose blocks are float64."""

    @wraps(function)
    def computed(*arrays: Array) -> Array:
        xp = array_namespace(arrays[0])
        arrays = tuple(xp.broadcast_arrays(*arrays))
        result = xp.empty(arrays[0].shape, result_type(*(array.dtype for array in arrays)))
        flat, operands = result.reshape(-1), [array.reshape(-1) for array in arrays]
        size = BLOCK if xp is np else BLOCK_ON_GPU
        with np.errstate(all="ignore"):
            for start in range(0, result.size, size):
                block = slice(start, start + size)
                found = function(xp, *(converted(operand[block], f64) for operand in operands))
                found = xp.where(found == found, found, np.nan)  # a nan's bits depend on the processor
                flat[block] = found if xp is np else converted(found, result.dtype)
        return result

    return computed


@elementwise
def exp(xp: Any, x: Array) -> Array:
    """Return e**x."""
    k, head, tail = _exponential(xp, xp.clip(x, -746.0, 710.0))
    return _scaled(head + tail, k.astype(i64))


@elementwise
def tanh(xp: Any, x: Array) -> Array:
    """Return (1 - e) / (1 + e) for e = exp(-2 |x|), with the sign of x."""
    k, head, tail = _exponential(xp, -2.0 * xp.clip(xp.abs(x), 0.0, 32.0))
    scale = two_to(k.astype(i64))
    e, tail = head * scale, tail * scale
    return xp.copysign(_quotient(*_one_plus(-e, -tail), *_one_plus(e, tail)), x)


@elementwise
def sigmoid(xp: Any, x: Array) -> Array:
    """Return 1 / (1 + exp(-x))."""
    k, head, tail = _exponential(xp, xp.clip(-xp.abs(x), -746.0, 0.0))
    scale = two_to(xp.clip(k, -1000.0, 0.0).astype(i64))
    negative = x < 0.0  # with e = exp(-|x|): e / (1 + e) for these, 1 / (1 + e) for the others
    above, above_tail = xp.where(negative, head, 1.0), xp.where(negative, tail, 0.0)
    quotient = _quotient(above, above_tail, *_one_plus(head * scale, tail * scale))
    return _scaled(quotient, xp.where(negative, k, 0.0).astype(i64))


@elementwise
def log(xp: Any, x: Array) -> Array:
    """Return the natural logarithm."""
    k, m = _split(xp, x)
    found = _logarithm(k, m - 1.0)
    return xp.where((x > 0.0) & (x < np.inf), found, xp.where(x > 0.0, x, xp.where(x == 0.0, -np.inf, np.nan)))


@elementwise
def log1p(xp: Any, x: Array) -> Array:
    """Return log(1 + x)."""
    s, rest = two_sum(1.0, x)
    k, m = _split(xp, s)
    near = k == 0.0
    found = _logarithm(k, xp.where(near, x, m - 1.0), xp.where(near, 0.0, rest / s))
    usable = (x > -1.0) & (x < np.inf) & (x != 0.0)
    return xp.where(usable, found, xp.where(x >= 0.0, x, xp.where(x == -1.0, -np.inf, np.nan)))


@elementwise
def sin(xp: Any, x: Array) -> Array:
    """Return the sine."""
    return xp.where(x == 0.0, x, _circular(xp, x, 0))


@elementwise
def cos(xp: Any, x: Array) -> Array:
    """Return the cosine."""
    return _circular(xp, x, 1)


@elementwise
def power(xp: Any, x: Array, y: Array) -> Array:
    """Return x**y; nan for negative x unless y is an integer."""
    size, half = xp.abs(x), 0.5 * y
    log_size, log_tail = _long_logarithm(*_split(xp, size))
    exponent = xp.clip(y, -(2.0**65), 2.0**65)  # beyond, the result is 0, 1 or inf
    p, p_tail = two_product(exponent, log_size)
    p_tail = xp.where(xp.abs(p) < 800.0, p_tail + exponent * log_tail, 0.0)
    k, head, tail = _exponential(xp, xp.clip(p, -800.0, 800.0), p_tail)
    found = _scaled(head + tail, k.astype(i64))
    found = xp.where(size == 0.0, xp.where(y < 0.0, np.inf, 0.0), found)
    found = xp.where(size == np.inf, xp.where(y < 0.0, 0.0, np.inf), found)
    whole = xp.rint(y) == y
    odd = whole & (xp.rint(half) != half)
    found = xp.where(odd, xp.copysign(found, x), found)
    undefined = ((x < 0.0) & (size < np.inf) & ~whole) | (x != x) | (y != y)
    return xp.where((x == 1.0) | (y == 0.0), 1.0, xp.where(undefined, np.nan, found))


def maximum(x: Array, y: Array) -> Array:
    """Return the larger element; of 0.0 and -0.0 it is 0.0, whichever the processor takes."""
    return array_namespace(x).maximum(x, y) + x.dtype.type(0)


def minimum(x: Array, y: Array) -> Array:
    """Return the smaller element; of 0.0 and -0.0 it is 0.0."""
    return array_namespace(x).minimum(x, y) + x.dtype.type(0)


def _sum(a: Array | float, b: Array) -> tuple[Array, Array]:
    """Return a + b and its rounding error, for |a| >= |b| (Dekker)."""
    s = a + b
    return s, b - (s - a)


def _one_plus(a: Array, a_tail: Array) -> tuple[Array, Array]:
    """Return head and tail of 1 + a + a_tail for |a| <= 1; the tail is below an ulp of the head."""
    s, rest = _sum(1.0, a)
    return _sum(s, rest + a_tail)


def _quotient(a: Array, a_tail: Array | float, b: Array, b_tail: Array) -> Array:
    head, tail = _long_quotient(a, a_tail, b, b_tail)
    return head + tail


def _long_quotient(a: Array, a_tail: Array | float, b: Array, b_tail: Array) -> tuple[Array, Array]:
    q = a / b
    product, rest = two_product(q, b)
    return q, ((((a - product) - rest) + a_tail) - q * b_tail) / b


def _scaled(v: Array, n: Array) -> Array:
    """Return v 2^n for v near 1, rounded once."""
    half = n >> 1
    return (v * two_to(half)) * two_to(n - half)


def _exponential(xp: Any, z: Array, z_tail: Array | float = 0.0) -> tuple[Array, Array, Array]:
    """Return k, head and tail: exp(z + z_tail) = 2^k (head + tail)."""
    k = xp.rint(z * LOG2E)
    near, far = z - k * HI, k * LO - z_tail
    f = near - far
    head, tail = _sum(1.0, f)
    return k, head, (tail + ((near - f) - far)) + curved(f)


def _split(xp: Any, v: Array) -> tuple[Array, Array]:
    """Return k and m: v = 2^k m for positive v, with m from sqrt(1/2) to sqrt(2)."""
    subnormal = v < 2.0**-1022
    bits = xp.where(subnormal, v * 2.0**54, v).view(i64)
    n = (bits - 0x3FE6A09E667F3BCD) >> 52
    return n.astype(f64) - xp.where(subnormal, 54.0, 0.0), (bits - (n << 52)).view(f64)


def _logarithm(k: Array, f: Array, rest: Array | float = 0.0) -> Array:
    """Return k log 2 + log(1 + f) + rest.

    log(1 + f) = f - (h - s (h + r)) with h = f^2 / 2, s = f / (2 + f) (fdlibm).
    """
    s, h = f / (2.0 + f), 0.5 * f * f
    w = s * s
    return k * HI - ((h - (s * (h + w * _series(w, ATANH[5:])) + (k * LO + rest))) - f)


def _long_logarithm(k: Array, m: Array) -> tuple[Array, Array]:
    """Return head and tail of k log 2 + log m, with a relative error of 2^-64.

    log m = 2 z + z^3 (2/3 + ...), z = (m - 1) / (m + 1).
    """
    z, z_tail = _long_quotient(m - 1.0, 0.0, *two_sum(1.0, m))
    w, w_tail = two_product(z, z)
    w_tail = w_tail + 2.0 * z * z_tail
    cube, cube_tail = two_product(z, w)
    cube_tail = cube_tail + (z * w_tail + z_tail * w)
    q, q_tail = _sum(ATANH[-1], w * _series(w, ATANH[4:-1]))
    q_tail = q_tail + 2.0**-54 / 1.5  # the rest of 2/3
    last, last_tail = two_product(cube, q)
    last_tail = last_tail + (cube * q_tail + cube_tail * q)
    s, s_tail = two_sum(k * HI, z + z)
    s, more = two_sum(s, last)
    return _sum(s, (s_tail + more) + ((k * LO + (z_tail + z_tail)) + last_tail))


def _series(w: Array, coefficients: tuple[float, ...]) -> Array:
    q = w * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        q = q * w + coefficient
    return q


def _pi(bits: int) -> int:
    """Return pi 2^bits, truncated (Machin)."""

    def arctangent(n: int) -> int:
        term = total = (1 << bits + 20) // n
        for k in range(3, bits, 2):
            term //= -n * n
            total += term // k
        return total

    return (16 * arctangent(5) - 4 * arctangent(239)) >> 20


# pi / 2 as 2^-PI_BITS HALF_PI, and in four parts; products of the first three with an n up to NEAR are exact.
PI_BITS = 1200
HALF_PI = _pi(PI_BITS) // 2
PARTS = [math.ldexp(HALF_PI >> PI_BITS - 32, -32)]
for _bits in (65, 98):
    PARTS.append(math.ldexp((HALF_PI >> PI_BITS - _bits) % 2**33, -_bits))
PARTS.append(math.ldexp(HALF_PI % 2 ** (PI_BITS - 98) >> PI_BITS - 151, -151))
# sin r = r + r^3 (-1/3! + ...) and cos r = 1 - r^2 / 2 + r^4 (1/4! - ...).
SINE = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in range(8, 0, -1))
COSINE = tuple((-1.0) ** k / math.factorial(2 * k) for k in range(9, 1, -1))


def _circular(xp: Any, x: Array, quarters: int) -> Array:
    """Return sin(x + quarters pi / 2)."""
    far = ~(xp.abs(x) < NEAR)
    x_near = xp.where(far, 0.0, x)
    n = xp.rint(x_near * (2.0 / math.pi))
    r, tail = two_sum(x_near - n * PARTS[0], -(n * PARTS[1]))
    r, more = two_sum(r, -(n * PARTS[2]))
    r, tail = _sum(r, (tail + more) - n * PARTS[3])
    n = n.astype(i64)
    if is_true(far.any()):
        places = xp.nonzero(far)[0]
        found = [_reduced(value) for value in to_host(x[places]).tolist()]
        for array, numbers in zip((n, r, tail), zip(*found, strict=True), strict=True):
            array[places] = xp.asarray(numbers, dtype=array.dtype)
    w = r * r
    sine = r + (r * w * _series(w, SINE) + tail * (1.0 - 0.5 * w))
    c, c_tail = _sum(1.0, -0.5 * w)
    cosine = c + (c_tail + (w * w * _series(w, COSINE) - r * tail))
    n = n + quarters
    found = xp.where((n & 1) == 0, sine, cosine)
    return xp.where((n & 2) == 0, found, -found)


def _reduced(x: float) -> tuple[int, float, float]:
    """Return n modulo 4, head and tail: x = n pi / 2 + head + tail."""
    if not math.isfinite(x):
        return 0, math.nan, 0.0
    numerator, denominator = x.as_integer_ratio()
    numerator, unit = numerator << PI_BITS, HALF_PI * denominator
    n = (2 * numerator + unit) // (2 * unit)
    rest, scale = numerator - n * unit, denominator << PI_BITS
    head = rest / scale
    top, bottom = head.as_integer_ratio()
    return n % 4, head, (rest * bottom - top * scale) / (scale * bottom)

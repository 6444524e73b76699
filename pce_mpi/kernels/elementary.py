"""Elementary functions in an arithmetic whose bits are the same everywhere, in NumPy.

exp(z) = 2^n (1 + t). Both n and t are functions of z alone: n is an integer near z / log 2 and t a polynomial of
f = z - n log 2. No maximum is subtracted, so no shard of the classes has to know another one's logits.

Only + - * / , comparisons, conversions and scalings by powers of two are used, in one fixed order. The fused
multiply-add of float32 is the one of IEEE 754: exact product, exact sum, one rounding.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from pce_mpi.arrays import name_of
from pce_mpi.kernels.interface import DOUBLE, SHORT, SINGLE, Precision, Transform

Array = np.ndarray[Any, Any]
f32, f64, i64, u64 = np.float32, np.float64, np.int64, np.uint64
_hex = float.fromhex


def numbers_of(text: str) -> tuple[float, ...]:
    """Return hexadecimal numbers between spaces."""
    return tuple(map(_hex, text.split()))


#: The number of this arithmetic on docs/the-bits.md: another one as soon as a bit of a result changes.
VERSION = 3
# log 2 and its reciprocal. A product of the high part with an n of the near range is exact.
LOG2E32, HI32, LO32 = f32(_hex("0x1.715476p+0")), f32(_hex("0x1.62ep-1")), f32(_hex("0x1.0bfbe8p-15"))
LOG2E, HI, LO = _hex("0x1.71547652b82fep+0"), _hex("0x1.62e42feep-1"), _hex("0x1.a39ef35793c76p-33")
LN2, LN2_REST = _hex("0x1.62e42fefa39efp-1"), _hex("0x1.abc9e3b39803fp-56")
# exp(f) = 1 + f + f^2 Q(f); for float32 the coefficients are fitted to |f| <= 0.35, for float64 they are 1 / k!.
Q32 = tuple(f32(_hex(h)) for h in ("0x1.6db642p-10", "0x1.123cep-7", "0x1.55545cp-5", "0x1.55548cp-3", "0x1p-1"))
Q = tuple(1.0 / math.factorial(k) for k in range(2, 14))
# log(1 + y) = 2 z + z w R(w), with z = y / (2 + y) and w = z^2.
ATANH = tuple(2.0 / (2 * k + 1) for k in range(16, 0, -1))
# Polynomials of fewer terms, for results in float32: fitted to |f| <= log 2 / 2, and to w <= 1 / 9.
SHORT_Q = numbers_of(
    "0x1.fffffffffe069p-2 0x1.5555555554f97p-3 0x1.55555565c5602p-5 0x1.111111170ad7ap-7 "
    "0x1.6c166be7451fep-10 0x1.a019c3721025ap-13 0x1.a136b08f4d167p-16 0x1.72ad3afdd48dep-19"
)
SHORT_ATANH = numbers_of(
    "0x1.8677a4bf9332ap-3 0x1.27db2445d4862p-3 0x1.75de5d874a272p-3 0x1.c70d2f5e45807p-3 "
    "0x1.24926db12eb2ap-2 0x1.99999958485b0p-2 0x1.555555555ed28p-1"
)
# Adding MAGIC32 rounds a float32 to an integer, which is then in the low bits.
MAGIC32, MAGIC_BITS = f32(_hex("0x1.8p23")), np.int32(0x4B400000)
# float32 reduces |z| up to NEAR32 by itself; float64 up to NEAR, beyond it with a second part of each product. From
# HUGE on, two different logits are so far apart that of their exponentials only the larger counts.
NEAR32, NEAR, HUGE = f32(2048.0), 2.0**20, 2.0**60


# Beyond these a step of `two_product` may overflow, or be rounded.
_LARGE_FACTOR, _SMALL_PRODUCT = 2.0**996, 2.0**-900
# The bits of float64 after the first 13 digits; elements that stay in the cache.
_REST, _BLOCK = (1 << 40) - 1, 2**13


def fma32(a: Array, b: Any, c: Any) -> Array:
    """Return a b + c of float32, rounded once."""
    product = np.multiply(a, b, dtype=f64)  # exact
    s = np.ascontiguousarray(product + c)
    # A sum rounded to 53 bits and then to 24 is wrong only if the first rounding gave the middle of two float32.
    middle = np.flatnonzero((s.view(i64) & 0x1FFFFFFF) == 0x10000000)
    if middle.size:
        p, t = (np.broadcast_to(array, s.shape).reshape(-1)[middle].astype(f64) for array in (product, c))
        total = s.reshape(-1)[middle]
        _, error = two_sum(p, t)
        s.reshape(-1)[middle] = np.where(
            error == 0.0, total, np.nextafter(total, np.where(error > 0.0, np.inf, -np.inf))
        )
    return s.astype(f32)


def narrowed(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return floating-point numbers in another dtype, rounded once."""
    if values.dtype != f64 or not name_of(dtype).startswith(("bfloat16", "float8")):
        return values.astype(dtype)
    # Cut to 13 digits, of which the last is 1 if one that is cut off was: two more than a half has, so that a rounding
    # to float32 on the way is exact.
    flat, found = values.reshape(-1), np.empty(values.size, dtype)
    for start in range(0, flat.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        bits = flat[block].astype(f64).view(i64)  # a copy
        bits |= (bits & _REST) + _REST
        bits &= ~_REST
        found[block] = bits.view(f64).astype(f32)
    return found.reshape(values.shape)


def two_sum(a: Array | float, b: Array) -> tuple[Array, Array]:
    """Return a + b and its rounding error (Knuth)."""
    s = a + b
    v = s - a
    return s, (a - (s - v)) + (b - v)


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Return a b and its rounding error, for numbers of usual sizes (Dekker)."""
    p = a * b
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    return p, ((a1 * b1 - p) + a1 * b2 + a2 * b1) + a2 * b2


def any_two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Return a b and its rounding error, of which subnormal digits are rounded once, as by a fused multiply-add.

    The error of a product that is not finite means nothing.
    """
    p, error = two_product(a, b)
    size, factors = np.abs(p), np.broadcast_arrays(a, b)
    is_small = (size < _SMALL_PRODUCT) & (a != 0.0) & (b != 0.0)
    is_large = (np.abs(a) >= _LARGE_FACTOR) | (np.abs(b) >= _LARGE_FACTOR)
    places = np.nonzero((is_small | is_large) & np.isfinite(p))
    if places[0].size:
        (m, e), (m_of_b, e_of_b) = (np.frexp(factor[places]) for factor in factors)
        _, error_of_m = two_product(m, m_of_b)
        exponent = e.astype(i64) + e_of_b
        # That of a subnormal product is at most half of the smallest number.
        error[places] = np.where(size[places] < 2.0**-1021, 0.0, scaled(error_of_m, exponent))
    return p, error


def _halves(a: Array) -> tuple[Array, Array]:
    high = ((a.view(i64) + 2**26) & -(2**27)).view(f64)
    return high, a - high


def power(n: Array) -> Array:
    """Return 2^n in float64, for n from -1022 to 1023."""
    return ((n + 1023) << 52).view(f64)


def scaled(v: Array, n: Array) -> Array:
    """Return v 2^n, rounded once if v is normal."""
    n = np.clip(n, -2200, 2200)
    # Only the last step down can round, and only the last step up can overflow.
    for _ in range(3):
        step = np.clip(n, -800, 800)
        v = v * power(step)
        n = n - step
    return v


class Exponential(NamedTuple):
    """exp(z) = 2^n (1 + t), elementwise: n is int64, t has the precision's dtype."""

    n: Array
    t: Array

    def fixed_point(self, precision: Precision) -> Array:
        """Return (1 + t) 2^point, truncated, as int64."""
        return (self.t * self.t.dtype.type(2.0**precision.point)).astype(i64) + (i64(1) << precision.point)


def exponential(x: Array, transform: Transform, precision: Precision) -> Exponential:
    """Return the exponential of z for the logits x; the result for logits that are not finite has no meaning."""
    if precision is not SINGLE:
        n, f = reduced(*transformed(x.astype(f64), transform))
        return Exponential(n, curved(f, precision) + f)
    x = x.astype(f32)
    scale = f32(transform.scale)
    if transform.softcap is not None or float(scale) != transform.scale:
        n, f = reduced(*transformed(x.astype(f64), transform))
        return Exponential(n, _polynomial32(f.astype(f32)))
    product = scale * x
    near = np.abs(product) <= NEAR32
    all_near = bool(near.all())
    if not all_near:
        far = np.nonzero(~near & np.isfinite(x))
        n_far, f_far = reduced(*transformed(x[far].astype(f64), transform))
        x, product = np.where(near, x, f32(0)), np.where(near, product, f32(0))
    k = fma32(product, LOG2E32, MAGIC32)
    n = (k.view(np.int32) - MAGIC_BITS).astype(i64)
    k -= MAGIC32
    # The first product is exact, and so is that of the logit and the scale.
    f = fma32(-k, LO32, fma32(x, scale, -(k * HI32)))
    if not all_near:
        n[far], f[far] = n_far, f_far
    return Exponential(n, _polynomial32(f))


def transformed(x: Array, transform: Transform) -> tuple[Array, Array]:
    """Return z for logits x in float64, as a number and its rounding error."""
    if transform.softcap is not None:
        z = transform.softcap * _tanh(transform.scale * x / transform.softcap)
        return np.where(np.isfinite(x), z, x), np.zeros_like(x)  # a masked class stays masked
    if transform.scale == 1.0:
        return x, np.zeros_like(x)
    finite = np.where(np.isfinite(x), x, 0.0)
    z, low = any_two_product(np.asarray(transform.scale), finite)
    return np.where(np.isfinite(x), z, x), np.where(np.isfinite(z), low, 0.0)


def reduced(z: Array, low: Array) -> tuple[Array, Array]:
    """Return n and f = z + low - n log 2 of float64; from HUGE on f is 0, and n is beyond that of any other z."""
    magnitude = np.abs(z)
    usable = magnitude < HUGE
    zs, z, low = z, np.where(usable, z, 0.0), np.where(usable, low, 0.0)
    k = np.rint(z * LOG2E)
    f = ((z - k * HI) - k * LO) + low
    n = np.where(magnitude >= HUGE, np.sign(zs) * 2.0**61, k).astype(i64)
    far = np.nonzero(usable & (magnitude > NEAR))
    if far[0].size:
        k = k[far]
        product, error = two_product(k, np.asarray(LN2))
        rest = (((z[far] - product) - error) - k * LN2_REST) + low[far]
        more = np.rint(rest * LOG2E)  # 0 unless an ulp of k is 1 or more
        n[far] += more.astype(i64)
        f[far] = rest - more * LN2
    return n, f


def _polynomial32(f: Array) -> Array:
    q = np.full_like(f, Q32[0])
    for coefficient in Q32[1:]:
        q = fma32(q, f, coefficient)
    return fma32(f * f, q, f)


def polynomial(f: Array) -> Array:
    """Return exp(f) - 1 of float64."""
    return curved(f) + f


def curved(f: Array, precision: Precision = DOUBLE) -> Array:
    """Return exp(f) - 1 - f of float64; coefficients are combined in pairs, and pairs in pairs (Estrin)."""
    f2 = f * f
    f4 = f2 * f2
    if precision is SHORT:
        q0, q1 = ((SHORT_Q[k] + SHORT_Q[k + 1] * f) + (SHORT_Q[k + 2] + SHORT_Q[k + 3] * f) * f2 for k in (0, 4))
        return f2 * (q0 + q1 * f4)
    q0, q1, q2 = ((Q[k] + Q[k + 1] * f) + (Q[k + 2] + Q[k + 3] * f) * f2 for k in (0, 4, 8))
    return f2 * ((q0 + q1 * f4) + q2 * (f4 * f4))


def _exp_of_minus(y: Array) -> tuple[Array, Array]:
    """Return exp(-y) and exp(-y) - 1, for y >= 0."""
    n, f = reduced(-y, np.zeros_like(y))
    t = polynomial(f)
    e = scaled(1.0 + t, n)
    return e, np.where(n == 0, t, e - 1.0)


def _tanh(y: Array) -> Array:
    e, less_one = _exp_of_minus(2.0 * np.minimum(np.abs(y), 64.0))
    return np.copysign(-less_one / (1.0 + e), y)


def softcap_slope(x: Array, transform: Transform) -> Array:
    """Return the slope of tanh at scale x / softcap, in float64."""
    assert transform.softcap is not None
    y = transform.scale * x / transform.softcap
    e, _ = _exp_of_minus(2.0 * np.minimum(np.abs(y), 400.0))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


def log(v: Array) -> Array:
    """Return log v of normal positive float64."""
    m, e = np.frexp(v)
    low = m < _hex("0x1.6a09e667f3bcdp-1")
    m, k = np.where(low, m + m, m), (e - low).astype(f64)
    return k * HI + (twice_atanh((m - 1.0) / (m + 1.0)) + k * LO)


def log1p(a: Array) -> Array:
    """Return log(1 + a) for a >= 0."""
    s, error = two_sum(1.0, a)
    return np.where(a < 0.4, twice_atanh(a / (2.0 + a)), log(s) + error / s)


def twice_atanh(z: Array) -> Array:
    """Return 2 artanh z = log((1 + z) / (1 - z)), for |z| up to 1 / 3."""
    return atanh_tail(z) + (z + z)


def atanh_tail(z: Array, precision: Precision = DOUBLE) -> Array:
    """Return 2 artanh z - 2 z."""
    w = z * z
    return z * (w * horner(SHORT_ATANH if precision is SHORT else ATANH, w))


def horner(coefficients: tuple[float, ...], w: Array) -> Array:
    """Return a polynomial of w; the coefficient of the highest power comes first."""
    value = np.full_like(w, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * w + coefficient
    return value

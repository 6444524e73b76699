"""The z of a target with a margin, and its derivative, in NumPy; `margin.h` has the same bits.

Angles, sines and cosines are sums of two float64 numbers, good to some 95 bits: so the angle of a cosine close to 1 or
-1 keeps its bits, and so does the sine of an angle close to a multiple of pi.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pce_mpi.kernels.elementary import any_two_product, i64, two_sum
from pce_mpi.kernels.interface import Transform
from pce_mpi.kernels.limbs import Double

Array = np.ndarray[Any, Any]
_hex = float.fromhex

_PER_QUARTER = _hex("0x1.45f306dc9c883p-1")  # 2 / pi
_QUARTER = _hex("0x1.921fb54442d18p+0"), _hex("0x1.1a62633145c07p-54")  # pi / 2


def margined(x: Array, transform: Transform) -> tuple[Array, Array, Array]:
    """Return z of targets x, as a number and its rounding error, and the derivative of z / scale by x.

    A cosine beyond [-1, 1] counts as -1 or 1. There an infinite derivative counts as 0.
    """
    m1, m2, m3 = transform.margin
    cosine, slope = _double(x), np.ones_like(x)
    if m1 != 1.0 or m2 != 0.0:
        c = np.where(x >= -1.0, np.where(x < 1.0, x, 1.0), -1.0)
        sine = _root(_product(Double(*two_sum(1.0, c)), Double(*two_sum(1.0, -c))))
        sine_of_angle, cosine = _sine_and_cosine(_sum(_product(_double(m1), _arccos(c, sine)), _double(m2)))
        has_limit = (m2 == 0.0) & ((c > 0.0) | (m1 == np.rint(m1)))
        limit = np.where(has_limit, (m1 * m1) * (cosine.high * c), 0.0)
        inside = sine.high > 0.0
        slope = np.where(inside, m1 * sine_of_angle.high / np.where(inside, sine.high, 1.0), limit)
    z = _product(_double(transform.scale), _sum(cosine, _double(-m3)))
    finite = np.isfinite(x)
    return np.where(finite, z.high, x), np.where(finite & np.isfinite(z.low), z.low, 0.0), slope


def _double(v: Array | float) -> Double:
    v = np.asarray(v)
    return Double(v, np.zeros_like(v))


def _negative(a: Double) -> Double:
    return Double(-a.high, -a.low)


def _sum(a: Double, b: Double) -> Double:
    s, rest = two_sum(a.high, b.high)
    return Double(*two_sum(s, rest + (a.low + b.low)))


def _product(a: Double, b: Double) -> Double:
    p, rest = any_two_product(a.high, b.high)
    return Double(*two_sum(p, rest + (a.high * b.low + a.low * b.high)))


def _quotient(a: Double, d: float) -> Double:
    q = a.high / d
    p, rest = any_two_product(q, np.asarray(d))
    return Double(*two_sum(q, (((a.high - p) - rest) + a.low) / d))


def _root(a: Double) -> Double:
    """Return the square root; that of 0 is 0."""
    positive = a.high > 0.0
    r = np.sqrt(np.where(positive, a.high, 1.0))
    p, rest = any_two_product(r, r)
    root = two_sum(r, (((a.high - p) - rest) + a.low) / (r + r))
    return Double(*(np.where(positive, part, 0.0) for part in root))


def _sine_and_cosine(angle: Double) -> tuple[Double, Double]:
    """Return sine and cosine of an angle of at most some thousands, by their series at f = angle - k pi / 2."""
    k = np.rint(angle.high * _PER_QUARTER)
    f = _sum(angle, _negative(_product(_double(k), Double(*map(np.asarray, _QUARTER)))))
    w = _product(f, f)
    s = c = np.ones_like(k)
    for j in range(12, 7, -1):  # float64 suffices for terms this small
        s = 1.0 - s * w.high / (2 * j * (2 * j + 1))
        c = 1.0 - c * w.high / (2 * j * (2 * j - 1))
    one, sine, cosine = _double(1.0), _double(s), _double(c)
    for j in range(7, 0, -1):
        sine = _sum(one, _quotient(_product(sine, w), -2.0 * j * (2 * j + 1)))
        cosine = _sum(one, _quotient(_product(cosine, w), -2.0 * j * (2 * j - 1)))
    sine = _product(f, sine)
    turns = k.astype(i64)
    odd, turned = (turns & 1) == 1, (turns & 2) == 2

    def of(even: Double, odds: Double) -> Double:
        parts = (np.where(odd, *both) for both in zip(odds, even, strict=True))
        return Double(*(np.where(turned, -part, part) for part in parts))

    return of(sine, cosine), of(cosine, _negative(sine))


def _arccos(x: Array, sine: Double) -> Double:
    """Return the angle of a cosine x, from its sine too: an approximation t, corrected twice by sin(angle - t)."""

    def beyond(t: Array) -> Double:
        s, c = _sine_and_cosine(_double(t))
        return _sum(_product(sine, c), _negative(_product(_double(x), s)))

    u = 1.0 - np.abs(x)
    t = np.sqrt(u + u) * (1.0 + u * (1.0 / 12.0 + u * (3.0 / 160.0)))  # 0.013 off at most
    t = np.where(x < 0.0, 2.0 * _QUARTER[0] - t, t)
    y = beyond(t).high
    t = t + (y + y * y * y / 6.0)
    return _sum(_double(t), beyond(t))

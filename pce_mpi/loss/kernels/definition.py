"""An arithmetic of the loss with the same bits for any cut of the classes, in NumPy.

The loss does not use it yet: `blockwise.py` and the CUDA kernels are to reproduce this file to the last bit.

**Elements.** exp(z) = 2^n (1 + t). Both n and t are functions of z alone: n is an integer near z / log 2 and t a
polynomial of f = z - n log 2. No maximum is subtracted, so no shard has to know another one's logits.

**Sums.** An element is cut to a multiple of 2^u, truncated toward zero, and written as an integer in digits of `width`
bits. A state keeps three limbs of a sum, T_j = sum_c trunc(element_c / 2^(u + j width)) modulo 2^64, for a grid u that
follows from the largest element. On the next coarser grid, u + width, limb j is limb j + 1 of the finer one: trunc of
trunc is trunc. So two states on different grids are shifted to the coarser one and added, and the state of a union is
the merge of the states to the last bit, in any order and for any cut.

**Rows.** One class of a row is held apart: its target, or its largest logit. With S the sum over the other classes,
a = S exp(-z_held) gives the loss log1p(a) and the gradient -a / (1 + a) without cancellation.

Only + - * / , comparisons, conversions and scalings by powers of two are used, in one fixed order. The fused
multiply-add of float32 is the one of IEEE 754: exact product, exact sum, one rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
import math
from typing import Any, NamedTuple

import numpy as np

from pce_mpi.loss.kernels.parameters import Transform

Array = np.ndarray[Any, Any]
f32, f64, i64, u64 = np.float32, np.float64, np.int64, np.uint64
_hex = float.fromhex

# log 2 and its reciprocal. A product of the high part with an n of the near range is exact.
LOG2E32, HI32, LO32 = f32(_hex("0x1.715476p+0")), f32(_hex("0x1.62ep-1")), f32(_hex("0x1.0bfbe8p-15"))
LOG2E, HI, LO = _hex("0x1.71547652b82fep+0"), _hex("0x1.62e42feep-1"), _hex("0x1.a39ef35793c76p-33")
LN2, LN2_REST = _hex("0x1.62e42fefa39efp-1"), _hex("0x1.abc9e3b39803fp-56")
# exp(f) = 1 + f + f^2 Q(f); for float32 the coefficients are fitted to |f| <= 0.35, for float64 they are 1 / k!.
Q32 = tuple(f32(_hex(h)) for h in ("0x1.6db642p-10", "0x1.123cep-7", "0x1.55545cp-5", "0x1.55548cp-3", "0x1p-1"))
Q = tuple(1.0 / math.factorial(k) for k in range(13, 1, -1))
# log(1 + y) = 2 z + z w R(w), with z = y / (2 + y) and w = z^2.
ATANH = tuple(2.0 / (2 * k + 1) for k in range(16, 0, -1))
# Adding it rounds a float32 to an integer, which then stands in the low bits.
MAGIC32, MAGIC_BITS = f32(_hex("0x1.8p23")), np.int32(0x4B400000)
# float32 reduces |z| up to NEAR32 by itself; float64 up to NEAR, beyond it with a second part of each product. From
# HUGE on, two different logits are so far apart that of their exponentials only the larger counts.
NEAR32, NEAR, HUGE = f32(2048.0), 2.0**20, 2.0**60


class Arithmetic(NamedTuple):
    """Bits of an element's fraction, bits of a digit, and the dtype of t."""

    point: int
    width: int
    dtype: np.dtype[Any]


SINGLE, DOUBLE = Arithmetic(30, 21, np.dtype(f32)), Arithmetic(62, 36, np.dtype(f64))


def fma32(a: Array, b: Any, c: Any) -> Array:
    """a b + c of float32, rounded once."""
    product = np.multiply(a, b, dtype=f64)  # exact
    s = product + c
    # Rounded to 53 bits and then to 24 a sum is wrong only where the first rounding has hit the middle of two float32.
    middle = np.flatnonzero((s.view(i64) & 0x1FFFFFFF) == 0x10000000)
    if middle.size:
        p, t = (np.broadcast_to(array, s.shape).reshape(-1)[middle].astype(f64) for array in (product, c))
        total = s.reshape(-1)[middle]
        _, error = two_sum(p, t)
        s.reshape(-1)[middle] = np.where(
            error == 0.0, total, np.nextafter(total, np.where(error > 0.0, np.inf, -np.inf))
        )
    return s.astype(f32)


def two_sum(a: Array | float, b: Array) -> tuple[Array, Array]:
    """a + b and what its rounding has left out (Knuth)."""
    s = a + b
    v = s - a
    return s, (a - (s - v)) + (b - v)


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """a b and what its rounding has left out (Dekker)."""
    p = a * b
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    return p, ((a1 * b1 - p) + a1 * b2 + a2 * b1) + a2 * b2


def _halves(a: Array) -> tuple[Array, Array]:
    c = 134217729.0 * a  # 2^27 + 1 (Veltkamp)
    high = c - (c - a)
    return high, a - high


def power(n: Array) -> Array:
    """2^n in float64, for n from -1022 to 1023."""
    return ((n + 1023) << 52).view(f64)


def scaled(v: Array, n: Array) -> Array:
    """v 2^n, rounded once where v is normal."""
    n = np.clip(n, -2200, 2200)
    # Down in steps of which only the last can round, up in steps that pass no bound before the last.
    for _ in range(3):
        step = np.clip(n, -800, 800)
        v = v * power(step)
        n = n - step
    return v


class Exponential(NamedTuple):
    """exp(z) = 2^n (1 + t), elementwise: n is int64, t has the arithmetic's dtype."""

    n: Array
    t: Array

    def fixed_point(self, arithmetic: Arithmetic) -> Array:
        """(1 + t) 2^point, truncated, as int64."""
        return (self.t * self.t.dtype.type(2.0**arithmetic.point)).astype(i64) + (i64(1) << arithmetic.point)


def exponential(x: Array, transform: Transform, arithmetic: Arithmetic) -> Exponential:
    """The exponential of z for the logits x; of those that are not finite the result has no meaning."""
    if arithmetic is DOUBLE:
        n, f = _reduce(*transformed(x.astype(f64), transform))
        return Exponential(n, _polynomial(f))
    x = x.astype(f32)
    scale = f32(transform.scale)
    if transform.softcap is not None or float(scale) != transform.scale:
        n, f = _reduce(*transformed(x.astype(f64), transform))
        return Exponential(n, _polynomial32(f.astype(f32)))
    product = scale * x
    near = np.abs(product) <= NEAR32
    all_near = bool(near.all())
    if not all_near:
        far = np.nonzero(~near & np.isfinite(x))
        n_far, f_far = _reduce(*transformed(x[far].astype(f64), transform))
        x, product = np.where(near, x, f32(0)), np.where(near, product, f32(0))
    k = fma32(product, LOG2E32, MAGIC32)
    n = (k.view(np.int32) - MAGIC_BITS).astype(i64)
    k -= MAGIC32
    # The first product is exact; with a scale that of the logit is, too.
    f = fma32(-k, LO32, fma32(x, scale, -(k * HI32)))
    if not all_near:
        n[far], f[far] = n_far, f_far
    return Exponential(n, _polynomial32(f))


def transformed(x: Array, transform: Transform) -> tuple[Array, Array]:
    """z for logits x in float64, as a number and what its rounding has left out."""
    if transform.softcap is not None:
        return transform.softcap * _tanh(transform.scale * x / transform.softcap), np.zeros_like(x)
    if transform.scale == 1.0:
        return x, np.zeros_like(x)
    finite = np.where(np.isfinite(x), x, 0.0)
    z, low = two_product(np.asarray(transform.scale), finite)
    # Dekker's halves overflow from 2^996 on.
    return np.where(np.isfinite(x), z, x), np.where(np.isfinite(low), low, 0.0)


def _reduce(z: Array, low: Array) -> tuple[Array, Array]:
    """n and f = z + low - n log 2 of float64; from HUGE on f is 0 and n beyond every other one."""
    magnitude = np.abs(z)
    usable = magnitude < HUGE
    zs, z, low = z, np.where(usable, z, 0.0), np.where(usable, low, 0.0)
    k = np.rint(z * LOG2E)
    f = ((z - k * HI) - k * LO) + low
    n = np.where(magnitude >= HUGE, np.where(magnitude < np.inf, np.sign(zs), 0.0) * 2.0**61, k).astype(i64)
    far = np.nonzero(usable & (magnitude > NEAR))
    if far[0].size:
        k = k[far]
        product, error = two_product(k, np.asarray(LN2))
        rest = (((z[far] - product) - error) - k * LN2_REST) + low[far]
        more = np.rint(rest * LOG2E)  # 0 unless k has no digit after the point that is its own
        n[far] += more.astype(i64)
        f[far] = rest - more * LN2
    return n, f


def _polynomial32(f: Array) -> Array:
    q = np.full_like(f, Q32[0])
    for coefficient in Q32[1:]:
        q = fma32(q, f, coefficient)
    return fma32(f * f, q, f)


def _polynomial(f: Array) -> Array:
    q = np.full_like(f, Q[0])
    for coefficient in Q[1:]:
        q = q * f + coefficient
    return (f * f) * q + f


def _exp_of_minus(y: Array) -> tuple[Array, Array]:
    """exp(-y) for y >= 0, and minus 1."""
    n, f = _reduce(-y, np.zeros_like(y))
    t = _polynomial(f)
    e = scaled(1.0 + t, n)
    return e, np.where(n == 0, t, e - 1.0)


def _tanh(y: Array) -> Array:
    e, less_one = _exp_of_minus(2.0 * np.minimum(np.abs(y), 64.0))
    return np.copysign(-less_one / (1.0 + e), y)


def softcap_slope(x: Array, transform: Transform) -> Array:
    """The slope of tanh at scale x / softcap, in float64."""
    assert transform.softcap is not None
    y = transform.scale * x / transform.softcap
    e, _ = _exp_of_minus(2.0 * np.minimum(np.abs(y), 400.0))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


NO_CLASS = np.iinfo(i64).max  # loses every tie against a class
# The grid of a sum of nothing, which every other one is coarser than, and those of sums that are not finite.
NO_GRID, INFINITE, NOT_A_NUMBER = -(2**30), 2**30, 2**30 + 1
NO_ENTROPY = -(2**60)
# The digits of sums that are not of exponentials.
WIDE = DOUBLE.width


@dataclass(frozen=True)
class StateFields:
    """Which fields the states of one call have.

    `hold_largest` holds the largest logit apart rather than the target, whose logit `target` then has. `held_weight`
    is the weight of the class held; `weights` has the sums of u and u z over the others; `entropy` that of exp(z) z.
    """

    hold_largest: bool = False
    target: bool = False
    held_weight: bool = False
    weights: bool = False
    entropy: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the fields."""
        return self.dtype.names or ()

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The structured dtype of one state; 40 bytes for a plain loss."""
        fields: list[Any] = [("held", f64), ("top", f64), ("sum", u64, 3)]
        fields += [("argmax", i64)] * self.hold_largest + [("target", f64)] * self.target
        fields += [("held_weight", f64)] * (self.held_weight or self.weights)
        if self.weights:
            fields += [("weight_grids", np.int32, 2), ("weight", u64, 3), ("weighted_logit", u64, 3)]
        if self.entropy:
            fields += [("entropy_grid", i64), ("exp_logit", u64, 3)]
        return np.dtype(fields)


def limbs_of(mantissa: Array, exponent: Array, unit: Array, width: int) -> Array:
    """The three limbs of mantissa 2^exponent, int64, cut to multiples of 2^unit: (..., 3) uint64, modulo 2^64.

    The magnitude must be below 2^(unit + 3 width).
    """
    shift = exponent - unit
    magnitude = np.abs(mantissa).astype(u64)
    left, right = (np.clip(s, 0, 63).astype(u64) for s in (shift, -shift))
    low = np.where(shift > -64, (magnitude << left) >> right, u64(0))
    high = np.where(shift > 0, (magnitude >> u64(1)) >> (u64(63) - left), u64(0))
    limbs = [low]
    for j in (1, 2):
        s = u64(width * j % 64)
        limbs.append(high >> s if width * j >= 64 else (low >> s) | (high << (u64(64) - s)))
    return np.stack([np.where(mantissa < 0, u64(0) - limb, limb) for limb in limbs], axis=-1)


def shifted(limbs: Array, grids: Array) -> Array:
    """The limbs on a grid that is so many times coarser; what is below it is gone."""
    padded = np.concatenate([limbs, np.zeros_like(limbs)], axis=-1)
    return np.take_along_axis(padded, np.clip(grids, 0, 3)[..., None] + np.arange(3), axis=-1)


class Double(NamedTuple):
    """The sum of two float64, the second at most half an ulp of the first."""

    high: Array
    low: Array


def value_of(limbs: Array, width: int) -> Double:
    """The sum that the limbs stand for, in units of their grid, correct to 2^-104."""
    digits = [limbs[..., j].copy() for j in range(3)]
    for j in (0, 1):
        digits[j] -= digits[j + 1] << u64(width)
    signed = [digit.view(i64) for digit in digits]
    _carry(signed, width)
    negative = signed[2] < 0
    signed = [np.where(negative, -digit, digit) for digit in signed]
    _carry(signed, width)
    top = signed[2]
    upper = ((top >> 32) << 32).astype(f64)
    high, low = two_sum(upper * 2.0 ** (2 * width), (top & 0xFFFFFFFF).astype(f64) * 2.0 ** (2 * width))
    high, error = two_sum(high, signed[1].astype(f64) * 2.0**width)
    low += error
    high, error = two_sum(high, signed[0].astype(f64))
    low += error
    high, low = two_sum(high, low)
    sign = np.where(negative, -1.0, 1.0)
    return Double(sign * high, sign * low)


def _carry(digits: list[Array], width: int) -> None:
    for j in (0, 1):
        digits[j + 1] = digits[j + 1] + (digits[j] >> width)
        digits[j] = digits[j] & ((1 << width) - 1)


# States


def identity(fields: StateFields, *shape: int) -> Array:
    """States of no classes."""
    states = np.zeros(shape, fields.dtype)
    for name in {"held", "top", "target"} & set(fields.names):
        states[name] = -np.inf
    if fields.hold_largest:
        states["argmax"] = NO_CLASS
    if fields.weights:
        states["weight_grids"] = NO_GRID
    if fields.entropy:
        states["entropy_grid"] = NO_ENTROPY
    return states


def states_of(
    x: Array,
    held_column: Array | None,
    fields: StateFields,
    *,
    u: Array | None,
    transform: Transform,
    arithmetic: Arithmetic,
    first_class: int,
) -> Array:
    """Return the states of a block of logits, (rows, classes), with the weights u.

    `held_column` has the column of each row's target, -1 if it is elsewhere; None if the largest logit is held apart.
    """
    states = identity(fields, len(x))
    if not x.shape[1]:
        return states
    rows = np.arange(len(x))
    if fields.hold_largest:
        columns = x.argmax(axis=1)  # a nan is the largest
        states["argmax"] = first_class + columns
    else:
        assert held_column is not None
        rows = np.flatnonzero((held_column >= 0) & (held_column < x.shape[1]))
        columns = held_column[rows]
    if fields.target and held_column is not None:
        here = np.flatnonzero((held_column >= 0) & (held_column < x.shape[1]))
        states["target"][here] = _canonical(x[here, held_column[here]])
    states["held"][rows] = _canonical(x[rows, columns])
    others = np.ones(x.shape, np.bool_)
    others[rows, columns] = False
    _fill_sum(states, x, others, transform, arithmetic, fields)
    if fields.held_weight or fields.weights:
        states["held_weight"][rows] = 1.0 if u is None else np.broadcast_to(u, x.shape)[rows, columns]
    if fields.weights:
        weight = np.where(others, 1.0 if u is None else u, 0.0)
        _fill_weights(states, x, weight, transform)
    return states


def _canonical(values: Array) -> Array:
    """Return float64 with one bit pattern for nan and one for zero."""
    return np.where(np.isnan(values), np.nan, values.astype(f64)) + 0.0


def _fill_sum(
    states: Array, x: Array, others: Array, transform: Transform, arithmetic: Arithmetic, fields: StateFields
) -> None:
    top = np.max(x, axis=1, where=others, initial=-np.inf).astype(f64)
    states["top"] = _canonical(np.where(top == np.inf, np.nan, top))
    counted = others & (x > -np.inf) & (x < np.inf)
    z_top, _ = transformed(top, transform)
    huge = ~(np.abs(z_top) < HUGE) & np.isfinite(top)
    if huge.any():
        counted &= ~huge[:, None] | (x == top[:, None])
    counted &= np.isfinite(states["top"])[:, None]
    e = exponential(x, transform, arithmetic)
    unit = grid_of_sum(states["top"], transform, arithmetic)[:, None]
    fixed = np.where(counted, e.fixed_point(arithmetic), 0)
    exponent = e.n - arithmetic.point
    states["sum"] = limbs_of(fixed, exponent, unit, arithmetic.width).sum(axis=1, dtype=u64)
    if fields.entropy:
        z, low = transformed(x.astype(f64), transform)
        z, low = np.where(counted, z, 0.0), np.where(counted, low, 0.0)
        # A float64 holds all bits of SINGLE's fixed-point numbers, and half of those of DOUBLE's.
        digits = max(0, arithmetic.point - 30)
        upper = fixed >> digits << digits
        parts = [*two_product(upper.astype(f64), z), *two_product((fixed - upper).astype(f64), z)]
        parts.append(fixed.astype(f64) * low)
        states["entropy_grid"], states["exp_logit"] = _wide_sum(parts, exponent, NO_ENTROPY)


def grid_of_sum(top: Array, transform: Transform, arithmetic: Arithmetic) -> Array:
    """The unit, as a power of two, of the sum of exponentials of which the largest is that of the logit `top`."""
    finite = np.where(np.isfinite(top), top, 0.0)
    if arithmetic is SINGLE:
        finite = finite.astype(f32)
    n = exponential(finite, transform, arithmetic).n
    return arithmetic.width * (n // arithmetic.width - 2)


def _mantissa_and_exponent(v: Array) -> tuple[Array, Array]:
    """v as m 2^e, int64, with 53 bits in m; 0, 0 for what is not finite."""
    m, e = np.frexp(np.where(np.isfinite(v), v, 0.0))
    return (m * 2.0**53).astype(i64), e.astype(i64) - 53


def _wide_sum(parts: list[Array], exponent: Array | int, none: int) -> tuple[Array, Array]:
    """Sum the parts, times 2^exponent, over the classes: the grid, from the first and largest part, and the limbs."""
    split = [_mantissa_and_exponent(part) for part in parts]
    mantissa, its_exponent = split[0]
    nothing = np.iinfo(i64).min // 2
    size = np.where(mantissa != 0, its_exponent + 52 + exponent, nothing).max(axis=1)
    grid = np.where(size == nothing, none, size // WIDE)
    unit = WIDE * (grid - 2)[:, None]
    return grid, sum(limbs_of(m, e + exponent, unit, WIDE).sum(axis=1, dtype=u64) for m, e in split)


def _fill_weights(states: Array, x: Array, weight: Array, transform: Transform) -> None:
    """Sum u and u z over all classes where u is not 0."""
    z, low = transformed(x.astype(f64), transform)
    masked = (z == -np.inf) & (weight != 0.0)
    usable = np.isfinite(z)
    z, low = np.where(usable, z, 0.0), np.where(usable, low, 0.0)
    product, rest = two_product(weight, z)
    rest = np.where(np.isfinite(rest), rest + weight * low, 0.0)
    states["weight_grids"][:, 0], states["weight"] = _wide_sum([weight], 0, NO_GRID)
    states["weight_grids"][:, 1], states["weighted_logit"] = _wide_sum([product, rest], 0, NO_GRID)
    # A weight on a masked class makes the loss infinite, and one that is not finite makes it nan.
    states["weight_grids"][masked.any(axis=1), 1] = INFINITE
    states["weight_grids"][~np.isfinite(weight).all(axis=1), 1] = NOT_A_NUMBER
    states["weighted_logit"][states["weight_grids"][:, 1] >= INFINITE] = 0


def merge(a: Array, b: Array, fields: StateFields, transform: Transform, arithmetic: Arithmetic) -> Array:
    """Return the states of the union of two disjoint sets of classes of the same rows."""
    merged = _merge_others(a, b, fields, transform, arithmetic)
    if fields.target:
        merged["target"] = np.maximum(a["target"], b["target"])
    if not fields.hold_largest:
        merged["held"] = np.maximum(a["held"], b["held"])
        if "held_weight" in fields.names:  # nought on every shard but the one that has the target
            merged["held_weight"] = a["held_weight"] + b["held_weight"]
        return merged
    # Of the two classes held apart, the one with the smaller logit joins the others.
    swap = _b_is_held(a, b)
    smaller, larger = np.where(swap, a, b), np.where(swap, b, a)
    there = smaller["argmax"] != NO_CLASS
    alone = identity(fields, *a.shape)
    _fill_sum(alone, smaller["held"][:, None], there[:, None], transform, arithmetic, fields)
    if fields.weights:
        _fill_weights(alone, smaller["held"][:, None], np.where(there, smaller["held_weight"], 0.0)[:, None], transform)
    merged = _merge_others(merged, alone, fields, transform, arithmetic)
    for name in {"held", "held_weight", "argmax"} & set(fields.names):
        merged[name] = larger[name]
    if fields.target:
        merged["target"] = np.maximum(a["target"], b["target"])
    return merged


def _merge_others(a: Array, b: Array, fields: StateFields, transform: Transform, arithmetic: Arithmetic) -> Array:
    merged = identity(fields, *a.shape)
    top = np.maximum(a["top"], b["top"])
    merged["top"] = top
    unit = grid_of_sum(top, transform, arithmetic)
    huge = ~(np.abs(transformed(top, transform)[0]) < HUGE)
    for state in (a, b):
        coarser = (unit - grid_of_sum(state["top"], transform, arithmetic)) // arithmetic.width
        coarser = np.where(huge & (state["top"] != top), 3, coarser)
        merged["sum"] += shifted(state["sum"], np.where(state["top"] == -np.inf, 0, coarser))
    merged["sum"][np.isnan(top)] = 0
    if fields.weights:
        grids = merged["weight_grids"] = np.maximum(a["weight_grids"], b["weight_grids"])
        for column, name in enumerate(("weight", "weighted_logit")):
            for state in (a, b):
                merged[name] += shifted(state[name], grids[:, column] - state["weight_grids"][:, column].astype(i64))
    if fields.entropy:
        gone = [np.isnan(top) | (huge & (state["top"] != top)) for state in (a, b)]
        grids = [np.where(g, NO_ENTROPY, state["entropy_grid"]) for g, state in zip(gone, (a, b), strict=True)]
        grid = merged["entropy_grid"] = np.maximum(*grids)
        for state, its in zip((a, b), grids, strict=True):
            merged["exp_logit"] += shifted(state["exp_logit"], np.where(its == NO_ENTROPY, 3, grid - its))
    return merged


def _b_is_held(a: Array, b: Array) -> Array:
    """Return the rows of which b holds the largest logit: a nan before numbers, the larger, then the lower class."""
    nan_a, nan_b = np.isnan(a["held"]), np.isnan(b["held"])
    lower = b["argmax"] < a["argmax"]
    larger = (b["held"] > a["held"]) | ((b["held"] == a["held"]) & lower)
    return np.where(nan_a | nan_b, nan_b & (~nan_a | lower), larger)


# Rows


def log(v: Array) -> Array:
    """log v of normal positive float64."""
    m, e = np.frexp(v)
    low = m < _hex("0x1.6a09e667f3bcdp-1")
    m, k = np.where(low, m + m, m), (e - low).astype(f64)
    return k * HI + (_twice_atanh((m - 1.0) / (m + 1.0)) + k * LO)


def log1p(a: Array) -> Array:
    """log(1 + a) for a >= 0."""
    s, error = two_sum(1.0, a)
    return np.where(a < 0.4, _twice_atanh(a / (2.0 + a)), log(s) + error / s)


def _twice_atanh(z: Array) -> Array:
    w = z * z
    q = np.full_like(w, ATANH[0])
    for coefficient in ATANH[1:]:
        q = q * w + coefficient
    return z * (w * q) + (z + z)


class RowSoftmax:
    """The softmax of each row, from merged states; float64, (rows,). Rows with a nan, a +inf or no class are `nan`."""

    def __init__(self, states: Array, fields: StateFields, transform: Transform, arithmetic: Arithmetic):
        self.fields, self._states = fields, states
        self.held, self.top = states["held"], states["top"]
        with np.errstate(all="ignore"):
            bad = np.isnan(self.top) | ~(self.held < np.inf) | ((self.top == -np.inf) & (self.held == -np.inf))
            self._held_z = _Logit(self.held, transform)
            self._top_z = _Logit(self.top, transform)
            unit = grid_of_sum(self.top, transform, arithmetic)
            self._sum, self._unit = value_of(states["sum"], arithmetic.width), unit
            s, none = self._sum.high, self.held == -np.inf
            n, e = self._held_z.n, self._held_z.e
            # Of two logits that are HUGE or on either side of it, only the larger counts.
            apart = (self._held_z.huge | self._top_z.huge) & (self.held != self.top) & (s > 0) & ~none
            held_alone, others_alone = apart & (self.held > self.top), apart & (self.held < self.top)
            s = np.where(held_alone, 0.0, s)
            quotient = s / e
            odds = scaled(quotient, unit - n)
            odds = np.where(others_alone | none, np.inf, odds)
            self.odds = np.where(bad, np.nan, odds)
            #: the power of two that `normalizer` is in units of
            self.exponent = np.where(
                s > 0, np.where(none | others_alone, self._top_z.n, np.maximum(self._top_z.n, n)), n
            )
            e = np.where(none | others_alone, 0.0, scaled(e, n - self.exponent))
            self._sum_of_others = scaled(s, unit - self.exponent)
            #: the factor of exp(z_c) 2^-exponent that gives the probability of another class
            self.normalizer = np.where(bad, np.nan, 1.0 / (self._sum_of_others + e))
            d = (unit - n).astype(f64)
            large = d * HI + (log(np.where(quotient > 0, quotient, 1.0)) + d * LO)
            top_n = np.where(self._top_z.huge, self._top_z.n, 0)
            others = self._top_z.huge_value + (_times_log2(unit - top_n) + log(np.where(s > 0, s, 1.0)))
            nll = np.where(self.odds > 2.0**60, large, log1p(np.where(self.odds > 2.0**60, 0.0, self.odds)))
            nll = np.where(others_alone, others - self._held_z.z, nll)
            #: -log of the probability of the class held
            self.held_nll = np.where(bad, np.nan, np.where(none, np.inf, nll))
            #: that probability, and it less 1
            self.held_probability = 1.0 / (1.0 + self.odds)
            self.held_minus_one = np.where(
                self.odds <= 1.0, -self.odds / (1.0 + self.odds), -1.0 / (1.0 + 1.0 / self.odds)
            )
            total = (self._sum_of_others + e) / self._top_z.e
            above = log(np.where(total > 0, total, 1.0)) + _times_log2(self.exponent - self._top_z.n)
            gap = (self._held_z.z - self._top_z.z) + (self._held_z.low - self._top_z.low)
            #: logsumexp less the largest logit of the others
            self.above_top = np.where(self.held >= self.top, gap + self.held_nll, above)
            self.logsumexp = np.where(self.held >= self.top, self._held_z.z + self.held_nll, self._top_z.z + above)
            self.logsumexp = np.where(bad, np.nan, self.logsumexp)

    @property
    def weight(self) -> Array:
        """sum of u_c over all classes."""
        return self._states["held_weight"] + self._weights("weight", 0).high

    def _weights(self, name: str, column: int) -> Double:
        grid = np.clip(self._states["weight_grids"][:, column].astype(i64), -100, 100)
        unit = WIDE * (grid - 2)
        high, low = value_of(self._states[name], WIDE)
        return Double(scaled(high, unit), scaled(low, unit))

    @property
    def weighted_nll(self) -> Array:
        """sum of -u_c log p_c over all classes."""
        with np.errstate(all="ignore"):
            weight, held_weight = self._weights("weight", 0), self._states["held_weight"]
            gap = _gap(weight, self._top_z, self._weights("weighted_logit", 1))
            value = (times(held_weight, self.held_nll) + times(weight.high, self.above_top)) + gap
            grid = self._states["weight_grids"].max(axis=1)
            return np.where(grid == NOT_A_NUMBER, np.nan, np.where(grid == INFINITE, value + np.inf, value))

    @property
    def entropy(self) -> Array:
        """sum of -p_c log p_c over all classes."""
        with np.errstate(all="ignore"):
            unit = WIDE * (self._states["entropy_grid"] - 2) - self.exponent
            high, low = value_of(self._states["exp_logit"], WIDE)
            total = Double(*(scaled(part, self._unit - self.exponent) for part in self._sum))
            gap = _gap(total, self._top_z, Double(scaled(high, unit), scaled(low, unit)))
            others = (times(total.high, self.above_top) + gap) * self.normalizer
            return times(self.held_probability, self.held_nll) + np.where(self._sum_of_others == 0.0, 0.0, others)

    @property
    def target_log_prob(self) -> Array:
        """log of the probability of the target, where the largest logit is held; two terms of one sign."""
        with np.errstate(all="ignore"):
            target = _Logit(self._states["target"], self._held_z.transform)
            gap = (target.z - self._held_z.z) + (target.low - self._held_z.low)
            return np.minimum(gap, 0.0) - self.held_nll


class _Logit:
    """One logit per row: z, its parts, and e in exp(z) = 2^n e."""

    def __init__(self, x: Array, transform: Transform):
        self.transform = transform
        self.z, self.low = transformed(x, transform)
        self.huge = np.isfinite(self.z) & ~(np.abs(self.z) < HUGE)
        self.huge_value = np.where(self.huge, self.z, 0.0)
        self.n, f = _reduce(self.z, self.low)
        self.e = 1.0 + _polynomial(f)


def _times_log2(n: Array) -> Array:
    return n.astype(f64) * HI + n.astype(f64) * LO


def _gap(weight: Double, logit: _Logit, weighted: Double) -> Array:
    """weight z - weighted, whose digits cancel where all logits are far from 0."""
    z = np.where(np.isfinite(logit.z), logit.z, 0.0)
    product, error = two_product(weight.high, z)
    error = error + (weight.high * logit.low + weight.low * z)
    s, rest = two_sum(product, -weighted.high)
    return s + (rest + (error - weighted.low))


def times(weight: Array, value: Array) -> Array:
    """weight value, where weight 0 gives 0 even if the value is infinite."""
    return np.where(weight == 0.0, 0.0, weight * value)


def gradient_of(x: Array, factor: Array, softmax: RowSoftmax, transform: Transform, arithmetic: Arithmetic) -> Array:
    """factor exp(z) 2^-exponent for a block of logits, in the arithmetic's dtype; (rows,) float64 factors."""
    with np.errstate(all="ignore"):
        e = exponential(x, transform, arithmetic)
        m, k = np.frexp(factor)
        m, k = np.where(np.isfinite(factor), m + m, factor), k.astype(i64) - 1
        n = e.n + (k - softmax.exponent)[:, None]
        if arithmetic is SINGLE:
            high = m.astype(f32)
            low = (m - high.astype(f64)).astype(f32)
            value = high[:, None] + fma32(*np.broadcast_arrays(high[:, None], e.t, low[:, None]))
            near = np.clip(n, -125, 127)
            rest = np.clip(n - near, -30, 30)
            value = value * power(near).astype(f32) * power(rest).astype(f32)
        else:
            value = m[:, None] + m[:, None] * e.t
            near = np.clip(n, -1020, 1023)
            value = value * power(near) * power(np.clip(n - near, -60, 60))
        nought = x == -np.inf
        if softmax._top_z.huge.any():
            nought |= softmax._top_z.huge[:, None] & (x != softmax.top[:, None])
        return np.where(nought, (factor * 0.0)[:, None].astype(value.dtype), value)

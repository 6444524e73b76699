"""Sums in limbs, which no order of addition changes, in NumPy.

An element is cut to a multiple of 2^unit, truncated toward zero, and written as an integer in digits of `width` bits. A
sum keeps three limbs, T_j = sum_c trunc(element_c / 2^(unit + j width)) modulo 2^64. The unit is a multiple of the
width, `width (grid - 2)`, and the grid follows from the largest element. On the next coarser grid, limb j is limb j + 1
of the finer one: trunc of trunc is trunc. So two sums on different grids are shifted to the coarser one and added, to
the last bit in any order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from pce_mpi.kernels.elementary import f64, i64, scaled, two_sum, u64
from pce_mpi.kernels.interface import DOUBLE, INFINITE, MINUS_INFINITE, NO_GRID, NOT_A_NUMBER

Array = np.ndarray[Any, Any]

# The digits of sums that are not of exponentials.
WIDE = DOUBLE.width


class Sums(NamedTuple):
    """Sums in limbs, uint64 (rows, 3), each on the grid in `grids`, int64 (rows,)."""

    grids: Array
    limbs: Array


def limbs_of(mantissa: Array, exponent: Array, unit: Array, width: int) -> Array:
    """Return the three limbs of mantissa 2^exponent, int64, cut to multiples of 2^unit: (..., 3) uint64, modulo 2^64.

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
    """Return the limbs on a grid that is coarser by `grids` steps; digits below it are dropped."""
    padded = np.concatenate([limbs, np.zeros_like(limbs)], axis=-1)
    return np.take_along_axis(padded, np.clip(grids, 0, 3)[..., None] + np.arange(3), axis=-1)


def united(nothing: int, *sums: Sums) -> Sums:
    """Return the sum of sums, on the coarsest of their grids; `nothing` is the grid of an empty sum."""
    grids = sums[0].grids
    for each in sums[1:]:
        grids = np.maximum(grids, each.grids)
    limbs = np.zeros_like(sums[0].limbs)
    for each in sums:
        limbs += shifted(each.limbs, np.where(each.grids == nothing, 3, grids - each.grids))
    return Sums(grids, limbs)


class Double(NamedTuple):
    """The sum of two float64, the second at most half an ulp of the first."""

    high: Array
    low: Array


def value_of(limbs: Array, width: int) -> Double:
    """Return the value of limbs, in units of their grid, correct to 2^-104."""
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


def sum_of(parts: Iterable[Array], exponent: Array | int = 0, nothing: int = NO_GRID) -> Sums:
    """Sum the parts, (rows, classes), times 2^exponent, over the classes; the first part is the largest of each."""
    split = [mantissa_and_exponent(part) for part in parts]
    mantissa, its_exponent = split[0]
    none = np.iinfo(i64).min // 2
    size = np.where(mantissa != 0, its_exponent + 52 + exponent, none).max(axis=1, initial=none)
    grids = np.where(size == none, nothing, size // WIDE)
    unit = WIDE * (grids - 2)[:, None]
    limbs = np.zeros((len(grids), 3), u64)
    for m, e in split:
        limbs += limbs_of(m, e + exponent, unit, WIDE).sum(axis=1, dtype=u64)
    return Sums(grids, limbs)


def mantissa_and_exponent(v: Array) -> tuple[Array, Array]:
    """Return m and e, int64, with v = m 2^e and 53 bits in m; 0, 0 for v that is not finite."""
    m, e = np.frexp(np.where(np.isfinite(v), v, 0.0))
    return (m * 2.0**53).astype(i64), e.astype(i64) - 53


def value_of_wide(sums: Sums) -> Double:
    """Return the value of a sum in digits of `WIDE` bits."""
    return Double(*(scaled(part, exponent_of_wide(sums.grids)) for part in value_of(sums.limbs, WIDE)))


def sum_of_numbers(numbers: Array) -> Sums:
    """Sum numbers, (rows, classes), over the classes; they need not be finite."""
    return of_kinds(sum_of([numbers]), numbers)


def of_kinds(sums: Sums, numbers: Array) -> Sums:
    """Return sums which have the kind of `numbers`, (rows, classes), as their grid where these are not all finite."""
    plus, minus, nan = (each.any(axis=1) for each in (numbers == np.inf, numbers == -np.inf, np.isnan(numbers)))
    strange: Array = np.any([plus, minus, nan], axis=0)
    kinds = np.where(nan | (plus & minus), NOT_A_NUMBER, np.where(plus, INFINITE, MINUS_INFINITE))
    return Sums(np.where(strange, kinds, sums.grids), np.where(strange[:, None], u64(0), sums.limbs))


def united_numbers(*sums: Sums) -> Sums:
    """Return the sum of sums of numbers, which need not be finite."""
    grids, limbs = united(NO_GRID, *sums)
    mixed = [(each.grids >= INFINITE) & (each.grids != grids) for each in sums]
    return Sums(np.where(np.any(mixed, axis=0), NOT_A_NUMBER, grids), limbs)


def number_of(sums: Sums) -> Double:
    """Return the value of a sum of numbers, which need not be finite."""
    high, low = value_of_wide(sums)
    for kind, value in ((INFINITE, np.inf), (MINUS_INFINITE, -np.inf), (NOT_A_NUMBER, np.nan)):
        high = np.where(sums.grids == kind, value, high)
    return Double(high, low)


def exponent_of_wide(grids: Array) -> Array:
    """Return the exponent of the unit of sums in digits of `WIDE` bits, a power of two."""
    return WIDE * (np.clip(grids, -100, 100) - 2)

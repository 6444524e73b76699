"""Sums of floating-point numbers with the same bits for any order of addition and any split over ranks.

The numbers of one sum have a common exponent e, that of the largest of them on all ranks: |x| < 2^e. Slice i of x is a
multiple of 2^(e - (i + 1) bits), an integer of at most `bits` bits on its grid, so a sum of few enough of them has at
most 53 bits: float64 adds them without an error, in any order, by any library, on any number of ranks. The rest of x
that all slices leave out, less than 2^(e - bits count), does not depend on the rank that holds x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import Array, array_namespace, is_true, number_of
from pce_mpi.comm.collectives import all_reduce
from pce_mpi.kernels import converted
from pce_mpi.kernels.elementary import two_product, two_sum

# The exponent of a sum with an infinity or a nan, above all others.
NOT_FINITE = 2000
# Bits of the significand of float64, and of each floating-point dtype by its itemsize.
_DIGITS = 53
_MANTISSA = {2: 11, 4: 24, 8: 53}


def slicing(dtype: np.dtype[Any], terms: int, factors: int = 1, spread: int = 0) -> tuple[int, int]:
    """Return the bits of a slice, and the number of slices, for exact sums of `terms` products of `factors` numbers.

    The slices of a sum leave out less than the last bit of a number 2^spread times smaller than the largest one.
    """
    carried = max(0, terms - 1).bit_length()
    needed = _MANTISSA[dtype.itemsize] + spread + carried
    # The more slices, the more products of two of them add up in one level: 5 / 4 of the first for 3, 5 / 2 for 7.
    for spare, most in ((0, 2), (1, 6), (2, math.inf)) if factors > 1 else ((0, math.inf),):
        bits = min(_DIGITS - 2, (_DIGITS - carried - spare) // factors)
        count = -(-needed // bits)
        if count <= most:
            break
    return bits, count


def exponents(x: Array, axes: tuple[int, ...]) -> Array:
    """Return int32 exponents e, |x| < 2^e, of the largest element along `axes`, which stay with length 1."""
    xp = array_namespace(x)
    if not all(x.shape[axis] for axis in axes):
        shape = [1 if axis in axes else length for axis, length in enumerate(x.shape)]
        return xp.full(shape, -NOT_FINITE, np.int32)
    wide = x if x.dtype.itemsize > 2 else x.astype(np.float32)
    if xp is not np:  # CuPy's float32 has no subnormal numbers
        wide = converted(x, np.float64)
    largest = xp.maximum(xp.max(wide, axis=axes, keepdims=True), -xp.min(wide, axis=axes, keepdims=True))
    found = xp.frexp(largest)[1].astype(np.int32)
    found[largest == 0] = -NOT_FINITE
    found[~xp.isfinite(largest)] = NOT_FINITE
    return found


def grids(
    arrays: Sequence[Array], largest: Sequence[Callable[[Array], Array]], comm: Any
) -> tuple[bool, list[Array], list[Array]]:
    """Return whether all elements on all ranks are finite, the arrays with 0 for those that are not, and exponents.

    `largest[i]` finds the exponent of each sum of array i. Collective over `comm`: one all_reduce.
    """
    here, parts = [find(x) for find, x in zip(largest, arrays, strict=True)], list(arrays)
    finite = not any(is_true((e == NOT_FINITE).any()) for e in here)
    if not finite:
        parts = [finite_part(x) for x in arrays]
        here = [find(x) for find, x in zip(largest, parts, strict=True)]
    if comm is not None:
        sent = [*here, array_namespace(here[0]).full(1, not finite, np.int32)]
        here = apart(all_reduce(side_by_side(sent).astype(np.int16), comm, "max").astype(np.int32), sent)
        finite = not is_true(here.pop()[0])
    # Sums that have no element but 0 get 0, of which a power of two can be made.
    return finite, parts, [array_namespace(e).where(e == -NOT_FINITE, 0, e) for e in here]


def side_by_side(parts: Sequence[Array]) -> Array:
    """Return all elements of `parts` in one vector."""
    return array_namespace(parts[0]).concatenate([part.reshape(-1) for part in parts])


def apart(flat: Array, parts: Sequence[Array]) -> list[Array]:
    """Split a vector, as `side_by_side` makes it, into the shapes of `parts`."""
    ends = list(accumulate(part.size for part in parts))
    return [flat[start:end].reshape(part.shape) for start, end, part in zip([0, *ends], ends, parts, strict=False)]


def finite_part(x: Array) -> Array:
    """Return `x` with 0 for infinities and nan."""
    xp = array_namespace(x)
    return xp.where(xp.isfinite(x), x, x.dtype.type(0))


def slices(
    x: Array, e: Array, bits: int, count: int, dtype: np.dtype[Any], *, squared: bool = False, finite: bool = True
) -> Iterator[Array]:
    """Yield the slices of `x`, or of its squares, as float64; those of float64 numbers are in units of 2^e.

    Adding and taking away 1.5 2^(52 - bits) 2^e rounds to a multiple of 2^(e - bits). Infinities and nan, if there are
    any, are in the first slice alone.
    """
    if dtype.itemsize == 8:  # e may be as large as exponents of float64 are
        x, unit = scaled(x, -e), 1.0
    else:
        x, unit = converted(x, np.float64), power_of_two(e)
    if squared:
        x, unit = x * x, unit * unit
    for index in range(count):
        rounding = unit * (1.5 * 2.0 ** (_DIGITS - 1 - (index + 1) * bits))
        part = x + rounding
        part -= rounding
        if index + 1 < count:
            x -= part
            x = x if finite else finite_part(x)
        yield part


def joined(levels: Sequence[Array]) -> Array:
    """Add up sums of slices, largest first in `levels`, from the smallest."""
    total = levels[-1]
    for level in levels[-2::-1]:
        total = total + level
    return total


def in_units(sums: Array, e: Array, dtype: np.dtype[Any]) -> Array:
    """Return sums of slices as numbers; those of float64 numbers are in units of 2^e."""
    return scaled(sums, e) if dtype.itemsize == 8 else sums


def power_of_two(n: Array) -> Array:
    """Return 2^n in float64, for -1022 <= n <= 1023."""
    return ((n.astype(np.int64) + 1023) << 52).view(np.float64)


def scaled(x: Array, n: Array) -> Array:
    """Return x 2^n in float64, for any n that may be needed."""
    third = n // 3
    factor = power_of_two(third)
    return x * factor * factor * power_of_two(n - 2 * third)


# The number of elements of a block whose slices fit a cache.
_BLOCK = 2**15
# Running sums keep their digits if they are at most 2^_SPREAD times smaller than the largest element.
_SPREAD = 48


def total(x: Array, axes: tuple[int, ...], length: int, comm: Any = None) -> Array:
    """Return the sum of `x` along `axes` in float64; the axes stay with length 1.

    `length` elements are summed over all ranks of `comm`. Collective over `comm`: one Allreduce of 2 bytes and one of 8
    bytes (16 for float64) for each sum; 8 more for more than 2^14 elements (2^17 of float64, 2^21 of halves).
    """
    if not x.ndim:
        return total(x.reshape(1), (), length, comm).reshape(())
    return _totals([x], axes, [length], comm, squared=False)[0]


def sums_of_squares(arrays: Sequence[Array], lengths: Sequence[int], comm: Any) -> list[float]:
    """Return the sums of the squares of vectors, of which vector i has `lengths[i]` elements on all ranks of `comm`.

    Collective over `comm`: one Allreduce of 2 bytes and one of 8 or 16 bytes for each vector.
    """
    found = _totals(arrays, (0,), lengths, comm, squared=True) if arrays else []
    return list(map(number_of, found))


def _totals(
    arrays: Sequence[Array],
    axes: tuple[int, ...],
    lengths: Sequence[int],
    comm: Any,
    squared: bool,
    divisor: float = 1.0,
) -> list[Array]:
    finite, _, found = grids(arrays, [partial(exponents, axes=axes)] * len(arrays), comm)
    levels = []
    for x, e, length in zip(arrays, found, lengths, strict=True):
        bits, count = slicing(x.dtype, length)
        levels.append(array_namespace(x).zeros((count, *e.shape)))
        for part in _blocks(x):
            here = slice(None) if 0 in axes else part  # blocks of a summed first axis add up
            pieces = slices(x[part], e[here], bits, count, x.dtype, squared=squared, finite=finite)
            for level, piece in zip(levels[-1], pieces, strict=True):
                level[here] += piece.sum(axes, keepdims=True)
    add = joined if divisor == 1.0 else partial(_divided, divisor=divisor)
    return [
        one_nan(in_units(add(level), 2 * e if squared else e, x.dtype))
        for level, e, x in zip(reduced_together(levels, comm), found, arrays, strict=True)
    ]


def scattered(
    scatter: Callable[[str, Array, Array], None],
    gather: Callable[[Array], Array],
    x: Array,
    shape: tuple[int, ...],
    length: int,
    comm: Any = None,
) -> Array:
    """Add the elements of `x` to float64 zeros of `shape`, several of them at one place, and return the sums.

    `scatter("add", target, x)` adds each element of `x` at its place in `target`, and `scatter("maximum", target, x)`
    takes the largest there; `gather(target)` returns, for each element of `x`, the element of `target` at its place.
    At most `length` elements on all ranks of `comm` have one place. Collective over `comm`: for each element of the
    result one Allreduce of 2 bytes, and one of 8 bytes for each slice.
    """
    xp = array_namespace(x)

    def largest(x: Array) -> Array:
        e = xp.full(shape, -NOT_FINITE, np.int32)
        scatter("maximum", e, exponents(x[None], (0,))[0])
        return e

    finite, _, (e,) = grids([x], [largest], comm)
    bits, count = slicing(x.dtype, length)
    levels = xp.zeros((count, *shape))
    for level, piece in zip(levels, slices(x, gather(e), bits, count, x.dtype, finite=finite), strict=True):
        scatter("add", level, piece)
    return one_nan(in_units(joined(reduced(levels, comm)), e, x.dtype))


def running_total(x: Array, axis: int, add: Callable[[Array], Array]) -> Array:
    """Return running sums of `x` along `axis`, whole on this rank, in float64; `add` makes those of one slice."""
    finite, _, (e,) = grids([x], [partial(exponents, axes=(axis,))], None)
    bits, count = slicing(x.dtype, x.shape[axis], spread=_SPREAD)
    pieces = slices(x, e, bits, count, x.dtype, finite=finite)
    return one_nan(in_units(joined([add(piece) for piece in pieces]), e, x.dtype))


def average(x: Array, length: int, comm: Any, divisor: float) -> Array:
    """Return the sum of `x` along its first axis, divided by `divisor`, in the dtype of `x`.

    The axis has `length` over all ranks of `comm`. The average of equal numbers is that number, on any number of ranks.
    """
    return converted(_totals([x], (0,), [length], comm, squared=False, divisor=divisor)[0][0], x.dtype)


def _divided(levels: Array, divisor: float) -> Array:
    """Return the sum of exact `levels`, largest first, divided by `divisor`; rounding errors are divided and added."""
    xp = array_namespace(levels)
    head, tail = two_sum(levels[0], joined(levels[1:])) if len(levels) > 1 else (levels[0], 0.0)
    number: Any = np.float64(divisor)
    quotient = head / number
    product, rest = two_product(quotient, number)
    return xp.where(xp.isfinite(quotient), quotient + (((head - product) - rest) + tail) / number, quotient)


def reduced_together(parts: Sequence[Array], comm: Any) -> list[Array]:
    """Return exact sums over the ranks of `comm`, by one all_reduce."""
    return list(parts) if comm is None else apart(reduced(side_by_side(parts), comm), parts)


def _blocks(x: Array) -> Iterator[slice]:
    step = max(1, _BLOCK * len(x) // max(1, x.size))
    return (slice(start, start + step) for start in range(0, len(x), step))


def reduced(levels: Array, comm: Any) -> Array:
    """Return exact sums over the ranks of `comm`."""
    return levels if comm is None else all_reduce(levels, comm, "sum", overwrite=True)


def one_nan(x: Array) -> Array:
    """Return `x` with the same bits in every nan: those of a sum depend on the order of addition."""
    xp = array_namespace(x)
    return xp.where(xp.isnan(x), x.dtype.type(np.nan), x)

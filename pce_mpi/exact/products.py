"""Matrix products with the same bits for any split of the rows, the columns and the summed axis, and for any BLAS.

A number of float32 or of a half is cut into four signed digits of 8 bits, the first of them beneath the power of two
above the largest element of its row of the first, or its column of the second matrix:

    x = 2^(e - 30) (d0 2^24 + d1 2^16 + d2 2^8 + d3),   -128 <= di < 128,   what is left of x is rounded away

The ten products of digits i and j with i + j <= 3 are added up over all terms, in units of 2^(e + f - 36): an integer
of at most 64 bits, exact in any order, which is rounded to the dtype in the end. Dropped products and rounding take at
most 2^(e + f - 28) from a term.

float64 is multiplied after Ozaki et al., Error-free transformations of matrix multiplication, 2012: rows and columns
are cut into slices of integers, whose products are sums of at most 53 bits. Level d adds the products of slices i and
d - i; levels beyond the last slice are below the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import Array, array_namespace
from pce_mpi.comm.collectives import all_reduce
from pce_mpi.exact.sums import exponents, grids, in_units, joined, one_nan, power_of_two, reduced, slices, slicing
from pce_mpi.kernels import converted, digit_loops

# The number of float64 elements that fit a cache, and the fewest rows with which a product is fast.
_CACHE, _ROWS = 2**17, 128
# Bits of an integer, those that the unit of a sum has more than that of two integers, and the most terms of a sum.
_BITS, _DROPPED, _LONGEST = 30, 24, 2**26
# Terms that float64 adds up without an error: a digit of at most 64, times 30 bits, or another, times 22.
_EXACT = 2**16


def product(a: Array, b: Array, length: int, comm: Any = None) -> Array:
    """Return the matrix product of `a` and `b`, of one dtype and with at least two axes each, in that dtype.

    `length` is that of the summed axis over all ranks of `comm`. Collective over `comm`: one Allreduce of 2 bytes for
    each row and column, and one of 8 bytes (24 for float64) for each element of the product; 8 more for a `length`
    above 2^10 in float64.
    """
    if a.dtype.itemsize == 8 or length > _LONGEST:
        return _by_slices(a, b, length, comm)
    loops, dtype = digit_loops(a, b), a.dtype
    a, b = (converted(x, np.float32, copy=False) for x in (a, b))
    find = loops.exponents if loops else exponents
    finite, (first, second), (e, f) = _grids(a, b, find, comm)
    if loops and comm is None and dtype == np.float32:
        found = loops.multiply(first, second, e, f, dtype)
    else:
        sums = reduced((loops.multiply if loops else _digit_sums)(first, second, e, f), comm).astype(np.float64)
        sums *= power_of_two(e + _DROPPED - 2 * _BITS)
        sums *= power_of_two(f)
        found = converted(sums, dtype)
    if finite:
        return found
    special = _special(a, b)
    if comm is not None:
        special = one_nan(all_reduce(special, comm, "sum"))
    return array_namespace(a).where(special == 0, found, special.astype(dtype))


def _grids(a: Array, b: Array, find: Callable[..., Array], comm: Any) -> Any:
    """Return whether all elements on all ranks are finite, both matrices with 0 for others, and their exponents."""
    return grids((a, b), [partial(find, axes=(x.ndim - 1 - side,)) for side, x in enumerate((a, b))], comm)


def _digit_sums(a: Array, b: Array, e: Array, f: Array) -> Array:
    """Return the sums of products of digits, int64."""
    xp, k = array_namespace(a), a.shape[-1]
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    found = xp.zeros(shape, np.int64)
    for start in range(0, k, _EXACT):
        terms = slice(start, start + _EXACT)
        right = xp.concatenate(_heads(b[..., terms, :], f), axis=-2)
        for rows in _blocks(a.shape[-2], math.prod(shape[:-2]) * (shape[-1] + 8 * k), xp, _ROWS):
            heads = [*_heads(a[..., rows, terms], e[..., rows, :]), 0.0]
            left = xp.concatenate([heads[i] - 256.0 * heads[i + 1] for i in (3, 2, 1, 0)], axis=-1)
            found[..., rows, :] += xp.matmul(left, right).astype(np.int64)
    return found


def _heads(x: Array, e: Array) -> list[Array]:
    """Return the integers of `x` without their last 0 to 3 digits, float64."""
    xp = array_namespace(x)
    heads = [xp.rint(converted(x, np.float64) * power_of_two(_BITS - e))]
    for _ in range(3):
        heads.append(xp.floor((heads[-1] + 128.0) / 256.0))
    return heads


def _by_slices(a: Array, b: Array, length: int, comm: Any) -> Array:
    """Return the product by slices of float64."""
    finite, (first, second), (e, f) = _grids(a, b, exponents, comm)
    xp, k, dtype = array_namespace(a), a.shape[-1], a.dtype
    bits, count = slicing(dtype, length, factors=2)
    # The slices of b stand in reverse order, so that the slices of level d are contiguous in both operands.
    right = _side_by_side(second, f, bits, range(count)[::-1], -2)
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    levels = xp.empty((count, *shape))
    for rows in _blocks(a.shape[-2], math.prod(shape[:-2]) * (shape[-1] + k * count), xp, _ROWS):
        left = _side_by_side(first[..., rows, :], e[..., rows, :], bits, range(count), -1)
        for d, level in enumerate(levels):
            level[..., rows, :] = xp.matmul(left[..., : (d + 1) * k], right[..., (count - 1 - d) * k :, :])
    if not finite:  # a sum over ranks keeps infinities and nan
        special = _special(a, b)
        levels[0] = xp.where(special == 0, levels[0], special)
    return converted(one_nan(in_units(joined(reduced(levels, comm)), e + f, dtype)), dtype)


def _blocks(rows: int, elements: int, xp: Any, fewest: int = 1) -> Iterator[slice]:
    """Yield blocks of rows of `elements` elements each; on the host a block fits a cache."""
    step = max(fewest, _CACHE // max(1, elements)) if xp is np else max(1, rows)
    return (slice(start, start + step) for start in range(0, rows, step))


def _side_by_side(x: Array, e: Array, bits: int, places: Sequence[int], axis: int) -> Array:
    """Return the slices of `x` in one array along `axis`, slice i at `places[i]`.

    The result has the memory order of `x`: a transposed matrix is not transposed in memory.
    """
    if x.strides[-1] > x.strides[-2]:
        return _side_by_side(x.swapaxes(-1, -2), e.swapaxes(-1, -2), bits, places, -3 - axis).swapaxes(-1, -2)
    xp, length, shape = array_namespace(x), x.shape[axis], list(x.shape)
    shape[axis] *= len(places)
    held = xp.empty(shape)
    for rows in _blocks(x.shape[-2], math.prod(x.shape) // max(1, x.shape[-2]) * 8, xp):
        unit = e if axis == -2 else e[..., rows, :]
        for place, piece in zip(places, slices(x[..., rows, :], unit, bits, len(places), x.dtype), strict=True):
            if axis == -1:
                held[..., rows, place * length : (place + 1) * length] = piece
            else:
                held[..., rows.start + place * length : rows.start + place * length + piece.shape[-2], :] = piece
    return held


def _special(a: Array, b: Array) -> Array:
    """Return, for each element of the product, the sum of its infinite and nan terms; 0 if it has none."""
    xp = array_namespace(a)
    (high, low, up, down, none, no), (high_b, low_b, up_b, down_b, none_b, no_b) = (
        [each.astype(float) for each in (x == np.inf, x == -np.inf, x > 0, x < 0, x == 0, xp.isnan(x))] for x in (a, b)
    )
    above = high @ up_b + low @ down_b + up @ high_b + down @ low_b > 0
    below = high @ down_b + low @ up_b + up @ low_b + down @ high_b > 0
    nan = (high + low) @ none_b + none @ (high_b + low_b) + no @ xp.ones_like(no_b) + xp.ones_like(no) @ no_b > 0
    found = xp.where(above, np.inf, xp.where(below, -np.inf, 0.0))
    return xp.where(nan | (above & below), np.nan, found)

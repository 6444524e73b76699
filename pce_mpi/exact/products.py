"""Matrix products with the same bits for any split of the rows, the columns and the summed axis, and for any BLAS.

After Ozaki et al., Error-free transformations of matrix multiplication, 2012: rows of the first and columns of the
second matrix are cut into slices of integers, whose products are sums of at most 53 bits. Level d adds the products of
slices i and d - i; levels beyond the last slice are below the last bit.

Slices of a parameter are kept for the next product while the parameter does not change. A step of training changes
every parameter, but micro-batches, evaluation and generation multiply by the same one many times. A parameter is the
same if its elements are: their copy is a small part of the memory that is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
import math
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np

from pce_mpi.arrays import array_namespace
from pce_mpi.exact.sums import exponents, grids, in_units, joined, one_nan, reduced, slices, slicing
from pce_mpi.kernels import converted

Array = Any  # numpy.ndarray or cupy.ndarray

# The number of float64 elements that fit a cache, and the fewest rows with which a product is fast.
_CACHE, _ROWS = 2**17, 128


class _Kept(NamedTuple):
    parameter: Array
    exponents: Array
    slices: Array


_kept: dict[tuple[Any, ...], _Kept] = {}


def _kept_slices(make: Callable[..., Array], x: Any, e: Any, *how: Any) -> Any:
    """Return `make(x, e, *how)`: the result of the last call, if `x` and its exponents `e` have the same elements.

    The result is kept until the memory of `x` is freed. Arrays on GPUs are not kept.
    """
    if type(x) is not np.ndarray:
        return make(x, e, *how)
    owner = x
    while type(owner.base) is np.ndarray:
        owner = owner.base
    key = (id(owner), x.ctypes.data, x.shape, x.strides, x.dtype, *how)
    found = _kept.get(key)
    if found is None or not (np.array_equal(found.exponents, e) and np.array_equal(found.parameter, x)):
        if found is None:
            finalize(owner, _kept.pop, key, None)
        found = _kept[key] = _Kept(x.copy(), e, make(x, e, *how))
    return found.slices


def product(a: Array, b: Array, length: int, comm: Any = None, keep: bool = False) -> Array:
    """Return the matrix product of `a` and `b`, of one dtype and with at least two axes each, in that dtype.

    `length` is that of the summed axis over all ranks of `comm`. If `keep`, b is a parameter, whose slices are kept.
    Collective over `comm`: one Allreduce of 4 bytes for each row and column, and one of 16 bytes (24 for float64) for
    each element of the product; 8 more for a `length` above 2^14 (2^10 in float64).
    """
    finite, (first, second), (e, f) = grids(
        (a, b), [partial(exponents, axes=axes) for axes in ((a.ndim - 1,), (b.ndim - 2,))], comm
    )
    xp, k, dtype = array_namespace(a), a.shape[-1], a.dtype
    bits, count = slicing(dtype, length, factors=2)
    # The slices of b stand in reverse order, so that the slices of level d are contiguous in both operands.
    how = bits, range(count)[::-1], -2
    right = _kept_slices(_side_by_side, second, f, *how) if keep and finite else _side_by_side(second, f, *how)
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    found, levels = xp.empty(shape, dtype), None if comm is None else xp.empty((count, *shape))
    for rows in _blocks(a.shape[-2], math.prod(shape[:-2]) * (shape[-1] + k * count), xp, _ROWS):
        unit = e[..., rows, :]
        left = _side_by_side(first[..., rows, :], unit, bits, range(count), -1)
        sums = [xp.matmul(left[..., : (d + 1) * k], right[..., (count - 1 - d) * k :, :]) for d in range(count)]
        if levels is None:
            found[..., rows, :] = converted(in_units(joined(sums), unit + f, dtype), dtype)
        else:
            for level, part in zip(levels, sums, strict=True):
                level[..., rows, :] = part
    if not finite:  # a sum over ranks keeps infinities and nan
        special = _special(a, b)
        at = found if levels is None else levels[0]
        at[...] = xp.where(special == 0, at, special)
    if levels is not None:
        found[...] = converted(one_nan(in_units(joined(reduced(levels, comm)), e + f, dtype)), dtype)
    return found


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

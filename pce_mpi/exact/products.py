"""Matrix products whose bits do not depend on how rows, columns and the summed axis are cut, by any BLAS.

After Ozaki et al., Error-free transformations of matrix multiplication, 2012: rows of the first and columns of the
second matrix are cut into slices of integers, whose products are sums of at most 53 bits. Level d adds the products of
slices i and d - i; those beyond the last slice are below the last bit.
"""

from __future__ import annotations

from typing import Any

from pce_mpi.arrays import array_namespace
from pce_mpi.exact.slices import all_finite, exponents, finite_part, in_units, joined, slices, slicing, together, usable
from pce_mpi.exact.sums import decided, reduced

Array = Any  # numpy.ndarray or cupy.ndarray


def product(a: Array, b: Array, length: int, comm: Any = None) -> Array:
    """Return in float64 the matrix product of `a` and `b`, of one dtype and with at least two axes each.

    `length` is that of the summed axis over all ranks of `comm`. Collective over `comm`: one Allreduce of 4 bytes for
    each row and column, and one of 16 bytes (24 for float64) for each element of the product.
    """
    e, f = together([exponents(a, (a.ndim - 1,)), exponents(b, (b.ndim - 2,))], comm)
    finite, dtype = all_finite([e, f]), a.dtype
    bits, count = slicing(dtype, length, factors=2)
    e, f = usable(e), usable(f)
    first = _side_by_side(a if finite else finite_part(a), e, bits, count, -1)
    second = _side_by_side(b if finite else finite_part(b), f, bits, count, -2)
    xp, k = array_namespace(a), a.shape[-1]
    levels = [
        xp.matmul(first[..., : (level + 1) * k], second[..., (count - 1 - level) * k :, :]) for level in range(count)
    ]
    if comm is not None:
        levels = reduced(xp.stack(levels), comm)
    found = in_units(joined(levels), e + f, dtype)
    return found if finite else found + _not_finite(a, b, comm)


def _side_by_side(x: Array, e: Array, bits: int, count: int, axis: int) -> Array:
    """Return the slices of `x` in one array along `axis`, the columns of the second matrix with the smallest first.

    The result has the memory order of `x`: a transposed matrix is not transposed in memory.
    """
    xp, length = array_namespace(x), x.shape[axis]
    shape = list(x.shape)
    shape[axis] *= count
    turned = x.strides[-1] > x.strides[-2]
    if turned:
        shape[-1], shape[-2] = shape[-2], shape[-1]
    held = xp.empty(shape)
    held = held.swapaxes(-1, -2) if turned else held
    for index, piece in enumerate(slices(x, e, bits, count, x.dtype)):
        start = (index if axis == -1 else count - 1 - index) * length
        place = slice(start, start + length)
        held[(..., place) if axis == -1 else (..., place, slice(None))] = piece
    return held


def _not_finite(a: Array, b: Array, comm: Any) -> Array:
    """Return what the infinities and nan among the terms make of each element; 0, if there are none."""
    xp = array_namespace(a)
    (high, low, up, down, none, no), (high_b, low_b, up_b, down_b, none_b, no_b) = (
        [each.astype(float) for each in (x == xp.inf, x == -xp.inf, x > 0, x < 0, x == 0, xp.isnan(x))] for x in (a, b)
    )
    above = high @ up_b + low @ down_b + up @ high_b + down @ low_b
    below = high @ down_b + low @ up_b + up @ low_b + down @ high_b
    nan = (high + low) @ none_b + none @ (high_b + low_b) + no @ xp.ones_like(no_b) + xp.ones_like(no) @ no_b
    return decided(reduced(xp.stack([nan, above, below]), comm))

"""Sums of floating-point numbers with the same bits for any order of addition and any split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, number_of
from pce_mpi.comm.collectives import all_reduce
from pce_mpi.exact.slices import (
    NOT_FINITE,
    apart,
    exponents,
    grids,
    in_units,
    joined,
    side_by_side,
    slices,
    slicing,
)
from pce_mpi.kernels import converted
from pce_mpi.kernels.elementary import two_product, two_sum

Array = Any  # numpy.ndarray or cupy.ndarray

# The number of elements of a block whose slices fit a cache.
_BLOCK = 2**15
# Running sums keep their digits if they are at most 2^_SPREAD times smaller than the largest element.
_SPREAD = 48


def total(x: Array, axes: tuple[int, ...], length: int, comm: Any = None) -> Array:
    """Return the sum of `x` along `axes` in float64; the axes stay with length 1.

    `length` elements are summed over all ranks of `comm`. Collective over `comm`: one Allreduce of 4 bytes and one of 8
    bytes (16 for float64) for each sum; 8 more for more than 2^14 elements (2^17 of float64, 2^21 of halves).
    """
    if not x.ndim:
        return total(x.reshape(1), (), length, comm).reshape(())
    return _totals([x], axes, [length], comm, squared=False)[0]


def sums_of_squares(arrays: Sequence[Array], lengths: Sequence[int], comm: Any) -> list[float]:
    """Return the sums of the squares of vectors, of which vector i has `lengths[i]` elements on all ranks of `comm`.

    Collective over `comm`: one Allreduce of 4 bytes and one of 8 or 16 bytes for each vector.
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
    result one Allreduce of 4 bytes, and one of 8 bytes for each slice.
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

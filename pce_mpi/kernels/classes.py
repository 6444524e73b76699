"""Elements of chosen columns, taken and put by their bits, sums over equal columns, and the largest elements of rows.

For NumPy and CuPy arrays.
"""

from __future__ import annotations

from collections.abc import Callable
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import Array, HostArray, array_namespace, is_half


def bits_of(x: Array) -> Array:
    """View floating-point numbers as unsigned integers."""
    return x.view(f"u{x.dtype.itemsize}")


def nought_of(dtype: np.dtype[Any]) -> int:
    """Return the bits of -inf, the logit of a class that is left out."""
    return int(bits_of(np.array(-np.inf, dtype)))


def taken(x: HostArray, axis: int, columns: HostArray, other: int = 0) -> HostArray:
    """Return the bits of the elements in `columns`, (rows, chosen), `other` where a row of `x` has no such one."""
    found = np.full(columns.shape, other, f"u{x.dtype.itemsize}")
    entries, elements = _places(x, axis, columns)
    found[entries] = bits_of(np.moveaxis(x, axis, -1))[elements]
    return found


def put(x: HostArray, axis: int, columns: HostArray, values: HostArray) -> None:
    """Put `values`, (rows, chosen) of the dtype of `x`, into `columns` of each row of `x`, where it has them."""
    entries, elements = _places(x, axis, columns)
    bits_of(np.moveaxis(x, axis, -1))[elements] = bits_of(values)[entries]


def _places(x: HostArray, axis: int, columns: HostArray) -> tuple[tuple[HostArray, ...], tuple[HostArray, ...]]:
    """Return the indices of the columns that `x` has: in (rows, chosen), and in `x` with the class axis last."""
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    row, place = np.nonzero((columns >= 0) & (columns < x.shape[axis]))
    return (row, place), (*(np.unravel_index(row, shape) if shape else ()), columns[row, place])


def sums_of_equal(ids: HostArray, values: Array) -> Array:
    """Return for each of `values`, (rows, chosen), the sum over those of its row with the same id, in their order."""
    xp, chosen = array_namespace(values), ids.shape[1]
    order = ids.argsort(axis=1, kind="stable")
    ordered = np.take_along_axis(ids, order, axis=1)
    start = np.zeros(ids.shape, np.int64)
    start[:, 1:] = np.where(ordered[:, 1:] != ordered[:, :-1], np.arange(1, chosen), 0)
    first = np.empty_like(order)  # the first place of the same id
    np.put_along_axis(first, order, np.take_along_axis(order, np.maximum.accumulate(start, axis=1), axis=1), axis=1)
    if (first == np.arange(chosen)).all():
        return 0.0 + values
    sums, rows, places = xp.zeros(values.shape), xp.arange(len(ids)), xp.asarray(first)
    for place in range(chosen):
        sums[rows, places[:, place]] += values[:, place]
    return xp.take_along_axis(sums, places, axis=1)


# The number of elements that are widened and put in order at once.
_BLOCK, _BLOCK_ON_GPU = 2**20, 2**24


def _widened(x: Array) -> Array:
    return x.astype(np.float32) if is_half(x.dtype) else x


def largest_of(x: Array, k: int, widened: Callable[[Array], Array] = _widened) -> tuple[Array, Array]:
    """Return the k largest elements of each row, largest first, and their columns: (rows, k) each.

    A nan is larger than any number, and of equal elements those in the lowest columns come first. `widened` gives rows
    in a dtype that the array library puts in order; that is the dtype of the values.
    """
    xp, (rows, columns) = array_namespace(x), x.shape
    step = max(1, (_BLOCK if xp is np else _BLOCK_ON_GPU) // max(1, columns))
    found = [_in_order(widened(x[start : start + step]), k) for start in range(0, max(1, rows), step)]
    values, places = found[0] if len(found) == 1 else map(xp.concatenate, zip(*found, strict=True))
    return values, places


def order(x: Array) -> Array:
    """Return the order of each row from the largest element, or a `nan`, to the smallest; equal ones stay in order."""
    return x.shape[1] - 1 - array_namespace(x).argsort(x[:, ::-1], axis=1, kind="stable")[:, ::-1]


def _in_order(x: Array, k: int) -> tuple[Array, Array]:
    """Put only blocks with large maxima in order.

    The k largest are in the k blocks with the largest maxima: an element of another block comes after these k maxima.
    """
    xp = array_namespace(x)
    rows, columns = x.shape
    size = max(1, math.isqrt(columns // max(1, k)))
    blocks = columns // size
    maxima = x[:, : blocks * size].reshape(rows, blocks, size).max(axis=2)
    # Blocks are in order, so that among equal elements the lowest columns come first.
    chosen = xp.sort(order(maxima)[:, :k], axis=1)
    places = (chosen[:, :, None] * size + xp.arange(size)).reshape(rows, chosen.shape[1] * size)
    rest = xp.broadcast_to(xp.arange(blocks * size, columns), (rows, columns - blocks * size))
    places = xp.concatenate([places, rest], axis=1)
    values = xp.take_along_axis(x, places, axis=1)
    first = order(values)[:, :k]
    return xp.take_along_axis(values, first, axis=1), xp.take_along_axis(places, first, axis=1)

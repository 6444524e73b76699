"""The largest elements of rows and their columns, for NumPy and CuPy arrays."""

from __future__ import annotations

from collections.abc import Callable
import math

import numpy as np

from pce_mpi.arrays import Array, array_namespace, is_half

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

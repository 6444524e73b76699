"""The largest elements of rows and their columns, for NumPy and CuPy arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, is_half

Array = Any  # numpy.ndarray or cupy.ndarray

# The number of elements that are sorted at once on the host, where halves are widened first.
_BLOCK = 2**20


def largest_of(x: Array, k: int) -> tuple[Array, Array]:
    """Return the k largest elements of each row, largest first, and their columns: (rows, k) each.

    A nan is larger than any number, and of equal elements those in the lowest columns come first.
    """
    xp, (rows, columns) = array_namespace(x), x.shape
    if xp is not np:
        return _in_order(x, k)
    values, places = np.empty((rows, k), x.dtype), np.empty((rows, k), np.int64)
    step = max(1, _BLOCK // max(1, columns))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        values[part], places[part] = _in_order(x[part], k)
    return values, places


def order(x: Array) -> Array:
    """Return the order of each row from the largest element, or a `nan`, to the smallest; equal ones stay in order."""
    return x.shape[1] - 1 - array_namespace(x).argsort(x[:, ::-1], axis=1, kind="stable")[:, ::-1]


def _in_order(x: Array, k: int) -> tuple[Array, Array]:
    """Put only blocks with large maxima in order.

    The k largest are in the k blocks with the largest maxima: an element of another block comes after these k maxima.
    """
    xp = array_namespace(x)
    if is_half(x.dtype):
        x = x.astype(np.float32)
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

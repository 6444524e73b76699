"""Tiles of rows and classes that stay in the cache, for the NumPy kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from pce_mpi.kernels.elementary import narrowed

Array = np.ndarray[Any, Any]

# The number of classes of a tile.
_TILE = 2**14


def tiles_of(rows: int, classes: int) -> Iterable[tuple[slice, slice]]:
    """Cut rows and classes into tiles; those of one row come in order."""
    width = min(classes, _TILE)
    height = max(1, _TILE // max(1, width))
    for row in range(0, rows, height):
        for first in range(0, classes, max(1, width)):
            yield slice(row, min(rows, row + height)), slice(first, min(classes, first + width))


def rows_of(array: Array, rows: slice, classes: slice) -> Array:
    """Return some rows and classes of an array (outer, classes, inner), as (rows, classes)."""
    outer, inner = np.divmod(np.arange(rows.start, rows.stop), max(1, array.shape[2]))
    return array[outer, classes, inner]


def put_rows(array: Array, rows: slice, classes: slice, values: Array) -> None:
    """Write (rows, classes) to an array (outer, classes, inner)."""
    outer, inner = np.divmod(np.arange(rows.start, rows.stop), max(1, array.shape[2]))
    array[outer, classes, inner] = narrowed(values, array.dtype)

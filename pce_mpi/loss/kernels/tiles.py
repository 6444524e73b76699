"""Tiles of an array of logits that stay in cache, and the scratch memory of their size.

An array comes as (outer, classes, inner), the class axis in the middle; its rows are the pairs (outer, inner). The
classes of a row are cut into segments of one width, and a few that are left over. A tile is some rows by some segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

#: a row has a multiple of so many segments
SEGMENTS = 4
_WIDEST_SEGMENT = 2**14
_NARROWEST_SEGMENT = 16


@dataclass(frozen=True)
class Part:
    """Classes of a shard that are cut into `segments` of one `width`, from class `start` and state `first` on."""

    start: int
    first: int
    segments: int
    width: int
    dtype: np.dtype[Any]


class Tile(NamedTuple):
    """Some rows by some segments: `block` of the (outer, classes, inner) array, as (rows, segments, width)."""

    rows: slice
    states: slice
    block: tuple[slice, slice, slice]
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]

    def direct(self, array: Array | None) -> Array | None:
        """This tile of a (outer, classes, inner) array as a view of `shape` to compute in, if there is one."""
        if array is None or array.dtype != self.dtype or array.shape[2] != 1 or array.strides[1] != self.dtype.itemsize:
            return None
        return array[self.block].reshape(self.shape)

    def load(self, array: Array, into: Array) -> None:
        """Copy this tile of a (outer, classes, inner) array into an array of `shape`."""
        view = array[self.block].transpose(0, 2, 1)
        into.reshape(view.shape)[...] = view

    def store(self, array: Array, source: Array) -> None:
        """The inverse of `load`; rounds to the dtype of `array`."""
        view = array[self.block].transpose(0, 2, 1)
        view[...] = source.reshape(view.shape).astype(array.dtype, copy=False)

    def places(self, columns: Array) -> tuple[Array, Array, Array]:
        """(row, segment, place) of those of the local columns, (rows,), that lie in this tile."""
        columns = columns[self.rows] - self.block[1].start
        _, segments, width = self.shape
        rows = np.flatnonzero((columns >= 0) & (columns < segments * width))
        return rows, *np.divmod(columns[rows], width)


def parts_of(classes: int, dtype: np.dtype[Any]) -> list[Part]:
    """The classes of a shard, but for a few as equal segments, and those few."""
    segments = SEGMENTS * max(1, -(-classes // (SEGMENTS * _WIDEST_SEGMENT)))
    width = classes // segments
    even = segments * width if width >= _NARROWEST_SEGMENT else 0
    parts = [Part(0, 0, segments, width, dtype)] if even else []
    if classes > even:
        parts.append(Part(even, segments if even else 0, 1, classes - even, np.dtype(np.float64)))
    return parts


def tiles_of(shape: tuple[int, int, int], dtype: np.dtype[Any], size: int) -> Iterator[Tile]:
    """Tiles of a (outer, classes, inner) array; each takes whole stretches of `inner`, or part of one."""
    outer, classes, inner = shape
    for part in parts_of(classes, dtype):
        abreast = min(part.segments, max(1, size // part.width))
        rows = max(1, size // (abreast * part.width))
        outer_step, inner_step = max(1, rows // max(1, inner)), max(1, min(rows, inner))
        for outer_start in range(0, outer, outer_step):
            outers = slice(outer_start, min(outer, outer_start + outer_step))
            for inner_start in range(0, inner, inner_step):
                inners = slice(inner_start, min(inner, inner_start + inner_step))
                begin = outers.start * inner + inners.start
                count = (outers.stop - outers.start) * (inners.stop - inners.start)
                for segment in range(0, part.segments, abreast):
                    stop = min(part.segments, segment + abreast)
                    columns = slice(part.start + segment * part.width, part.start + stop * part.width)
                    yield Tile(
                        rows=slice(begin, begin + count),
                        states=slice(part.first + segment, part.first + stop),
                        block=(outers, columns, inners),
                        shape=(count, stop - segment, part.width),
                        dtype=part.dtype,
                    )


class Buffers:
    """Scratch tiles, one per purpose and dtype, allocated when asked for."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, np.dtype[Any]], Array] = {}

    def take(self, purpose: str, tile: Tile, dtype: np.dtype[Any] | None = None) -> Array:
        """An array of the tile's shape, and of its dtype unless told."""
        rows, segments, width = tile.shape
        return self.take_flat(purpose, rows * segments * width, dtype or tile.dtype).reshape(tile.shape)

    def take_flat(self, purpose: str, size: int, dtype: np.dtype[Any]) -> Array:
        flat = self._flat.get((purpose, dtype))
        if flat is None or flat.size < size:
            flat = self._flat[purpose, dtype] = np.empty(size, dtype)
        return flat[:size]

"""The two hot loops in NumPy, in tiles that stay in cache.

An array of logits comes as (outer, classes, inner), the class axis in the middle; its rows are the pairs
(outer, inner). Work goes tile by tile, a few rows by up to `_TILE_CLASSES` classes, so that a logit is read from memory
once for all of the passes over it: copy, max, subtract, exp, sum. Classes beyond one tile's width make one record per
tile, and those merge like shards do.

Exponentials are computed in the compute dtype; their sums in runs of `_RUN` in that dtype and those in float64, which
costs a float32 tile 10 % where summing it in float64 costs 40 %. Everything per row is float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from math import ceil
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, same_memory, to_host
from pce_mpi.records import Layout, merge

__all__ = ["ClassWeights", "RowGradient", "Transform", "fill_records", "write_gradient"]

Array = Any  # numpy.ndarray or cupy.ndarray

# 2**18 float32 are a usual second-level cache; smaller tiles cost more in calls than they save in misses.
_TILE = 2**18
_TILE_CLASSES = 2**16
# A float32 sum of 8 terms of one sign is within 3.5 ulp at worst, and within half of one typically.
_RUN = 8


@dataclass(frozen=True)
class Transform:
    """From logits x to z, of which the softmax is taken: z = scale x, or softcap tanh(scale x / softcap)."""

    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class ClassWeights:
    """The weights u of a sum over classes: `weight`, or `weight` times the smoothed target probabilities.

    `weight` is (classes,) or None for ones, `probabilities` (outer, classes, inner) or None. With probabilities p,
    u = weight (p (1 - smoothing) + smoothing / classes), `classes` counted over all shards.
    """

    weight: Array | None = None
    probabilities: Array | None = None
    smoothing: float = 0.0
    classes: int = 1


@dataclass(frozen=True)
class RowGradient:
    """The gradient of z as the kernel wants it, each a float64 (rows,) array.

    dz_c = factor exp(z_c - max) - weight_factor u_c, but `held_gradient` in the local column `held_column` (-1: not
    on this shard), and 0 in rows that are not `valid`, whatever their logits.
    """

    max: Array
    factor: Array
    weight_factor: Array | None
    held_column: Array
    held_gradient: Array
    valid: Array


@dataclass(frozen=True)
class _Tile:
    rows: slice
    classes: slice
    chunk: int
    index: tuple[slice, slice, slice]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.classes.stop - self.classes.start

    def direct(self, array: Array | None, dtype: np.dtype[Any]) -> Array | None:
        """This tile of a (outer, classes, inner) array as a (rows, classes) view to compute in, if there is one."""
        if array is None or array.dtype != dtype or array.shape[2] != 1 or array.strides[1] != dtype.itemsize:
            return None
        return array[self.index][:, :, 0]

    def load(self, array: Array, into: Array) -> None:
        """Copy this tile of a (outer, classes, inner) array into a (rows, classes) one."""
        view = array[self.index].transpose(0, 2, 1)
        into.reshape(view.shape)[...] = view

    def store(self, array: Array, source: Array) -> None:
        """The inverse of `load`; rounds to the dtype of `array`."""
        view = array[self.index].transpose(0, 2, 1)
        view[...] = source.reshape(view.shape).astype(array.dtype, copy=False)

    def columns(self, held: Array) -> tuple[Array, Array]:
        """(row, column) within this tile of those local columns `held` (rows,) that lie in it."""
        columns = held[self.rows] - self.classes.start
        rows = np.flatnonzero((columns >= 0) & (columns < self.shape[1]))
        return rows, columns[rows]


def _chunks(classes: int) -> int:
    return max(1, ceil(classes / _TILE_CLASSES))


def _tiles(shape: tuple[int, int, int]) -> Iterator[_Tile]:
    """Tiles of a (outer, classes, inner) array; each takes whole stretches of `inner`, or part of one."""
    outer, classes, inner = shape
    rows = max(1, _TILE // max(1, min(classes, _TILE_CLASSES)))
    inner_step = min(rows, inner)
    outer_step = max(1, rows // max(1, inner))
    for first in range(0, outer, outer_step):
        outers = slice(first, min(outer, first + outer_step))
        for start in range(0, inner, max(1, inner_step)):
            inners = slice(start, min(inner, start + inner_step))
            begin = outers.start * inner + inners.start
            count = (outers.stop - outers.start) * (inners.stop - inners.start)
            for chunk in range(_chunks(classes)):
                columns = slice(chunk * _TILE_CLASSES, min(classes, (chunk + 1) * _TILE_CLASSES))
                yield _Tile(slice(begin, begin + count), columns, chunk, (outers, columns, inners))


class _Buffers:
    """Scratch tiles, one per purpose, each of one dtype (the compute dtype unless told), allocated when asked for."""

    def __init__(self, xp: Any, compute_dtype: np.dtype[Any]):
        self.xp, self.compute_dtype = xp, compute_dtype
        self._flat: dict[str, Array] = {}

    def take(self, purpose: str, shape: tuple[int, int], dtype: np.dtype[Any] | None = None) -> Array:
        size = shape[0] * shape[1]
        flat = self._flat.get(purpose)
        if flat is None or flat.size < size:
            flat = self._flat[purpose] = self.xp.empty(size, dtype or self.compute_dtype)
        return flat[:size].reshape(shape)


def _row_sums(tile: Array) -> Array:
    """Sum of each row in float64, by runs of `_RUN` in the tile's dtype."""
    rows, classes = tile.shape
    length = classes // _RUN
    runs = tile[:, : length * _RUN].reshape(rows, _RUN, length).sum(axis=1)
    return runs.sum(axis=1, dtype=np.float64) + tile[:, length * _RUN :].sum(axis=1, dtype=np.float64)


def _load_capped(tile: _Tile, logits: Array, transform: Transform, buffers: _Buffers) -> Array:
    """z of the tile in float64: float32 cannot hold softcap tanh(...) well enough to take exponentials of it."""
    assert transform.softcap is not None
    xp = array_namespace(logits)
    z = buffers.take("capped", tile.shape, np.dtype(np.float64))
    tile.load(logits, z)
    unbounded = xp.isinf(z)  # a masked class stays masked, and +inf stays an error
    infinities = z[unbounded]
    xp.multiply(z, transform.scale / transform.softcap, out=z)
    xp.tanh(z, out=z)
    xp.multiply(z, transform.softcap, out=z)
    z[unbounded] = infinities
    return z


def _subtract(z: Array, reference: Array, scale: float, out: Array) -> None:
    """out = scale (z - reference), row by row, subtracted before it is scaled."""
    xp = array_namespace(z)
    finite = xp.asarray(np.where(reference == -np.inf, 0.0, reference), dtype=z.dtype)
    xp.subtract(z, finite[:, None], out=out, casting="same_kind")
    if scale != 1.0:
        xp.multiply(out, out.dtype.type(scale), out=out)


def _class_weights(tile: _Tile, weights: ClassWeights, buffers: _Buffers) -> Array | None:
    """u on this tile: None for ones, float64 (classes,) where it is the same for all rows, else a tile of scratch."""
    weight = None if weights.weight is None else buffers.xp.asarray(weights.weight[tile.classes])
    if weights.probabilities is None:
        return weight
    u = buffers.take("weights", tile.shape, buffers.compute_dtype)
    tile.load(weights.probabilities, u)
    if weights.smoothing:
        u *= u.dtype.type(1.0 - weights.smoothing)
        u += u.dtype.type(weights.smoothing / weights.classes)
    if weight is not None:
        u *= weight.astype(u.dtype, copy=False)
    return u


def fill_records(
    logits: Array,
    target_column: Array | None,
    layout: Layout,
    *,
    weights: ClassWeights,
    transform: Transform,
    compute_dtype: np.dtype[Any],
    class_start: int,
    exponentials: Array | None = None,
) -> tuple[Array, Array]:
    """The record of every row of this shard.

    `logits` is (outer, classes, inner). `target_column` (rows,) is the local column of the row's target, -1 where it
    is elsewhere; None where rows have no one target. `exponentials`, shaped as the logits and possibly the same array,
    takes exp(z_c - r) for the r of its row and chunk of classes, 0 for the class held apart.

    Returns `records` (rows,) and `references` (chunks, rows): those r, as float64.
    """
    xp = array_namespace(logits)
    outer, classes, inner = logits.shape
    chunks = layout.identity(_chunks(classes), outer * inner)
    scale = transform.scale if transform.softcap is None else 1.0  # a softcap leaves nothing to scale
    overwrite = exponentials is not None and same_memory(exponentials, logits)
    buffers = _Buffers(xp, compute_dtype)
    with np.errstate(all="ignore"):
        for tile in _tiles(logits.shape) if classes else ():
            record = chunks[tile.chunk, tile.rows]
            in_place = tile.direct(exponentials, compute_dtype)
            above = buffers.take("above", tile.shape) if in_place is None else in_place
            if transform.softcap is None:
                z = above
                if in_place is None or not overwrite:
                    tile.load(logits, z)
            else:
                z = _load_capped(tile, logits, transform, buffers)
            rows = columns = np.empty(0, np.intp)
            if target_column is not None:
                rows, columns = tile.columns(target_column)
                record["target"][rows] = scale * to_host(z[xp.asarray(rows), xp.asarray(columns)]).astype(np.float64)
            if layout.hold_largest:
                rows, columns = np.arange(tile.shape[0]), to_host(z.argmax(axis=1))
                record["argmax"] = columns + (class_start + tile.classes.start)
                record["largest"] = scale * to_host(z[xp.asarray(rows), xp.asarray(columns)]).astype(np.float64)
            held = (xp.asarray(rows), xp.asarray(columns))
            z[held] = -np.inf
            reference = to_host(z.max(axis=1)).astype(np.float64)
            record["max"] = scale * reference
            _subtract(z, reference, scale, above)
            if layout.held_weight or layout.weights:
                u = _class_weights(tile, weights, buffers)
                record["held_weight"][rows] = 1.0 if u is None else to_host(xp.broadcast_to(u, tile.shape)[held])
            if layout.weights:
                above[held] = 0.0
                record["weight"], record["weighted_gap"] = _weighted_sums(u, held, above, buffers)
                above[held] = -np.inf
            if layout.entropy:
                # Where exp is 0 anyway, any finite gap will do in place of an infinite one.
                gap = buffers.take("gap", tile.shape)
                xp.maximum(above, compute_dtype.type(-1000.0), out=gap)
            xp.exp(above, out=above)
            record["sum_exp"] = to_host(_row_sums(above))
            if layout.entropy:
                gap *= above
                record["exp_gap"] = -to_host(_row_sums(gap))
            if exponentials is not None and in_place is None:
                tile.store(exponentials, above)
    return reduce(merge, chunks), chunks["max"]


def _weighted_sums(u: Array | None, held: tuple[Array, Array], above: Array, buffers: _Buffers) -> tuple[Array, Array]:
    """sum of u and of u (max - z) over the classes that are not held; `above` is z - max, 0 where held."""
    xp = array_namespace(above)
    rows, columns = held
    if u is None:
        total = xp.full(above.shape[0], float(above.shape[1]))
        total[rows] -= 1.0
        return to_host(total), -to_host(_row_sums(above))
    if u.ndim == 1:
        total = xp.full(above.shape[0], u.sum())
        total[rows] -= u[columns]
    else:
        u[held] = 0.0
        total = _row_sums(u)
    product = buffers.take("product", above.shape)
    xp.multiply(u.astype(above.dtype, copy=False), above, out=product)
    gap = -_row_sums(product)
    if xp.isnan(gap).any():
        # Either an honest nan, or a masked class of weight 0, which contributes nothing.
        gap = -_row_sums(xp.where(u == 0.0, above.dtype.type(0.0), product))
    return to_host(total), to_host(gap)


def write_gradient(
    out: Array,
    logits: Array,
    gradient: RowGradient,
    *,
    weights: ClassWeights,
    transform: Transform,
    compute_dtype: np.dtype[Any],
    references: Array | None = None,
) -> None:
    """Write the gradient of the logits into `out`; both are (outer, classes, inner) and may be one array.

    With `references`, `out` already has the exponentials that `fill_records` left there, and `logits` is not read.
    """
    xp = array_namespace(out)
    softcap = transform.softcap
    scale = transform.scale if softcap is None else 1.0
    all_valid = bool(gradient.valid.all())
    buffers = _Buffers(xp, compute_dtype)
    with np.errstate(all="ignore"):
        for tile in _tiles(out.shape) if out.shape[1] else ():
            # The slope of a softcap needs the logits once more, and `out` may be their memory.
            in_place = tile.direct(out, compute_dtype) if softcap is None else None
            dz = buffers.take("dz", tile.shape) if in_place is None else in_place
            if references is None:
                z = tile.direct(logits, compute_dtype)
                if softcap is not None:
                    z = _load_capped(tile, logits, transform, buffers)
                elif z is None:
                    z = dz
                    tile.load(logits, z)
                _subtract(z, gradient.max[tile.rows] / scale, scale, dz)
                xp.exp(dz, out=dz)
                factor = gradient.factor[tile.rows]
            else:
                if in_place is None:
                    tile.load(out, dz)
                factor = _rescaled(gradient, references[tile.chunk], tile.rows)
            dz *= xp.asarray(factor, dtype=compute_dtype)[:, None]
            if gradient.weight_factor is not None:
                subtracted = xp.asarray(gradient.weight_factor[tile.rows], dtype=compute_dtype)[:, None]
                u = _class_weights(tile, weights, buffers)
                dz -= subtracted if u is None else subtracted * u.astype(compute_dtype, copy=False)
            rows, columns = tile.columns(gradient.held_column)
            dz[xp.asarray(rows), xp.asarray(columns)] = xp.asarray(
                gradient.held_gradient[tile.rows][rows], dtype=compute_dtype
            )
            if softcap is not None:
                dz *= _softcap_slope(tile, logits, transform.scale / softcap, buffers)
            if not all_valid:
                dz[xp.asarray(np.flatnonzero(~gradient.valid[tile.rows]))] = 0.0
            if in_place is None:
                tile.store(out, dz)


def _rescaled(gradient: RowGradient, reference: Array, rows: slice) -> Array:
    """`factor` for exponentials that were taken relative to `reference` rather than to `max`."""
    gap = np.where(reference[rows] == gradient.max[rows], 0.0, reference[rows] - gradient.max[rows])
    return gradient.factor[rows] * np.exp(gap)


def _softcap_slope(tile: _Tile, logits: Array, factor: float, buffers: _Buffers) -> Array:
    """sech(factor x)**2, the slope of tanh, by one exponential that cannot overflow."""
    xp = array_namespace(logits)
    slope = buffers.take("slope", tile.shape, np.dtype(np.float64))
    tile.load(logits, slope)
    slope *= -2.0 * factor
    xp.exp(-xp.abs(slope), out=slope)
    return 4.0 * slope / (1.0 + slope) ** 2

"""The two hot loops in NumPy, in tiles that stay in cache.

An array of logits comes as (outer, classes, inner), the class axis in the middle; its rows are the pairs
(outer, inner). Work goes tile by tile, some rows by some classes, so that a logit is read from memory once for all of
the passes over it: copy, max, subtract, exp, sum.

Float32 has 24 bits, and a loss is asked for to 4 units of the last. Three habits see to it, at no cost in speed:

- The classes of a row are cut into segments, at least 4, and each makes a state of its own; states merge in float64,
  like those of shards. Each segment subtracts another reference than its neighbour. So a logit that stands in a row a
  thousand times is not rounded the same way a thousand times, nor is its exponential (np.exp: up to 2.5 ulp).
- Exponentials are added to each other in pairs in float32, which costs half an ulp, and those sums in float64. (In
  longer runs a 1 swallows the same bits of each small number that is added to it.)
- What is left over when classes are cut evenly is computed in float64; so are shards of less than 64 classes, whatever
  is multiplied by weights of classes, and everything under a softcap.

Everything per row is float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pce_mpi.loss.kernels.parameters import ClassWeights, RowGradient, Transform
from pce_mpi.loss.kernels.tiles import SEGMENTS, Buffers, Tile, parts_of, tiles_of
from pce_mpi.loss.softmax_state import StateFields, merge
from pce_mpi.memory import same_memory

Array = np.ndarray[Any, Any]

# 2**19 float32 are 2 MiB, a core's share of its caches. Smaller tiles cost more in calls than they save in misses.
_TILE = 2**19
# With a softcap, weights or entropy there are more arrays of a tile's size, and of float64.
_SMALL_TILE = 2**17
# NumPy copies what is broadcast along an axis that is shorter than its buffer, which doubles the time of a subtraction.
_BUFFER = 512
# What neighbouring segments add to their maxima: spread over half of the period with which np.exp reduces its argument.
_OFFSETS = np.log(2.0) / 2.0 * np.arange(SEGMENTS) / SEGMENTS


def _sums(array: Array) -> Array:
    """Sum of each segment in float64."""
    # Of NumPy's ways to sum float32 in float64 the fastest; its `sum` takes half as long again.
    return np.einsum("rsw->rs", array, dtype=np.float64)


def _sums_by_pairs(array: Array, buffers: Buffers) -> Array:
    """Sum each segment of numbers in [0, 1]: pairs in the dtype of the array, and the pairs in float64."""
    rows, segments, width = array.shape
    if array.dtype == np.float32 and width % 2 == 0:
        half = buffers.take_flat("pairs", rows * segments * width // 2, array.dtype).reshape(rows, segments, width // 2)
        array = np.add(array[:, :, : width // 2], array[:, :, width // 2 :], out=half)
    return _sums(array)


def _cap(z: Array, transform: Transform) -> None:
    """Turn logits into softcap tanh(scale x / softcap), in place."""
    if transform.softcap is None:
        return
    unbounded = np.isinf(z)  # a masked class stays masked, and +inf stays an error
    infinities = z[unbounded]
    np.multiply(z, transform.scale / transform.softcap, out=z)
    np.tanh(z, out=z)
    np.multiply(z, transform.softcap, out=z)
    z[unbounded] = infinities


def _subtract(z: Array, reference: Array, scale: float, out: Array) -> None:
    """out = scale (z - reference), subtracted before it is scaled; `reference` is (rows, segments) or (rows, 1)."""
    finite = np.where(reference == -np.inf, 0.0, reference).astype(z.dtype, copy=False)
    np.subtract(z, finite[:, :, None], out=out)
    if scale != 1.0:
        # A scale that float32 cannot hold would be off by the same factor for all classes.
        exact = out.dtype.type(scale) == scale
        np.multiply(out, scale, out=out, dtype=out.dtype if exact else np.float64, casting="same_kind")


def _class_weights(tile: Tile, weights: ClassWeights, buffers: Buffers) -> Array | None:
    """u on this tile in float64: None for ones, (segments, width) if all rows have the same, else a tile of scratch."""
    weight = None
    if weights.weight is not None:
        weight = weights.weight[tile.block[1]].reshape(tile.shape[1:])
    if weights.probabilities is None:
        return weight
    u = buffers.take("weights", tile, np.dtype(np.float64))
    tile.load(weights.probabilities, u)
    if weights.smoothing:
        u *= 1.0 - weights.smoothing
        u += weights.smoothing / weights.classes
    if weight is not None:
        u *= weight
    return u


def fill_states(
    logits: Array,
    target_column: Array | None,
    fields: StateFields,
    *,
    weights: ClassWeights,
    transform: Transform,
    compute_dtype: np.dtype[Any],
    class_start: int,
    exponentials: Array | None = None,
) -> tuple[Array, Array]:
    """The state of every row of this shard.

    `logits` is (outer, classes, inner). `target_column` (rows,) is the local column of the row's target, -1 where it
    is elsewhere; None where rows have no one target. `exponentials`, shaped as the logits and possibly the same array,
    takes exp(z_c - r) for the r of its row and segment of classes, 0 for the class held apart.

    Returns `states` (rows,) and `references` (rows, segments): those r, as float64, of logits x where a scale is left
    to be applied to differences.
    """
    outer, classes, inner = logits.shape
    dtype = _working_dtype(compute_dtype, transform)
    states = fields.identity(outer * inner, max(1, sum(part.segments for part in parts_of(classes, dtype))))
    scale = transform.of_differences
    if fields.scaled:
        states["scale"] = scale
    offsets = _OFFSETS[np.arange(states.shape[1]) % SEGMENTS] / max(scale, 1.0)
    size = _SMALL_TILE if fields.weights or fields.entropy or transform.softcap is not None else _TILE
    overwrite = exponentials is not None and same_memory(exponentials, logits)
    buffers = Buffers()
    with np.errstate(all="ignore"):  # which also restores the buffer size
        np.setbufsize(_BUFFER)
        for tile in tiles_of(logits.shape, dtype, size):
            state = states[tile.rows, tile.states]
            in_place = tile.direct(exponentials)
            z = buffers.take("z", tile) if in_place is None else in_place
            if in_place is None or not overwrite:
                tile.load(logits, z)
            _cap(z, transform)
            held: tuple[Array, ...] = (np.empty(0, np.intp),) * 3
            if target_column is not None:
                held = tile.places(target_column)
                state["target"][held[:2]] = _at(z, held)
            if fields.hold_largest:
                place = z.argmax(axis=2)
                held = (*np.indices(place.shape), place)
                state["largest"] = _at(z, held)
                state["argmax"] = class_start + tile.block[1].start + held[1] * tile.shape[2] + place
            z[held] = -np.inf
            reference = z.max(axis=2)
            if z.dtype == np.float32:
                # Rounded to float32: what is subtracted is what the state says.
                reference += offsets[tile.states].astype(np.float32)
            state["max"] = reference
            _subtract(z, reference, scale, out=z)
            if fields.held_weight or fields.weights:
                u = _class_weights(tile, weights, buffers)
                state["held_weight"][held[:2]] = 1.0 if u is None else _at(np.broadcast_to(u, tile.shape), held)
            if fields.weights:
                z[held] = 0.0
                state["weight"], state["weighted_gap"] = _weighted_sums(tile, u, held, z, buffers)
                z[held] = -np.inf
            if fields.entropy:
                # Where exp is 0 anyway, any finite gap will do in place of an infinite one.
                gap = buffers.take("gap", tile)
                np.maximum(z, z.dtype.type(-1000.0), out=gap)
            np.exp(z, out=z)
            state["sum_exp"] = _sums_by_pairs(z, buffers)
            if fields.entropy:
                gap *= z
                state["exp_gap"] = -_sums(gap)
            if exponentials is not None and in_place is None:
                tile.store(exponentials, z)
    references = states["max"]
    while states.shape[1] > 1:
        half = states.shape[1] // 2
        pairs = merge(states[:, :half], states[:, half : 2 * half])
        states = np.concatenate([pairs, states[:, 2 * half :]], axis=1)
    return states[:, 0].copy(), references


def _at(array: Array, index: tuple[Array, ...]) -> Array:
    """The elements of `array` at `index`, as float64."""
    return array[index].astype(np.float64)


def _working_dtype(compute_dtype: np.dtype[Any], transform: Transform) -> np.dtype[Any]:
    """Return the dtype of tiles: float32 cannot hold softcap tanh(...) well enough to take exponentials of it."""
    return compute_dtype if transform.softcap is None else np.dtype(np.float64)


def _weighted_sums(
    tile: Tile, u: Array | None, held: tuple[Array, ...], above: Array, buffers: Buffers
) -> tuple[Array, Array]:
    """sum of u and of u (max - z) over the classes that are not held; `above` is z - max, 0 where held."""
    rows, segments, _ = held
    if u is None:
        total = np.full(above.shape[:2], float(above.shape[2]))
        total[rows, segments] -= 1.0
        return total, -_sums(above)
    if u.ndim == 2:
        total = np.broadcast_to(u.sum(axis=1), above.shape[:2]).copy()
        total[rows, segments] -= u[held[1:]]
    else:
        u[held] = 0.0
        total = _sums(u)
    product = buffers.take("product", tile, np.dtype(np.float64))
    np.multiply(u, above, out=product)
    gap = -_sums(product)
    if np.isnan(gap).any():
        # Either an honest nan, or a masked class of weight 0, which contributes nothing.
        gap = -_sums(np.where(u == 0.0, 0.0, product))
    return total, gap


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

    With `references`, `out` already has the exponentials that `fill_states` left there, and `logits` is not read.
    """
    softcap, scale = transform.softcap, transform.of_differences
    plain = gradient.weight_factor is None and softcap is None
    all_valid = bool(gradient.valid.all())
    buffers = Buffers()
    with np.errstate(all="ignore"):  # which also restores the buffer size
        np.setbufsize(_BUFFER)
        for tile in tiles_of(out.shape, _working_dtype(compute_dtype, transform), _TILE if plain else _SMALL_TILE):
            # The slope of a softcap needs the logits once more, and `out` may be their memory.
            in_place = tile.direct(out) if softcap is None else None
            dz = buffers.take("dz", tile) if in_place is None else in_place
            factor = gradient.factor[tile.rows, None]
            if references is None:
                z = tile.direct(logits) if softcap is None else None
                if z is None:
                    z = dz
                    tile.load(logits, z)
                    _cap(z, transform)
                _subtract(z, gradient.max[tile.rows, None], scale, dz)
                np.exp(dz, out=dz)
            else:
                if in_place is None:
                    tile.load(out, dz)
                # These are relative to the maxima of segments rather than to that of the row.
                reference, top = references[tile.rows, tile.states], gradient.max[tile.rows, None]
                factor = factor * np.exp(scale * np.where(reference == top, 0.0, reference - top))
            dz *= factor.astype(dz.dtype, copy=False)[:, :, None]
            if gradient.weight_factor is not None:
                subtracted = gradient.weight_factor[tile.rows][:, None, None]
                u = _class_weights(tile, weights, buffers)
                if u is not None:
                    product = buffers.take("product", tile, np.dtype(np.float64))
                    subtracted = np.multiply(subtracted, u, out=product)
                np.subtract(dz, subtracted, out=dz, casting="same_kind")
            held = tile.places(gradient.held_column)
            dz[held] = gradient.held_gradient[tile.rows][held[0]]
            if softcap is not None:
                dz *= _softcap_slope(tile, logits, transform.scale / softcap, buffers)
            if not all_valid:
                dz[np.flatnonzero(~gradient.valid[tile.rows])] = 0.0
            if in_place is None:
                tile.store(out, dz)


def _softcap_slope(tile: Tile, logits: Array, factor: float, buffers: Buffers) -> Array:
    """sech(factor x)**2, the slope of tanh, by one exponential that cannot overflow."""
    slope, square = buffers.take("slope", tile), buffers.take("square", tile)
    tile.load(logits, slope)
    np.abs(slope, out=slope)
    slope *= -2.0 * factor
    np.exp(slope, out=slope)
    np.add(slope, 1.0, out=square)
    square *= square
    slope *= 4.0
    slope /= square
    return slope

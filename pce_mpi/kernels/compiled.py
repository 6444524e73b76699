"""The kernel in C++, with the bits of `definition.py`; arrays are handed over without a copy."""

from __future__ import annotations

from functools import cache, cached_property, lru_cache
from struct import Struct
from typing import Any

import numpy as np

from pce_mpi.kernels import classes
import pce_mpi.kernels._compiled as _compiled  # type: ignore[import-not-found]  # built by setup.py
from pce_mpi.kernels.classes import put as put, sums_of_equal as sums_of_equal, taken as taken
from pce_mpi.kernels.divergence import (
    logsumexp_differences as logsumexp_differences,
    row_divergences as row_divergences,
)
from pce_mpi.kernels.interface import (
    DOUBLE,
    ROW_GRADIENT,
    ROW_SOFTMAX,
    STATISTICS,
    ClassWeights,
    GradientOf,
    MergedStates,
    Pair,
    Pass,
    StateFields,
    Upstream,
)
from pce_mpi.kernels.losses import LossTerms, target_log_probs as target_log_probs

Array = np.ndarray[Any, Any]

#: `enum Kind` of compiled.cpp
_KINDS = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}
#: `struct LossTerms` of losses.h
_TERMS = Struct(f"{len(LossTerms._fields)}d")


def instruction_sets() -> list[str]:
    """Return the instruction sets of this processor for which there are loops, the best first."""
    names: list[str] = _compiled.instruction_sets()
    return names


def instruction_set() -> str:
    """Return the instruction set in use."""
    name: str = _compiled.instruction_set()
    return name


def choose(name: str) -> None:
    """Use the instruction set of this name; an empty name is the best one."""
    for each in instruction_sets():
        if name.lower() in ("", each.lower()):
            _compiled.use(each)
            return
    raise ValueError(f"PCE_MPI_KERNEL must be numpy or one of {', '.join(instruction_sets())}, got {name!r}")


@cache
def _kind_of(dtype: np.dtype[Any]) -> int:
    return _KINDS[dtype.name]


def _raw(array: Array | None) -> tuple[Array | None, int]:
    """Return an array as a buffer, and its kind: no buffer has the dtype bfloat16."""
    if array is None:
        return None, 0
    kind = _kind_of(array.dtype)
    return array.view(np.uint16) if kind >= 2 else array, kind


def _weights(weights: ClassWeights, used: bool) -> tuple[Any, ...]:
    if not used:
        return None, None, 0, 1.0, 0.0
    share = 0.0 if weights.probabilities is None else weights.smoothing / weights.classes
    return weights.weight, *_raw(weights.probabilities), 1.0 - weights.smoothing, share


@lru_cache(maxsize=64)
def _call(how: Pass) -> tuple[Any, ...]:
    fields, transform, precision = how
    return fields.flags, transform.scale, transform.softcap or 0.0, precision is DOUBLE


def valid_rows(targets: Array, ignore_index: int) -> tuple[Array, bool, int]:
    """Return the rows that count; see `definition.valid_rows`."""
    valid = np.empty(len(targets), np.bool_)
    return valid, *_compiled.valid_rows(targets, ignore_index, valid)


def fill_states(
    logits: Array, target_column: Array | None, how: Pass, weights: ClassWeights, class_start: int
) -> Array:
    """Return the states of the rows of this shard; `definition.fill_states` has the arguments."""
    fields = how.fields
    states = np.empty(logits.shape[0] * logits.shape[2], fields.dtype)
    used = fields.held_weight or fields.weight or fields.weighted_logit
    _compiled.fill_states(*_raw(logits), target_column, *_weights(weights, used), class_start, states, *_call(how))
    return states


def merge(a: Array, b: Array, how: Pass) -> None:
    """Merge the states `a` of some classes into the states `b` of others, of the same rows."""
    _compiled.merge_states(a, b, *_call(how))


class HostStates(MergedStates):
    """Merged states, and with `given` what the compiled functions take of them."""

    def __init__(self, states: Array, *more: Any):
        self.states, self.given = states, (states, *more)

    @cached_property
    def columns(self) -> Array:
        """The columns of `ROW_SOFTMAX`."""
        columns = np.empty((len(self), len(ROW_SOFTMAX)))
        _compiled.row_softmax(self.given, columns)
        return columns


def row_softmax(states: Array, how: Pass, class_weights: Array | None) -> HostStates:
    """Return the softmax of each row."""
    return HostStates(states, class_weights, *_call(how), *how.transform.margin)


def row_losses(softmax: HostStates, fields: StateFields, valid: Array, terms: LossTerms) -> Array:
    """Return the losses and weights of rows, (2, rows); `losses.row_losses` has the arguments."""
    # 48 bytes a row of this room are never touched. glibc, where it is in use, keeps free memory of twice the largest
    # block that was returned to it, up to 32 MiB: so all of a call, 113 bytes a row, for the next one. New pages would
    # take a tenth of the time of short rows.
    losses = np.empty((8, len(valid)))[:2]
    _compiled.row_losses(softmax.given, valid, losses, _TERMS.pack(*terms))
    return losses


def row_statistics(softmax: HostStates, valid: Array, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return statistics of rows; `losses.row_statistics` has the arguments."""
    numbers, argmax = np.empty((5, len(softmax))), np.empty(len(softmax), np.int64)
    _compiled.row_statistics(softmax.given, valid, numbers, argmax)
    with np.errstate(all="ignore"):
        return numbers.astype(dtype), argmax


def statistics_gradients(
    softmax: HostStates, valid: Array, target_column: Array | None, classes: range, scale: float, upstream: Upstream
) -> Array:
    """Return the rows of a gradient of statistics; `losses.statistics_gradients` has the arguments."""
    rows = np.empty((len(softmax), len(ROW_GRADIENT)))
    given = softmax.given, valid, target_column, classes.start, len(classes), scale
    _compiled.statistics_gradients(*given, *map(upstream.__getitem__, STATISTICS), rows)
    return rows


# The rows of a gradient, which `write_gradient` computes where it needs them: what the compiled function takes.
GradientRows = tuple[Any, ...]


def row_gradients(
    softmax: HostStates,
    fields: StateFields,
    valid: Array,
    target_column: Array | None,
    upstream: Array,
    divisor: Array,
    scale: float,
    terms: LossTerms,
) -> GradientRows:
    """Return the rows of a gradient; `losses.row_gradients` has the arguments."""
    return softmax.given, valid, target_column, upstream, divisor, scale, _TERMS.pack(*terms)


def write_gradient(out: Array, logits: Array, rows: Array | GradientRows, how: Pass, weights: ClassWeights) -> None:
    """Write the gradient of the logits into `out`; `definition.write_gradient` has the arguments."""
    used = how.fields.weighted_logit
    _compiled.write_gradient(*_raw(logits), *_raw(out), rows, *_weights(weights, used), *_call(how))


# The largest k for which the k best elements of a row are kept in order while the others are compared with the last.
_FEW = 32


def largest_of(x: Array, k: int) -> tuple[Array, Array]:
    """Return the k largest elements of each row and their columns; see `classes.largest_of`."""
    if x.dtype.name not in _KINDS or not 0 < k <= _FEW:
        return classes.largest_of(x, k)
    values, columns = np.empty((len(x), k)), np.empty((len(x), k), np.int64)
    if x.strides[1] != x.itemsize:
        x = np.ascontiguousarray(x)
    _compiled.largest_of(*_raw(x), k, values, columns)
    return values, columns


def _pair(pair: Pair) -> tuple[Any, ...]:
    numbers = pair.p_rows, pair.q_rows, pair.difference, pair.transform.scale
    return *_raw(pair.p), *_raw(pair.q), *numbers, pair.single, *(pair.mean or [0.0] * 4)


def divergence_sums(pair: Pair) -> Array:
    """Return the sums of a divergence over this shard's classes; see `divergence.divergence_sums`."""
    sums = np.empty((len(pair.difference), 6), np.uint64)
    _compiled.diverge(*_pair(pair), 0, sums, None, 0, None, None, None)
    return sums


def write_divergence_gradient(
    out: Array, pair: Pair, of: GradientOf, slope: Array, constant: Array, valid: Array
) -> None:
    """Write the gradient of a divergence; `divergence.write_divergence_gradient` has the arguments."""
    _compiled.diverge(*_pair(pair), of, None, *_raw(out), slope, constant, valid)


def sums_of(*arrays: Array) -> Array:
    """Return the sum of each array of float64 numbers, finite or not: (arrays, 4) words, a grid and limbs."""
    sums = np.empty((len(arrays), 4), np.uint64)
    _compiled.sums_of(arrays, sums)
    return sums


def add(a: Array, b: Array) -> None:
    """Add the sums `a`, as `sums_of` gives them, (sums, 4), to the sums `b`."""
    _compiled.add_sums(a, b)


def loss_of_rows(losses: Array, mean: bool, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return the loss and the divisor of its gradient; `losses` is that of `row_losses`."""
    return loss_of(sums_of(losses[0], losses[1]), mean, dtype)


def loss_of(sums: Array, mean: bool, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return the loss and the divisor of its gradient; `definition.loss_of` has the arguments."""
    loss, divisor = np.empty((), dtype), np.empty(1)
    _compiled.loss_of(sums, mean, loss, divisor)
    return loss, divisor


def takes_layer(*arrays: Array) -> bool:
    """Return whether the functions below take these arrays, which have one dtype."""
    dtype = arrays[0].dtype
    usable = (array.dtype == dtype and array.flags.c_contiguous and array.flags.aligned for array in arrays)
    return dtype in (np.float32, np.float64) and all(usable)


def gelu(x: Array, y: Array, slope: Array | None, a: float, b: float, bent: float) -> None:
    """Write x / (1 + exp(-a x - b x**3)) of float32, and its slope; exp is 0 where |x| is above `bent`."""
    _compiled.gelu(x, y, slope, a, b, bent)


def attend(p: Array, seen: int) -> None:
    """Replace scores by their softmax; query q sees the first `seen` + q columns, and the others become 0."""
    _compiled.attend(p, p.shape[-1], p.shape[-2], seen)


def normalize(x: Array, scale: Array, y: Array, statistics: Array, eps: float, center: bool) -> None:
    """Write normalized rows times `scale`, which is float64, and their statistics."""
    _compiled.norm(0, _kind_of(x.dtype), None, x, scale, statistics, y, eps, center)


def write_norm_gradient(g: Array, x: Array, scale: Array, statistics: Array, out: Array, center: bool) -> None:
    """Write the gradient of rows, from that of `y`."""
    _compiled.norm(1, _kind_of(x.dtype), g, x, scale, np.ascontiguousarray(statistics), out, 0.0, center)


def add_scale_gradient(g: Array, x: Array, statistics: Array, sums: Array) -> None:
    """Add the gradient of `scale` to `sums`."""
    _compiled.norm(2, _kind_of(x.dtype), g, x, None, np.ascontiguousarray(statistics), sums, 0.0, False)


def exponents(x: Array, axes: tuple[int]) -> Array:
    """Return the exponents of float32 numbers along one of the last two axes; see `exact/sums.py`."""
    found = np.empty([1 if axis in axes else length for axis, length in enumerate(x.shape)], np.int32)
    _compiled.find_exponents(x, axes[0] == x.ndim - 2, found)
    return found


def multiply(a: Array, b: Array, e: Array, f: Array, dtype: Any = np.int64) -> Array:
    """Return products of stacks of matrices, float32, or the sums of products of their digits; see `exact/products.py`.

    Rows of `a` and columns of `b` have the exponents `e` and `f`.
    """
    stack = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    found = np.empty((*stack, a.shape[-2], b.shape[-1]), dtype)
    _compiled.multiply(*(np.broadcast_to(x, (*stack, *x.shape[-2:])) for x in (a, b, e, f)), found)
    return found

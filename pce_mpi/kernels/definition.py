"""The arithmetic of the loss, with the same bits for any cut of the classes, in NumPy.

The kernel's interface is here: arrays are (outer, classes, inner), the class axis in the middle. The arithmetic is in
the files that are imported, in the order in which they are best read:

    elementary      exp(z) = 2^n (1 + t), with n and t from z alone
    limbs           sums that are the same in any order
    states          the state of a row, and the merge of two
    row_softmax     what follows from a merged state
    losses          the loss of a row, and the row of its gradient
    gradients       the gradient of its logits
    divergence      the divergence of two softmaxes
    classes         the logits of chosen classes, and the largest ones of a row
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pce_mpi.kernels.classes import largest_of as largest_of, put as put, sums_of_equal as sums_of_equal, taken as taken
from pce_mpi.kernels.divergence import (
    divergence_sums as divergence_sums,
    logsumexp_differences as logsumexp_differences,
    row_divergences as row_divergences,
    write_divergence_gradient as write_divergence_gradient,
)
from pce_mpi.kernels.elementary import f64, i64, softcap_slope, u64
from pce_mpi.kernels.gradients import gradient_of
from pce_mpi.kernels.interface import ROW_GRADIENT, ClassWeights, Pass
from pce_mpi.kernels.limbs import Sums, number_of, sum_of_numbers, united_numbers
from pce_mpi.kernels.losses import (
    row_gradients as row_gradients,
    row_losses as row_losses,
    row_statistics as row_statistics,
    statistics_gradients as statistics_gradients,
    target_log_probs as target_log_probs,
)
from pce_mpi.kernels.row_softmax import row_softmax as row_softmax
from pce_mpi.kernels.states import merge as merge, states_of
from pce_mpi.kernels.tiles import put_rows, rows_of, tiles_of

Array = np.ndarray[Any, Any]


def valid_rows(targets: Array, ignore_index: int) -> tuple[Array, bool, int]:
    """Return which rows count, (rows,), whether all do, and the largest of their targets as an unsigned number."""
    valid = targets != ignore_index
    return valid, bool(valid.all()), int(targets[valid].view(u64).max(initial=0))


def fill_states(
    logits: Array, target_column: Array | None, how: Pass, weights: ClassWeights, class_start: int
) -> Array:
    """Return the states of the rows of this shard.

    `target_column` (rows,) is the local column of each row's target, -1 if another shard has it; None if rows have no
    single target.
    """
    rows, classes = logits.shape[0] * logits.shape[2], logits.shape[1]
    fields = how.fields
    states = fields.identity(rows)
    weighted = fields.held_weight or fields.weight or fields.weighted_logit
    with np.errstate(all="ignore"):
        for mine, tile in tiles_of(rows, classes):
            column = None if target_column is None else target_column[mine] - tile.start
            tile_weights = _class_weights(weights, mine, tile) if weighted else None
            part = states_of(rows_of(logits, mine, tile), column, how, tile_weights, class_start + tile.start)
            if tile.start == 0:
                states[mine] = part
            else:
                merge(part, states[mine], how)
    return states


def write_gradient(out: Array, logits: Array, rows: Array, how: Pass, weights: ClassWeights) -> None:
    """Write the gradient of the logits into `out`; both are (outer, classes, inner) and may be one array."""
    column, valid, target = (rows[:, ROW_GRADIENT[name]].view(i64) for name in ("column", "valid", "target"))
    held_gradient, held, held_weight = (
        rows[:, ROW_GRADIENT[name], None] for name in ("held_gradient", "held", "held_weight")
    )
    with np.errstate(all="ignore"):
        for mine, tile in tiles_of(len(rows), logits.shape[1]):
            x = rows_of(logits, mine, tile)
            u = _class_weights(weights, mine, tile) if how.fields.weighted_logit else None
            is_target = np.arange(tile.start, tile.stop) == target[mine, None]
            value = gradient_of(x, rows[mine], how, 1.0 if u is None else u, is_target)
            if weights.probabilities is None:
                is_held = np.arange(tile.start, tile.stop) == column[mine, None]
            else:
                is_held = (x == held[mine]) & (u == held_weight[mine])
            at_held = np.broadcast_to(held_gradient[mine], x.shape)
            if how.transform.softcap is not None:
                at_held = at_held * softcap_slope(x.astype(f64), how.transform)
            at_held = np.where(np.isnan(at_held), np.nan, at_held)  # a nan's bits depend on the processor
            value = np.where(is_held, at_held.astype(how.precision.dtype), value)
            value[valid[mine] == 0] = 0.0
            put_rows(out, mine, tile, value)


def _class_weights(weights: ClassWeights, rows: slice, classes: slice) -> Array | None:
    """Return u of a tile: None for ones, (classes,) if all rows have the same, else (rows, classes)."""
    weight = None if weights.weight is None else weights.weight[classes]
    if weights.probabilities is None:
        return weight
    u = rows_of(weights.probabilities, rows, classes).astype(f64)
    if weights.smoothing:
        u = u * (1.0 - weights.smoothing) + weights.smoothing / weights.classes
    return u if weight is None else u * weight


def sums_of(*arrays: Array) -> Array:
    """Return the sum of each array of float64 numbers, finite or not: (arrays, 4) words, a grid and limbs."""
    sums = np.zeros((len(arrays), 4), u64)
    for row, numbers in zip(sums, arrays, strict=True):
        grids, limbs = sum_of_numbers(numbers[None])
        row[:1], row[1:] = grids.view(u64), limbs[0]
    return sums


def add(a: Array, b: Array) -> None:
    """Add the sums `a`, as `sums_of` gives them, (sums, 4), to the sums `b`."""
    grids, b[:, 1:] = united_numbers(_sums_in(a), _sums_in(b))
    b[:, 0] = grids.view(u64)


def _sums_in(words: Array) -> Sums:
    return Sums(words[:, 0].copy().view(i64), words[:, 1:])


def loss_of_rows(losses: Array, mean: bool, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return the loss and the divisor of its gradient, as `loss_of` does, from what `row_losses` gives."""
    return loss_of(sums_of(losses[0], losses[1]), mean, dtype)


def loss_of(sums: Array, mean: bool, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return the loss, 0-d, and the divisor of its gradient, (1,), from the sums of the rows' losses and weights.

    A mean over rows whose weights sum to 0 is `nan`, and so is its gradient.
    """
    total, weights = number_of(_sums_in(sums)).high
    divisor = np.array([(np.nan if weights == 0.0 else weights) if mean else 1.0])
    with np.errstate(all="ignore"):
        loss = total / divisor
        # Every nan gets the same bits, on every processor.
        return np.where(np.isnan(loss), np.nan, loss).astype(dtype).reshape(()), divisor

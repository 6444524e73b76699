"""Losses and statistics of rows, and the rows of their gradients, in NumPy; `losses.h` has the same bits.

With h the class held apart, the loss of a row is u_h (-log p_h) + sum_{c != h} u_c (-log p_c) + z_loss logsumexp^2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from pce_mpi.kernels.elementary import transformed
from pce_mpi.kernels.interface import ROW_GRADIENT, Columns, StateFields, Transform, Upstream
from pce_mpi.kernels.row_softmax import times

Array = np.ndarray[Any, Any]


class LossTerms(NamedTuple):
    """The terms of the loss of a row.

    The loss is (1 - smoothing) w_t (-log p_t) + share sum_c w_c (-log p_c) for a target t, or sum_c u_c (-log p_c) for
    target probabilities, plus z_loss logsumexp^2. `share` is smoothing / classes; the terms after it are options.
    """

    smoothing: float = 0.0
    share: float = 0.0
    z_loss: float = 0.0


def row_losses(softmax: Array, fields: StateFields, valid: Array, terms: LossTerms) -> Array:
    """Return the loss of each row, and its weight in a mean: (2, rows), 0 for rows that are not `valid`.

    `softmax` has the columns of `ROW_SOFTMAX`.
    """
    rows = Columns(softmax)
    with np.errstate(all="ignore"):
        if fields.hold_largest:
            weights, losses = np.ones(len(softmax)), rows.weighted_nll
        else:
            weights = rows.held_weight if fields.held_weight else np.ones(len(softmax))
            losses = times((1.0 - terms.smoothing) * weights, rows.held_nll)
            if fields.weighted_logit:
                losses = losses + terms.share * rows.weighted_nll
        if terms.z_loss:
            losses = losses + terms.z_loss * rows.logsumexp * rows.logsumexp
    losses = np.where(np.isnan(losses), np.nan, losses)  # every nan gets the same bits, on every rank
    return np.where(valid, [losses, weights], 0.0)


def row_gradients(
    softmax: Array,
    fields: StateFields,
    valid: Array,
    target_column: Array | None,
    upstream: Array,
    divisor: Array,
    scale: float,
    terms: LossTerms,
) -> Array:
    """Return the rows of a gradient, (rows, columns of `ROW_GRADIENT`).

    `upstream`, (1,) or (rows,), is the gradient of the loss, to be divided by `divisor`, (1,); `scale` is the scale of
    the logits.
    """
    rows = Columns(softmax)
    with np.errstate(all="ignore"):
        slope = scale * np.where(valid, upstream / divisor, 0.0)
        share = 1.0 if fields.hold_largest else terms.share
        held = rows.held_weight if fields.held_weight else np.ones(len(softmax))
        if not fields.hold_largest:
            of_target = (1.0 - terms.smoothing) * held  # nan for smoothing 1 of an infinite weight
            held = np.where(np.isnan(of_target), np.nan, (1.0 - terms.smoothing + share) * held)
        others = share * rows.weight if fields.weighted_logit else 0.0
        common = 2.0 * terms.z_loss * rows.logsumexp if terms.z_loss else 0.0
        total = held + others + common
        at_held = held * rows.held_minus_one + (others + common) * rows.held_probability
        # If the total is infinite, the others have no sum of their own.
        at_held = np.where(np.isfinite(total), at_held, total * rows.held_probability - held) * rows.held_slope
        columns = {
            "exponent": rows.exponent,
            "top": rows.top,
            "most": rows.most,
            "factor": slope * total * rows.normalizer,
            "weight_factor": slope * share,
            "held_gradient": slope * at_held,
            "held": rows.held,
            "held_weight": rows.held_weight,
        }
    return _gradient_of(
        columns, {"valid": valid, "column": -1 if target_column is None else target_column, "target": -1}
    )


def _gradient_of(columns: Mapping[str, Array], whole: Mapping[str, Array | int]) -> Array:
    """Return the rows of `ROW_GRADIENT` with these columns, `whole` those of int64, and zeros in the others."""
    gradient = np.zeros((len(columns["top"]), len(ROW_GRADIENT)))
    for array, named in (gradient, columns), (gradient.view(np.int64), whole):
        for name, values in named.items():
            array[:, ROW_GRADIENT[name]] = values
    return gradient


def row_statistics(softmax: Array, valid: Array, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return statistics of rows, (5, rows) of `dtype`, and the largest class of each, (rows,).

    They are the largest z, sum_c exp(z_c - it), logsumexp, the target's log-probability, or 0 in rows that are not
    `valid`, and the entropy.
    """
    rows = Columns(softmax)
    with np.errstate(all="ignore"):
        log_prob = np.where(valid, rows.target_log_prob, 0.0)
        found = np.array([rows.held_z, 1.0 + rows.odds, rows.logsumexp, log_prob, rows.entropy])
        # Every nan gets the same bits, on every rank.
        return np.where(np.isnan(found), np.nan, found).astype(dtype), rows.argmax.view(np.int64).copy()


def target_log_probs(softmax: Array, chosen: Array, valid: Array, transform: Transform, dtype: np.dtype[Any]) -> Array:
    """Return the log-probabilities of chosen logits, (rows, chosen) of `dtype`; 0 where they are not `valid`.

    Each is that of a single target, `RowSoftmax.target_log_prob`.
    """
    rows = Columns(softmax)
    with np.errstate(all="ignore"):
        (z, low), (held, held_low) = (
            transformed(x, transform) for x in (chosen.astype(np.float64), rows.held[:, None])
        )
        log_probs = np.minimum(((z + 0.0) - held) + (low - held_low), 0.0) - rows.held_nll[:, None]
        return np.where(np.isnan(log_probs) & valid, np.nan, np.where(valid, log_probs, 0.0)).astype(dtype)


def statistics_gradients(
    softmax: Array, valid: Array, target_column: Array | None, classes: range, scale: float, upstream: Upstream
) -> Array:
    """Return the rows of a gradient from those of three statistics, (rows, columns of `ROW_GRADIENT`).

    The gradients of the statistics are (1,) or (rows,); that of `log_prob` does not count in rows that are not `valid`.
    `classes` are those of this shard, and `target_column` is None without targets.
    """
    rows = Columns(softmax)
    column = rows.argmax.view(np.int64) - classes.start  # that of the class held apart
    is_held = np.False_ if target_column is None else target_column == column
    entropy, logsumexp = upstream["entropy"], upstream["logsumexp"]
    with np.errstate(all="ignore"):
        log_prob = np.where(valid, upstream["log_prob"], 0.0)
        common = logsumexp - entropy * (rows.entropy - rows.held_nll)
        less_one = np.where(is_held, rows.held_minus_one, rows.held_probability)
        columns = {
            **{name: getattr(rows, name) for name in ("exponent", "top", "most")},
            "factor": scale * rows.normalizer,
            "constant": common - log_prob,
            "slope": -entropy,
            "origin": rows.held,
            "held_gradient": scale * (common * rows.held_probability - log_prob * less_one),
            "target_gradient": scale * log_prob,
        }
    # A row without an upstream gradient has none, whatever its logits are.
    given = (log_prob != 0.0) | (entropy != 0.0) | (logsumexp != 0.0)
    column = np.where((column >= 0) & (column < len(classes)), column, -1)
    target = -1 if target_column is None else np.where(is_held, -1, target_column)
    return _gradient_of(columns, {"valid": given, "column": column, "target": target})

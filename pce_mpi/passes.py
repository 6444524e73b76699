"""The forward and the backward pass, from arguments that every rank has agreed on.

Forward: fill one record per row from this rank's classes, merge the records of all ranks in one Allreduce, derive the
loss. Backward: write this rank's part of the gradient from the same merged records; nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pce_mpi.arguments import Call, Problem, Reduction, rows_and_classes
from pce_mpi.arrays import array_namespace
from pce_mpi.collectives import all_reduce
from pce_mpi.kernels.blockwise import RowGradient, fill_records, write_gradient
from pce_mpi.records import Layout, RowSoftmax, merge, times

__all__ = ["Residuals", "evaluate", "record_of", "row_softmax", "write_gradient_rows"]

Array = Any  # numpy.ndarray or cupy.ndarray
HostArray = np.ndarray[Any, Any]


@dataclass(eq=False, repr=False)
class Residuals:
    """What a forward pass keeps for the backward pass; opaque."""

    problem: Problem
    softmax: RowSoftmax
    terms: _Terms
    divisor: float
    loss_shape: tuple[int, ...]
    used_up: bool = False


@dataclass(frozen=True)
class _Terms:
    """A row's loss as u_h (-log p_h) + sum_{c != h} u_c (-log p_c), h the class held apart; (rows,) arrays.

    `held` is u_h and `others` the sum of u_c. Over the classes c, u_c is `share` times what `ClassWeights` says, but
    for the target's own (1 - s) w_t.
    """

    held: HostArray
    others: HostArray
    share: float


@np.errstate(all="ignore")
def evaluate(call: Call, problem: Problem, exponentials: Array | None = None) -> tuple[Array, Residuals, HostArray]:
    """The loss, the residuals, and what the exponentials are relative to."""
    smoothed = problem.label_smoothing > 0.0
    layout = record_of(
        probabilities=problem.targets is None,
        weighted=problem.weight is not None,
        smoothed=smoothed,
        scaled=problem.transform.of_differences != 1.0,
    )
    softmax, references = row_softmax(call, problem, layout, exponentials)
    records = softmax.records
    if problem.targets is not None:
        weight = records["held_weight"] if "held_weight" in layout.names else problem.valid.astype(np.float64)
        share = problem.label_smoothing / problem.num_classes
        losses = times((1.0 - problem.label_smoothing) * weight, softmax.held_nll)
        others = np.zeros_like(losses)
        if smoothed:
            losses = losses + share * softmax.weighted_nll
            others = share * records["weight"]
        terms = _Terms((1.0 - problem.label_smoothing + share) * weight, others, share)
    else:
        weight = np.ones(problem.valid.size)
        losses = softmax.weighted_nll
        terms = _Terms(records["held_weight"], records["weight"], 1.0)
    if problem.z_loss:
        losses = losses + problem.z_loss * softmax.logsumexp * softmax.logsumexp
    losses = np.where(problem.valid, losses, 0.0)
    losses[np.isnan(losses)] = np.nan  # one nan of the many, the same on every rank
    loss, divisor = _reduce(call, problem, losses, weight[problem.valid].sum())
    xp = array_namespace(problem.logits)
    loss = xp.asarray(loss.astype(problem.compute_dtype))
    return loss, Residuals(problem, softmax, terms, divisor, loss.shape), references


def record_of(*, probabilities: bool, weighted: bool, smoothed: bool, scaled: bool) -> Layout:
    """What the record of a row has to have for a loss with these options."""
    if probabilities:
        return Layout(scaled=scaled, hold_largest=True, weights=True)
    return Layout(scaled=scaled, held_weight=weighted, weights=smoothed)


def row_softmax(
    call: Call, problem: Problem, layout: Layout, exponentials: Array | None = None
) -> tuple[RowSoftmax, HostArray]:
    """The softmax of each row over the classes of all shards, and what the exponentials are relative to."""
    records, references = fill_records(
        rows_and_classes(problem.logits, problem.axis),
        problem.target_column,
        layout,
        weights=problem.class_weights,
        transform=problem.transform,
        compute_dtype=problem.compute_dtype,
        class_start=problem.class_start,
        exponentials=exponentials,
    )
    if call.comm is not None:
        reason = "the softmax records of the shards, merged"
        records = all_reduce(records, call.comm, merge, operation=call.operation, over=call.over, reason=reason)
    return RowSoftmax(records), references


def _reduce(call: Call, problem: Problem, losses: HostArray, weight: float) -> tuple[HostArray, float]:
    """The losses per row reduced as asked, and what the gradient of that is divided by."""
    if problem.reduction is Reduction.NONE:
        return losses.reshape(problem.rows_shape), 1.0
    sums = np.array([losses.sum(), weight])
    if call.batch_comm is not None:
        reason = f"{problem.reduction} over the rows of all ranks"
        sums = all_reduce(sums, call.batch_comm, "sum", operation=call.operation, over=call.batch_over, reason=reason)
    if problem.reduction is Reduction.SUM:
        return sums[:1].reshape(()), 1.0
    return np.where(sums[1] == 0.0, np.nan, sums[0] / sums[1]), float(sums[1])


@np.errstate(all="ignore")
def write_gradient_rows(
    rows: Array, residuals: Residuals, upstream: HostArray, references: HostArray | None = None
) -> None:
    """Fill `rows`, (outer, classes, inner), with the gradient of the logits; `upstream` is (1,) or (rows,)."""
    problem, softmax, terms = residuals.problem, residuals.softmax, residuals.terms
    # A mean over rows whose weights sum to 0 is nan, and so is its gradient.
    g = upstream / residuals.divisor if residuals.divisor else np.full_like(upstream, np.nan)
    g = np.where(problem.valid, g, 0.0)
    slope = problem.transform.scale * g
    common = 2.0 * problem.z_loss * softmax.logsumexp if problem.z_loss else 0.0
    factor = slope * (terms.held + terms.others + common) * softmax.normalizer
    held = terms.held * softmax.held_minus_one + (terms.others + common) * softmax.held_probability
    held_column = problem.target_column
    if held_column is None:
        columns = softmax.records["argmax"] - problem.class_start
        held_column = np.where((columns >= 0) & (columns < problem.classes), columns, -1)
    write_gradient(
        rows,
        rows_and_classes(problem.logits, problem.axis),
        RowGradient(
            max=softmax.max,
            factor=factor,
            weight_factor=slope * terms.share if terms.share else None,
            held_column=held_column,
            held_gradient=slope * held,
            valid=problem.valid,
        ),
        weights=problem.class_weights,
        transform=problem.transform,
        compute_dtype=problem.compute_dtype,
        references=references,
    )

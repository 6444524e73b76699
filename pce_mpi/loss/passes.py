"""The forward and the backward pass, from arguments that every rank has agreed on.

Forward: fill one state per row from this rank's classes, merge the states of all ranks in one Allreduce, derive the
loss. Backward: write this rank's part of the gradient from the same merged states; nothing is sent.

Per row everything is float64, in the library of the logits: of what is on a GPU only states leave it, and only where
there are other ranks to merge them with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace
from pce_mpi.comm.collectives import all_reduce
from pce_mpi.comm.tracing import cause
from pce_mpi.loss.arguments import Call, Problem, Reduction, rows_and_classes
from pce_mpi.loss.kernels import kernels_of
from pce_mpi.loss.kernels.terms import RowGradient
from pce_mpi.loss.softmax_state import RowSoftmax, StateFields, merge, times

__all__ = ["Residuals", "evaluate", "evaluate_and_write", "row_softmax", "state_fields", "write_gradient_rows"]

Array = Any  # numpy.ndarray or cupy.ndarray
HostArray = np.ndarray[Any, Any]


@dataclass(eq=False, repr=False)
class Residuals:
    """What a forward pass keeps for the backward pass; opaque."""

    problem: Problem
    softmax: RowSoftmax
    terms: _Terms
    divisor: Array
    loss_shape: tuple[int, ...]
    used_up: bool = False


@dataclass(frozen=True)
class _Terms:
    """A row's loss as u_h (-log p_h) + sum_{c != h} u_c (-log p_c), h the class held apart; (rows,) arrays.

    `held` is u_h and `others` the sum of u_c. Over the classes c, u_c is `share` times what `ClassWeights` says, but
    for the target's own (1 - s) w_t.
    """

    held: Array
    others: Array
    share: float


@np.errstate(all="ignore")
def evaluate(call: Call, problem: Problem, exponentials: Array | None = None) -> tuple[Array, Residuals, HostArray]:
    """The loss, the residuals, and what the exponentials are relative to."""
    softmax, references = row_softmax(call, problem, _fields_of_problem(problem), exponentials)
    return *_loss_and_residuals(call, problem, softmax), references


@np.errstate(all="ignore")
def evaluate_and_write(call: Call, problem: Problem, rows: Array) -> Array | None:
    """The loss, with the gradient written to `rows`, on a GPU, by a kernel that reads each logit once.

    None if there is none, and nothing is written: there is one for class numbers, rows that fit on the chip, and no
    other rank to hear from before the gradient is known.
    """
    alone = call.comm is None or call.comm.size == 1
    divided = problem.reduction is Reduction.MEAN
    if not alone or (divided and call.batch_comm is not None) or problem.targets is None:
        return None
    if problem.label_smoothing:
        return None
    xp, kernels = array_namespace(rows), kernels_of(rows)
    logits = rows_and_classes(problem.logits, problem.axis)
    if not kernels.fused_fits(logits, problem.compute_dtype, problem.transform):
        return None
    columns = problem.target_column
    assert columns is not None  # as there are class numbers
    if problem.weight is None:
        weight = problem.valid.astype(np.float64)
    else:  # one rank has the weights of all targets
        weight = np.where(problem.valid, problem.weight[columns], 0.0)
    divisor = weight[problem.valid].sum() if divided else 1.0
    slope = problem.transform.scale * np.where(problem.valid, np.float64(1.0) / divisor if divisor else np.nan, 0.0)
    states = kernels.fill_states_and_write_gradient(
        rows,
        logits,
        columns,
        _fields_of_problem(problem),
        transform=problem.transform,
        compute_dtype=problem.compute_dtype,
        class_start=problem.class_start,
        slope=xp.asarray(slope),
        held=xp.asarray(weight),
        valid=xp.asarray(problem.valid),
        z_loss=problem.z_loss,
    )
    if states is None:
        return None
    return _loss_and_residuals(call, problem, _merged(call, states, _fields_of_problem(problem)))[0]


def _fields_of_problem(problem: Problem) -> StateFields:
    return state_fields(
        probabilities=problem.targets is None,
        weighted=problem.weight is not None,
        smoothed=problem.label_smoothing > 0.0,
        scaled=problem.transform.of_differences != 1.0,
    )


def _loss_and_residuals(call: Call, problem: Problem, softmax: RowSoftmax) -> tuple[Array, Residuals]:
    xp, fields = array_namespace(problem.logits), softmax.fields
    valid = xp.asarray(problem.valid)
    if problem.targets is not None:
        weight = fields["held_weight"] if "held_weight" in fields else valid.astype(np.float64)
        share = problem.label_smoothing / problem.num_classes
        losses = times((1.0 - problem.label_smoothing) * weight, softmax.held_nll)
        others = xp.zeros_like(losses)
        if problem.label_smoothing > 0.0:
            losses = losses + share * softmax.weighted_nll
            others = share * fields["weight"]
        terms = _Terms((1.0 - problem.label_smoothing + share) * weight, others, share)
    else:
        weight = xp.ones(problem.valid.size)
        losses = softmax.weighted_nll
        terms = _Terms(fields["held_weight"], fields["weight"], 1.0)
    if problem.z_loss:
        losses = losses + problem.z_loss * softmax.logsumexp * softmax.logsumexp
    losses = xp.where(valid, losses, 0.0)
    losses = xp.where(xp.isnan(losses), np.nan, losses)  # one nan of the many, the same on every rank
    # On a GPU a boolean index would wait for the kernels, to know how many rows there are.
    total = weight[valid].sum() if xp is np else xp.where(valid, weight, 0.0).sum()
    loss, divisor = _reduce(call, problem, losses, total)
    loss = xp.asarray(loss.astype(problem.compute_dtype))
    return loss, Residuals(problem, softmax, terms, divisor, loss.shape)


def state_fields(*, probabilities: bool, weighted: bool, smoothed: bool, scaled: bool) -> StateFields:
    """What the state of a row has to have for a loss with these options."""
    if probabilities:
        return StateFields(scaled=scaled, hold_largest=True, weights=True)
    return StateFields(scaled=scaled, held_weight=weighted, weights=smoothed)


def row_softmax(
    call: Call, problem: Problem, fields: StateFields, exponentials: Array | None = None
) -> tuple[RowSoftmax, HostArray]:
    """The softmax of each row over the classes of all shards, and what the exponentials are relative to."""
    options = {} if exponentials is None else {"exponentials": exponentials}
    states, references = kernels_of(problem.logits).fill_states(
        rows_and_classes(problem.logits, problem.axis),
        problem.target_column,
        fields,
        weights=problem.class_weights,
        transform=problem.transform,
        compute_dtype=problem.compute_dtype,
        class_start=problem.class_start,
        **options,
    )
    return _merged(call, states, fields), references


def _merged(call: Call, states: Array, fields: StateFields) -> RowSoftmax:
    if call.comm is not None:
        element = None if states.dtype.names else fields.dtype
        with cause(call.operation, call.over, "the softmax states of the shards, merged"):
            states = all_reduce(states, call.comm, merge, element=element)
    return RowSoftmax(fields.by_name(states))


def _reduce(call: Call, problem: Problem, losses: Array, weight: Array) -> tuple[Array, Array]:
    """The losses per row reduced as asked, and what the gradient of that is divided by."""
    xp = array_namespace(losses)
    if problem.reduction is Reduction.NONE:
        return losses.reshape(problem.rows_shape), xp.ones(())
    sums = np.array([losses.sum(), weight]) if xp is np else xp.stack([losses.sum(), weight])
    if call.batch_comm is not None:
        with cause(call.operation, call.batch_over, f"{problem.reduction} over the rows of all ranks"):
            sums = all_reduce(sums, call.batch_comm, "sum")
    if problem.reduction is Reduction.SUM:
        return sums[:1].reshape(()), xp.ones(())
    # A mean over rows whose weights sum to 0 is nan, and so is its gradient.
    divisor = xp.where(sums[1] == 0.0, np.nan, sums[1])
    return sums[0] / divisor, divisor


@np.errstate(all="ignore")
def write_gradient_rows(
    rows: Array, residuals: Residuals, upstream: Array, references: HostArray | None = None
) -> None:
    """Fill `rows`, (outer, classes, inner), with the gradient of the logits; `upstream` is (1,) or (rows,)."""
    problem, softmax, terms = residuals.problem, residuals.softmax, residuals.terms
    xp = array_namespace(rows)
    valid = xp.asarray(problem.valid)
    g = xp.where(valid, upstream / residuals.divisor, 0.0)
    slope = problem.transform.scale * g
    common = 2.0 * problem.z_loss * softmax.logsumexp if problem.z_loss else 0.0
    factor = slope * (terms.held + terms.others + common) * softmax.normalizer
    held = terms.held * softmax.held_minus_one + (terms.others + common) * softmax.held_probability
    if problem.targets is None:
        columns = softmax.fields["argmax"] - problem.class_start
        held_column = xp.where((columns >= 0) & (columns < problem.classes), columns, -1)
    else:
        held_column = xp.asarray(problem.target_column)
    kernels_of(rows).write_gradient(
        rows,
        rows_and_classes(problem.logits, problem.axis),
        RowGradient(
            max=softmax.max,
            factor=factor,
            weight_factor=slope * terms.share if terms.share else None,
            held_column=held_column,
            held_gradient=slope * held,
            valid=valid,
        ),
        weights=problem.class_weights,
        transform=problem.transform,
        compute_dtype=problem.compute_dtype,
        references=references,
    )

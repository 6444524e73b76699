"""The forward and the backward pass, from arguments that every rank has agreed on.

The forward pass computes one softmax state per row from this rank's classes, merges the states of all ranks in one
Allreduce and derives the loss. The backward pass writes this rank's part of the gradient from the same merged states
and communicates nothing.

The arithmetic on rows is float64, in the array library of the logits. Only states leave a GPU, and only if there are
other ranks to merge them with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from pce_mpi.comm.collectives import all_reduce
from pce_mpi.comm.tracing import cause
from pce_mpi.loss.kernels import kernels_of
from pce_mpi.loss.kernels.parameters import RowGradient
from pce_mpi.loss.options import Problem, Reduction, rows_and_classes
from pce_mpi.loss.softmax_state import RowSoftmax, StateFields, merge, times
from pce_mpi.memory import shares_memory

Array = Any  # numpy.ndarray or cupy.ndarray
HostArray = np.ndarray[Any, Any]


@dataclass(eq=False, repr=False)
class Residuals:
    """The arrays that a forward pass keeps for the backward pass, opaque to its caller.

    Attributes
    ----------
    problem : Problem
        The checked arguments, with references to the caller's arrays.
    softmax : RowSoftmax
        The merged softmax states, and the numbers that follow from them.
    coefficients : RowCoefficients
        The coefficients of each row's loss.
    divisor : array
        The divisor of the gradient, 1 unless the reduction is a mean.
    loss_shape : tuple of int
        The shape of the loss.
    used_up : bool
        True once a backward pass has overwritten the logits.
    """

    problem: Problem
    softmax: RowSoftmax
    coefficients: RowCoefficients
    divisor: Array
    loss_shape: tuple[int, ...]
    used_up: bool = False


@dataclass(frozen=True)
class RowCoefficients:
    """The coefficients of a row's loss u_h (-log p_h) + sum_{c != h} u_c (-log p_c), h the class held apart.

    `held` is u_h and `others` the sum of the other u_c, each (rows,). u_c is `share` times the weight of c in
    `ClassWeights`; u_h of a target has (1 - s) w_t besides.
    """

    held: Array
    others: Array
    share: float


@np.errstate(all="ignore")
def forward(problem: Problem) -> tuple[Array, Residuals]:
    """The loss and the residuals; collective over the communicators of `problem`."""
    softmax, _ = row_softmax(problem, _fields_of(problem))
    return _loss_and_residuals(problem, softmax)


@np.errstate(all="ignore")
def value_and_grad(problem: Problem) -> tuple[Array, Array]:
    """The loss and the gradient, in `problem.out`; collective over the communicators of `problem`."""
    xp, gradient = problem.xp, problem.out
    assert gradient is not None  # allocated before the ranks agreed, unless the caller passed it
    if xp is not np and (loss := _forward_and_write(problem, gradient)) is not None:
        return loss, gradient
    # On the host one exponential per logit suffices if the gradient can keep it until the merged states are known, and
    # nothing else of the logits is needed then.
    keeps = (
        xp is np
        and gradient.dtype == problem.options.compute_dtype
        and problem.targets is not None
        and problem.transform.softcap is None
    )
    exponentials = rows_and_classes(gradient, problem.options.axis) if keeps else None
    softmax, references = row_softmax(problem, _fields_of(problem), exponentials)
    loss, residuals = _loss_and_residuals(problem, softmax)
    write_gradient(gradient, residuals, xp.ones(1), exponentials, references if keeps else None)
    return loss, gradient


def row_softmax(
    problem: Problem, fields: StateFields, exponentials: Array | None = None
) -> tuple[RowSoftmax, HostArray]:
    """The softmax of each row over the classes of all shards, and the logits that the exponentials are relative to."""
    kept = {} if exponentials is None else {"exponentials": exponentials}
    states, references = kernels_of(problem.logits).fill_states(
        rows_and_classes(problem.logits, problem.options.axis),
        problem.target_column,
        fields,
        weights=problem.class_weights,
        transform=problem.transform,
        compute_dtype=problem.options.compute_dtype,
        class_start=problem.class_start,
        **kept,
    )
    return _merged(problem, states, fields), references


def _merged(problem: Problem, states: Array, fields: StateFields) -> RowSoftmax:
    options = problem.options
    if options.comm is not None:
        element = None if states.dtype.names else fields.dtype
        with cause(options.operation, options.over, "the softmax states of the shards, merged"):
            states = all_reduce(states, options.comm, merge, element=element)
    return RowSoftmax(fields.by_name(states), problem.xp)


@cache
def state_fields(*, probabilities: bool, weighted: bool, smoothed: bool, scaled: bool) -> StateFields:
    """The fields that a row's state needs for a loss with these options."""
    if probabilities:
        return StateFields(scaled=scaled, hold_largest=True, weights=True)
    return StateFields(scaled=scaled, held_weight=weighted, weights=smoothed)


def _fields_of(problem: Problem) -> StateFields:
    return state_fields(
        probabilities=problem.targets is None,
        weighted=problem.options.weight is not None,
        smoothed=problem.options.label_smoothing > 0.0,
        scaled=problem.transform.of_differences != 1.0,
    )


def _loss_and_residuals(problem: Problem, softmax: RowSoftmax) -> tuple[Array, Residuals]:
    options, xp, fields = problem.options, problem.xp, softmax.fields
    valid = xp.asarray(problem.valid)
    if problem.targets is not None:
        smoothing = options.label_smoothing
        weight = fields["held_weight"] if "held_weight" in fields else valid.astype(np.float64)
        share = smoothing / problem.num_classes
        losses = times((1.0 - smoothing) * weight, softmax.held_nll, xp)
        others = xp.zeros_like(losses)
        if smoothing > 0.0:
            losses = losses + share * softmax.weighted_nll
            others = share * fields["weight"]
        coefficients = RowCoefficients((1.0 - smoothing + share) * weight, others, share)
    else:
        weight = xp.ones(problem.valid.size)
        losses = softmax.weighted_nll
        coefficients = RowCoefficients(fields["held_weight"], fields["weight"], 1.0)
    if options.z_loss:
        losses = losses + options.z_loss * softmax.logsumexp * softmax.logsumexp
    losses = xp.where(valid, losses, 0.0)
    losses = xp.where(xp.isnan(losses), np.nan, losses)  # one nan of the many, the same on every rank
    # On a GPU a boolean index would wait for the kernels, to know how many rows there are.
    total = weight[valid].sum() if xp is np else xp.where(valid, weight, 0.0).sum()
    loss, divisor = _reduce(problem, losses, total)
    loss = xp.asarray(loss.astype(options.compute_dtype))
    return loss, Residuals(problem, softmax, coefficients, divisor, loss.shape)


def _reduce(problem: Problem, losses: Array, weight: Array) -> tuple[Array, Array]:
    """The losses of the rows, reduced, and the divisor of their gradient."""
    options, xp = problem.options, problem.xp
    if options.reduction == Reduction.NONE:
        return losses.reshape(problem.rows_shape), xp.ones(())
    sums = np.array([losses.sum(), weight]) if xp is np else xp.stack([losses.sum(), weight])
    if options.batch_comm is not None:
        with cause(options.operation, options.batch_over, f"{options.reduction} over the rows of all ranks"):
            sums = all_reduce(sums, options.batch_comm, "sum")
    if options.reduction == Reduction.SUM:
        return sums[:1].reshape(()), xp.ones(())
    # A mean over rows whose weights sum to 0 is nan, and so is its gradient.
    divisor = xp.where(sums[1] == 0.0, np.nan, sums[1])
    return sums[0] / divisor, divisor


def _forward_and_write(problem: Problem, gradient: Array) -> Array | None:
    """The loss, with the gradient written by a GPU kernel that reads each logit once.

    Returns None, with nothing written, if there is no such kernel. There is one for class numbers, for rows that fit on
    the chip, and if no other rank is to be heard from before the gradient is known.
    """
    options, transform = problem.options, problem.transform
    alone = options.comm is None or options.comm.size == 1
    divided = options.reduction == Reduction.MEAN
    if not alone or (divided and options.batch_comm is not None) or problem.targets is None:
        return None
    if options.label_smoothing:
        return None
    xp, kernels = problem.xp, kernels_of(problem.logits)
    logits, rows = rows_and_classes(problem.logits, options.axis), rows_and_classes(gradient, options.axis)
    if not kernels.fused_fits(logits, options.compute_dtype, transform):
        return None
    columns = problem.target_column
    assert columns is not None  # as there are class numbers
    if options.weight is None:
        weight = problem.valid.astype(np.float64)
    else:  # one rank has the weights of all targets
        weight = np.where(problem.valid, options.weight[columns], 0.0)
    divisor = weight[problem.valid].sum() if divided else 1.0
    slope = transform.scale * np.where(problem.valid, np.float64(1.0) / divisor if divisor else np.nan, 0.0)
    fields = _fields_of(problem)
    states = kernels.fill_states_and_write_gradient(
        rows,
        logits,
        columns,
        fields,
        transform=transform,
        compute_dtype=options.compute_dtype,
        class_start=problem.class_start,
        slope=xp.asarray(slope),
        held=xp.asarray(weight),
        valid=xp.asarray(problem.valid),
        z_loss=options.z_loss,
    )
    if states is None:
        return None
    _copy_back(rows, gradient)
    return _loss_and_residuals(problem, _merged(problem, states, fields))[0]


@np.errstate(all="ignore")
def write_gradient(
    array: Array,
    residuals: Residuals,
    upstream: Array,
    exponentials: Array | None = None,
    references: HostArray | None = None,
) -> None:
    """Fill `array` with the gradient of the logits; `upstream`, the gradient of the loss, is (1,) or (rows,).

    `exponentials` are the rows and classes of `array`, if `fill_states` left exponentials, relative to `references`,
    there.
    """
    problem, softmax, coefficients = residuals.problem, residuals.softmax, residuals.coefficients
    options, transform, xp = problem.options, problem.transform, problem.xp
    rows = rows_and_classes(array, options.axis) if exponentials is None else exponentials
    valid = xp.asarray(problem.valid)
    slope = transform.scale * xp.where(valid, upstream / residuals.divisor, 0.0)
    common = 2.0 * options.z_loss * softmax.logsumexp if options.z_loss else 0.0
    held = coefficients.held * softmax.held_minus_one + (coefficients.others + common) * softmax.held_probability
    if problem.targets is None:
        columns = softmax.fields["argmax"] - problem.class_start
        held_column = xp.where((columns >= 0) & (columns < problem.classes), columns, -1)
    else:
        held_column = xp.asarray(problem.target_column)
    kernels_of(problem.logits).write_gradient(
        rows,
        rows_and_classes(problem.logits, options.axis),
        RowGradient(
            max=softmax.max,
            factor=slope * (coefficients.held + coefficients.others + common) * softmax.normalizer,
            weight_factor=slope * coefficients.share if coefficients.share else None,
            held_column=held_column,
            held_gradient=slope * held,
            valid=valid,
        ),
        weights=problem.class_weights,
        transform=transform,
        compute_dtype=options.compute_dtype,
        references=references,
    )
    _copy_back(rows, array)


def _copy_back(rows: Array, array: Array) -> None:
    """Copy `rows` to `array` if the strides of `array` allowed no view of it."""
    if not shares_memory(rows, array):
        array[...] = rows.reshape(array.shape)

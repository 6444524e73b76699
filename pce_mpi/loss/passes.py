"""The forward and the backward pass, from arguments that every rank has agreed on.

The forward pass computes one softmax state per row from this rank's classes, merges the states of all ranks in one
Allreduce and derives the loss. The backward pass writes this rank's part of the gradient from the same merged states
and communicates nothing.

Kernels compute what has a bit to promise; what is left for the array library is + - * / and comparisons of float64,
elementwise. Only states leave a GPU, and only if there are other ranks to merge them with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from pce_mpi.arrays import to_host
from pce_mpi.comm.collectives import all_reduce
from pce_mpi.comm.tracing import cause
from pce_mpi.loss.kernels import host_kernel, kernel_of
from pce_mpi.loss.kernels.elementary import DOUBLE, SINGLE, Arithmetic
from pce_mpi.loss.kernels.parameters import ClassWeights, Transform
from pce_mpi.loss.options import Problem, Reduction, rows_and_classes
from pce_mpi.loss.softmax_state import ROW_GRADIENT, RowSoftmax, StateFields
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
    return _loss_and_residuals(problem, row_softmax(problem, _fields_of(problem)))


@np.errstate(all="ignore")
def value_and_grad(problem: Problem) -> tuple[Array, Array]:
    """The loss and the gradient, in `problem.out`; collective over the communicators of `problem`."""
    gradient = problem.out
    assert gradient is not None  # allocated before the ranks agreed, unless the caller passed it
    loss, residuals = _loss_and_residuals(problem, row_softmax(problem, _fields_of(problem)))
    write_gradient(gradient, residuals, problem.xp.ones(1))
    return loss, gradient


@dataclass(frozen=True)
class Merge:
    """The merge of the states of one call, as an operator of an all-reduce."""

    fields: StateFields
    transform: Transform
    arithmetic: Arithmetic

    def __call__(self, a: HostArray, b: HostArray) -> HostArray:
        """Return the states of the union of two disjoint sets of classes of the same rows."""
        return host_kernel().merged(a, b, self.fields, self.transform, self.arithmetic)


def arithmetic_of(problem: Problem) -> Arithmetic:
    """The arithmetic of a call: that of its compute dtype."""
    return DOUBLE if problem.options.compute_dtype == np.float64 else SINGLE


def row_softmax(problem: Problem, fields: StateFields) -> RowSoftmax:
    """The softmax of each row over the classes of all shards."""
    options, kernel, arithmetic = problem.options, kernel_of(problem.logits), arithmetic_of(problem)
    states = kernel.fill_states(
        rows_and_classes(problem.logits, options.axis),
        problem.target_column,
        fields,
        weights=problem.class_weights,
        transform=problem.transform,
        arithmetic=arithmetic,
        class_start=problem.class_start,
    )
    rows, class_weights = len(states), None
    needs_weights = fields.weighted_logit and not fields.weight
    if needs_weights:
        # Each rank has the weights of its own classes; without weights, all ranks know the sum.
        ones = np.array([float(problem.num_classes)])
        class_weights = host_kernel().sums_of(ones if options.weight is None else options.weight)[0]
        if options.weight is not None:
            states = _with_class_weights(states, class_weights, fields, problem.xp)
    if options.comm is not None:
        element = None if states.dtype.names else fields.dtype
        merge = Merge(fields, problem.transform, arithmetic)
        with cause(options.operation, options.over, "the softmax states of the shards, merged"):
            states = all_reduce(states, options.comm, merge, element=element)
    if needs_weights and options.weight is not None:
        class_weights = _class_weights_of(states, fields)
    states = states[:rows]
    columns = kernel.row_softmax(states, fields, problem.transform, arithmetic, class_weights)
    return RowSoftmax(columns, states, fields)


def _with_class_weights(states: Array, class_weights: HostArray, fields: StateFields, xp: Any) -> Array:
    """Append a row whose weighted logits are the weights of this rank's classes: their sum is that of all classes."""
    row = fields.identity(1)
    row["logit_grid"], row["weighted_logit"] = class_weights[:1].view(np.int64), class_weights[1:]
    return xp.concatenate([states, row if xp is np else xp.asarray(row.view(np.uint64).reshape(1, -1))])


def _class_weights_of(states: Array, fields: StateFields) -> HostArray:
    """The sum of the weights of all classes, from the row that `_with_class_weights` has appended."""
    row = to_host(states[-1:]).reshape(-1).view(fields.dtype)
    return np.concatenate([row["logit_grid"].astype(np.int64).view(np.uint64), row["weighted_logit"][0]])


@cache
def state_fields(*, probabilities: bool, weighted: bool, smoothed: bool) -> StateFields:
    """The fields that a row's state needs for a loss with these options."""
    if probabilities:
        return StateFields(hold_largest=True, held_weight=True, weight=True, weighted_logit=True)
    return StateFields(held_weight=weighted, weighted_logit=smoothed)


def _fields_of(problem: Problem) -> StateFields:
    return state_fields(
        probabilities=problem.targets is None,
        weighted=problem.options.weight is not None,
        smoothed=problem.options.label_smoothing > 0.0,
    )


def _times(weight: Array, loss: Array, xp: Any) -> Array:
    """weight loss; 0 if the weight is 0, even if the loss is infinite."""
    return xp.where(weight == 0.0, 0.0, weight * loss)


def _loss_and_residuals(problem: Problem, softmax: RowSoftmax) -> tuple[Array, Residuals]:
    options, xp = problem.options, problem.xp
    valid = xp.asarray(problem.valid)
    if problem.targets is not None:
        smoothing = options.label_smoothing
        weight = valid.astype(np.float64) if options.weight is None else softmax.field("held_weight")
        share = smoothing / problem.num_classes
        losses = _times((1.0 - smoothing) * weight, softmax.held_nll, xp)
        others = xp.zeros_like(losses)
        if smoothing > 0.0:
            losses = losses + share * softmax.weighted_nll
            others = share * softmax.weight
        coefficients = RowCoefficients((1.0 - smoothing + share) * weight, others, share)
    else:
        weight = xp.ones(problem.valid.size)
        losses = softmax.weighted_nll
        coefficients = RowCoefficients(softmax.field("held_weight"), softmax.weight, 1.0)
    if options.z_loss:
        losses = losses + options.z_loss * softmax.logsumexp * softmax.logsumexp
    losses = xp.where(valid, losses, 0.0)
    losses = xp.where(xp.isnan(losses), np.nan, losses)  # one nan of the many, the same on every rank
    loss, divisor = _reduce(problem, losses, xp.where(valid, weight, 0.0))
    loss = xp.asarray(loss.astype(options.compute_dtype))
    return loss, Residuals(problem, softmax, coefficients, divisor, loss.shape)


# A sum of float64 numbers that has the same bits in any order.
_SUM = np.dtype([("grid", np.int64), ("limbs", np.uint64, 3)])


def _added(a: HostArray, b: HostArray) -> HostArray:
    sums = host_kernel().added(*(each.view(np.uint64).reshape(-1, 4) for each in (a, b)))
    return np.ascontiguousarray(sums).view(_SUM).reshape(-1)


def _reduce(problem: Problem, losses: Array, weight: Array) -> tuple[Array, Array]:
    """The losses of the rows, reduced, and the divisor of their gradient."""
    options, xp = problem.options, problem.xp
    if options.reduction == Reduction.NONE:
        return losses.reshape(problem.rows_shape), xp.ones(())
    kernel = kernel_of(losses)
    sums = kernel.sums_of(losses, weight)
    if options.batch_comm is not None:
        with cause(options.operation, options.batch_over, f"{options.reduction} over the rows of all ranks"):
            sums = all_reduce(sums, options.batch_comm, _added, element=_SUM)
    total, weights = kernel.values_of(sums)
    if options.reduction == Reduction.SUM:
        return xp.asarray(total), xp.ones(())
    # A mean over rows whose weights sum to 0 is nan, and so is its gradient.
    divisor = xp.where(weights == 0.0, np.nan, weights)
    return xp.asarray(total / divisor), divisor


@np.errstate(all="ignore")
def write_gradient(array: Array, residuals: Residuals, upstream: Array) -> None:
    """Fill `array` with the gradient of the logits; `upstream`, the gradient of the loss, is (1,) or (rows,)."""
    problem, softmax, coefficients = residuals.problem, residuals.softmax, residuals.coefficients
    options, transform, xp = problem.options, problem.transform, problem.xp
    valid = xp.asarray(problem.valid)
    slope = transform.scale * xp.where(valid, upstream / residuals.divisor, 0.0)
    common = 2.0 * options.z_loss * softmax.logsumexp if options.z_loss else 0.0
    held = coefficients.held * softmax.held_minus_one + (coefficients.others + common) * softmax.held_probability
    columns = {
        "factor": slope * (coefficients.held + coefficients.others + common) * softmax.normalizer,
        "weight_factor": slope * coefficients.share,
        "held_gradient": slope * held,
        "valid": valid,
        "column": -1 if problem.targets is None else xp.asarray(problem.target_column),
    }
    if problem.targets is None:
        columns |= {name: softmax.field(name) for name in ("held", "held_weight")}
    fields = _fields_of(problem)
    write_rows(array, problem, softmax, columns, fields, problem.class_weights)


def write_rows(
    array: Array,
    problem: Problem,
    softmax: RowSoftmax,
    columns: dict[str, Any],
    fields: StateFields,
    weights: ClassWeights,
) -> None:
    """Fill `array` from the columns of `ROW_GRADIENT`, those that are 0 left out."""
    xp, axis = problem.xp, problem.options.axis
    gradient = xp.zeros((problem.valid.size, len(ROW_GRADIENT)))
    whole = gradient.view(np.int64)
    for name in ("exponent", "top", "most"):
        gradient[:, ROW_GRADIENT[name]] = getattr(softmax, name)
    for name, values in columns.items():
        of_integers = name in ("column", "valid")
        (whole if of_integers else gradient)[:, ROW_GRADIENT[name]] = values
    rows = rows_and_classes(array, axis)
    kernel_of(problem.logits).write_gradient(
        rows,
        rows_and_classes(problem.logits, axis),
        gradient,
        fields,
        weights=weights,
        transform=problem.transform,
        arithmetic=arithmetic_of(problem),
    )
    if not shares_memory(rows, array):  # the strides of `array` allowed no view of it
        array[...] = rows.reshape(array.shape)

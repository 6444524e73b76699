"""The forward and the backward pass, from arguments that every rank has agreed on.

The forward pass computes one softmax state per row from this rank's classes, merges the states of all ranks in one
Allreduce and derives the loss. The backward pass writes this rank's part of the gradient from the same merged states
and communicates nothing.

Kernels compute everything whose bits are promised; the array library computes only a quotient. Only states leave a GPU,
and only if there are other ranks to merge them with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, ClassVar, NoReturn

import numpy as np

from pce_mpi.arrays import Array, HostArray, same_memory, shares_memory, to_host
from pce_mpi.comm.collectives import all_reduce, start_all_reduce
from pce_mpi.comm.tracing import cause
from pce_mpi.kernels import converted, host_kernel, kernel_of, sets_arithmetic
from pce_mpi.kernels.interface import ROW_GRADIENT, ClassWeights, Pass, RowSoftmax, StateFields, Upstream
from pce_mpi.loss.agreement import confirm, settle
from pce_mpi.loss.options import Reduction
from pce_mpi.loss.problem import Problem, check_out, rows_and_classes
from pce_mpi.validation import check_floating_point


class MadeResiduals:
    """The residuals of any forward pass, which name the function that makes them."""

    made_by: ClassVar[str]
    of_tensors = False  # True if all arrays of the forward pass were torch's
    layout: Any = None  # that of the logits, if they were a DTensor

    @property
    def _comms(self) -> tuple[Any, ...]:
        """The communicators over which the backward pass communicates."""
        return ()

    @classmethod
    def check(cls, residuals: object) -> None:
        """Raise `TypeError` unless these residuals are of this class."""
        if not isinstance(residuals, cls):
            raise TypeError(f"residuals must come from {cls.made_by}, got {type(residuals).__name__}")


@dataclass(eq=False, repr=False)
class PassResiduals(MadeResiduals):
    """The residuals of any forward pass over logits."""

    problem: Problem
    used_up: bool = field(default=False, init=False)

    def __reduce_ex__(self, _: object) -> NoReturn:
        # A copy would not know that a backward pass of the other one has overwritten the logits.
        raise TypeError(
            "residuals are neither copied nor pickled, as they refer to the logits: run the forward pass again"
        )

    def gradient_for(self, out: Any, logits: Array) -> Array:
        """Return the array for the gradient of some logits: `out`, checked, or a new one.

        If `out` is these logits, mark the residuals `used_up`.
        """
        if not sets_arithmetic:
            check_floating_point()
        if self.used_up:
            raise RuntimeError("these residuals were used up by a backward pass into out=logits")
        others = [each for each in self.problem.inputs if each is not logits]
        gradient = self.problem.xp.empty_like(logits) if out is None else check_out(out, (logits, *others))
        self.used_up = same_memory(gradient, logits)
        return gradient


@dataclass(eq=False, repr=False)
class Residuals(PassResiduals):
    """The arrays that a forward pass keeps for the backward pass, opaque to its caller.

    Attributes
    ----------
    problem : Problem
        The checked arguments, with references to the caller's arrays.
    softmax : RowSoftmax
        The numbers that follow from the merged softmax states.
    divisor : array, shape (1,)
        The divisor of the gradient, 1 unless the reduction is a mean.
    loss_shape : tuple of int
        The shape of the loss.
    used_up : bool
        True once a backward pass has overwritten the logits.
    """

    made_by = "softmax_cross_entropy_forward"

    softmax: RowSoftmax
    divisor: Array
    loss_shape: tuple[int, ...]


def forward(problem: Problem, *, confirmed: bool = True) -> tuple[Array, Residuals]:
    """Return the loss and the residuals; collective over the communicators of `problem`.

    Unless `confirmed`, the caller calls `confirm`.
    """
    softmax = row_softmax(problem, loss_fields(problem))
    loss, divisor = reduced(problem, row_losses(problem, softmax))
    if confirmed and problem.pending is not None:
        confirm(problem)
    return loss, Residuals(problem, softmax, divisor, loss.shape)


def value_and_grad(problem: Problem) -> tuple[Array, Array]:
    """Return the loss and the gradient, in `problem.out`; collective over the communicators of `problem`."""
    gradient = problem.out
    assert gradient is not None  # allocated before the ranks agreed, unless the caller passed it
    loss, residuals = forward(problem, confirmed=False)
    has_check = problem.pending is not None and problem.wrong is not None
    if has_check:
        out = rows_and_classes(gradient, problem.options.axis)
        if not (shares_memory(out, gradient) and problem.kernel.is_written_in_place(out)):
            confirm(problem)  # what is copied to the gradient cannot be kept from it
    write_gradient(gradient, residuals, np.ones(1))
    if has_check:
        confirm(problem)
    return loss, gradient


@lru_cache(maxsize=64)
def merge_of(how: Pass) -> Callable[[HostArray, HostArray], None]:
    """Return the merge of states `a` of some classes into states `b` of others, of the same rows, for an all-reduce."""
    return lambda a, b: host_kernel().merge(a, b, how)


def row_softmax(problem: Problem, fields: StateFields) -> RowSoftmax:
    """Return the softmax of each row over the classes of all shards; rows of `problem.beside` come last."""
    return start_row_softmax(problem, fields)()


def start_row_softmax(problem: Problem, fields: StateFields) -> Callable[[], RowSoftmax]:
    """Start the merge of the states of all shards, and return the function that waits for it."""
    options, kernel, how = problem.options, problem.kernel, Pass(fields, problem.transform, problem.precision)
    parts = []
    for logits in problem.logits, *problem.beside:
        x = rows_and_classes(logits, options.axis)
        parts.append(kernel.fill_states(x, problem.target_column, how, problem.class_weights, problem.class_start))
    if problem.pending is not None:
        settle(problem)
    states = problem.xp.concatenate(parts) if problem.beside else parts[0]
    rows, class_weights = len(states), None
    needs_weights = fields.weighted_logit and not fields.weight
    differ = needs_weights and options.weight is not None and options.comm is not None
    if needs_weights:
        # Each rank has the weights of its own classes; without weights, all ranks know the sum.
        weight = np.array([float(problem.num_classes)]) if options.weight is None else options.weight
        class_weights = kernel_of(weight).sums_of(weight)[0]
        if differ:
            states = with_class_weights(states, class_weights, fields, problem.xp)
    finish_merge = None
    if options.comm is not None:
        element = None if states.dtype.names else fields.dtype
        with cause(options.operation, options.over, "the softmax states of the shards, merged"):
            finish_merge = start_all_reduce(states, options.comm, merge_of(how), overwrite=True, element=element)

    def finish() -> RowSoftmax:
        merged = states if finish_merge is None else finish_merge()
        sums = class_weights
        if differ:
            sums = _class_weights_of(merged, fields)
        return RowSoftmax(kernel.row_softmax(merged[:rows], how, sums), how)

    return finish


def with_class_weights(states: Array, class_weights: Array, fields: StateFields, xp: Any) -> Array:
    """Append a row whose weighted logits are the weights of this rank's classes: merged, it has the sum of all."""
    row = fields.identity(1)
    words = to_host(class_weights)
    row["logit_grid"], row["weighted_logit"] = words[:1].view(np.int64), words[1:]
    return xp.concatenate([states, row if states.dtype.names else xp.asarray(row.view(np.uint64).reshape(1, -1))])


def _class_weights_of(states: Array, fields: StateFields) -> HostArray:
    """Return the sum of the weights of all classes, from the row that `with_class_weights` appended."""
    row = to_host(states[-1:]).reshape(-1).view(fields.dtype)
    return np.concatenate([row["logit_grid"].astype(np.int64).view(np.uint64), row["weighted_logit"][0]])


@cache
def state_fields(probabilities: bool, weighted: bool, smoothed: bool) -> StateFields:
    """Return the fields that a row's state needs for a loss with these options."""
    if probabilities:
        return StateFields(hold_largest=True, held_weight=True, weight=True, weighted_logit=True)
    return StateFields(held_weight=weighted, weighted_logit=smoothed)


def loss_fields(problem: Problem) -> StateFields:
    """Return the fields that the states of a problem's loss have."""
    options = problem.options
    return state_fields(problem.targets is None, options.weight is not None, options.label_smoothing > 0.0)


def row_losses(problem: Problem, softmax: RowSoftmax) -> Array:
    """Return the losses of the rows, and their weights in a mean: (2, rows)."""
    return problem.kernel.row_losses(softmax.columns, softmax.how.fields, problem.counted, problem.loss_terms)


# A sum of float64 numbers that has the same bits in any order.
_SUM = np.dtype([("grid", np.int64), ("limbs", np.uint64, 3)])


def _add(a: HostArray, b: HostArray) -> None:
    host_kernel().add(*(each.view(np.uint64).reshape(-1, 4) for each in (a, b)))


def reduced(problem: Problem, losses: Array) -> tuple[Array, Array]:
    """Return the loss, from the losses and weights of `row_losses`, and the divisor of its gradient, (1,).

    The divisor is in NumPy if it is 1 for any loss.
    """
    options = problem.options
    if options.reduction == Reduction.NONE:
        with np.errstate(all="ignore"):
            return converted(losses[0], options.compute_dtype).reshape(problem.rows_shape), np.ones(1)
    kernel, mean = problem.kernel, options.reduction == Reduction.MEAN
    if options.batch_comm is None:
        return kernel.loss_of_rows(losses, mean, options.compute_dtype)
    with cause(options.operation, options.batch_over, f"{options.reduction} over the rows of all ranks"):
        sums = all_reduce(kernel.sums_of(losses[0], losses[1]), options.batch_comm, _add, element=_SUM)
    return kernel.loss_of(sums, mean, options.compute_dtype)


def write_gradient(array: Array, residuals: Residuals, upstream: Array) -> None:
    """Fill `array` with the gradient of the logits; `upstream`, that of `upstream_of`, is the gradient of the loss."""
    problem, softmax = residuals.problem, residuals.softmax
    given = problem.counted, problem.target_column, upstream, residuals.divisor, problem.transform.scale
    more = () if problem.pending is None or problem.wrong is None else (problem.wrong.array,)
    rows = problem.kernel.row_gradients(softmax.columns, softmax.how.fields, *given, problem.loss_terms, *more)
    _write_rows(array, problem, rows, softmax.how, problem.class_weights)


def write_probabilities(array: Array, problem: Problem, softmax: RowSoftmax) -> None:
    """Fill `array` with the softmax."""
    _write_rows(array, problem, probability_rows(problem, softmax), softmax.how, ClassWeights())


def probability_rows(problem: Problem, softmax: RowSoftmax) -> Array:
    """Return the rows of `ROW_GRADIENT` from which the softmax is written."""
    rows = problem.xp.zeros((len(softmax.top), len(ROW_GRADIENT)))
    for name, values in {"top": softmax.top, "most": softmax.most, "factor": softmax.normalizer}.items():
        rows[:, ROW_GRADIENT[name]] = values
    rows[:, ROW_GRADIENT["exponent"]] = softmax.exponent
    whole = rows.view(np.int64)
    whole[:, ROW_GRADIENT["valid"]], whole[:, ROW_GRADIENT["column"]] = 1, -1
    return rows


def write_statistics_gradient(array: Array, problem: Problem, softmax: RowSoftmax, upstream: Upstream) -> Array:
    """Fill `array` with the gradient of the logits from those of three statistics, each that of `upstream_of`.

    Returns the rows of `ROW_GRADIENT`.
    """
    classes = range(problem.class_start, problem.class_start + problem.classes)
    given = problem.counted, problem.target_column, classes, problem.transform.scale
    rows = problem.kernel.statistics_gradients(softmax.columns, *given, upstream)
    _write_rows(array, problem, rows, softmax.how, ClassWeights())
    return rows


def _write_rows(array: Array, problem: Problem, rows: Array, how: Pass, weights: ClassWeights) -> None:
    """Fill `array` from rows of `ROW_GRADIENT`."""
    axis = problem.options.axis
    x = rows_and_classes(problem.logits, axis)
    in_rows(array, axis, lambda out: problem.kernel.write_gradient(out, x, rows, how, weights))


def in_rows(array: Array, axis: int, write: Callable[[Array], None]) -> None:
    """Let `write` fill `array` as (outer, classes, inner)."""
    out = rows_and_classes(array, axis)
    write(out)
    if not shares_memory(out, array):  # `out` is a copy, as the strides of `array` allow no view
        array[...] = out.reshape(array.shape)

"""Statistics of each row's softmax, and the gradient of the logits from those of the statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

from pce_mpi.loss.agreement import prepare
from pce_mpi.loss.kernels import standard_arithmetic
from pce_mpi.loss.options import Options, StatisticsOptions, takes
from pce_mpi.loss.passes import PassResiduals, row_softmax, write_statistics_gradient
from pce_mpi.loss.problem import Problem, upstream_of
from pce_mpi.loss.softmax_state import RowSoftmax, StateFields

Array = Any  # numpy.ndarray or cupy.ndarray


class ClassStatistics(NamedTuple):
    """The statistics of each row, shaped as the logits without the class axis.

    z are the logits after `logit_scale` and `softcap`, and p their softmax. All arrays but `argmax` have the compute
    dtype.

    Attributes
    ----------
    max : array
        The largest z.
    sum_exp : array
        sum_c exp(z_c - max).
    logsumexp : array
        log sum_c exp(z_c).
    log_prob : array or None
        log p of the target, in nats; 0 in rows with the target `ignore_index`: leave these rows out of a mean. None
        without targets.
    entropy : array
        -sum_c p_c log p_c, in nats.
    argmax : array of int64
        The global number of the class with the largest logit, the lowest on ties.
    """

    max: Array
    sum_exp: Array
    logsumexp: Array
    log_prob: Array | None
    entropy: Array
    argmax: Array


@takes(StatisticsOptions)
def class_statistics(logits: Any, targets: Any = None, **options: Unpack[StatisticsOptions]) -> ClassStatistics:
    """Compute statistics of each row's softmax over the classes of all shards, without gathering a logit.

    Parameters
    ----------
    logits : array
        Those of `softmax_cross_entropy`.
    targets : array of integers, optional
        The class numbers of `softmax_cross_entropy`; only `log_prob` needs them.
    axis, ignore_index, logit_scale, softcap, compute_dtype, comm, class_start, num_classes : optional
        Those of `softmax_cross_entropy`.

    Returns
    -------
    ClassStatistics
        `max`, `sum_exp`, `logsumexp`, `log_prob`, `entropy` and `argmax` of each row; the same bits on every rank.

    Raises
    ------
    ValueError
        For probabilities as targets. All other errors are those of `softmax_cross_entropy`.

    Notes
    -----
    Collective over `comm`: one Allgather of 56 bytes, and one Allreduce of 80 bytes a row, 8 more with
    targets.

    Examples
    --------
    >>> import numpy as np
    >>> class_statistics(np.log([[1.0, 3.0]])).entropy
    array([0.56233514])
    """
    with standard_arithmetic():
        return statistics_of(prepare(_checked("class_statistics", options), logits, targets, needs_targets=False))[0]


@dataclass(eq=False, repr=False)
class StatisticsResiduals(PassResiduals):
    """The arrays that `class_statistics_forward` keeps for the backward pass, opaque to its caller.

    Attributes
    ----------
    problem : Problem
        The checked arguments, with references to the caller's arrays.
    softmax : RowSoftmax
        The numbers that follow from the merged softmax states.
    used_up : bool
        True once a backward pass has overwritten the logits.
    """

    made_by = "class_statistics_forward"

    softmax: RowSoftmax


@takes(StatisticsOptions)
def class_statistics_forward(
    logits: Any, targets: Any = None, **options: Unpack[StatisticsOptions]
) -> tuple[ClassStatistics, StatisticsResiduals]:
    """Compute `class_statistics`, and the residuals from which `class_statistics_backward` computes a gradient.

    Parameters
    ----------
    logits, targets : array
        Those of `class_statistics`. Logits must not change until the backward pass.
    axis, ignore_index, logit_scale, softcap, compute_dtype, comm, class_start, num_classes : optional
        Those of `softmax_cross_entropy`.

    Returns
    -------
    statistics : ClassStatistics
        Those of `class_statistics`.
    residuals : StatisticsResiduals
        References to the arrays that were passed, and about 160 bytes a row.

    Notes
    -----
    Errors and communication are those of `class_statistics`.

    Examples
    --------
    >>> import numpy as np
    >>> statistics, residuals = class_statistics_forward(np.zeros((1, 2)), np.array([0]))
    >>> class_statistics_backward(residuals, log_prob=1.0)
    array([[ 0.5, -0.5]])
    """
    checked = _checked("class_statistics_forward", options)
    with standard_arithmetic():
        return statistics_of(prepare(checked, logits, targets, needs_targets=False))


def class_statistics_backward(
    residuals: StatisticsResiduals,
    *,
    log_prob: Any = None,
    entropy: Any = None,
    logsumexp: Any = None,
    out: Any = None,
) -> Array:
    """Compute the gradient of the logits from those of log-probabilities, entropies and logsumexp, in one pass.

    With p the softmax over the classes of all shards, t the target of a row and H its entropy, the derivatives by z_c
    are [c = t] - p_c of log p_t, -p_c (log p_c + H) of H, and p_c of logsumexp.

    Parameters
    ----------
    residuals : StatisticsResiduals
        Those of `class_statistics_forward`. They can be used again, unless `out` was the logits.
    log_prob, entropy, logsumexp : float or array of real numbers, optional
        The upstream gradient of each: a number, or one per row. That of `log_prob` does not count in ignored rows.
    out : array of a floating dtype, optional
        That of `softmax_cross_entropy_backward`.

    Returns
    -------
    array
        `out`, or a new array of the logits' dtype and shape.

    Raises
    ------
    RuntimeError
        If a backward pass into the logits has used the residuals up.
    TypeError, ValueError
        For upstream gradients or an `out` that do not fit, and for `log_prob` without targets.

    Notes
    -----
    Communicates nothing. Errors are raised on the rank that finds them, alone.

    Examples
    --------
    >>> import numpy as np
    >>> _, residuals = class_statistics_forward(np.log([[1.0, 3.0]]))
    >>> class_statistics_backward(residuals, entropy=1.0).round(4)
    array([[ 0.206, -0.206]])
    """
    StatisticsResiduals.check(residuals)
    problem = residuals.problem
    if log_prob is not None and problem.targets is None:
        raise ValueError("log_prob has no gradient without targets")
    given = {"log_prob": log_prob, "entropy": entropy, "logsumexp": logsumexp}
    with standard_arithmetic():
        upstream = {
            name: upstream_of(0.0 if value is None else value, name, problem.rows_shape, problem)
            for name, value in given.items()
        }
        gradient = residuals.gradient_for(out, problem.logits)
        fields = statistics_fields(problem.targets is not None)
        write_statistics_gradient(gradient, problem, residuals.softmax, fields, upstream)
    return gradient if out is None else out


def _checked(function: str, options: StatisticsOptions) -> Options:
    return Options.of(function, options, StatisticsOptions)


def statistics_fields(with_targets: bool) -> StateFields:
    """Return the fields that the states of statistics have."""
    return StateFields(hold_largest=True, argmax=True, target=with_targets, entropy=True)


def statistics_of(problem: Problem) -> tuple[ClassStatistics, StatisticsResiduals]:
    """Return the statistics and the residuals; collective over the communicators of `problem`."""
    with_targets, shape = problem.targets is not None, problem.rows_shape
    softmax = row_softmax(problem, statistics_fields(with_targets))
    dtype = problem.options.compute_dtype
    numbers, argmax = problem.kernel.row_statistics(softmax.columns, problem.counted, dtype)
    largest, sum_exp, logsumexp, log_prob, entropy = (each.reshape(shape) for each in numbers)
    statistics = ClassStatistics(
        largest, sum_exp, logsumexp, log_prob if with_targets else None, entropy, argmax.reshape(shape)
    )
    return statistics, StatisticsResiduals(problem, softmax)

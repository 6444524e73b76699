"""Statistics of each row's softmax, and the gradient of the logits from those of the statistics."""

from __future__ import annotations

from dataclasses import dataclass, replace
import math
from typing import Any, NamedTuple, Unpack
import zlib

import numpy as np

from pce_mpi.arrays import as_array
from pce_mpi.hollow import Hollow
from pce_mpi.kernels import standard_arithmetic
from pce_mpi.kernels.chosen import bits_of
from pce_mpi.kernels.softmax_state import RowSoftmax, StateFields
from pce_mpi.loss.agreement import agree_on
from pce_mpi.loss.chosen import by_row, check_several, fits_several, in_shape, upstream_of_several
from pce_mpi.loss.options import Options, StatisticsOptions, takes
from pce_mpi.loss.passes import PassResiduals, row_softmax, write_statistics_gradient
from pce_mpi.loss.problem import LARGEST, Problem, check, target_text, upstream_of
from pce_mpi.loss.several import SeveralTargets, without_targets
from pce_mpi.loss.support import Members, Outside, Support, checked_support
from pce_mpi.loss.tensors import tensors_for_tensors, tensors_on_this_rank

Array = Any  # numpy.ndarray or cupy.ndarray


class ClassStatistics(NamedTuple):
    """The statistics of each row, shaped as the logits without the class axis.

    z are the logits after `logit_scale` and `softcap`, and p their softmax, both of the classes of the support if there
    is one. A row whose support is empty is like one of only -inf, and its `argmax` is -1. All arrays but `argmax` have
    the compute dtype.

    Attributes
    ----------
    max : array
        The largest z.
    sum_exp : array
        sum_c exp(z_c - max).
    logsumexp : array
        log sum_c exp(z_c).
    log_prob : array or None
        log p of the target, in nats; 0 where the target is `ignore_index`: leave these out of a mean. It has the shape
        of the targets, and is None without any.
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
@tensors_for_tensors
def class_statistics(logits: Any, targets: Any = None, **options: Unpack[StatisticsOptions]) -> ClassStatistics:
    """Compute statistics of each row's softmax over the classes of all shards, without gathering a logit.

    Parameters
    ----------
    logits : array
        Those of `softmax_cross_entropy`.
    targets : array of integers, optional
        The class numbers of `softmax_cross_entropy`, or several a row, in place of the class axis, as `top_k` gives
        them; only `log_prob` needs them. An `ignore_index` among several counts for nothing by itself.

    Returns
    -------
    ClassStatistics
        `max`, `sum_exp`, `logsumexp`, `log_prob`, `entropy` and `argmax` of each row; the same bits on every rank.

    Raises
    ------
    ValueError
        For probabilities as targets, a class twice in a support, and a target outside its support.
    IndexError
        For a target, or a class of a support, out of range. All other errors are those of `softmax_cross_entropy`.

    Notes
    -----
    Collective over `comm`: one Allgather of 56 bytes, and one Allreduce of 80 bytes a row, 8 more with
    targets. For several targets a row these 8 are missing, and one Allreduce of the bytes of their logits follows.

    Examples
    --------
    >>> import numpy as np
    >>> class_statistics(np.log([[1.0, 3.0]])).entropy
    array([0.56233514])
    """
    with standard_arithmetic():
        return statistics_of(Options.of("class_statistics", options, StatisticsOptions), logits, targets)[0]


@dataclass(eq=False, repr=False)
class StatisticsResiduals(PassResiduals):
    """The arrays that `class_statistics_forward` keeps for the backward pass, opaque to its caller.

    Attributes
    ----------
    problem : Problem
        The checked arguments, with references to the caller's arrays.
    softmax : RowSoftmax
        The numbers that follow from the merged softmax states.
    inner : Problem
        The problem of the classes that statistics are taken over.
    members : Members or None
        This shard's part of the support.
    several : SeveralTargets or None
        The targets, if there are several a row.
    used_up : bool
        True once a backward pass has overwritten the logits.
    """

    made_by = "class_statistics_forward"

    softmax: RowSoftmax
    inner: Problem
    members: Members | None
    several: SeveralTargets | None


@takes(StatisticsOptions)
@tensors_for_tensors
def class_statistics_forward(
    logits: Any, targets: Any = None, **options: Unpack[StatisticsOptions]
) -> tuple[ClassStatistics, StatisticsResiduals]:
    """Compute `class_statistics`, and the residuals from which `class_statistics_backward` computes a gradient.

    Parameters
    ----------
    logits, targets : array
        Those of `class_statistics`. Logits must not change until the backward pass.

    Returns
    -------
    statistics : ClassStatistics
        Those of `class_statistics`.
    residuals : StatisticsResiduals
        References to the arrays that were passed, about 110 bytes a row, 150 more with several targets or a support, 33
        a target of several, and the logits of this shard's members of a support with 8 bytes for each.

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
    with standard_arithmetic():
        return statistics_of(Options.of("class_statistics_forward", options, StatisticsOptions), logits, targets)


@tensors_on_this_rank
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
    are [c = t] - p_c of log p_t, -p_c (log p_c + H) of H, and p_c of logsumexp. With a support p is its
    softmax, and the gradient of other classes is 0.

    Parameters
    ----------
    residuals : StatisticsResiduals
        Those of `class_statistics_forward`. They can be used again, unless `out` was the logits.
    log_prob, entropy, logsumexp : float or array of real numbers, optional
        The upstream gradient of each: a number, or an array of its shape. That of `log_prob` does not count where the
        target is ignored.
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
    problem, inner, members = residuals.problem, residuals.inner, residuals.members
    with standard_arithmetic():
        upstream = upstream_of_statistics(problem, log_prob, entropy, logsumexp)
        gradient = residuals.gradient_for(out, problem.logits)
        # That of a support is written to its own array first, as `out` may be the logits.
        written = gradient if members is None else problem.xp.empty(inner.logits.shape, gradient.dtype)
        fields = statistics_fields(inner.targets is not None)
        write = write_statistics_gradient if residuals.several is None else residuals.several.write_gradient
        write(written, inner, residuals.softmax, fields, upstream)
        if members is not None:
            bits_of(gradient)[...] = 0
            problem.kernel.put(gradient, problem.options.axis, members.columns, written)
    return gradient if out is None else out


def upstream_of_statistics(
    problem: Problem, log_prob: Any = None, entropy: Any = None, logsumexp: Any = None
) -> dict[str, Array]:
    """Return the upstream gradients of statistics, checked, each that of `upstream_of`; None is 0."""
    if log_prob is not None and problem.targets is None:
        raise ValueError("log_prob has no gradient without targets")
    upstream = {}
    for name, value in (("log_prob", log_prob), ("entropy", entropy), ("logsumexp", logsumexp)):
        number = 0.0 if value is None else value
        if name == "log_prob" and problem.several:
            upstream[name] = upstream_of_several(number, name, problem)
        else:
            upstream[name] = upstream_of(number, name, problem.rows_shape, problem)
    return upstream


def statistics_fields(with_targets: bool) -> StateFields:
    """Return the fields that the states of statistics have."""
    return StateFields(hold_largest=True, argmax=True, target=with_targets, entropy=True)


def statistics_of(options: Options, logits: Any, targets: Any = None) -> tuple[ClassStatistics, StatisticsResiduals]:
    """Return the statistics and the residuals; collective over the communicators of `options`."""
    supports: list[Support | None] = []

    def check_arguments() -> Problem:
        problem, support = _check(options, logits, targets)
        supports[:] = [support]
        return problem

    problem = agree_on(options, check_arguments)
    inner, members, several = problem, None, None
    if supports[0] is not None:
        members = Members.of(supports[0], problem)
        inner = members.inner
    if problem.several:
        several = SeveralTargets.of(problem, members)
        inner = without_targets(inner)
    elif members is not None and problem.targets is not None:
        columns, _ = members.columns_of(*(by_row(each, problem) for each in (problem.targets, problem.valid)))
        inner = replace(inner, target_column=problem.xp.asarray(columns[:, 0]))
    softmax = row_softmax(inner, statistics_fields(inner.targets is not None))
    numbers, argmax = inner.kernel.row_statistics(softmax.columns, inner.counted, inner.options.compute_dtype)
    if members is not None:
        argmax = members.classes_of(argmax, softmax.held)
    statistics = named_statistics(problem, numbers, argmax)
    if several is not None:
        statistics = statistics._replace(log_prob=in_shape(several.log_probs(inner, softmax, argmax), problem))
    return statistics, StatisticsResiduals(problem, softmax, inner, members, several)


def named_statistics(problem: Problem, numbers: Array, argmax: Array) -> ClassStatistics:
    """Name the statistics of all rows, (5, rows) and (rows,)."""
    shape = problem.rows_shape
    largest, sum_exp, logsumexp, log_prob, entropy = (each.reshape(shape) for each in numbers)
    given = None if problem.targets is None else log_prob
    return ClassStatistics(largest, sum_exp, logsumexp, given, entropy, argmax.reshape(shape))


def _check(options: Options, logits: Any, targets: Any) -> tuple[Problem, Support | None]:
    """Return the checked arguments; the support is None if there is none, or if a class is out of range."""
    logits, outside = as_array(logits, "logits"), Outside.named(options.outside)
    targets = None if targets is None else as_array(targets, "targets")
    several = targets is not None and targets.dtype.kind in "iu" and targets.ndim == logits.ndim
    problem = check(options, logits, None if several else targets, needs_targets=False)
    if several:
        if not fits_several(problem, targets):
            check(options, logits, targets, needs_targets=False)  # raises, and says which shape targets have
        check_several(problem, targets, "targets")
    if options.support is None:
        return problem, None
    rows = math.prod(problem.rows_shape)
    total, numbers = options.support_rows or (rows, np.arange(rows))
    ids, offsets = checked_support(options.support, total)
    problem.members = ids
    problem.highest_target = max(problem.highest_target, min(int(ids.view(np.uint64).max(initial=0)), LARGEST))
    checksum = zlib.crc32(offsets.data, zlib.crc32(ids.data))
    problem.also = {"support": f"checksum {checksum:08x}", "outside": str(outside)}
    if problem.targets is None:
        return problem, Support.of(ids, offsets, numbers)
    classes, valid = (by_row(array, problem) for array in (problem.targets, problem.valid))
    known = type(classes) is not Hollow
    more = None
    if outside is Outside.ADD and known:
        more = np.stack([np.broadcast_to(np.arange(rows)[:, None], classes.shape)[valid], classes[valid]])
    support = Support.of(ids, offsets, numbers, more)
    if support is not None and outside is Outside.RAISE and known:
        missing = np.flatnonzero(in_shape(valid & ~support.place_of(classes)[1], problem))
        if missing.size:
            which = target_text(problem.targets, problem.targets_shape, missing[0])
            raise ValueError(f"{which} is outside the support of its row; outside='-inf' or 'add' gives that a meaning")
    return problem, support

"""The divergence of a student's softmax from a teacher's, over the classes of all shards, and its gradients.

With P and Q the two softmaxes of a row, the first Allreduce merges their states, and the second one the sums of the
divergence of `kernels/divergence.py`, which need both logsumexp. The gradients need nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import numpy as np

from pce_mpi.arrays import Array, HostArray, as_array, cupy_of, is_true, name_of, to_host
from pce_mpi.comm.collectives import all_reduce
from pce_mpi.comm.tracing import cause
from pce_mpi.gpu import check_on_current_gpu
from pce_mpi.kernels import converted, host_kernel
from pce_mpi.kernels.divergence import mean_of
from pce_mpi.kernels.interface import SINGLE, GradientOf, Pair, StateFields
from pce_mpi.loss.agreement import agree_on
from pce_mpi.loss.options import Direction, Options, ShardedDivergenceOptions, check_scale_is_near, takes
from pce_mpi.loss.passes import PassResiduals, in_rows, probability_rows, reduced, row_softmax
from pce_mpi.loss.problem import Problem, check, is_alone, rows_and_classes, upstream_of
from pce_mpi.loss.tensors import tensors_for_tensors, tensors_on_this_rank


@takes(ShardedDivergenceOptions)
@tensors_for_tensors
def kl_divergence(student: Any, teacher: Any, **options: Unpack[ShardedDivergenceOptions]) -> Array:
    """Compute the divergence of plain shards; see `pce_mpi.kl_divergence`."""
    return divergence_of(prepare_divergence(_checked("kl_divergence", options), student, teacher))[0]


@dataclass(eq=False, repr=False)
class DivergenceResiduals(PassResiduals):
    """The arrays that `kl_divergence_forward` keeps for the backward pass, opaque to its caller.

    Attributes
    ----------
    problem : Problem
        The checked arguments, with references to the caller's arrays.
    pair : Pair
        The logits in the order of the divergence, and the numbers from which their softmax is written.
    valid : array of bool, shape (rows,)
        The rows that count.
    divergences : array, shape (rows,)
        The divergence of each row.
    skewness : array, shape (rows,)
        KL(Q || m) - KL(P || m) times the weight of Q in m, for Jensen-Shannon.
    divisor : array, shape (1,)
        The divisor of the gradient, 1 unless the reduction is a mean.
    loss_shape : tuple of int
        The shape of the divergence that was returned.
    used_up : bool
        True once a backward pass has overwritten logits.
    """

    made_by = "kl_divergence_forward"

    pair: Pair
    valid: Array
    divergences: Array
    skewness: Array
    divisor: Array
    loss_shape: tuple[int, ...]


@takes(ShardedDivergenceOptions)
@tensors_for_tensors
def kl_divergence_forward(
    student: Any, teacher: Any, **options: Unpack[ShardedDivergenceOptions]
) -> tuple[Array, DivergenceResiduals]:
    """Compute `kl_divergence`, and the residuals from which `kl_divergence_backward` computes gradients.

    Parameters
    ----------
    student, teacher : array
        The logits of this rank's classes, of one shape; dtypes may differ. They must not change until the last backward
        pass.
    logit_scale : float, default 1.0
        The factor of both logits, from 2**-64 to 2**64: 1 / T for a temperature T.
    reduction : {"mean", "sum", "none"}, default "mean"
        `"mean"` divides by the number of rows that count; if there are none it is `nan`.
    compute_dtype : dtype, optional
        Dtype of the divergence: float32, or float64 for float64 logits, unless given. If the student or the teacher is
        float64, it is computed in float64.

    Returns
    -------
    divergence : array
        That of `kl_divergence`.
    residuals : DivergenceResiduals
        References to the arrays that were passed, and about 280 bytes a row.

    Notes
    -----
    Errors and communication are those of `kl_divergence`.

    Examples
    --------
    >>> import numpy as np
    >>> _, residuals = kl_divergence_forward(np.log([[1.0, 3.0]]), np.zeros((1, 2)))
    >>> kl_divergence_backward(1.0, residuals).round(6)
    array([[-0.25,  0.25]])
    """
    return divergence_of(prepare_divergence(_checked("kl_divergence_forward", options), student, teacher))


@tensors_on_this_rank
def kl_divergence_backward(
    dloss: Any, residuals: DivergenceResiduals, out: Any = None, *, of: str = "student"
) -> Array:
    """Compute the gradient of the student's logits, or of the teacher's, from the gradient of the divergence.

    With D the divergence of a row, x the logits of the student, y those of the teacher, and all of it times
    logit_scale,

        forward           dx_c = s_c - t_c                              dy_c = t_c (log(t_c / s_c) - D)
        reverse           dx_c = s_c (log(s_c / t_c) - D)               dy_c = t_c - s_c
        jensen-shannon    dx_c = (1 - beta) s_c (log(s_c / m_c) - KL(s || m))
                          dy_c = beta t_c (log(t_c / m_c) - KL(t || m)), for a beta between 0 and 1

    times g = dloss, divided by the number of rows for `"mean"`. Rows that do not count have a zero gradient. A rank
    writes the gradient of its own classes; nothing is summed over ranks, so nothing is counted twice.

    Parameters
    ----------
    dloss : float or array of real numbers
        A number, or one per row for `reduction="none"`.
    residuals : DivergenceResiduals
        Those of `kl_divergence_forward`. They can be used again, unless `out` was the logits of either.
    out : array of a floating dtype, optional
        The array for the gradient. It has the logits' shape and is exactly these logits, which are then overwritten, or
        shares no memory with an argument of the forward pass.
    of : {"student", "teacher"}, default "student"
        The logits that the gradient is of.

    Returns
    -------
    array
        `out`, or a new array of the dtype and shape of these logits.

    Raises
    ------
    RuntimeError
        If a backward pass into logits has used the residuals up.
    TypeError, ValueError
        For a `dloss`, an `out` or an `of` that does not fit.

    Notes
    -----
    Communicates nothing. Errors are raised on the rank that finds them, alone.

    Examples
    --------
    >>> import numpy as np
    >>> _, residuals = kl_divergence_forward(np.log([[1.0, 3.0]]), np.zeros((1, 2)), reduction="none")
    >>> kl_divergence_backward(np.array([2.0]), residuals).round(6)
    array([[-0.5,  0.5]])
    >>> kl_divergence_backward(np.array([2.0]), residuals, of="teacher").round(6)
    array([[ 0.549306, -0.549306]])
    """
    DivergenceResiduals.check(residuals)
    if not isinstance(of, str) or of not in ("student", "teacher"):
        raise ValueError(f"of must be 'student' or 'teacher', got {of!r}")
    problem = residuals.problem
    upstream = upstream_of(dloss, "dloss", residuals.loss_shape, problem)
    gradient = residuals.gradient_for(out, problem.logits if of == "student" else problem.beside[0])
    _write_gradient(gradient, residuals, upstream, of == "student")
    return gradient if out is None else out


@takes(ShardedDivergenceOptions, like=kl_divergence_forward)
@tensors_for_tensors
def kl_divergence_value_and_grad(
    student: Any, teacher: Any, *, out: Any = None, **options: Unpack[ShardedDivergenceOptions]
) -> tuple[Array, Array]:
    """Compute the divergence and the gradient of the student's logits.

    Formula, communication and errors are those of `kl_divergence`; for the gradient of the teacher's logits see
    `kl_divergence_backward`.

    Parameters
    ----------
    student, teacher : array
        Those of `kl_divergence`.
    out : array of a floating dtype, optional
        The array for the gradient. It has the student's shape and is exactly its logits, which are then overwritten, or
        shares no memory with another argument.

    Returns
    -------
    divergence : array
        0-d, or one number per row for `reduction="none"`.
    gradient : array
        `out`, or a new array of the dtype and shape of `student`: the gradient of the divergence, or of the sum over
        this rank's rows for `reduction="none"`.

    Examples
    --------
    >>> import numpy as np
    >>> divergence, dstudent = kl_divergence_value_and_grad(np.log([[1.0, 3.0]]), np.zeros((1, 2)))
    >>> dstudent.round(6)
    array([[-0.25,  0.25]])
    """
    checked = _checked("kl_divergence_value_and_grad", options, "out")
    problem = prepare_divergence(checked, student, teacher, out=out, with_gradient=True)
    divergence, residuals = divergence_of(problem)
    _write_gradient(problem.out, residuals, np.ones(1), True)
    return divergence, problem.out if out is None else out


def _direction(options: Options) -> str:
    """Return the direction; a mean that is one of the softmaxes leaves the other's divergence from it."""
    ends: dict[float, str] = {0.0: Direction.FORWARD, 1.0: Direction.REVERSE}
    jensen_shannon = options.direction == Direction.JENSEN_SHANNON
    return ends.get(options.beta, options.direction) if jensen_shannon else options.direction


def _is_swapped(options: Options) -> bool:
    """Return whether P is the student: it is the teacher for "forward", else that with the larger weight."""
    direction = _direction(options)
    return direction == Direction.REVERSE or (direction == Direction.JENSEN_SHANNON and options.beta < 0.5)


def _checked(function: str, options: ShardedDivergenceOptions, *own: str) -> Options:
    return Options.of(function, options, ShardedDivergenceOptions, *own)


def prepare_divergence(options: Options, student: Any, teacher: Any, **more: Any) -> Problem:
    """Check the arguments on this rank, and agree on the call with the others."""
    return agree_on(options, partial(_check, options, student, teacher, **more))


def _check(options: Options, student: Any, teacher: Any, **more: Any) -> Problem:
    beside = {"teacher": as_array(teacher, "teacher")}
    problem = check(options, student, None, needs_targets=False, later=True, name="student", beside=beside, **more)
    check_scale_is_near(problem.options)
    if options.beta != 0.5 and problem.options.direction != Direction.JENSEN_SHANNON:
        said = f"got beta = {options.beta} and direction = {problem.options.direction!r}"
        raise ValueError(f"beta is of direction='jensen-shannon', {said}")
    problem.targets_name = "rows"
    problem.also = {"teacher's dtype": name_of(beside["teacher"].dtype), "rows given": options.rows is not None}
    if options.rows is not None:
        rows = as_array(options.rows, "rows")
        if rows.dtype != np.bool_:
            raise TypeError(f"rows must be bool, got {rows.dtype}")
        if rows.shape != problem.rows_shape:
            raise ValueError(
                f"rows must have the logits' shape without the class axis, {problem.rows_shape}, got {rows.shape}"
            )
        # On the host they are compared with those of other ranks.
        on_gpu = None not in (cupy_of(rows), cupy_of(problem.logits)) and is_alone(options)
        check_on_current_gpu({"rows": rows} if on_gpu else {})
        problem.valid = (rows if on_gpu else to_host(rows)).reshape(-1).astype(np.bool_)
        problem.all_valid = not on_gpu and is_true(problem.valid.all())
    return problem


_FIELDS = StateFields(hold_largest=True)
# The sums of a row: a grid and limbs, and two sums of whole numbers.
_SUMS = np.dtype([("divergence", np.uint64, 4), ("more", np.uint64, 2)])


def _add(a: HostArray, b: HostArray) -> None:
    """Add the sums `a` of some classes to the sums `b` of others, of the same rows."""
    total = np.ascontiguousarray(b["divergence"])
    host_kernel().add(np.ascontiguousarray(a["divergence"]), total)
    b["divergence"] = total
    b["more"] += a["more"]


def divergence_of(problem: Problem) -> tuple[Array, DivergenceResiduals]:
    """Return the divergence and the residuals; collective over the communicators of `problem`."""
    options, kernel, xp = problem.options, problem.kernel, problem.xp
    count, direction = problem.valid.size, _direction(options)
    softmax = row_softmax(problem, _FIELDS)
    rows = probability_rows(problem, softmax)
    student, teacher = (rows_and_classes(each, options.axis) for each in (problem.logits, problem.beside[0]))
    valid = xp.ones(count, np.bool_) if problem.counted is None else problem.counted
    with np.errstate(all="ignore"):
        difference = kernel.logsumexp_differences(softmax.held, softmax.held_nll, problem.transform)
        difference = xp.where(valid[:, None], difference, np.nan)  # nothing is computed for rows that do not count
        of_rows = rows[count:], rows[:count], difference
        pair = Pair(teacher, student, *of_rows, problem.transform, problem.precision is SINGLE)
        if _is_swapped(options):
            pair = pair.swapped()
        if direction == Direction.JENSEN_SHANNON:
            pair = pair._replace(mean=mean_of(min(options.beta, 1.0 - options.beta)))
        sums = kernel.divergence_sums(pair)
        if options.comm is not None:
            with cause(options.operation, options.over, "the sums of the divergence, merged"):
                sums = all_reduce(sums, options.comm, _add, overwrite=True, element=_SUMS)
        divergences, low, skewness = kernel.row_divergences(sums, pair.mean)
        divergences = xp.where(xp.isfinite(pair.difference[:, 0]), divergences, np.nan)
        losses = xp.stack([xp.where(valid, divergences, 0.0), xp.where(valid, 1.0, 0.0)])
        loss, divisor = reduced(problem, losses)
        pair.difference[:, 2] += low
    return loss, DivergenceResiduals(problem, pair, valid, divergences, skewness, divisor, loss.shape)


def _write_gradient(array: Array, residuals: DivergenceResiduals, upstream: Array, of_student: bool) -> None:
    """Fill `array` with a gradient; `upstream`, that of `upstream_of`, is the gradient of the divergence."""
    problem, pair, constant = residuals.problem, residuals.pair, residuals.divergences
    options, kernel, xp, count = problem.options, problem.kernel, problem.xp, problem.valid.size
    by_q = of_student != _is_swapped(options)
    of = GradientOf.KL_BY_Q if by_q else GradientOf.KL_BY_P
    factor = problem.transform.scale
    with np.errstate(all="ignore"):
        if mean := pair.mean:
            of, skewness = GradientOf.JENSEN_SHANNON_BY_Q, residuals.skewness
            if by_q:
                factor, constant = mean.q * factor, constant + mean.p * (skewness / mean.q)
            else:
                factor, constant, pair = mean.p * factor, constant - skewness, pair.swapped()
        slope = xp.zeros(count) + converted(xp.asarray(upstream), np.float64) / xp.asarray(residuals.divisor) * factor
    given = pair, of, slope, constant, residuals.valid
    in_rows(array, options.axis, lambda out: kernel.write_divergence_gradient(out, *given))

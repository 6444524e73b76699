"""KL(teacher || student) over the teacher's largest classes, of all shards, in each row; it is called with `top_k`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pce_mpi import dense
from pce_mpi.conformance.kinds import kl
from pce_mpi.conformance.problems import Array, Kind, Problem
from pce_mpi.conformance.terms import REDUCTIONS
from pce_mpi.conformance.textbook import Faults, Given, Textbook, softmax
from pce_mpi.conformance.texts import meant

_LARGEST = 4


def _fitted(problem: Problem, seed: int) -> Problem:
    """Return the problem with a teacher whose largest classes are above all others in every dtype."""
    problem = kl.drawn_teacher(problem, seed)
    count = min(_LARGEST, problem.classes)
    teacher = problem.row_major(problem.targets).astype(np.float64)
    order = np.argsort(np.where(np.isnan(teacher), -np.inf, teacher), axis=-1)[:, problem.classes - count :]
    above = np.take_along_axis(teacher, order, axis=-1)
    with np.errstate(invalid="ignore"):
        np.put_along_axis(teacher, order, above + np.maximum(0.5, np.abs(above) / 64.0), axis=-1)
    shaped = np.moveaxis(teacher.reshape(*problem.rows_shape, problem.classes), -1, problem.axis)
    return replace(problem, targets=shaped.astype(problem.dtype), options=problem.options | {"top_k": count})


def _largest(teacher: Array, count: int) -> Array:
    """Return a mask of the `count` largest of each row."""
    mask = np.zeros(teacher.shape, np.bool_)
    order = np.argsort(np.where(np.isnan(teacher), -np.inf, teacher), axis=-1, kind="stable")
    np.put_along_axis(mask, order[:, teacher.shape[-1] - count :], True, axis=-1)
    return mask


def _dropped(student: Array, teacher: Array, chosen: Array, scale: float) -> tuple[Array, Array]:
    log_p, log_q = (-softmax(scale * each)["nll"] for each in (student, teacher))
    q = np.where(chosen, np.exp(log_q), 0.0)
    rows = np.where(q == 0.0, 0.0, q * (log_q - log_p)).sum(axis=-1)
    return rows, scale * (q.sum(axis=-1, keepdims=True) * np.exp(log_p) - q)


def _renormalized(student: Array, teacher: Array, chosen: Array, scale: float) -> tuple[Array, Array]:
    within = (np.where(chosen, each, -np.inf) for each in (student, teacher))
    found = dense.kl_divergence_value_and_grad(*within, logit_scale=scale, reduction="none")
    return found.divergence, found.dstudent


def _bucket(student: Array, teacher: Array, chosen: Array, scale: float) -> tuple[Array, Array]:
    if chosen.all():  # there is no other class
        return _renormalized(student, teacher, chosen, scale)
    pair = [each - each.max(axis=-1, keepdims=True) for each in (student, teacher)]
    within, beyond = ([np.where(mask, each, -np.inf) for each in pair] for mask in (chosen, ~chosen))
    masses = [dense.class_statistics(scale * each).logsumexp[:, None] / scale for each in beyond]
    with_bucket = [np.append(each, mass, axis=-1) for each, mass in zip(within, masses, strict=True)]
    found = dense.kl_divergence_value_and_grad(*with_bucket, logit_scale=scale, reduction="none")
    share = np.where(chosen, 0.0, np.exp(scale * (beyond[0] - masses[0])))
    return found.divergence, found.dstudent[:, :-1] + found.dstudent[:, -1:] * share


# The ways to treat the other classes, in words, and as a divergence of each row with its gradient.
_RESTS = {
    "dropped": ("the terms of the other classes are dropped", _dropped),
    "renormalized": ("the probabilities of the largest classes are renormalized", _renormalized),
    "bucket": ("the other classes are one class more", _bucket),
}


def _of_support(problem: Problem, chosen: Array, rest: str) -> tuple[Array, Array]:
    """Return the divergence over the classes of a mask (rows, classes), and its gradient, of the problem's shapes."""
    scale = 1.0 / problem.options.get("temperature", 1.0)
    student, teacher = (problem.row_major(each).astype(np.float64) for each in (problem.logits, problem.targets))
    with np.errstate(all="ignore"):
        rows, gradient = _RESTS[rest][1](student, teacher, chosen, scale)
        factor = scale**-2 if problem.conventions["temperature_squared"] else 1.0
        if problem.reduction == "mean":
            factor = factor / problem.rows if problem.rows else np.nan
        gradient = gradient * factor * np.broadcast_to(problem.upstream.reshape(-1), rows.shape)[:, None]
        loss = rows.reshape(problem.rows_shape) if problem.reduction == "none" else rows.sum()
    shape = *problem.rows_shape, problem.classes
    return np.asarray(loss * factor), np.moveaxis(gradient.reshape(shape), -1, problem.axis)


def _exact(problem: Problem) -> tuple[Array, Array]:
    chosen = _largest(problem.row_major(problem.targets).astype(np.float64), problem.options["top_k"])
    return _of_support(problem, chosen, problem.conventions["rest"])


def _faults(b: Textbook) -> Faults:
    """SkyRL; and what a declaration may say."""
    problem, count = b.problem, b.problem.options["top_k"]
    teacher = problem.row_major(problem.targets).astype(np.float64)
    chosen, declared = _largest(teacher, count), problem.conventions["rest"]

    def given(mask: Array, rest: str) -> Given:
        loss, gradient = _of_support(problem, mask, rest)
        return Given((loss,), problem.row_major(gradient))

    for rest, (what, _) in _RESTS.items():
        if rest != declared:
            yield f"{what}: {meant(rest=rest)}", given(chosen, rest)
    if problem.ranks > 1:
        own = np.zeros_like(chosen)
        for rank in range(problem.ranks):
            mine = b.in_shard(rank)
            own[:, mine] = _largest(teacher[:, mine], min(count, int(mine.sum())))
        text = f"the {count} classes are each rank's own: the loss depends on the number of ranks"
        for rest in _RESTS:
            yield text, given(own, rest)
    yield (
        "the classes are those of the student's largest logits, not of the teacher's",
        given(_largest(b.x, count), declared),
    )


TOPK_KL = Kind(
    noun="divergence",
    plural="divergences",
    exact=_exact,
    sizes=kl.sizes,
    faults=_faults,
    told='the numbers are a divergence over the largest classes: that is declared by @offers(kind="topk_kl")',
    options=("temperature",),
    facts=("class_start", "num_classes", "top_k"),
    reductions=REDUCTIONS,
    arrays=("student", "teacher"),
    fitted=_fitted,
    cases=kl.CASES,
    catches=kl.KL.catches,
)

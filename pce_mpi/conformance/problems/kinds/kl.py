"""Divergences of a student's softmax and a teacher's, over all classes or the teacher's largest, of all shards."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pce_mpi import dense
from pce_mpi.conformance.problems.cases import DTYPES, REDUCTIONS, Cases, Setting
from pce_mpi.conformance.problems.generators import random_problem, rounded
from pce_mpi.conformance.problems.problem import Array, Kind, Problem, Told
from pce_mpi.conformance.problems.textbook import Faults, Given, Textbook, all_ranks, of_gradient, softmax
from pce_mpi.conformance.text import meant


def drawn_teacher(problem: Problem, seed: int) -> Problem:
    """Return the problem with a teacher near the student, unless it has one; a class of logit -inf is so in both."""
    if problem.targets.shape == problem.logits.shape and problem.targets.dtype == problem.dtype:
        return problem
    student = problem.logits.astype(np.float64)
    noise = 2.0 * np.random.default_rng([seed, 6]).standard_normal(student.shape)
    with np.errstate(all="ignore"):
        near = np.where(np.isfinite(student), student + noise, np.where(student == -np.inf, -np.inf, noise))
        rounded_near = near.astype(problem.dtype).astype(np.float64)
        finite = np.clip(rounded_near, student.min(initial=0.0), student.max(initial=0.0))
        teacher = np.where(np.isfinite(student), finite, near).astype(problem.dtype)
    return replace(problem, targets=teacher)


def of_problem(problem: Problem, student: Array, teacher: Array) -> tuple[Array, Array]:
    """Return the divergence of two arrays of logits, in the conventions of a problem, and its gradient."""
    temperature = problem.options.get("temperature", 1.0)
    results = dense.kl_divergence_value_and_grad(
        student,
        teacher,
        direction=problem.conventions["direction"],
        beta=problem.conventions["beta"],
        logit_scale=1.0 / temperature,
        reduction=problem.reduction,
        axis=problem.axis,
    )
    factor = temperature**2 if problem.conventions["temperature_squared"] else 1.0
    return np.asarray(results.divergence) * factor, results.dstudent * (factor * problem.upstream)


# Student and teacher are close where no logits differ by more: of a divergence of half the square of that, differences
# of log-probabilities in float32 leave two digits at most.
_CLOSE = 2.0**-6


def _summands(book: Textbook) -> tuple[Array, Array, Array]:
    """Return the sizes of logarithms by class, those of a row's summands, and the latter where student and teacher are
    close; 0 where they are not.

    Logarithms of probabilities have an ulp of their own. A divergence of a student and a teacher that are close need
    have none of it: the differences of their logits are exact or rounded once, and so is their common part,
    log(sum p exp(difference)), by expm1 and log1p. An ulp of p times the difference is left.
    """
    larger, teacher = np.maximum(book.p, book.q), book.problem.row_major(book.problem.targets).astype(np.float64)
    nlls = book.nll, softmax(book.slope * teacher)["nll"]
    logs = np.sum([np.where(np.isfinite(nll), nll, 0.0) for nll in nlls], axis=0)
    apart = np.abs(np.where(teacher == book.x, 0.0, book.slope * (teacher - book.x)))
    close = (apart.max(axis=-1, initial=0.0) < _CLOSE) & apart.any(axis=-1)
    close &= book.problem.dtype != np.float64  # the exact divergence is a difference of logarithms too
    of_close = np.where(close, np.maximum(np.finfo(np.float32).eps, (larger * apart).sum(axis=-1)), 0.0)
    return logs, np.maximum(1.0, (larger * logs).sum(axis=-1)), of_close


def sizes(book: Textbook) -> tuple[Array, Array, Array]:
    """Return the sizes of the summands, as `kinds.loss.sizes` does."""
    larger, (logs, summands, of_close) = np.maximum(book.p, book.q), _summands(book)
    factor = book.w.max(initial=0.0) / (book.divisor or 1.0)
    upstream = np.full(book.problem.rows, factor) * np.where(of_close, of_close, summands)
    slope = np.abs(book.g * factor) * book.slope.max(initial=0.0)
    forward = book.problem.conventions["direction"] == "forward"
    return upstream, slope, slope[:, None] * larger * (1.0 if forward else 1.0 + logs)


def _given(b: Textbook, student: Array, teacher: Array, **conventions: object) -> Given:
    """Return the answer for other logits, (rows, classes), or in other conventions."""
    problem = replace(
        b.problem,
        logits=student.reshape(*b.problem.rows_shape, b.problem.classes),
        targets=teacher,
        axis=-1,
        conventions={**b.problem.conventions, **conventions},
    )
    loss, gradient = of_problem(problem, problem.logits, teacher.reshape(problem.logits.shape))
    return Given((loss,), gradient.reshape(b.p.shape))


_DIRECTIONS = {
    "forward": "KL(teacher || student)",
    "reverse": "KL(student || teacher)",
    "jensen-shannon": "the Jensen-Shannon divergence",
}


def _faults(b: Textbook) -> Faults:
    """NeMo-RL; and what a declaration may say."""
    problem = b.problem
    student, teacher = b.x, problem.row_major(problem.targets).astype(np.float64)
    for direction, what in _DIRECTIONS.items():
        if direction != problem.conventions["direction"]:
            yield f"this is {what}: {meant(direction=direction)}", _given(b, student, teacher, direction=direction)
    beta = problem.conventions["beta"]
    if problem.conventions["direction"] == "jensen-shannon" and beta != 0.5:
        text = f"beta weighs the student, not the teacher: {meant(beta=1 - beta)}"
        yield text, _given(b, student, teacher, beta=1 - beta)
        yield f"the mean has equal weights: {meant(beta=0.5)}", _given(b, student, teacher, beta=0.5)
    if "temperature" in problem.options:
        other = not problem.conventions["temperature_squared"]
        there = "has" if other else "lacks"
        text = f"the divergence {there} the square of the temperature as a factor: {meant(temperature_squared=other)}"
        yield text, _given(b, student, teacher, temperature_squared=other)
        temperature = problem.options["temperature"]
        gradient = problem.row_major(problem.expected[1]) * temperature
        yield "the gradient lacks the factor 1 / temperature", of_gradient(gradient)
        text = "the temperature divides the student's logits only"
        yield text, _given(b, student, teacher * temperature)
        yield "the temperature is not looked at", _given(b, student * temperature, teacher * temperature)
    if problem.conventions["direction"] == "forward":
        text = "the entropy of the teacher is not subtracted: the numbers are a cross entropy"
        yield text, all_ranks(b.but(lost=0.0))
        masked = (b.q == 0.0).any(axis=-1)
        if masked.any():
            text = "0 times -inf gives nan: a class to which the teacher gives probability 0 adds 0 to the divergence"
            lost = np.where(masked, np.nan, b.lost)
            yield text, Given((b.but(lost=lost).loss(),), None)
            yield text, Given((b.but(lost=lost).loss(),), b.gradient() + np.where(masked, np.nan, 0.0)[:, None])
    if problem.ranks > 1:
        yield from _local(b, teacher)


def _local(b: Textbook, teacher: Array) -> Faults:
    """Softmaxes, or sums, of each rank's own classes."""
    if b.problem.conventions["direction"] != "forward":
        return
    shards = [b.in_shard(rank) for rank in range(b.problem.ranks)]
    own_q, own_p, own_nll = np.zeros_like(b.q), np.zeros_like(b.p), np.zeros_like(b.nll)
    for each in filter(np.any, shards):
        own_q[:, each] = softmax(b.slope[:, each] * teacher[:, each])["p"]
        of_student = softmax(b.z[:, each])
        own_p[:, each], own_nll[:, each] = of_student["p"], of_student["nll"]
    right, own = (b.p, b.nll), (own_p, own_nll)
    for whose, q, (p, nll) in (
        ("the teacher's softmax is", own_q, right),
        ("the student's softmax is", b.q, own),
        ("both softmaxes are", own_q, own),
    ):
        local = b.but(p=p, nll=nll, lost=(b.w * _times_log(q, q)).sum(axis=-1)).with_u(b.w * q)
        text, gradient = f"{whose} of each rank's own classes only", b.gradient_of(b.w * (p - q))
        yield text, all_ranks(local)
        yield text, Given((local.loss(),), gradient)
        yield text, of_gradient(gradient)
    terms = b.w * (_times_log(b.q, b.q) + np.where(b.q == 0.0, 0.0, b.q * b.nll))
    nothing = b.with_u(np.zeros_like(b.u))
    parts = tuple(nothing.but(lost=terms[:, each].sum(axis=-1)).loss() for each in shards)
    if np.ptp(parts, axis=0).max(initial=0.0) > 2.0**-7:
        text = "the divergence is of each rank's own classes only: it is never reduced over the ranks"
        yield text, Given(parts, None)


def _times_log(p: Array, q: Array) -> Array:
    """Return p log q, and 0 where p is."""
    return np.where(p == 0.0, 0.0, p * np.log(np.where(p == 0.0, 1.0, q)))


def tell(book: Textbook, name: str, got: Array) -> Told | None:
    """Name a divergence that has no digits (DeepSpeed), being a difference of log-probabilities in float32."""
    if name == "gradient":
        return None
    _, summands, of_close = _summands(book)
    most = 4.0 * np.finfo(np.float32).eps * summands * book.w.max(initial=0.0)
    if book.problem.reduction != "none":
        most = most.sum(keepdims=True) / book.divisor
    errors = np.abs(got - book.problem.expected[0].reshape(-1))
    if not of_close.all() or not (errors <= most).all():
        return None
    text = (
        "the loss has the errors of log-probabilities in float32 that were subtracted: where student and teacher are "
        "close, it is smaller than these errors, and has to be made of differences of their logits, or in float64"
    )
    return Told((text,))


CASES = Cases()


def _with_teacher(
    setting: Setting, change: Callable[[Array, np.random.Generator], Array], options: tuple[str, ...] = ()
) -> Problem:
    problem = random_problem(setting, options=options)
    teacher = change(problem.logits.astype(np.float64), np.random.default_rng([setting.seed, 7]))
    return replace(problem, targets=rounded(setting, teacher))


@CASES.case("far-teacher/{dtype}")
def _far_teacher(setting: Setting) -> Problem:
    """A teacher of its own: which of the two is the first argument of KL(P || Q) shows."""
    return _with_teacher(setting, lambda student, rng: np.asarray(3.0 * rng.standard_normal(student.shape)))


@CASES.case("near-teacher/{dtype}", [{"dtype": each} for each in DTYPES if each != "float64"])
def _near_teacher(setting: Setting) -> Problem:
    """A student that has nearly learnt: a divergence that is a small difference of two sums, and may be negative. In
    float64 the exact one would be another such difference.
    """
    return _with_teacher(setting, lambda student, rng: student * (1.0 + 2.0**-6 * rng.standard_normal(student.shape)))


@CASES.case("close-teacher/float32", dtype="float32", reductions=("none", "mean", "sum"))
def _close_teacher(setting: Setting) -> Problem:
    """A student that has all but learnt: its divergence, some 1e-8, is below an ulp of the log-probabilities that are
    subtracted. Differences of logits have its digits, and so has float64.
    """
    return _with_teacher(setting, lambda student, rng: student * (1.0 + 2.0**-13 * rng.standard_normal(student.shape)))


@CASES.case("equal-logits")
def _equal_logits(setting: Setting) -> Problem:
    """A student with the logits of its teacher: the divergence is 0 and so is its gradient."""
    return _with_teacher(setting, lambda student, rng: student)


@CASES.case("certain-teacher", special=True)
def _certain_teacher(setting: Setting) -> Problem:
    """A teacher whose probabilities are 1 and 0: 0 times log 0 is 0, not nan."""

    def certain(student: Array, rng: np.random.Generator) -> Array:
        teacher = np.full(student.shape, -4_000.0)
        teacher[np.arange(len(teacher)), rng.integers(0, student.shape[-1], len(teacher))] = 4_000.0
        return teacher

    return _with_teacher(setting, certain)


@CASES.case("temperature/{dtype}", options=("temperature",))
def _temperature(setting: Setting) -> Problem:
    """A temperature: both softmaxes are of logits that are divided by it, and the gradient has 1 / T as a factor."""
    return _with_teacher(
        setting, lambda student, rng: student + 2.0 * rng.standard_normal(student.shape), options=("temperature",)
    )


KL = Kind(
    noun="divergence",
    plural="divergences",
    exact=lambda problem: of_problem(problem, problem.logits, problem.targets),
    sizes=sizes,
    faults=_faults,
    told='the numbers are a divergence: that is declared by @offers(kind="kl")',
    options=("temperature",),
    reductions=REDUCTIONS,
    arrays=("student", "teacher"),
    tell=tell,
    fitted=drawn_teacher,
    cases=CASES,
    catches={
        "random-logits": "Random logits, equal shards: a candidate that fails here has the formula wrong.",
        "p-near-1": "Student and teacher are nearly certain of one class: p - q computed after both were rounded.",
        "p-equal-1": "One class has all of the student's probability.",
        "offset": "Differences of logits and a logsumexp, which lose what an offset common to all classes pushes out.",
    },
)

_LARGEST = 4


def _fitted(problem: Problem, seed: int) -> Problem:
    """Return the problem with a teacher whose largest classes are above all others in every dtype."""
    problem = drawn_teacher(problem, seed)
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


def _dropped(student: Array, teacher: Array, chosen: Array, scale: float, direction: str) -> tuple[Array, Array]:
    log_p, log_q = (-softmax(scale * each)["nll"] for each in (student, teacher))
    every_p = np.exp(log_p)
    p, q = (np.where(chosen, each, 0.0) for each in (every_p, np.exp(log_q)))
    if direction == "forward":
        rows = np.where(q == 0.0, 0.0, q * (log_q - log_p)).sum(axis=-1)
        return rows, scale * (q.sum(axis=-1, keepdims=True) * every_p - q)
    of_class = np.where(p == 0.0, 0.0, p * (log_p - log_q))
    rows = of_class.sum(axis=-1)
    return rows, scale * (of_class + p - every_p * (rows + p.sum(axis=-1))[:, None])


def _renormalized(student: Array, teacher: Array, chosen: Array, scale: float, direction: str) -> tuple[Array, Array]:
    within = (np.where(chosen, each, -np.inf) for each in (student, teacher))
    results = dense.kl_divergence_value_and_grad(*within, direction=direction, logit_scale=scale, reduction="none")
    return results.divergence, results.dstudent


def _bucket(student: Array, teacher: Array, chosen: Array, scale: float, direction: str) -> tuple[Array, Array]:
    if chosen.all():  # there is no other class
        return _renormalized(student, teacher, chosen, scale, direction)
    pair = [each - each.max(axis=-1, keepdims=True) for each in (student, teacher)]
    within, beyond = ([np.where(mask, each, -np.inf) for each in pair] for mask in (chosen, ~chosen))
    masses = [dense.class_statistics(scale * each).logsumexp[:, None] / scale for each in beyond]
    with_bucket = [np.append(each, mass, axis=-1) for each, mass in zip(within, masses, strict=True)]
    results = dense.kl_divergence_value_and_grad(*with_bucket, direction=direction, logit_scale=scale, reduction="none")
    share = np.where(chosen, 0.0, np.exp(scale * (beyond[0] - masses[0])))
    return results.divergence, results.dstudent[:, :-1] + results.dstudent[:, -1:] * share


# The ways to treat the other classes, in words, and as a divergence of each row with its gradient.
_RESTS = {
    "dropped": ("the terms of the other classes are dropped", _dropped),
    "renormalized": ("the probabilities of the largest classes are renormalized", _renormalized),
    "bucket": ("the other classes are one class more", _bucket),
}


def _of_support(problem: Problem, chosen: Array, rest: str, direction: str) -> tuple[Array, Array]:
    """Return the divergence over the classes of a mask (rows, classes), and its gradient, of the problem's shapes."""
    scale = 1.0 / problem.options.get("temperature", 1.0)
    student, teacher = (problem.row_major(each).astype(np.float64) for each in (problem.logits, problem.targets))
    with np.errstate(all="ignore"):
        rows, gradient = _RESTS[rest][1](student, teacher, chosen, scale, direction)
        factor = scale**-2 if problem.conventions["temperature_squared"] else 1.0
        if problem.reduction == "mean":
            factor = factor / problem.rows if problem.rows else np.nan
        gradient = gradient * factor * np.broadcast_to(problem.upstream.reshape(-1), rows.shape)[:, None]
        loss = rows.reshape(problem.rows_shape) if problem.reduction == "none" else rows.sum()
    shape = *problem.rows_shape, problem.classes
    return np.asarray(loss * factor), np.moveaxis(gradient.reshape(shape), -1, problem.axis)


def _exact(problem: Problem) -> tuple[Array, Array]:
    chosen = _largest(problem.row_major(problem.targets).astype(np.float64), problem.options["top_k"])
    return _of_support(problem, chosen, problem.conventions["rest"], problem.conventions["direction"])


def _topk_faults(b: Textbook) -> Faults:
    """SkyRL; and what a declaration may say."""
    problem, count = b.problem, b.problem.options["top_k"]
    teacher = problem.row_major(problem.targets).astype(np.float64)
    chosen, declared = _largest(teacher, count), problem.conventions["rest"]
    direction = problem.conventions["direction"]
    other = "reverse" if direction == "forward" else "forward"

    def given(mask: Array, rest: str, direction: str = direction) -> Given:
        loss, gradient = _of_support(problem, mask, rest, direction)
        return Given((loss,), problem.row_major(gradient))

    yield f"this is {_DIRECTIONS[other]}: {meant(direction=other)}", given(chosen, declared, other)

    for rest, (what, _) in _RESTS.items():
        if rest != declared:
            yield f"{what}: {meant(rest=rest)}", given(chosen, rest)
    if problem.ranks > 1:
        own = np.zeros_like(chosen)
        for rank in range(problem.ranks):
            shard = b.in_shard(rank)
            own[:, shard] = _largest(teacher[:, shard], min(count, int(shard.sum())))
        text = f"the {count} classes are each rank's own: the loss depends on the number of ranks"
        for rest in _RESTS:
            yield text, given(own, rest)
    text = "the classes are those of the student's largest logits, not of the teacher's"
    yield text, given(_largest(b.x, count), declared)


TOPK_KL = replace(
    KL,
    exact=_exact,
    faults=_topk_faults,
    told='the numbers are a divergence over the largest classes: that is declared by @offers(kind="topk_kl")',
    facts=("class_start", "num_classes", "top_k"),
    tell=Kind.tell,
    fitted=_fitted,
)

"""Log-probabilities of each row's target, negatives of a loss; entropies, without targets; and both over a support."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np

from pce_mpi import dense
from pce_mpi.arrays import dtype_named
from pce_mpi.conformance.problems.cases import Cases, Setting, has_dtype
from pce_mpi.conformance.problems.generators import random_problem, uneven
from pce_mpi.conformance.problems.kinds import sharding
from pce_mpi.conformance.problems.kinds.loss import LOSS, sizes
from pce_mpi.conformance.problems.problem import Array, Kind, Problem, Told
from pce_mpi.conformance.problems.textbook import Faults, Given, Textbook, of_gradient

CASES = Cases(options=("support",))


def _support_faults(b: Textbook) -> Faults:
    """Softmaxes over all classes, as before truncated sampling; and what is this rank's own."""
    over_all = b.problem.over_all
    if over_all is None:
        return
    whole = replace(over_all, options=b.problem.options, kind=b.problem.kind)
    yield "the support is not looked at: the numbers are those of the softmax over all classes", _answer(whole)
    ids, offsets = over_all.options["support"]
    row_of = np.repeat(np.arange(whole.rows), np.diff(offsets))
    inside = np.zeros(b.p.shape, np.bool_)
    for start, stop in pairwise(whole.splits):
        near = ids < stop - start
        inside[row_of[near], start + ids[near]] = True
    text = "the ids of the support are taken for numbers of each rank's own classes"
    answer = _answer(whole.within(inside))
    yield text, answer
    yield text, Given(answer.losses, None)
    if whole.ranks > 1 and whole.with_numbers:
        own = whole.rank_of(np.arange(whole.classes)) == whole.rank_of(whole.targets.reshape(-1))[:, None]
        text = "the softmax is over the classes of the support that the target's rank has: its sum is never reduced"
        answer = _answer(b.problem.within(own))
        yield text, answer
        yield text, Given(answer.losses, b.gradient())


def _answer(problem: Problem) -> Given:
    loss, gradient = problem.expected
    return Given((loss,), problem.row_major(gradient))


def _with_support(
    setting: Setting, choose: Callable[[Problem, np.random.Generator, int], Array], problem: Problem | None = None
) -> Problem:
    """Return a problem with the classes that `choose` gives each row, and with its target, in any order."""
    problem = random_problem(setting) if problem is None else problem
    rng = np.random.default_rng([setting.seed, 8])
    chosen = [
        rng.permutation(np.union1d(choose(problem, rng, row), target))
        for row, target in enumerate(problem.targets.reshape(-1))
    ]
    ids = np.concatenate([*chosen, np.zeros(0, np.int64)]).astype(np.int64)
    offsets = np.cumsum([0, *map(len, chosen)])
    return replace(problem, options=problem.options | {"support": (ids, offsets)})


@CASES.case("support/some-classes/{dtype}")
def _some_classes(setting: Setting) -> Problem:
    """A softmax over the classes that truncated sampling left, of another number in each row: who takes all classes is
    off by the logarithm of the mass.
    """
    return _with_support(setting, lambda problem, rng, row: rng.choice(problem.classes, 1 + row % problem.classes))


@CASES.case("support/uneven-shards", shards="array_split", classes=23)
def _uneven_shards(setting: Setting) -> Problem:
    """Global ids on shards of several lengths."""
    problem = random_problem(setting, uneven(setting))
    return _with_support(setting, lambda _, rng, row: rng.choice(problem.classes, 5), problem)


@CASES.case("support/target-alone")
def _target_alone(setting: Setting) -> Problem:
    """A support of one class: its log-probability and the entropy are 0, and so is the gradient."""
    return _with_support(setting, lambda problem, rng, row: np.zeros(0, np.int64))


@CASES.case("support/on-one-rank")
def _on_one_rank(setting: Setting) -> Problem:
    """A row's support in one shard: a maximum of no class is -inf on the other ranks, and -inf less -inf is nan."""

    def own(problem: Problem, rng: np.random.Generator, row: int) -> Array:
        rank = problem.rank_of(problem.targets.reshape(-1)[row])
        return np.arange(*problem.splits[rank : rank + 2])[::2]

    return _with_support(setting, own)


@CASES.case("support/all-classes")
def _all_classes(setting: Setting) -> Problem:
    """A support that leaves every class: the numbers are those without one."""
    return _with_support(setting, lambda problem, rng, row: np.arange(problem.classes))


@CASES.case("support/largest-class-left-out", special=True)
def _without_largest(setting: Setting) -> Problem:
    """A class far above all others that is not in the support: who subtracts the maximum of all classes has
    exponentials of 0.
    """
    problem = random_problem(setting)
    logits, rows = problem.logits.copy(), np.arange(problem.rows)
    above = (problem.targets + 1) % problem.classes
    if problem.classes > 1:
        logits[rows, above] = 1_000.0
    problem = replace(problem, logits=logits)
    return _with_support(setting, lambda _, rng, row: np.setdiff1d(rng.choice(problem.classes, 6), above[row]), problem)


def exact_statistic(name: str, problem: Problem) -> tuple[Array, Array]:
    """Return a field of `dense.class_statistics`, and its gradient."""
    arguments: dict[str, Any] = problem.exact_options | {"axis": problem.axis}
    if problem.with_numbers:
        arguments["targets"] = problem.targets
    statistics = dense.class_statistics(problem.logits, **arguments)
    arguments[name] = np.ones(()) if problem.dloss is None else problem.dloss
    return getattr(statistics, name), dense.class_statistics_backward(problem.logits, **arguments)


LOG_PROB = Kind(
    noun="log-probability",
    plural="log-probabilities",
    exact=partial(exact_statistic, "log_prob"),
    sizes=sizes,
    faults=lambda book: chain(_support_faults(book), LOSS.faults(book)),
    told='the loss is of the opposite sign: a log-probability is declared by @offers(kind="log_prob")',
    options=("ignore_index", "logit_scale", "softcap", "support"),
    cases=CASES,
    negates=LOSS,
)

# The hint for a function without targets that declares no kind.
NOT_DECLARED = 'where it is an entropy, which takes no targets, declare it: @offers(kind="entropy")'


def _sizes(book: Textbook) -> tuple[Array, Array, Array]:
    slope = np.abs(book.g * book.problem.exact_options.get("logit_scale", 1.0))
    of_class = np.where(book.p == 0.0, 0.0, book.p * book.nll)
    whole = np.maximum(of_class, book.p * of_class.sum(axis=-1, keepdims=True))
    return np.ones(book.problem.rows), slope, slope[:, None] * whole


def _faults(b: Textbook) -> Faults:
    """verl, NeMo-RL; and parts of the entropy that stay on their ranks, as ms-swift's."""
    yield from _support_faults(b)
    yield from _of_other_softmaxes(b)
    of_class = np.where(b.p == 0.0, 0.0, b.p * b.nll)
    masked = (b.z == -np.inf).any(axis=-1)
    if masked.any():
        entropy, nan = of_class.sum(-1, keepdims=True), np.where(masked, np.nan, 0.0)
        right = (of_class - b.p * entropy) * b.slope * b.g[:, None]
        text = "0 times -inf gives nan: a class whose logit is -inf has probability 0, and adds 0 to the entropy"
        yield text, Given(((entropy[:, 0] + nan).reshape(b.problem.rows_shape),), right + nan[:, None])
    own, local = np.zeros_like(b.p), []
    for start, stop in pairwise(b.problem.splits):
        here = slice(start, stop)
        entropy, part = of_class[:, here].sum(-1, keepdims=True), b.p[:, here].sum(-1, keepdims=True)
        local.append(entropy.reshape(b.problem.rows_shape))
        own[:, here] = of_class[:, here] - b.p[:, here] * (1.0 + entropy - part)
        if start < stop:
            # The shard's maximum is not detached.
            largest = start + b.z[:, here].argmax(axis=-1)
            own[np.arange(len(own)), largest] += ((1.0 - part) * (part - entropy))[:, 0]
    if np.ptp(local, axis=0).max(initial=0.0) > 2.0**-7:
        text = "the entropy is of each rank's own classes only: it is never reduced over the ranks"
        yield text, Given(tuple(local), None)
    text = (
        "each rank has the gradient of its own classes' part of the entropy: an all-reduce that autograd does not see"
    )
    yield text, of_gradient(own * b.slope * b.g[:, None])


def _of_other_softmaxes(b: Textbook) -> Faults:
    """Entropies of softmaxes that no sum, or a wrong one, has gone into."""
    shape, shards = b.problem.rows_shape, [b.in_shard(rank) for rank in range(b.problem.ranks)]
    for text, books in sharding.softmaxes(b):
        p = books[0].p
        of_class = np.where(p == 0.0, 0.0, p * books[0].nll)
        parts = np.stack([of_class[:, shard].sum(axis=-1) for shard in shards])
        own = np.repeat(parts.T, np.diff(b.problem.splits), axis=-1)
        whole = parts.sum(axis=0)
        for losses in ((whole.reshape(shape),), tuple(part.reshape(shape) for part in parts)):
            for less in (whole[:, None], own):
                yield text, Given(losses, (of_class - p * less) * b.slope * b.g[:, None])


def _tell(b: Textbook, name: str, got: Array) -> Told | None:
    """Name a gradient that is dropped (trl before #6625), or entropies that are differences of large numbers."""
    if name == "gradient" and not got.any():
        return Told(("the gradient of the entropy is dropped: it is 0 for all classes",))
    if not _is_unshifted(b, name, got):
        return None
    return Told(("the entropy is logsumexp less the mean logit: an offset that all logits share costs its digits",))


def _is_unshifted(b: Textbook, name: str, got: Array) -> bool:
    """Return True if entropies, or their gradient, are differences of two large numbers.

    A difference of float32 numbers near 1e4 is a multiple of 2^-10, and so is the factor of each p in its gradient.
    """
    wide = np.float64 if b.problem.dtype == np.float64 else np.float32
    mean = np.where(b.p == 0.0, 0.0, b.p * b.z).sum(axis=-1)
    unit = np.spacing(np.minimum(np.abs(b.lse), np.abs(mean)).astype(wide)).astype(np.float64)
    half = b.problem.dtype.name if b.problem.dtype.itemsize == 2 else "bfloat16"
    if has_dtype(half) and np.array_equal(got, got.astype(dtype_named(half)), equal_nan=True):
        return False  # any half is a multiple
    if name == "loss":
        parts, units, slack, least = got, np.broadcast_to(unit, got.shape), 0.0, 2.0
    else:
        large = (b.p > 2.0**-12) & (b.slope != 0.0) & (b.g[:, None] != 0.0)
        parts = (got / (b.p * b.slope * b.g[:, None]))[large]
        units, slack, least = np.broadcast_to(unit[:, None], got.shape)[large], 0.05, 64.0
    ratio = units / np.spacing(np.abs(parts).astype(wide))
    tell = np.isfinite(parts) & (ratio > least)
    multiples, nearest = parts[tell] / units[tell], np.rint(parts[tell] / units[tell])
    # By accident, one in `ratio` numbers is a multiple; 0 is one anyway.
    return bool(np.log2(ratio[tell][nearest != 0]).sum() >= 24.0 and not (np.abs(multiples - nearest) > slack).any())


ENTROPY = Kind(
    noun="entropy",
    plural="entropies",
    exact=partial(exact_statistic, "entropy"),
    sizes=_sizes,
    faults=_faults,
    told='the loss is an entropy: that is declared by @offers(kind="entropy"), and gets no targets',
    options=("logit_scale", "softcap", "support"),
    cases=CASES,
    arrays=("logits",),
    tell=_tell,
    catches={
        "random-logits": "Random logits, equal shards: a candidate that fails here has the formula wrong.",
        "reduction": "One entropy for each row, once, and not once for each rank.",
        "p-near-1": "One class has nearly all of the probability: a difference of large numbers has no digits.",
        "p-equal-1": "One class has all of the probability: the entropy is 0 and so is its gradient, not nan.",
        "offset": "log Z - sum p x, which loses what an offset common to all classes pushes out (verl, slime, AReaL).",
        "logits-of-1000": "exp without the maximum subtracted overflows; 0 times the logarithm of 0 is nan.",
        "backward-twice": "A second backward pass in memory that the first changed: right, or refused everywhere.",
    },
)

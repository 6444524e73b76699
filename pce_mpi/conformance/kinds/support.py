"""Log-probabilities and entropies over a support: the cases, and the faults that are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np

from pce_mpi.conformance.cases import Cases, Setting
from pce_mpi.conformance.drawing import random_problem, uneven
from pce_mpi.conformance.problems import Array, Problem
from pce_mpi.conformance.textbook import Faults, Given, Textbook

CASES = Cases(options=("support",))


def faults(b: Textbook) -> Faults:
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
    return _with_support(
        setting, lambda problem, rng, row: rng.choice(problem.classes, 5), random_problem(setting, uneven(setting))
    )


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
    beside = (problem.targets + 1) % problem.classes
    if problem.classes > 1:
        logits[rows, beside] = 1_000.0
    return _with_support(
        setting,
        lambda problem, rng, row: np.setdiff1d(rng.choice(problem.classes, 6), beside[row]),
        replace(problem, logits=logits),
    )

"""Cases with -inf, +inf and nan among the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
import math
from typing import Any

import numpy as np

from pce_mpi.conformance.problems.cases import Cases, Setting
from pce_mpi.conformance.problems.generators import random_problem, rounded
from pce_mpi.conformance.problems.problem import Array, Problem

CASES = Cases(special=True)

# One loss per row shows which rows are off.
_BY_ROW = ("none", "mean", "sum")


def _masked(setting: Setting, which: Callable[[Problem, Array, Array], Array]) -> Problem:
    """Set logits to -inf at the (row, class) that `which` selects, but never at a target."""
    problem = random_problem(setting)
    rows, classes = map(np.asarray, np.indices(problem.logits.shape))
    masked = which(problem, rows, classes)
    targets = problem.targets.copy()
    for row in range(problem.rows):
        free, target = np.flatnonzero(~masked[row]), int(targets[row])
        if free.size == 0:  # on one rank, or with one class
            masked[row, target] = False
        elif masked[row, target]:
            targets[row] = free[target % free.size]
    logits = np.where(masked, np.asarray(-np.inf, problem.dtype), problem.logits)
    return replace(problem, logits=logits, targets=targets)


def _or_a_third(rows: Array, classes: Array, masked: Any) -> Array:
    """Mask every third class in odd rows: rows tell what gives nan, a single -inf, or a shard of these alone."""
    return np.where(rows % 2, (classes + rows) % 3 == 0, masked)


@CASES.case("masked-shard/last")
def _last_shard(setting: Setting) -> Problem:
    """A shard of -inf alone: its own maximum is -inf, and -inf - -inf is nan (TransformerEngine, flash-attention)."""
    return _masked(setting, lambda problem, rows, classes: _or_a_third(rows, classes, classes >= problem.splits[-2]))


@CASES.case("masked-shard/another-in-each-row", rows=8)
def _shard_by_row(setting: Setting) -> Problem:
    """A shard of -inf alone, where every rank has rows that are masked on it and rows that are not."""

    def which(problem: Problem, rows: Array, classes: Array) -> Array:
        return _or_a_third(rows, classes, problem.rank_of(classes) == rows // 2 % problem.ranks)

    return _masked(setting, which)


@CASES.case("masked-classes/every-third")
def _every_third_class(setting: Setting) -> Problem:
    """-inf here and there: a masked class has probability 0 and a gradient of 0, not nan."""
    return _masked(setting, lambda problem, rows, classes: _or_a_third(rows, classes, False))


@CASES.case("masked-classes/first-block", rows=2, resizable=False)
def _first_block(setting: Setting) -> Problem:
    """The first 32,768 classes of every shard are -inf in one row, and nearly all of them in another: an online maximum
    that begins there takes -inf from -inf.
    """

    def which(problem: Problem, rows: Array, classes: Array) -> Array:
        local = classes - np.asarray(problem.splits)[problem.rank_of(classes)]
        return np.asarray((local < 32_768) & ((rows == 0) | (local % 256 > 0)))

    return _masked(replace(setting, classes=33_000 * setting.ranks), which)


@CASES.case("masked-classes/first-of-each-shard", options=("ignore_index",), reductions=_BY_ROW)
def _first_of_each_shard(setting: Setting) -> Problem:
    """The first class of each shard is -inf beside ignored rows: 0 times its logit, for a row that has its target
    elsewhere or none, is nan (neuronx-distributed, PyTorch's linear_cross_entropy).
    """
    problem = _masked(setting, lambda problem, rows, classes: np.isin(classes, problem.splits))
    targets = problem.targets.copy()
    targets[1::3] = setting.ignore_index
    return replace(problem, targets=targets, options={"ignore_index": setting.ignore_index})


@CASES.case(
    "finite-mask/{name}",
    [
        {"name": name + "-smoothed" * bool(options), "value": value, "options": options}
        for name, value in (("1e30", -1e30), ("lowest", -math.inf))
        for options in ((), ("label_smoothing",))
    ],
)
def _finite_mask(setting: Setting, value: float, options: tuple[str, ...]) -> Problem:
    """Masks that are large and finite, -1e30 or the lowest number of the dtype: sums of them overflow, and with label
    smoothing they are part of the loss.
    """
    problem = random_problem(setting, options=options)
    rows, classes = np.indices(problem.logits.shape)
    masked = ((classes + rows) % 3 == 0) & (classes != problem.targets[:, None])
    lowest = np.nextafter(rounded(setting, -np.inf), rounded(setting, 0.0))
    least = rounded(setting, max(value, float(lowest)))
    return replace(problem, logits=np.where(masked, least, problem.logits))


def _with_row(setting: Setting, change: Callable[[Array, int], None]) -> Problem:
    """Apply `change` to one row in the middle, and its target."""
    problem = random_problem(setting)
    logits = problem.logits.copy()
    row = setting.rows // 2
    if row < setting.rows:
        change(logits[row], int(problem.targets[row]))
    return replace(problem, logits=logits)


@CASES.case("masked-target", reductions=_BY_ROW, targets=True)
def _masked_target(setting: Setting) -> Problem:
    """The target's own logit is -inf: the loss is inf and its gradient -1, not nan."""
    return _with_row(setting, lambda row, target: row.__setitem__(target, -np.inf))


@CASES.case("masked-row", reductions=_BY_ROW)
def _masked_row(setting: Setting) -> Problem:
    """A row of -inf alone has no softmax: its loss is nan, on every rank, and the other rows are right. A
    candidate that replaces a maximum of -inf by 0 gets a number here.
    """
    return _with_row(setting, lambda row, target: row.fill(-np.inf))


# In the order of the catalogue: both kinds of nan, then both of +inf.
for _which in (
    {"name": "nan", "family": "nan", "value": np.nan},
    {"name": "+inf", "family": "plus-inf", "value": np.inf},
):

    @CASES.case("{family}/in-a-row", [_which], reductions=_BY_ROW)
    def _beside_target(setting: Setting, value: float) -> Problem:
        """A {name} in one row gives nan there, the same on every rank, and leaves the other rows alone. MPI.MAX may
        give nan on one rank and a number on another.
        """
        return _with_row(setting, lambda row, target: row.__setitem__((target + 1) % row.size, value))

    @CASES.case("{family}/in-an-ignored-row", [_which], options=("ignore_index",))
    def _in_ignored_row(setting: Setting, value: float) -> Problem:
        """A {name} in a row that is ignored gets into the loss where rows are masked by a product with 0. In that row's
        own gradient, nan passes (PyTorch's dense loss has it there) unless strict.
        """
        problem = random_problem(setting, options=("ignore_index",))
        logits = problem.logits.copy()
        ignored = np.flatnonzero(~problem.valid)
        logits[ignored, ignored % problem.classes] = value
        return replace(problem, logits=logits, may_be_nan=~problem.valid)

"""Cases with -inf, +inf and nan among the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
import math
from typing import Any

import numpy as np

from pce_mpi.conformance.cases import Case, Problem, Setting
from pce_mpi.conformance.catalogue.drawing import random_problem, rounded
from pce_mpi.conformance.offers import Needs

Array = np.ndarray[Any, Any]

_LOWEST = {
    "float16": -65504.0,
    "bfloat16": -(2.0 - 2.0**-7) * 2.0**127,
    "float32": -(2.0 - 2.0**-23) * 2.0**127,
    "float64": -(2.0 - 2.0**-52) * 2.0**1023,
}
# One loss per row shows which rows are off.
_BY_ROW = ("none", "mean", "sum")


def families(main: str) -> Iterator[Case]:
    """Yield every case of this file."""
    yield Case(
        "masked-shard/last",
        "A shard of -inf alone: its own maximum is -inf, and -inf - -inf is nan (TransformerEngine, flash-attention).",
        main,
        partial(_masked, which=_last_shard),
    )
    yield Case(
        "masked-shard/another-in-each-row",
        "The same, where every rank has rows that are masked on it and rows that are not.",
        main,
        partial(_masked, which=_shard_by_row),
    )
    yield Case(
        "masked-classes/every-third",
        "-inf here and there: a masked class has probability 0 and a gradient of 0, not nan.",
        main,
        partial(_masked, which=_every_third_class),
    )
    yield Case(
        "masked-classes/first-block",
        "The first 32,768 classes of every shard are -inf: an online maximum that begins there takes -inf from -inf.",
        main,
        partial(_blocks, which=_first_block),
        rows=2,
        shrinkable=False,
    )
    for name, value in (("1e30", -1e30), ("lowest", -math.inf)):
        for options in ((), ("label_smoothing",)):
            yield Case(
                f"finite-mask/{name}{'-smoothed' * bool(options)}",
                "Masks that are large and finite, -1e30 or the lowest number of the dtype: sums of them overflow, and "
                "with label smoothing they are part of the loss.",
                main,
                partial(_finite_mask, value=value, options=options),
                Needs(options=options),
            )
    yield Case(
        "masked-target",
        "The target's own logit is -inf: the loss is inf and its gradient -1, not nan.",
        main,
        partial(_with_row, change=_mask_target),
        Needs(reductions=_BY_ROW),
    )
    yield Case(
        "masked-row",
        "A row of -inf alone has no softmax: its loss is nan, on every rank, and the other rows are right. Who guards "
        "a maximum of -inf by a 0 gets a number here.",
        main,
        partial(_with_row, change=partial(_fill, value=-np.inf)),
        Needs(reductions=_BY_ROW),
    )
    for name, value in (("nan", np.nan), ("plus-inf", np.inf)):
        yield Case(
            f"{name}/in-a-row",
            f"A {name.replace('plus-', '+')} in one row gives nan there, the same on every rank, and leaves the other "
            "rows alone. MPI.MAX may give nan on one rank and a number on another.",
            main,
            partial(_with_row, change=partial(_put_one, value=value)),
            Needs(reductions=_BY_ROW),
        )
        yield Case(
            f"{name}/in-an-ignored-row",
            f"A {name.replace('plus-', '+')} in a row that is ignored gets into the loss where rows are masked by a "
            "product with 0. In that row's own gradient, nan passes (PyTorch's dense loss has it there) unless strict.",
            main,
            partial(_in_ignored_row, value=value),
            Needs(options=("ignore_index",)),
        )


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


def _blocks(setting: Setting, which: Callable[[Problem, Array, Array], Array]) -> Problem:
    each = 33_000
    return _masked(replace(setting, classes=each * setting.ranks), which)


def _first_block(problem: Problem, rows: Array, classes: Array) -> Array:
    starts = np.asarray(problem.splits)[np.searchsorted(problem.splits, classes, side="right") - 1]
    return np.asarray(classes - starts < 32_768)


def _finite_mask(setting: Setting, value: float, options: tuple[str, ...]) -> Problem:
    """Every third class at `value`, or at the lowest number of the dtype, but for the targets."""
    problem = random_problem(setting, options=options)
    rows, classes = np.indices(problem.logits.shape)
    masked = ((classes + rows) % 3 == 0) & (classes != problem.targets[:, None])
    least = rounded(setting, max(value, _LOWEST[problem.dtype.name]))
    return replace(problem, logits=np.where(masked, least, problem.logits))


def _last_shard(problem: Problem, rows: Array, classes: Array) -> Array:
    return classes >= problem.splits[-2]


def _shard_by_row(problem: Problem, rows: Array, classes: Array) -> Array:
    owner = np.searchsorted(problem.splits, classes, side="right") - 1
    return owner == rows % problem.ranks


def _every_third_class(problem: Problem, rows: Array, classes: Array) -> Array:
    return (classes + rows) % 3 == 0


def _with_row(setting: Setting, change: Callable[[Array, int], None]) -> Problem:
    """Apply `change` to one row in the middle."""
    problem = random_problem(setting)
    logits = problem.logits.copy()
    row = setting.rows // 2
    if row < setting.rows:
        change(logits[row], int(problem.targets[row]))
    return replace(problem, logits=logits)


def _mask_target(row: Array, target: int) -> None:
    row[target] = -np.inf


def _fill(row: Array, target: int, value: float) -> None:
    row[:] = value


def _put_one(row: Array, target: int, value: float) -> None:
    row[(target + 1) % row.size] = value


def _in_ignored_row(setting: Setting, value: float) -> Problem:
    problem = random_problem(setting, options=("ignore_index",))
    logits = problem.logits.copy()
    ignored = np.flatnonzero(~problem.valid)
    logits[ignored, ignored % problem.classes] = value
    return replace(problem, logits=logits, may_be_nan=~problem.valid)

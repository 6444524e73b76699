"""Cases about targets: ignored rows, class numbers out of range, and probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from pce_mpi.conformance.cases import Case, Expects, Memory, Problem, Setting
from pce_mpi.conformance.catalogue.drawing import even, option_values, random_problem, rounded, uneven
from pce_mpi.conformance.offers import OPTIONS, REDUCTIONS, Needs

Array = np.ndarray[Any, Any]


def families(main: str) -> Iterator[Case]:
    """Yield every case of this file."""
    yield from _ignored(main)
    yield from _memory(main)
    yield from _out_of_range(main)
    yield from _probabilities(main)


def _ignored(main: str) -> Iterator[Case]:
    for name, which in (("negative", -1), ("first-class", 0), ("inside", 5), ("last-class", -2)):
        yield Case(
            f"ignored/{name}",
            "An ignore_index that is -1, or a class: rows with that target count neither in the sum nor in the mean's "
            "divisor, and have no gradient (ColossalAI: a wrong gradient; Paddle: divides by all rows).",
            main,
            partial(_ignore, which=which),
            Needs(options=("ignore_index",), any_ignore_index=True),
        )
    for name, number in (("as-local-number", 2), ("as-shifted-number", -1)):
        yield Case(
            f"ignored/{name}",
            "Targets that equal ignore_index once class_start is subtracted from them: who compares after the shift "
            "ignores rows that count.",
            main,
            partial(_ignore_after_shift, number=number),
            Needs(options=("ignore_index",), any_ignore_index=True),
        )
    for reduction in REDUCTIONS:
        yield Case(
            f"ignored/all-rows-{reduction}",
            "No row is left: the mean is nan, the sum 0, and the gradient 0, as PyTorch's dense loss has it.",
            main,
            _ignore_all,
            Needs(options=("ignore_index",), reductions=(reduction,)),
        )
    yield Case(
        "ignored/unevenly-over-ranks",
        "The rows that count have their targets on one rank, but for one: a mean over each rank's own rows, averaged "
        "over ranks, is wrong.",
        main,
        _ignore_unevenly,
        Needs(options=("ignore_index",)),
        rows=12,
    )
    yield Case(
        "ignored/weighted-mean",
        "The divisor of the mean is the sum of the weights of the targets that count, over all ranks; a rank knows the "
        "weights of its own classes only (PyTorch's loss_parallel with weights: index -100 is out of bounds).",
        main,
        lambda setting: random_problem(setting, uneven(setting), options=("weight", "ignore_index")),
        Needs(options=("weight", "ignore_index"), reductions=("mean",)),
        rows=12,
    )
    yield Case(
        "ignored/smoothed",
        "Label smoothing must not bring ignored rows back (Paddle, with an ignore_index that is a class).",
        main,
        partial(_ignore, which=5, label_smoothing=0.125),
        Needs(options=("ignore_index", "label_smoothing"), any_ignore_index=True),
    )


def _ignore(setting: Setting, which: int, **options: float) -> Problem:
    problem = random_problem(setting)
    number = problem.classes - 1 if which == -2 else min(which, problem.classes - 1)
    targets = problem.targets.copy()
    targets[1::2] = number  # never the only row of a small shape: that is another case
    return replace(problem, targets=targets, options={"ignore_index": number, **options})


def _ignore_after_shift(setting: Setting, number: int) -> Problem:
    """Targets that are `number` once `class_start` of their shard, or of the next one, is subtracted."""
    problem = random_problem(setting)
    starts = np.array(problem.splits[1:-1] or (0,))
    targets = np.resize(starts + number, problem.rows)
    targets[targets == number] = problem.classes - 1
    targets[::4] = number
    return replace(problem, targets=np.clip(targets, number, problem.classes - 1), options={"ignore_index": number})


def _memory(main: str) -> Iterator[Case]:
    yield Case(
        "targets/int32",
        "Targets of 32 bits that are read as if they had 64: refused, or right.",
        main,
        lambda setting: _with_targets(setting, lambda targets: targets.astype(np.int32)),
        Needs(targets=True),
        expects=Expects.EITHER,
    )
    strided: Memory = "strided"
    for memory in (strided, "expanded"):
        yield Case(
            f"targets/{memory}",
            "Targets that are a slice of a longer array, or one number for all rows with strides of 0: a kernel that "
            "takes them for contiguous.",
            main,
            partial(_targets_in_memory, memory=memory),
            Needs(strided=True, targets=True),
        )


def _with_targets(setting: Setting, change: Callable[[Array], Array]) -> Problem:
    problem = random_problem(setting)
    return replace(problem, targets=change(problem.targets))


def _targets_in_memory(setting: Setting, memory: Memory) -> Problem:
    problem = _with_targets(setting, (lambda t: np.full_like(t, t[:1].sum())) if memory == "expanded" else np.copy)
    return replace(problem, target_memory=memory)


def _ignore_all(setting: Setting) -> Problem:
    problem = random_problem(setting, options=("ignore_index",))
    return replace(problem, targets=np.full_like(problem.targets, setting.ignore_index))


def _ignore_unevenly(setting: Setting) -> Problem:
    problem = random_problem(setting, uneven(setting), options=("ignore_index",))
    owner = np.searchsorted(problem.splits, problem.targets, side="right") - 1
    targets = problem.targets.copy()
    first, last = problem.splits[0], problem.splits[-1] - 1
    targets[owner != problem.ranks - 1] = setting.ignore_index
    targets[:3] = (last, last, first)[: targets[:3].size]
    return replace(problem, targets=targets)


def _out_of_range(main: str) -> Iterator[Case]:
    for name, beyond in (("one-too-many", 0), ("far", 10**9)):
        yield Case(
            f"target-out-of-range/{name}",
            "A target that no rank owns: a loss of logsumexp, a gradient of softmax and a row that counts, without a "
            "word (Megatron, PyTorch's loss_parallel). To be refused on every rank, without hanging.",
            main,
            partial(_beyond, beyond=beyond),
            Needs(checks_targets=True),
            expects=Expects.REFUSAL,
        )
    yield Case(
        "target-out-of-range/wraps-in-int32",
        "A target of 2**32 + 1, which is class 1 for who keeps targets in 32 bits.",
        main,
        partial(_beyond, number=2**32 + 1),
        Needs(checks_targets=True),
        expects=Expects.REFUSAL,
    )
    yield Case(
        "target-out-of-range/negative",
        "A negative target that is not ignore_index: an index from the end, on the rank that takes it for its own.",
        main,
        partial(_beyond, number=-1),
        Needs(checks_targets=True),
        expects=Expects.REFUSAL,
    )
    yield Case(
        "target-out-of-range/another-ignore_index",
        "-100 where ignore_index is something else: no class and not ignored either.",
        main,
        partial(_beyond, number=-100, ignore_index=-1),
        Needs(options=("ignore_index",), any_ignore_index=True, checks_targets=True),
        expects=Expects.REFUSAL,
    )


def _beyond(setting: Setting, beyond: int = 0, number: int | None = None, **options: int) -> Problem:
    problem = random_problem(setting)
    targets = problem.targets.copy()
    beside = number if number != setting.ignore_index or options else -2
    targets[setting.rows // 2] = problem.classes + beyond if beside is None else beside
    return replace(problem, targets=targets, options=options)


def _probabilities(main: str) -> Iterator[Case]:
    needs = Needs(probabilities=True)
    yield Case(
        "probabilities/sum-to-1",
        "Targets as probabilities: the loss is right and the gradient is not (PyTorch's loss_parallel).",
        main,
        partial(_soft, total=1.0),
        needs,
    )
    yield Case(
        "probabilities/do-not-sum-to-1",
        "The gradient is softmax times the sum of a row's probabilities, over all ranks, less the probabilities: not "
        "softmax - q.",
        main,
        partial(_soft, total=None),
        Needs(probabilities=True, unnormalized=True),
    )
    yield Case(
        "probabilities/one-hot",
        "All of a row's probability in one class, on one rank: as index targets.",
        main,
        partial(_soft, total=0.0),
        needs,
    )
    for option in OPTIONS:
        if option == "ignore_index":
            continue  # no probabilities are a row to ignore
        yield Case(
            f"probabilities/{option}",
            f"Probabilities with {option}: the mean divides by the number of rows, also with weights; smoothing mixes "
            "with 1 / C of all classes; other options are as with class numbers.",
            main,
            partial(_soft, total=None, options=(option,)),
            Needs(options=(option,), probabilities=True),
        )
    yield Case(
        "probabilities/zero-at-minus-inf",
        "A probability of 0 at a logit of -inf: 0 * inf is nan, where the loss has a limit. nan passes (PyTorch's own "
        "dense loss has it) unless strict; a number must be right.",
        main,
        _zero_at_minus_inf,
        needs,
    )


def _soft(setting: Setting, total: float | None, options: tuple[str, ...] = ()) -> Problem:
    """Probabilities with this sum; 0: one-hot; None: a different sum in each row, if the candidate takes that."""
    problem = random_problem(setting, even(setting))
    drawn = np.asarray(np.random.default_rng([setting.seed, 3]).standard_exponential(problem.logits.shape))
    drawn /= drawn.sum(axis=-1, keepdims=True)
    if total is None and not setting.normalized:
        drawn *= np.linspace(0.5, 3.0, setting.rows)[:, None]
    elif total == 0.0:
        drawn = np.eye(problem.classes)[problem.targets]
    values = option_values(setting, options, problem.classes)
    return replace(problem, targets=rounded(setting, drawn), options=values)


def _zero_at_minus_inf(setting: Setting) -> Problem:
    problem = _soft(setting, total=1.0)
    logits, targets = problem.logits.copy(), problem.targets.copy()
    masked: Array = np.zeros(logits.shape, np.bool_)
    masked[::2, 1::4] = True
    logits[masked], targets[masked] = -np.inf, 0.0
    return replace(problem, logits=logits, targets=targets, may_be_nan=np.asarray(masked.any(axis=-1)))

"""Cases about numbers: arithmetic that is right on paper and loses its bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pce_mpi.conformance.problems.cases import EACH_REDUCTION, Cases, Setting, table
from pce_mpi.conformance.problems.generators import even, generator, normal_logits, random_problem, rounded, uneven
from pce_mpi.conformance.problems.problem import Array, Problem
from pce_mpi.ulps import ulp

CASES = Cases()


@CASES.case("random-logits/{dtype}")
def _random_logits(setting: Setting) -> Problem:
    """Random logits, equal shards, p(target) near 0, as every test of such a loss has them. A candidate that fails here
    has the formula wrong.
    """
    return random_problem(setting)


@CASES.case("reduction/{reductions[0]}", EACH_REDUCTION)
def _reduction(setting: Setting) -> Problem:
    """A mean that divides by something else than the number of rows, or a sum that counts once for each rank."""
    return random_problem(setting)


@CASES.case("p-near-1/{dtype}")
def _p_near_1(setting: Setting) -> Problem:
    """p - 1 computed after p was rounded: a bf16 gradient at the target is 17 % off at p = 0.99 and 100 % at 0.999,
    while the loss and other entries are right (Liger, TransformerEngine, PyTorch's loss_parallel).
    """
    splits = uneven(setting)
    classes = splits[-1]
    shape = (setting.rows, classes)
    logits = generator(setting, shape).uniform(-1.0, 1.0, shape)
    # The targets cycle over the shards, 3 to 16 above all others, by another distance in each row.
    targets = (np.arange(setting.rows) * max(1, classes // setting.ranks) + setting.seed) % classes
    logits[np.arange(setting.rows), targets] = 1.0 + np.linspace(16.0, 3.0, setting.rows)
    return Problem(rounded(setting, logits), targets, splits, setting.kind, reduction=setting.reduction)


@CASES.case("p-equal-1")
def _p_equal_1(setting: Setting) -> Problem:
    """A mean that counts the rows whose loss is not 0 (ColossalAI): a row that the model is certain of has loss 0, and
    counts.
    """
    problem = random_problem(setting)
    logits = problem.logits.copy()
    certain = np.arange(0, setting.rows, 2)
    logits[certain, problem.targets[certain]] = 2_000.0
    return replace(problem, logits=logits)


@CASES.case("offset/{offset}/{dtype}", table("offset", ("1e3",), ("1e4",)), special=True)
def _offset(setting: Setting, offset: str) -> Problem:
    """logsumexp - x_t and exp(x - logsumexp), which lose what an offset common to all classes pushes out of the dtype:
    5e-4 at 1e4 in float32. Subtract the maximum before anything else.
    """
    # A few ulps apart, around +offset and -offset in turn.
    offsets = np.where(np.arange(setting.rows) % 2, -float(offset), float(offset))
    scale = max(1.0, 0.5 * float(ulp(float(offset), setting.dtype)))
    return _nearly_equal(setting, even(setting), scale, offsets[:, None])


@CASES.case("logits-of-1000/{dtype}", special=True)
def _logits_of_1000(setting: Setting, **options: Any) -> Problem:
    """exp without the maximum subtracted overflows; x - max clipped, as Paddle's CPU kernel does at -64, makes losses
    of hundreds come out as 64.
    """
    problem = random_problem(setting)
    logits = generator(setting, problem.logits.shape).uniform(-1e3, 1e3, problem.logits.shape)
    return replace(problem, logits=rounded(setting, logits), options=options)


@CASES.case("logits-of-1000-smoothed/{dtype}", options=("label_smoothing",), special=True)
def _logits_of_1000_smoothed(setting: Setting) -> Problem:
    """log(exp(x - max)) in the smoothing term is -inf where the exponential is 0 (Megatron-LM)."""
    return _logits_of_1000(setting, label_smoothing=0.125)


@CASES.case("many-classes/{dtype}", rows=3, classes=4_800)
def _many_classes(setting: Setting) -> Problem:
    """A sum of exponentials that is kept in half precision, or in one long run: thousands of terms of one size do not
    add up.
    """
    return _nearly_equal(setting, uneven(setting), 0.1)


@CASES.case("many-classes/more-than-{block}-a-shard", table("block", (2**15,), (2**16,)), rows=2, resizable=False)
def _more_classes(setting: Setting, block: int) -> Problem:
    """More classes in a shard than kernels take at a time: Triton's take 32,768 or 65,536."""
    splits = tuple((block + 232) * rank for rank in range(setting.ranks + 1))
    logits = normal_logits(setting, (setting.rows, splits[-1]), 1.0)
    for stop in splits[1:]:  # large logits at the end of each shard, and the targets there
        logits[:, stop - 200 : stop] += 9.0
    targets = splits[-1] - 1 - np.arange(setting.rows)
    return Problem(rounded(setting, logits), targets, splits, setting.kind, reduction=setting.reduction)


# No shard of the 12 classes is empty on up to 4 ranks.
@CASES.case(
    "many-rows/{which}", table("which dtype", ("{main}", ""), ("bfloat16", "bfloat16")), rows=66_001, classes=12
)
def _many_rows(setting: Setting) -> Problem:
    """More rows than 65,535, the limit of a CUDA grid's second axis; a sum over rows that is kept in half precision, or
    in one long run.
    """
    return random_problem(setting)


def _nearly_equal(setting: Setting, splits: tuple[int, ...], scale: float, offset: Array | float = 0.0) -> Problem:
    problem = random_problem(setting, splits)
    return replace(problem, logits=rounded(setting, normal_logits(setting, problem.logits.shape, scale) + offset))

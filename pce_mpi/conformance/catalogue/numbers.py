"""Cases about numbers: arithmetic that is right on paper and loses its bits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from pce_mpi.conformance.cases import Case, Problem, Setting
from pce_mpi.conformance.catalogue.drawing import (
    even,
    generator,
    normal_logits,
    random_problem,
    random_targets,
    rounded,
    uneven,
)
from pce_mpi.conformance.offers import DTYPES, REDUCTIONS, Needs

Array = np.ndarray[Any, Any]


def families(main: str) -> Iterator[Case]:
    """Yield every case of this file."""
    for dtype in DTYPES:
        yield Case(
            f"random-logits/{dtype}",
            "What every test of such a loss has: random logits, equal shards, p(target) near 0. Who fails here has the "
            "formula wrong.",
            dtype,
            random_problem,
        )
    for reduction in REDUCTIONS:
        yield Case(
            f"reduction/{reduction}",
            "A mean that divides by something else than the number of rows, or a sum that counts once for each rank.",
            main,
            random_problem,
            Needs(reductions=(reduction,)),
        )
    for dtype in DTYPES:
        yield Case(
            f"p-near-1/{dtype}",
            "p - 1 computed after p was rounded: a bf16 gradient at the target is 17 % off at p = 0.99 and 100 % at "
            "0.999, while the loss and other entries are right (Liger, TransformerEngine, PyTorch's loss_parallel).",
            dtype,
            _p_near_1,
        )
    yield Case(
        "p-equal-1",
        "A mean that counts the rows whose loss is not 0 (ColossalAI): a row that the model is certain of has loss 0, "
        "and counts.",
        main,
        _p_equal_1,
    )
    for offset in (1e3, 1e4):
        for dtype in DTYPES:
            yield Case(
                f"offset/{offset:.0e}/{dtype}".replace("e+0", "e"),
                "logsumexp - x_t and exp(x - logsumexp), which lose what an offset common to all classes pushes out of "
                "the dtype: 5e-4 at 1e4 in float32. Subtract the maximum before anything else.",
                dtype,
                partial(_offset, offset=offset),
            )
    for dtype in DTYPES:
        yield Case(
            f"logits-of-1000/{dtype}",
            "exp without the maximum subtracted overflows; x - max clipped, as Paddle's CPU kernel does at -64, makes "
            "losses of hundreds come out as 64.",
            dtype,
            _logits_of_1000,
        )
        yield Case(
            f"logits-of-1000-smoothed/{dtype}",
            "log(exp(x - max)) in the smoothing term is -inf where the exponential is 0 (Megatron-LM).",
            dtype,
            partial(_logits_of_1000, label_smoothing=0.125),
            Needs(options=("label_smoothing",)),
        )
    for dtype in DTYPES:
        yield Case(
            f"many-classes/{dtype}",
            "A sum of exponentials that is kept in half precision, or in one long run: thousands of terms of one size "
            "do not add up.",
            dtype,
            _many_classes,
            rows=3,
            classes=4_800,
        )
    for block in (32_768, 65_536):
        yield Case(
            f"many-classes/more-than-{block}-a-shard",
            "More classes in a shard than kernels take at a time: Triton's take 32,768 or 65,536.",
            main,
            partial(_more_classes, each=block + 232),
            rows=2,
            shrinkable=False,
        )
    for dtype in dict.fromkeys((main, "bfloat16")):
        yield Case(
            f"many-rows/{dtype}",
            "More rows than 65,535, the limit of a CUDA grid's second axis; a sum over rows that is kept in half "
            "precision, or in one long run.",
            dtype,
            random_problem,
            rows=66_001,
            classes=12,  # no shard is empty on up to 4 ranks
        )


def _p_near_1(setting: Setting) -> Problem:
    """The target is 3 to 16 above all others, by another distance in each row; the targets cycle over the shards."""
    splits = uneven(setting)
    classes = splits[-1]
    shape = (setting.rows, classes)
    logits = generator(setting, shape).uniform(-1.0, 1.0, shape)
    targets = (np.arange(setting.rows) * max(1, classes // setting.ranks) + setting.seed) % classes
    logits[np.arange(setting.rows), targets] = 1.0 + np.linspace(16.0, 3.0, setting.rows)
    return Problem(rounded(setting, logits), targets, splits, reduction=setting.reduction)


def _p_equal_1(setting: Setting) -> Problem:
    """Every second row has a target so far above all others that its loss is 0 in every dtype."""
    problem = random_problem(setting)
    logits = problem.logits.copy()
    certain = np.arange(0, setting.rows, 2)
    logits[certain, problem.targets[certain]] = 2_000.0
    return Problem(logits, problem.targets, problem.splits, reduction=setting.reduction)


def _offset(setting: Setting, offset: float) -> Problem:
    """Logits a few ulps apart, around +offset and -offset in turn."""
    splits = even(setting)
    shape = (setting.rows, splits[-1])
    offsets = np.where(np.arange(setting.rows) % 2, -offset, offset)
    logits = rounded(setting, normal_logits(setting, shape, 1.0) + offsets[:, None])
    return Problem(logits, random_targets(setting, shape[:1], shape[1]), splits, reduction=setting.reduction)


def _logits_of_1000(setting: Setting, **options: Any) -> Problem:
    splits = even(setting)
    shape = (setting.rows, splits[-1])
    logits = rounded(setting, generator(setting, shape).uniform(-1e3, 1e3, shape))
    targets = random_targets(setting, shape[:1], shape[1])
    return Problem(logits, targets, splits, options, reduction=setting.reduction)


def _more_classes(setting: Setting, each: int) -> Problem:
    """Large logits at the end of each shard, and the targets there."""
    splits = tuple(each * rank for rank in range(setting.ranks + 1))
    shape = (setting.rows, splits[-1])
    logits = normal_logits(setting, shape, 1.0)
    for stop in splits[1:]:
        logits[:, stop - 200 : stop] += 9.0
    targets = splits[-1] - 1 - np.arange(setting.rows)
    return Problem(rounded(setting, logits), targets, splits, reduction=setting.reduction)


def _many_classes(setting: Setting) -> Problem:
    """All logits nearly the same, so that every term of the sum matters."""
    splits = uneven(setting)
    shape = (setting.rows, splits[-1])
    logits = rounded(setting, normal_logits(setting, shape, 0.1))
    return Problem(logits, random_targets(setting, shape[:1], shape[1]), splits, reduction=setting.reduction)

"""Cases about numbers: arithmetic that is right on paper and loses its bits; -inf, +inf and nan among the logits."""

from collections.abc import Callable
from dataclasses import replace
import math
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


SPECIAL = Cases(special=True)

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


@SPECIAL.case("masked-shard/last")
def _last_shard(setting: Setting) -> Problem:
    """A shard of -inf alone: its own maximum is -inf, and -inf - -inf is nan (TransformerEngine, flash-attention)."""
    return _masked(setting, lambda problem, rows, classes: _or_a_third(rows, classes, classes >= problem.splits[-2]))


@SPECIAL.case("masked-shard/another-in-each-row", rows=8)
def _shard_by_row(setting: Setting) -> Problem:
    """A shard of -inf alone, where every rank has rows that are masked on it and rows that are not."""

    def which(problem: Problem, rows: Array, classes: Array) -> Array:
        return _or_a_third(rows, classes, problem.rank_of(classes) == rows // 2 % problem.ranks)

    return _masked(setting, which)


@SPECIAL.case("masked-classes/every-third")
def _every_third_class(setting: Setting) -> Problem:
    """-inf here and there: a masked class has probability 0 and a gradient of 0, not nan."""
    return _masked(setting, lambda problem, rows, classes: _or_a_third(rows, classes, False))


@SPECIAL.case("masked-classes/first-block", rows=2, resizable=False)
def _first_block(setting: Setting) -> Problem:
    """The first 32,768 classes of every shard are -inf in one row, and nearly all of them in another: an online maximum
    that begins there takes -inf from -inf.
    """

    def which(problem: Problem, rows: Array, classes: Array) -> Array:
        local = classes - np.asarray(problem.splits)[problem.rank_of(classes)]
        return np.asarray((local < 32_768) & ((rows == 0) | (local % 256 > 0)))

    return _masked(replace(setting, classes=33_000 * setting.ranks), which)


@SPECIAL.case("masked-classes/first-of-each-shard", options=("ignore_index",), reductions=_BY_ROW)
def _first_of_each_shard(setting: Setting) -> Problem:
    """The first class of each shard is -inf beside ignored rows: 0 times its logit, for a row that has its target
    elsewhere or none, is nan (neuronx-distributed, PyTorch's linear_cross_entropy).
    """
    problem = _masked(setting, lambda problem, rows, classes: np.isin(classes, problem.splits))
    targets = problem.targets.copy()
    targets[1::3] = setting.ignore_index
    return replace(problem, targets=targets, options={"ignore_index": setting.ignore_index})


@SPECIAL.case(
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


@SPECIAL.case("masked-target", reductions=_BY_ROW, targets=True)
def _masked_target(setting: Setting) -> Problem:
    """The target's own logit is -inf: the loss is inf and its gradient -1, not nan."""
    return _with_row(setting, lambda row, target: row.__setitem__(target, -np.inf))


@SPECIAL.case("masked-row", reductions=_BY_ROW)
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

    @SPECIAL.case("{family}/in-a-row", [_which], reductions=_BY_ROW)
    def _beside_target(setting: Setting, value: float) -> Problem:
        """A {name} in one row gives nan there, the same on every rank, and leaves the other rows alone. MPI.MAX may
        give nan on one rank and a number on another.
        """
        return _with_row(setting, lambda row, target: row.__setitem__((target + 1) % row.size, value))

    @SPECIAL.case("{family}/in-an-ignored-row", [_which], options=("ignore_index",))
    def _in_ignored_row(setting: Setting, value: float) -> Problem:
        """A {name} in a row that is ignored gets into the loss where rows are masked by a product with 0. In that row's
        own gradient, nan passes (PyTorch's dense loss has it there) unless strict.
        """
        problem = random_problem(setting, options=("ignore_index",))
        logits = problem.logits.copy()
        ignored = np.flatnonzero(~problem.valid)
        logits[ignored, ignored % problem.classes] = value
        return replace(problem, logits=logits, may_be_nan=~problem.valid)

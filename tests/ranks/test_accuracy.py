"""Accuracy in bits, against mpmath: from one class to 50,000, from p(target) = 0.01 to 1 - e^-30, far from 0.

`pytest -s` prints the worst error of each kind, in ulps. `pytest --gpu` has all but `dense` done on a GPU.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import dense
from pce_mpi.arrays import to_host
from pce_mpi.testing import in_step
from ranks.exact import Pair, exact_row, exact_statistics, exact_weighted
from ranks.problems import split
from ulps import (
    DENSE,
    DENSE_ENTROPY,
    DROPPED,
    FLOAT64_ROUNDED_TO_FLOAT32,
    GRADIENT,
    HALF,
    LOSS,
    MASS,
    STATISTICS,
    WIDE_STATISTICS,
    errors,
    ulp,
)

# Two ranks merge, and `shard_of` varies where the classes are cut; any other number gives the same bits
# (test_properties.py, tests/jobs/test_digests.py).
pytestmark = pytest.mark.ranks(2)

CLASSES = [1, 2, 3, 10, 1000, 50_000]
# (1 - p) / p of the target: 1 - p goes from 0.99 to e^-30
ODDS = [99.0, 1.0, 0.1, 1e-3, np.exp(-10), np.exp(-20), np.exp(-30)]
OFFSETS = [0.0, 1.0, -1.0, 100.0, -100.0, 1e4, -1e4]
KINDS = ["random", "equal", "one above many", "one dominates", "masked"]


class Case(NamedTuple):
    """Rows of one kind of logits at one offset, one row for each of `ODDS`, rounded to a dtype."""

    name: str
    logits: np.ndarray
    targets: np.ndarray


def others_of(kind, classes, rng):
    """The logits of all classes but the target, around 0; few different ones."""
    if kind == "random":
        pool = rng.normal(0, 2, min(classes, 200))
        return rng.choice(pool, classes - 1)
    others = np.zeros(classes - 1)
    if kind == "one above many":  # together they weigh as much as it does: every error of theirs is the sum's
        others[:] = 0.3 - np.log(max(2, classes - 1)) - 0.7
        others[-1:] = 0.3
    elif kind == "one dominates":
        others[:] = -25
        others[-1:] = 0.1  # on the last rank, where the target may be on the first
    elif kind == "masked":
        others[:] = -np.inf
        others[-1:] = 0.1
    return others


def cases(classes, dtype, kinds=KINDS, offsets=OFFSETS, odds=ODDS):
    for kind in kinds:
        for offset in offsets:
            rng = np.random.default_rng([classes, KINDS.index(kind)])
            others = others_of(kind, classes, rng)
            total = np.exp(others).sum() if classes > 1 else 1.0
            # The target is first half of the time: alone on a rank if shards are cut that way.
            targets = np.where(np.arange(len(odds)) % 2, 0, rng.integers(0, classes, len(odds)))
            logits = np.empty((len(odds), classes))
            for row, (target, odd) in enumerate(zip(targets, odds, strict=True)):
                logits[row] = np.insert(others, target, np.log(total) - np.log(odd)) + offset
            yield Case(f"{kind} at {offset:g}", logits.astype(dtype), targets)


def exact(comm, case, function=exact_row, second=None):
    """`function` of the logits of each row and its target, or what is `second`; each rank does some rows for all."""
    second = case.targets if second is None else second
    mine = [function(case.logits[row].astype(np.float64), second[row]) for row in own_rows(comm, case)]
    shared = comm.allgather(mine)
    return [shared[row % comm.size][row // comm.size] for row in range(len(case.targets))]


def own_rows(comm, case):
    return range(comm.rank, len(case.targets), comm.size)


def shard_of(comm, case, number):
    """This rank's classes: cut in turn evenly, with the first class alone, in another order than the ranks'."""
    classes = case.logits.shape[1]
    if number % 3 == 0:
        return split(classes, comm.size)[comm.rank]
    if number % 3 == 1:
        return split(classes, comm.size, "first class alone")[comm.rank]
    return split(classes, comm.size, "uneven")[::-1][comm.rank]


class Worst:
    """The largest error of each kind, and the case that had it."""

    def __init__(self, limits):
        self.limits = limits
        self.found = dict.fromkeys(limits, (0.0, ""))

    def note(self, kind, found, case):
        value = float(np.max(found, initial=0.0))
        if not value <= self.found[kind][0]:  # nan is worse than anything
            self.found[kind] = (value, case.name)

    def note_loss(self, kind, loss, rows, case, dtype):
        near, rest = (np.array([row.loss[part][0] for row in rows]) for part in (0, 1))
        self.note(kind, errors(loss, near, dtype, remainder=rest), case)

    def note_gradient(self, kind, gradient, rows, case, dtype, start=0):
        """At the targets in ulps of themselves, elsewhere in ulps of the largest entry of the whole row."""
        for row, entries, logits in zip(rows, gradient, case.logits[:, start:], strict=True):
            near, rest = row.gradient(logits[: len(entries)].astype(np.float64), start)
            at_target = np.arange(start, start + len(entries)) == row.target
            found = errors(entries, near, dtype, np.where(at_target, near, row.largest()), rest)
            self.note(f"{kind} at the target", found[at_target], case)
            self.note(f"{kind} elsewhere", found[~at_target], case)

    def check(self, comm, title):
        for kind, (value, name) in self.found.items():
            everywhere, name = max(comm.allgather((value, name)))
            if comm.rank == 0:
                print(f"\n{title}: {kind}: {everywhere:.3g} ulp of {self.limits[kind]} ({name})", end="")
        for kind, (value, name) in self.found.items():
            assert value <= self.limits[kind], f"{title}: {kind}: {value} ulp ({name})"


def limits(kind, loss, gradient=None):
    places = dict.fromkeys([f"{kind} gradient at the target", f"{kind} gradient elsewhere"], gradient or loss)
    return {f"{kind} loss": loss} | places


def both_ways(comm, xp, case, number, **options):
    """The shard and, for value_and_grad and for forward with backward, the loss and the gradient."""
    start, stop = shard_of(comm, case, number)
    logits, targets = xp.asarray(case.logits[:, start:stop].copy()), xp.asarray(case.targets)
    options = dict(options, comm=comm, class_start=start, reduction="none")
    fused = pce.softmax_cross_entropy_value_and_grad(logits, targets, **options)
    loss, residuals = pce.softmax_cross_entropy_forward(logits, targets, **options)
    ways = [fused, (loss, pce.softmax_cross_entropy_backward(1.0, residuals))]
    return start, stop, [tuple(map(to_host, way)) for way in ways]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("classes", CLASSES)
def test_float32_logits(comm, xp, classes, kind):
    rounded, oracle = limits("float64", FLOAT64_ROUNDED_TO_FLOAT32), limits("dense", DENSE)
    worst = Worst(limits("float32", LOSS, GRADIENT) | rounded | oracle)
    offsets = OFFSETS if classes < 50_000 or kind == "random" else [1.0, -1e4]
    for number, case in enumerate(cases(classes, np.float32, [kind], offsets)):
        rows = exact(comm, case)
        start, _, ways = both_ways(comm, xp, case, number)
        for loss, gradient in ways:
            worst.note_loss("float32 loss", loss, rows, case, np.float32)
            worst.note_gradient("float32 gradient", gradient, rows, case, np.float32, start)
        start, _, ways = both_ways(comm, xp, case, number, compute_dtype=np.float64)
        for loss, gradient in ways:
            worst.note_loss("float64 loss", loss.astype(np.float32), rows, case, np.float32)
            worst.note_gradient("float64 gradient", gradient, rows, case, np.float32, start)
        note_dense(comm, worst, case, rows)
    worst.check(comm, f"float32 logits, {classes} classes")


def note_dense(comm, worst, case, rows):
    """Note the errors of dense on this rank's rows of the case."""
    own = np.array(own_rows(comm, case), np.int64)
    mine = Case(case.name, case.logits[own], case.targets[own])
    rows = [rows[row] for row in own]
    loss, gradient = dense.softmax_cross_entropy_value_and_grad(mine.logits, mine.targets, reduction="none")
    worst.note_loss("dense loss", loss, rows, mine, np.float64)
    worst.note_gradient("dense gradient", gradient, rows, mine, np.float64)


@pytest.mark.parametrize("classes", CLASSES)
def test_dense_on_float64_logits_that_float32_cannot_hold(comm, classes):
    worst = Worst(limits("dense", DENSE))
    for case in cases(classes, np.float64, offsets=[0.0, 1.0, -100.0, 1e4] if classes < 50_000 else [1.0, 1e4]):
        note_dense(comm, worst, case, exact(comm, case))
    worst.check(comm, f"float64 logits, {classes} classes")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("classes", CLASSES)
def test_half_logits_have_gradient_within_one_ulp(comm, xp, classes, dtype):
    worst = Worst({"loss": LOSS, "gradient": HALF})
    kinds = KINDS if classes < 50_000 else ["random", "one above many"]
    for number, case in enumerate(cases(classes, dtype, kinds, offsets=[0.0, 100.0, -1e4])):
        rows = exact(comm, case)
        start, stop, ways = both_ways(comm, xp, case, number)
        rounded = rounded_gradient(rows, case, start, stop)
        for loss, gradient in ways:
            worst.note_loss("loss", loss, rows, case, np.float32)
            worst.note("gradient", errors(gradient, rounded, dtype), case)
    worst.check(comm, f"{np.dtype(dtype)}, {classes} classes")


def rounded_gradient(rows, case, start, stop):
    """The nearest numbers of the logits' dtype."""
    shards = case.logits[:, start:stop].astype(np.float64)
    near = [row.gradient(shard, start).near for row, shard in zip(rows, shards, strict=True)]
    return np.stack(near).astype(case.logits.dtype)


def test_half_gradient_is_rounded_after_subtraction_at_target(comm, xp):
    # p = 0.999: rounded first, p - 1 has no bit left in bfloat16.
    for dtype in (np.float16, ml_dtypes.bfloat16):
        logits = np.array([[7.0, 0.0, -1.0, 0.5]]).astype(dtype)
        case = Case("", logits, np.array([0]))
        rows = exact(comm, case)
        for number in range(3):
            with in_step(comm):
                start, stop, ways = both_ways(comm, xp, case, number)
                for _, gradient in ways:
                    assert errors(gradient, rounded_gradient(rows, case, start, stop), dtype).max(initial=0) <= HALF


def rounding_worst(dtype, classes, wider, every):
    """Three rows of a target, m at every so many classes, and all others equally far below it.

    They are those, of many tried, whose others all round the same way, and badly: what errs is the difference to m and
    its exponential, and together they weigh as much as all m or more.
    """
    rng = np.random.default_rng([classes, every])
    m = rng.uniform(0.5, 2, 100_000).astype(dtype)
    others = (m - (np.log(every) + rng.uniform(-2, 1, m.size))).astype(dtype)
    exact_odds = (every - 1) * np.exp(others.astype(wider) - m.astype(wider))
    odds = (every - 1) * np.exp(others - m).astype(wider)
    found = np.abs(odds - exact_odds) / (1 + exact_odds)
    chosen = np.argsort(-found.astype(np.float64))[:3]
    logits = np.empty((3, classes), dtype)
    logits[:] = others[chosen, None]
    logits[:, 1::every] = m[chosen, None]
    total = np.exp(logits[:, 1:].astype(np.float64)).sum(axis=1)
    logits[:, 0] = np.log(total) - np.log(1.98 * 2**-10)  # a loss with many ulps, for its binade
    return Case(f"m = {m[chosen[0]]}, others {others[chosen[0]]}", logits, np.zeros(3, np.int64))


MANY = [(300, 300), (3000, 3000), (50_000, 50_000), (50_000, 6000), (50_000, 50)]


@pytest.mark.parametrize(("classes", "every"), MANY)
def test_many_classes_rounded_alike_in_float32(comm, xp, classes, every):
    worst = Worst(limits("float32", LOSS, GRADIENT))
    case = rounding_worst(np.float32, classes, np.float64, every)
    rows = exact(comm, case)
    for number in range(2):
        start, _, ways = both_ways(comm, xp, case, number)
        for loss, gradient in ways:
            worst.note_loss("float32 loss", loss, rows, case, np.float32)
            worst.note_gradient("float32 gradient", gradient, rows, case, np.float32, start)
    start, stop = split(classes, comm.size, "all on the last rank")[comm.rank]
    options = {"comm": comm, "class_start": start, "reduction": "none"}
    logits, targets = xp.asarray(case.logits[:, start:stop]), xp.asarray(case.targets)
    loss, gradient = map(to_host, pce.softmax_cross_entropy_value_and_grad(logits, targets, **options))
    worst.note_loss("float32 loss", loss, rows, case, np.float32)
    worst.note_gradient("float32 gradient", gradient, rows, case, np.float32, start)
    worst.check(comm, f"all round alike, {classes} classes")


@pytest.mark.parametrize(("classes", "every"), MANY)
def test_many_classes_rounded_alike_in_dense(comm, classes, every):
    worst = Worst(limits("dense", DENSE))
    case = rounding_worst(np.float64, classes, np.longdouble, every)
    note_dense(comm, worst, case, exact(comm, case))
    worst.check(comm, f"all round alike, {classes} classes")


@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_mean_keeps_bits_of_tiny_losses_under_weights(comm, xp, classes):
    worst = Worst({"loss": LOSS})
    weight = np.random.default_rng(1).uniform(0.25, 4, classes).astype(np.float32)
    for case in cases(classes, np.float32, kinds=["random", "one dominates"], offsets=[0.0, 100.0], odds=ODDS[-2:]):
        losses = np.array([row.loss.near[0] for row in exact(comm, case)])
        w = weight[case.targets].astype(np.float64)
        start, stop = shard_of(comm, case, 1)
        logits, targets, mine = map(xp.asarray, (case.logits[:, start:stop], case.targets, weight[start:stop]))
        loss = pce.softmax_cross_entropy(logits, targets, comm=comm, class_start=start, weight=mine)
        worst.note("loss", errors(to_host(loss), (w * losses).sum() / w.sum(), np.float32), case)
    worst.check(comm, f"weighted mean, {classes} classes")


@pytest.mark.parametrize("classes", [2, 3, 10, 300])
def test_probability_targets_close_to_a_certain_class(comm, xp, classes):
    worst = Worst({"loss": LOSS, "gradient": GRADIENT, "dense loss": DENSE, "dense gradient": DENSE})
    rng = np.random.default_rng(classes)
    for case in cases(classes, np.float32, kinds=["random", "equal", "one dominates"], offsets=[0.0, -100.0, 1e4]):
        rows = len(case.targets)
        doubt = np.exp(-rng.uniform(1, 30, rows))[:, None]
        rest = rng.random((rows, classes))
        np.put_along_axis(rest, case.targets[:, None], 0, axis=1)
        rest *= doubt / rest.sum(axis=1, keepdims=True)
        np.put_along_axis(rest, case.targets[:, None], 1 - doubt, axis=1)
        q = rest.astype(np.float32)
        rows_exact = exact(comm, case, exact_weighted, q.astype(np.float64))
        gradient_is = Pair(*(np.stack(part) for part in zip(*(row.gradient for row in rows_exact), strict=True)))
        size = np.stack([row.size for row in rows_exact]).max(axis=1, keepdims=True)
        size = np.broadcast_to(size, q.shape)
        start, stop = shard_of(comm, case, 2)
        options = {"comm": comm, "class_start": start, "reduction": "none"}
        logits, probabilities = xp.asarray(case.logits[:, start:stop]), xp.asarray(q[:, start:stop])
        loss, gradient = map(to_host, pce.softmax_cross_entropy_value_and_grad(logits, probabilities, **options))
        part = np.s_[:, start:stop]
        worst.note_loss("loss", loss, rows_exact, case, np.float32)
        worst.note(
            "gradient", errors(gradient, gradient_is.near[part], np.float32, size[part], gradient_is.rest[part]), case
        )
        loss, gradient = dense.softmax_cross_entropy_value_and_grad(case.logits, q, reduction="none")
        worst.note_loss("dense loss", loss, rows_exact, case, np.float64)
        worst.note("dense gradient", errors(gradient, gradient_is.near, np.float64, size, gradient_is.rest), case)
    worst.check(comm, f"probabilities, {classes} classes")


@pytest.mark.parametrize("classes", [1, 2, 10, 1000])
def test_statistics_of_nearly_certain_class_keep_bits(comm, xp, classes):
    names = ["sum_exp", "logsumexp", "log_prob", "entropy"]
    limits = dict.fromkeys(names, STATISTICS) | {f"dense {name}": DENSE for name in names}
    limits["dense entropy"] = DENSE_ENTROPY
    worst = Worst(limits | {f"{name} by float64 arithmetic, rounded": FLOAT64_ROUNDED_TO_FLOAT32 for name in names})
    for case in cases(classes, np.float32, offsets=[0.0, 1.0, -100.0, 1e4]):
        rows = exact(comm, case, exact_statistics)
        start, stop = shard_of(comm, case, 1)
        logits, targets = xp.asarray(case.logits[:, start:stop]), xp.asarray(case.targets)
        options = {"comm": comm, "class_start": start}
        by_float32 = pce.class_statistics(logits, targets, **options)
        by_float64 = pce.class_statistics(logits, targets, compute_dtype=np.float64, **options)
        by_dense = dense.class_statistics(case.logits, case.targets)
        for name in names:
            near = np.array([getattr(row, name).near[0] for row in rows])
            rest = np.array([getattr(row, name).rest[0] for row in rows])
            # max + log(sum_exp) may cancel.
            size = np.maximum(1.0, np.abs(near)) if name == "logsumexp" else near
            worst.note(name, errors(to_host(getattr(by_float32, name)), near, np.float32, size, rest), case)
            rounded = to_host(getattr(by_float64, name)).astype(np.float32)
            worst.note(f"{name} by float64 arithmetic, rounded", errors(rounded, near, np.float32, size, rest), case)
            worst.note(f"dense {name}", errors(getattr(by_dense, name), near, np.float64, size, rest), case)
    worst.check(comm, f"statistics, {classes} classes")


# The worst of some 25,000 random rows of 2 to 8 classes, with their targets.
WORST_IN_FLOAT64 = [
    ([21.17327144886857, -12.243291628320241], 1),
    ([10.37832743901015, 36.11201188326273, -7.528829343649807, 7.024589019684623, -31.287887069599346], 1),
    ([-0.724612544837917, 0.817182857912862, -5.372024323331665, 5.613082099690744, 13.949428431386819], 4),
    ([0.33, 0.28, -0.29, -0.93, -0.33, 0.05, 0.03, -0.67], 2),
    ([0.707955523467422, 1.020455885671658, -1.055092561982777, 0.239227971738391, 0.788207241249086, -1.08], 5),
]


@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_statistics_of_float64_logits(comm, xp, classes):
    names = ["sum_exp", "logsumexp", "log_prob", "entropy"]
    worst = Worst(dict.fromkeys(names, WIDE_STATISTICS))
    tried = [Case("found", np.array([row]), np.array([target])) for row, target in WORST_IN_FLOAT64]
    for case in [*tried, *cases(classes, np.float64, offsets=[0.0, 1.0, -100.0, 1e4])]:
        rows = exact(comm, case, exact_statistics)
        start, stop = shard_of(comm, case, 1)
        logits, targets = xp.asarray(case.logits[:, start:stop]), xp.asarray(case.targets)
        found = pce.class_statistics(logits, targets, comm=comm, class_start=start)
        for name in names:
            near, rest = (np.array([getattr(row, name)[part][0] for row in rows]) for part in (0, 1))
            size = np.maximum(1.0, np.abs(near)) if name == "logsumexp" else near
            worst.note(name, errors(to_host(getattr(found, name)), near, np.float64, size, rest), case)
    worst.check(comm, f"statistics in float64, {classes} classes")


@pytest.mark.parametrize("classes", [1_000_000, 4_000_000])
def test_very_many_classes_drop_what_pages_say(comm, classes):
    # 28.5 below the largest, of each class nearly one unit is dropped.
    start, stop = split(classes, comm.size)[comm.rank]
    logits = np.full((1, classes), -28.5, np.float32)
    logits[0, :2] = 0.0, -1.0
    given = {"comm": comm, "class_start": start}
    tail = (classes - 2) * np.exp(-28.5)
    nll, mass = np.log1p((1.0 + tail) / np.exp(-1.0)), 1.0 / (1.0 + tail / (1.0 + np.exp(-1.0)))
    part, targets = logits[:, start:stop], np.array([1])
    losses = (
        pce.softmax_cross_entropy(part, targets, **given),
        -pce.class_statistics(part, targets, **given).log_prob[0],
    )
    for loss in losses:
        assert abs(loss - nll) <= LOSS * ulp(nll, np.float32) + classes * DROPPED
    found = pce.nucleus(part, top_k=2, **given).mass[0]
    assert abs(found - mass) <= MASS * ulp(mass, np.float32) + classes * DROPPED


def test_ulp_is_distance_to_next_number():
    for dtype in (np.float32, np.float64, np.float16):
        for value in (1.0, 1.5, 3.0, 0.1, 1e-3, -7.0):
            rounded = dtype(value)
            assert ulp(rounded, dtype) == abs(float(np.spacing(rounded)))
    assert ulp(0.0, np.float32) == 2.0**-149
    assert ulp(1.0, ml_dtypes.bfloat16) == 2.0**-7


def test_exact_row_is_that_of_textbook():
    logits = np.log([1.0, 2.0, 5.0])
    row = exact_row(logits, 1)
    np.testing.assert_allclose(row.loss.near, np.log(4), rtol=1e-15)
    np.testing.assert_allclose(row.at_target.near, -0.75, rtol=1e-15)
    np.testing.assert_allclose(row.gradient(logits, 0).near, [1 / 8, -6 / 8, 5 / 8], rtol=1e-15)
    np.testing.assert_allclose(row.gradient(logits[2:], 2).near, [5 / 8], rtol=1e-15)
    assert row.largest() == 0.75
    assert np.abs(row.gradient(logits, 0).rest).max() <= 2.0**-53
    np.testing.assert_allclose(exact_weighted(logits, np.array([0.0, 1, 0])).loss.near, row.loss.near, rtol=1e-15)
    np.testing.assert_allclose(exact_statistics(logits, 1).log_prob.near, -np.log(4), rtol=1e-15)

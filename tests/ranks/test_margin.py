"""The margin of targets: against the textbook and mpmath, at the ends of the cosines, on any ranks, on the tape."""

from itertools import product
from math import cos, pi

import ml_dtypes
import mpmath
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Shard, dense
from pce_mpi.arrays import to_host
from pce_mpi.testing import in_step
from ranks.exact import DIGITS, exact_row
from ranks.problems import as_cosines, assert_as_dense, draw, evaluate, part_of
from ranks.test_accuracy import Case, Worst, limits, shard_of
from ranks.test_dense import finite_differences
from ulps import FINITE_DIFFERENCE, FLOAT64, FLOAT64_ROUNDED_TO_FLOAT32, GRADIENT, LOSS, worst

# Numbers do not depend on the ranks; two merge.
pytestmark = pytest.mark.ranks(2)
several = pytest.mark.ranks(1, 2, 3)

ARCFACE, COSFACE, SPHEREFACE = (1.0, 0.5, 0.0), (1.0, 0.0, 0.35), (4.0, 0.0, 0.0)
MARGINS = [ARCFACE, COSFACE, SPHEREFACE, (1.35, 0.0, 0.0), (0.9, 0.4, 0.15), (-2.0, -3.0, -0.5), (900.0, -1000.0, 1.0)]


def value_and_grad(x, targets, margin, **options):
    """The loss and the gradient of one process, in float64 unless logits are halves."""
    return pce.softmax_cross_entropy_value_and_grad(np.asarray(x), np.asarray(targets), margin=margin, **options)


# The formula


def test_dense_margin_is_that_of_the_papers():
    x = np.array([[0.3, -0.2, 0.9]])
    for (m1, m2, m3), scale in product(MARGINS, (1.0, 30.0)):
        loss, gradient = dense.softmax_cross_entropy_value_and_grad(x, [1], margin=(m1, m2, m3), logit_scale=scale)
        angle = m1 * np.arccos(-0.2) + m2
        z = scale * np.array([0.3, np.cos(angle) - m3, 0.9])
        odds = np.exp(z[0] - z[1]) + np.exp(z[2] - z[1])
        p = np.exp(z - z[1]) / (1.0 + odds)
        slope = np.array([1.0, m1 * np.sin(angle) / np.sin(np.arccos(-0.2)), 1.0])
        np.testing.assert_allclose(loss, np.log1p(odds), rtol=1e-11)
        np.testing.assert_allclose(gradient[0], scale * slope * [p[0], -odds / (1.0 + odds), p[2]], rtol=1e-11)


@pytest.mark.parametrize("margin", MARGINS[:-1], ids=str)
def test_dense_margin_has_gradient_of_its_loss(margin):
    rng = np.random.default_rng(2)
    x, targets, weight = rng.uniform(-0.9, 0.9, (5, 6)), np.array([0, 5, -100, 2, 2]), rng.uniform(0.5, 2, 6)
    for options in ({}, {"label_smoothing": 0.2, "weight": weight, "z_loss": 0.1}, {"reduction": "sum"}):
        options = {"margin": margin, "logit_scale": 3.0, **options}
        expected = finite_differences(
            lambda x, options=options: dense.softmax_cross_entropy(x, targets, **options), x.copy()
        )
        gradient = dense.softmax_cross_entropy_value_and_grad(x, targets, **options)[1]
        assert worst(gradient, expected, np.float64, np.full(x.shape, 8.0)) <= FINITE_DIFFERENCE, options


# Accuracy

ODDS = [np.exp(128.0), np.exp(120.0), np.exp(20.0), 3.0, 1e-2, np.exp(-20.0), np.exp(-60.0)]


def targets_of(dtype, margin):
    """Cosines of targets: close to 1 and to -1, around 0, with t + m beyond pi, and any."""
    one, rng = dtype(1), np.random.default_rng(5)
    ends = [np.nextafter(one, dtype(0)), dtype(1 - 1e-6), dtype(1 - 1e-3), dtype(0.97)]
    return [*ends, *(-end for end in ends), dtype(1e-9), dtype(-1e-12), *rng.uniform(-1, 1, 9).astype(dtype)]


def rows_of(dtype, scale, margin):
    """Cases of a target and few others, for all odds, and what mpmath says."""
    rng = np.random.default_rng(6)
    for x in targets_of(dtype, margin):
        with mpmath.workdps(DIGITS):
            z = float(scale * (mpmath.cos(margin[0] * mpmath.acos(float(x)) + margin[1]) - margin[2]))
        logits = np.empty((len(ODDS), 7), dtype)
        for row, odds in zip(logits, ODDS, strict=True):
            row[:] = (z + np.log(odds) - np.log(6) + rng.normal(0, 0.3, 7)) / scale
        targets = np.arange(len(ODDS)) % 7
        logits[np.arange(len(ODDS)), targets] = x
        case = Case(f"{margin} at {x!r}", logits, targets)
        wide = logits.astype(np.float64)
        yield case, [exact_row(row, target, scale, margin) for row, target in zip(wide, targets, strict=True)]


@pytest.mark.parametrize("scale", [64.0, 30.1], ids=str)
@pytest.mark.parametrize("margin", MARGINS, ids=str)
def test_margin_keeps_all_bits_of_float32(comm, xp, margin, scale):
    rounded = limits("float64", FLOAT64_ROUNDED_TO_FLOAT32)
    worst_of = Worst(limits("float32", LOSS, GRADIENT) | rounded)
    for number, (case, rows) in enumerate(rows_of(np.float32, scale, margin)):
        start, stop = shard_of(comm, case, number)
        mine = xp.asarray(case.logits[:, start:stop].copy())
        for kind, dtype in (("float32", None), ("float64", np.float64)):
            options = {"margin": margin, "logit_scale": scale, "compute_dtype": dtype, "reduction": "none"}
            options |= {"comm": comm, "class_start": start}
            found = pce.softmax_cross_entropy_value_and_grad(mine, xp.asarray(case.targets), **options)
            loss, gradient = map(to_host, found)
            worst_of.note_loss(f"{kind} loss", loss, rows, case, np.float32)
            worst_of.note_gradient(f"{kind} gradient", gradient, rows, case, np.float32, start)
    worst_of.check(comm, f"margin {margin}, scale {scale}")


@pytest.mark.parametrize("margin", MARGINS, ids=str)
def test_margin_of_float64_logits(comm, margin):
    worst_of = Worst(limits("float64", FLOAT64))
    for case, rows in rows_of(np.float64, 64.0, margin):
        loss, gradient = value_and_grad(case.logits, case.targets, margin, logit_scale=64.0, reduction="none")
        worst_of.note_loss("float64 loss", loss, rows, case, np.float64)
        worst_of.note_gradient("float64 gradient", gradient, rows, case, np.float64)
    worst_of.check(comm, f"margin {margin}")


def test_angle_one_rounding_from_pi_keeps_its_sine(comm):
    worst_of = Worst(limits("float32", LOSS, GRADIENT))
    for x in np.random.default_rng(0).uniform(-1, 1, 50).astype(np.float32):
        with mpmath.workdps(DIGITS):
            margin = 1.0, float(mpmath.pi - mpmath.acos(float(x))), 0.0
        logits = np.array([[-0.9, x, -1.0]], np.float32)
        loss, gradient = value_and_grad(logits, [1], margin, logit_scale=64.0, reduction="none")
        case, rows = Case(str(margin), logits, [1]), [exact_row(logits[0].astype(np.float64), 1, 64.0, margin)]
        worst_of.note_loss("float32 loss", loss, rows, case, np.float32)
        worst_of.note_gradient("float32 gradient", gradient, rows, case, np.float32)
    worst_of.check(comm, "close to pi")


# The ends of the cosines, and beyond


@pytest.mark.parametrize(
    ("margin", "at_1", "at_minus_1"),
    [
        (COSFACE, 1.0, 1.0),
        (ARCFACE, 0.0, 0.0),  # the derivative is infinite
        (SPHEREFACE, 16.0, -16.0),
        ((3.0, 0.0, 0.0), 9.0, 9.0),
        ((-3.0, 0.0, 0.2), 9.0, 9.0),
        ((1.25, 0.0, 0.0), 1.5625, 0.0),
        ((0.0, 1.0, 0.0), 0.0, 0.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_derivative_at_ends_is_its_limit(margin, at_1, at_minus_1, dtype):
    for x, slope in ((1.0, at_1), (-1.0, at_minus_1)):
        logits = np.array([[0.5, x, -0.25]], dtype)
        angle = margin[0] * (0.0 if x > 0 else pi) + margin[1]
        for one in (
            lambda x, g: value_and_grad(x, [1], margin, logit_scale=2.0),
            lambda x, g: dense.softmax_cross_entropy_value_and_grad(x, [1], margin=margin, logit_scale=2.0),
        ):
            loss, gradient = one(logits, slope)
            odds = (np.exp(1.0) + np.exp(-0.5)) / np.exp(2.0 * (cos(angle) - margin[2]))
            np.testing.assert_allclose(loss, np.log1p(odds), rtol=1e-6)
            expected = -2.0 * slope * odds / (1.0 + odds)
            np.testing.assert_allclose(np.float64(gradient[0, 1]), expected, rtol=2.0**-8, atol=1e-12)


@pytest.mark.parametrize("margin", [ARCFACE, SPHEREFACE, (1.5, 0.3, 0.1)], ids=str)
def test_target_beyond_1_counts_as_1(margin):
    for end in (1.0, -1.0):
        whole = np.array([[0.5, end, -0.25]], np.float32)
        loss, gradient = value_and_grad(whole, [1], margin)
        for beyond in (np.nextafter(np.float32(end), np.float32(2 * end)), np.float32(300 * end)):
            there = np.where([[False, True, False]], beyond, whole)
            found, slope = value_and_grad(there, [1], margin)
            assert found == loss and np.array_equal(slope, gradient)


def test_margin_on_cosine_alone_takes_any_logit():
    x, targets = np.random.default_rng(3).normal(0, 9, (6, 8)), np.arange(6)
    moved = x.copy()
    moved[targets, targets] -= 0.25
    found, expected = (
        value_and_grad(x, targets, (1.0, 0.0, 0.25)),
        pce.softmax_cross_entropy_value_and_grad(moved, targets),
    )
    assert worst(found[0], expected[0], np.float64) <= FLOAT64
    assert worst(found[1], expected[1], np.float64, np.abs(expected[1]).max(axis=1, keepdims=True)) <= FLOAT64


def test_margin_of_nothing_changes_no_bit():
    for dtype, scale in product((np.float32, np.float64, ml_dtypes.bfloat16), (1.0, 0.7)):
        x = np.random.default_rng(3).normal(0, 2, (6, 8)).astype(dtype)
        options = {"logit_scale": scale, "label_smoothing": 0.1, "z_loss": 0.1}
        found = value_and_grad(x, np.arange(6), (1, 0, 0), **options)
        expected = pce.softmax_cross_entropy_value_and_grad(x, np.arange(6), **options)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True))


# Special values


@pytest.mark.parametrize("margin", [ARCFACE, COSFACE, SPHEREFACE], ids=str)
def test_special_values_are_those_without_margin(margin):
    inf, nan = np.inf, np.nan
    x = np.array(
        [
            [0.1, -inf, 0.3],  # a masked class
            [-inf, 0.2, 0.3],  # a masked target
            [0.1, -inf, -inf],  # the target is alone
            [-inf, -inf, -inf],
            [inf, 0.2, 0.3],
            [0.1, inf, 0.3],
            [nan, 0.2, 0.3],
            [0.1, nan, 0.3],
            [nan, 0.2, inf],  # ignored
        ]
    )
    targets = np.array([0] * 8 + [-100])
    found, expected = (
        function(x, targets, margin=margin, logit_scale=3.0, reduction="none")
        for function in (pce.softmax_cross_entropy_value_and_grad, dense.softmax_cross_entropy_value_and_grad)
    )
    without = pce.softmax_cross_entropy_value_and_grad(x, targets, reduction="none")
    for ours, textbook, plain in zip(found, expected, without, strict=True):
        np.testing.assert_allclose(ours, textbook, rtol=1e-13)
        assert np.array_equal(np.isnan(ours), np.isnan(plain))
    assert found[0][1] == inf and found[0][2] == found[0][8] == 0.0 and not found[1][8].any()


@pytest.mark.parametrize("margin", [ARCFACE, COSFACE, SPHEREFACE], ids=str)
def test_masked_target_of_weight_0_costs_z_loss(margin):
    options = {"weight": np.array([0.0, 1.0, 1.0]), "z_loss": 1.0, "reduction": "none", "logit_scale": 3.0}
    loss, _ = value_and_grad([[-np.inf, -5.0, -6.0]], [0], margin, **options)
    np.testing.assert_allclose(loss, np.log(np.exp(-15.0) + np.exp(-18.0)) ** 2, rtol=1e-13)


def test_margined_logits_have_an_order_of_their_own():
    # The target's z is the larger or the smaller one, unlike its cosine, and so far off that nothing else counts.
    x, scale = np.array([[0.5, 0.25], [0.25, 0.5]]), 2.0**70
    for m3 in (0.5, -0.5):
        loss, gradient = value_and_grad(x, [0, 0], (1.0, 0.0, m3), logit_scale=scale, reduction="none")
        ahead = scale * (x[:, 1] - (x[:, 0] - m3))
        np.testing.assert_array_equal(loss, np.maximum(0.0, ahead))
        np.testing.assert_array_equal(gradient, scale * np.where(ahead[:, None] > 0, [[-1.0, 1.0]], 0.0))


# On ranks


@several
def test_margin_with_every_other_option(comm):
    for margin, weight, smoothing in product((ARCFACE, (1.35, 0.0, 0.2)), (False, True), (0.0, 0.1)):
        with in_step(comm):
            options = {"margin": margin, "logit_scale": 12.0, "label_smoothing": smoothing, "z_loss": 0.01}
            problem = draw(11, 23, weight=weight, ignored=0.3, axis=0, **options)
            problem = problem.but(logits=as_cosines(problem.logits))
            part = part_of(comm, problem)
            assert_as_dense(evaluate(comm, problem, part), problem, part)


@several
def test_linear_loss_takes_margin(comm):
    rng = np.random.default_rng(9)
    hidden, w = rng.normal(size=(12, 5)), rng.normal(size=(5, 17))
    hidden, w = hidden / np.linalg.norm(hidden, axis=1, keepdims=True), w / np.linalg.norm(w, axis=0)
    targets, mine = rng.integers(0, 17, 12), slice(*pce.shard_range(17, comm.size, comm.rank))
    options = {"margin": (1.1, 0.4, 0.1), "logit_scale": 8.0}
    expected = dense.linear_cross_entropy_value_and_grad(hidden, w, targets, **options)
    found = pce.linear_cross_entropy_value_and_grad(hidden, w[:, mine], targets, comm=comm, chunk=4, **options)
    mesh = pce.Mesh(comm, classes=comm.size)
    placed = pce.distribute(w, mesh, classes=Shard(1), requires_grad=True)
    loss = pce.linear_cross_entropy(pce.distribute(hidden, mesh), placed, targets, chunk=4, **options)
    loss.backward()
    with in_step(comm):
        np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-12)
        np.testing.assert_allclose(found.dhidden, expected.dhidden, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(found.dw, expected.dw[:, mine], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(loss.item(), expected.loss, rtol=1e-12)
        np.testing.assert_allclose(placed.grad.local, expected.dw[:, mine], rtol=1e-10, atol=1e-12)


# Wrong margins


def test_statistics_have_no_margin():
    with pytest.raises(TypeError, match="unexpected keyword argument 'margin'"):
        pce.class_statistics(np.zeros((1, 2)), margin=ARCFACE)


def test_dense_refuses_margin_without_a_target():
    for targets, options in (([0], {"softcap": 3.0}), ([[0.5, 0.5]], {})):
        with pytest.raises(ValueError, match="needs class numbers"):
            dense.softmax_cross_entropy([[0.0, 0.5]], targets, margin=ARCFACE, **options)


def test_true_is_no_margin_even_after_1():
    x, targets = np.zeros((1, 2)), np.array([0])
    pce.softmax_cross_entropy(x, targets, margin=(1, 0, 0))
    with pytest.raises(TypeError, match=r"margin\[0\] must be a real number, got True"):
        pce.softmax_cross_entropy(x, targets, margin=(True, 0, 0))

"""Masked classes, infinities, nan, and rows that count for nothing: what the loss and its gradient are then."""

from itertools import product

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi.testing import in_step
from ranks.problems import (
    WIDE,
    Problem,
    draw,
    evaluate,
    part_of,
    right_results,
    same_on_every_rank,
)

# Bits do not depend on how the classes are cut (test_properties.py, test_definition.py). If the cut decides who has
# the special value, or ranks must agree, there are several.
pytestmark = pytest.mark.ranks(1)
several_shards = pytest.mark.ranks(1, 3)

TARGETS = ["index", "probabilities"]
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 0.1},
    {"logit_scale": 3.0},
    {"softcap": 2.0},
    {"weight": True},
    {"weight": True, "label_smoothing": 0.1, "logit_scale": 0.5, "softcap": 9.0, "z_loss": 0.01},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("targets", TARGETS)
def test_masked_class_has_probability_0_and_no_gradient(comm, targets, options):
    for classes in (12, WIDE):
        with in_step(comm):
            problem = draw(6, classes, targets=targets, reduction="none", **options)
            masked = np.random.default_rng(1).random((6, classes)) < 0.5
            masked[1, : classes // 2] = masked[2, classes // 3 :] = True
            if targets == "index":
                masked[np.arange(6), problem.targets] = False
            else:
                masked[:, 4] = False
                problem.targets[masked] = 0
            problem.logits[masked] = -np.inf
            part = part_of(comm, problem, "uneven")
            results = right_results(comm, problem, part)
            for loss in results.losses.values():
                # Smoothing asks for some of every class, which a masked one cannot give.
                assert np.isposinf(loss).all() if "label_smoothing" in options else np.isfinite(loss).all()
            if "label_smoothing" not in options:
                for gradient in results.gradients.values():
                    assert not gradient[part.of(masked, 1)].any()


@pytest.mark.parametrize("scale", [30.0, 340.0, 1e4])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0])
def test_large_scale_of_small_logits_is_exact(comm, scale, spread):
    for targets in ("class numbers", "probabilities"):
        with in_step(comm):
            rng = np.random.default_rng(5)
            logits = (spread * rng.standard_normal((5, WIDE))).astype(np.float32)
            wanted = rng.integers(0, WIDE, 5) if targets == "class numbers" else rng.random((5, WIDE), np.float32)
            problem = Problem(logits, wanted, options={"logit_scale": scale})
            part = part_of(comm, problem)
            right_results(comm, problem, part)
            statistics = pce.class_statistics(part.of(logits, 1), comm=comm, logit_scale=scale)
            expected = pce.dense.class_statistics(logits, logit_scale=scale)
            np.testing.assert_allclose(statistics.logsumexp, expected.logsumexp, rtol=4 * np.finfo(np.float32).eps)


# Bad values and their places in a row: its target, a class (or the next, if that is the target), everywhere.
BAD = [(value, where) for value in (np.nan, np.inf) for where in ("target", 0, WIDE // 2, WIDE - 1, "all")] + [
    (-np.inf, "all")
]


def spoil(problem, rows, targets):
    """Put one of `BAD` into each of `rows`."""
    for row, (value, where) in zip(rows, BAD, strict=True):
        column = {"target": targets[row], "all": slice(None)}.get(where, where)
        if where == targets[row]:
            column = (where + 1) % WIDE
        problem.logits[row, column] = value


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("targets", TARGETS)
def test_bad_row_is_nan_on_every_rank_alone(comm, targets, options):
    problem = draw(2 * len(BAD), WIDE, targets=targets, reduction="none", **options)
    bad = np.arange(2 * len(BAD)) % 2 == 0
    spoil(problem, np.flatnonzero(bad), problem.targets if targets == "index" else problem.targets.argmax(axis=1))
    for how in ("balanced", "uneven"):
        with in_step(comm):
            results = right_results(comm, problem, how)
            for loss in results.losses.values():
                assert np.isnan(loss).tolist() == bad.tolist()
            for gradient in results.gradients.values():
                assert np.isnan(gradient[bad]).all()
                assert np.isfinite(gradient[~bad]).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("smoothing", [0.0, 1e-9, 0.1])
def test_bad_row_is_nan_whatever_its_target_weighs(comm, dtype, smoothing):
    for reduction in ("none", "sum", "mean"):
        with in_step(comm):
            problem = draw(2 * len(BAD), WIDE, dtype=dtype, reduction=reduction, label_smoothing=smoothing)
            bad = np.arange(2 * len(BAD)) % 2 == 0
            weight = np.ones(WIDE, np.float32)
            weight[problem.targets[bad]] = 0.0
            problem = problem.but(weight=weight)
            spoil(problem, np.flatnonzero(bad), problem.targets)
            results = right_results(comm, problem)
            for loss in results.losses.values():
                assert np.isnan(loss).tolist() == (bad.tolist() if reduction == "none" else True)
            for gradient in results.gradients.values():
                assert np.isnan(gradient[bad]).all()
    logits = np.array([[np.inf, np.inf, 6e4, np.inf, np.inf]], dtype)
    given = {"weight": np.array([0.0, 1, -1, 1, -1]), "label_smoothing": smoothing}
    assert np.isnan(pce.softmax_cross_entropy(logits, np.array([0]), reduction="sum", **given))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bad_row_is_nan_for_probabilities_of_0(comm, smoothing):
    problem = draw(2 * len(BAD), WIDE, targets="probabilities", reduction="none", label_smoothing=smoothing)
    bad = np.arange(2 * len(BAD)) % 2 == 0
    spoil(problem, np.flatnonzero(bad), problem.targets.argmax(axis=1))
    problem.targets[bad] = 0.0
    with in_step(comm):
        for loss in right_results(comm, problem).losses.values():
            assert np.isnan(loss).tolist() == bad.tolist()


@several_shards
def test_bad_row_gives_nan_statistics_everywhere(comm):
    problem = draw(2 * len(BAD), WIDE)
    bad = np.arange(2 * len(BAD)) % 2 == 0
    spoil(problem, np.flatnonzero(bad), problem.targets)
    for how in ("balanced", "uneven"):
        with in_step(comm):
            logits, targets, _ = part_of(comm, problem, how).on_this_rank(problem)
            statistics = pce.class_statistics(logits, targets, comm=comm)
            same = same_on_every_rank(comm, *statistics)
            for name in ("sum_exp", "logsumexp", "log_prob", "entropy"):
                assert np.isnan(getattr(statistics, name)).tolist() == bad.tolist(), name
            assert np.array_equal(statistics.argmax, problem.logits.argmax(axis=1))
            assert np.array_equal(statistics.max, problem.logits.max(axis=1), equal_nan=True)
            assert same


@several_shards
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_special_values_never_make_numpy_warn(comm, options, dtype):
    for targets, reduction in (("index", "mean"), ("probabilities", "none")):
        with in_step(comm):
            problem = draw(2 * len(BAD), WIDE, targets=targets, dtype=dtype, reduction=reduction, **options)
            spoil(
                problem, range(0, 2 * len(BAD), 2), problem.targets if targets == "index" else np.arange(2 * len(BAD))
            )
            problem.logits[1], problem.logits[3, ::2] = np.finfo(dtype).max, np.finfo(dtype).min
            part = part_of(comm, problem)
            with np.errstate(all="raise"):
                evaluate(comm, problem, part)
                logits, chosen, _ = part.on_this_rank(problem)
                pce.class_statistics(logits, chosen if targets == "index" else None, comm=comm)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ignored_row_has_no_loss_and_gradient_0(comm, options):
    for reduction in ("none", "sum", "mean"):
        with in_step(comm):
            clean = draw(2 * len(BAD), WIDE, reduction=reduction, **options)
            ignored = np.arange(2 * len(BAD)) % 2 == 0
            spoilt = clean.but(targets=np.where(ignored, -100, clean.targets), logits=clean.logits.copy())
            spoil(spoilt, np.flatnonzero(ignored), clean.targets)
            results = evaluate(comm, spoilt, part_of(comm, spoilt))
            reference = right_results(comm, clean.but(targets=spoilt.targets))
            for name, loss in results.losses.items():
                assert np.array_equal(loss, reference.losses[name])
            for name, gradient in results.gradients.items():
                assert not gradient[ignored].any()
                assert np.array_equal(gradient, reference.gradients[name])


@pytest.mark.parametrize("weights", [(0, 0), (-1, 1)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_rows_whose_weights_cancel_are_nan(comm, weights, smoothing):
    problem = draw(5, WIDE, label_smoothing=smoothing).but(targets=np.array([2, 9, -100, 2, 9]))
    weight = np.ones(WIDE, np.float32)
    weight[[2, 9]] = weights
    results = evaluate(comm, problem.but(weight=weight), part_of(comm, problem))
    for loss in results.losses.values():
        assert np.isnan(loss)
    for gradient in results.gradients.values():
        assert not gradient[2].any()  # ignored
        assert np.isnan(np.delete(gradient, 2, axis=0)).all()
    loss, gradient = problem.but(weight=weight).dense()
    assert np.isnan(loss)
    assert np.isnan(gradient).all(axis=1).tolist() == [True, True, False, True, True]


NAN, INF = np.nan, np.inf
WEIGHTS_OF_NO_SIZE = [
    # logits, weight, target, and the loss of a row
    ([1.0, 2, 0], [1.0, INF, 1], 0, INF),
    ([1.0, 2, 0], [1.0, -INF, 1], 0, -INF),
    ([1.0, 2, 0], [INF, 1.0, 1], 0, INF),
    ([1.0, 2, 0], [-INF, 1.0, 1], 0, -INF),
    ([1.0, 2, 0], [INF, 1.0, INF], 0, INF),
    ([1.0, 2, 0], [1.0, INF, -INF], 0, NAN),
    ([1.0, 2, 0], [1.0, NAN, 1], 0, NAN),
    ([1.0, 2, 0], [NAN, 1.0, 1], 0, NAN),
    ([1.0, 2, -INF], [1.0, INF, 0], 0, INF),
    ([1.0, 2, -INF], [1.0, 1.0, INF], 0, INF),
    ([1.0, 2, -INF], [1.0, 1.0, -INF], 0, -INF),
    # a masked class
    ([0.09, 0, -INF], [3.3, 1.0, -1], 0, -INF),
    ([0.09, 0, -INF], [3.3, 1.0, 1], 0, INF),
    ([0.09, 0, -INF], [3.3, 1.0, 0], 0, None),
    ([0.09, -INF, -INF], [3.3, 1.0, -1], 0, NAN),
    ([0.09, -INF, -INF], [3.3, -1.0, -1], 1, -INF),
    ([0.09, -INF, -INF], [3.3, 1.0, -1], 1, NAN),
    ([0.09, -INF, 1.0], [3.3, 1.0, -INF], 1, NAN),
]


@several_shards
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize(("logits", "weight", "target", "expected"), WEIGHTS_OF_NO_SIZE, ids=str)
def test_weights_that_are_infinite_count_as_in_dense(comm, logits, weight, target, expected, kind):
    targets = np.array([target] * 2) if kind == "index" else np.tile(np.where(np.arange(3) == target, 0.7, 0.1), (2, 1))
    for dtype, reduction in product((np.float32, np.float64), ("none", "sum", "mean")):
        options = {"label_smoothing": 0.1, "reduction": reduction}
        problem = Problem(np.array([logits] * 2, dtype), targets, weight=np.array(weight), options=options)
        with in_step(comm):
            loss, gradient = problem.dense()
            part = part_of(comm, problem)
            results = evaluate(comm, problem, part)
            for found in results.losses.values():
                np.testing.assert_allclose(found, loss, rtol=1e-6)
                assert expected is None or reduction != "none" or np.array_equal(found, [expected] * 2, equal_nan=True)
            for found in results.gradients.values():
                np.testing.assert_allclose(found, part.of(gradient, 1), rtol=1e-6, atol=1e-7)


INFINITE_WEIGHTS = [
    # logits, weight, target, label smoothing, the loss and the gradient of a row
    ([2.0, 2, 2], [INF, 1.0, 1], 0, 0.0, INF, [NAN, INF, INF]),
    ([2.0, 2, 2], [INF, 1.0, 1], 0, 0.1, INF, [NAN, INF, INF]),
    ([2.0, 2, 2], [INF, 1.0, 1], 0, 1.0, NAN, [NAN, NAN, NAN]),  # 1 - 1 times infinity
    ([2.0, 2, 2], [INF, 1.0, 1], 1, 1.0, INF, [NAN, INF, INF]),
    ([2.0, -INF, -INF], [INF, 0.0, 1], 0, 0.0, INF, [NAN, NAN, NAN]),
    ([2.0, -INF, -INF], [INF, 0.0, 0], 1, 0.1, INF, [NAN, NAN, NAN]),
    ([2.0, -INF, -INF], [-INF, 0.0, -1], 2, 0.1, -INF, [NAN, NAN, NAN]),
    ([2.0, -INF, -INF], [0.0, 1.0, INF], 2, 0.1, INF, [INF, NAN, NAN]),
    ([2.0, 1, -INF], [INF, -1.0, 1], 0, 0.1, INF, [NAN, INF, NAN]),
    ([2.0, 1, -INF], [INF, 1.0, -1], 0, 0.1, NAN, [NAN, INF, NAN]),
    ([2.0, 1, -INF], [-INF, 1.0, 0], 1, 0.1, -INF, [NAN, -INF, NAN]),
    ([99.0, 0, 0], [INF, 1.0, 1], 0, 0.0, INF, [NAN, INF, INF]),  # 1 + exp(-99) rounds to 1
    ([99.0, 0, 0], [INF, 1.0, 1], 1, 0.1, INF, [NAN, INF, INF]),
]


@several_shards
@pytest.mark.parametrize(("logits", "weight", "target", "smoothing", "loss", "gradient"), INFINITE_WEIGHTS, ids=str)
def test_infinite_weights_make_all_gradients_infinite_or_nan(comm, logits, weight, target, smoothing, loss, gradient):
    options = {"label_smoothing": smoothing, "reduction": "none"}
    for dtype in (np.float32, np.float64):
        problem = Problem(np.array([logits], dtype), np.array([target]), weight=np.array(weight), options=options)
        part = part_of(comm, problem)
        with in_step(comm):
            np.testing.assert_array_equal(problem.dense()[0], [loss])
            np.testing.assert_array_equal(problem.dense()[1], [gradient])
            results = evaluate(comm, problem, part)
            for found in results.losses.values():
                np.testing.assert_array_equal(found, [loss])
            for found in results.gradients.values():
                np.testing.assert_array_equal(found, part.of(np.array([gradient]), 1))


@pytest.mark.parametrize("smoothing", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("kind", TARGETS)
def test_weights_of_any_kind_count_as_in_dense(kind, smoothing):
    """Each class of three may be masked, each weight may be infinite or nan, and each class may be the target."""
    rows = [row for row in product((2.0, 1.0, -INF), repeat=3) if max(row) > -INF]
    logits, targets = np.repeat(rows, 3, axis=0), np.tile(np.arange(3), len(rows))
    options = {"label_smoothing": smoothing, "reduction": "none"}
    for weight in product((1.5, -1.0, 0.0, INF, -INF, NAN), repeat=3):
        given = (logits, targets if kind == "index" else np.eye(3)[targets])
        found = pce.softmax_cross_entropy_value_and_grad(*given, weight=np.array(weight), **options)
        expected = pce.dense.softmax_cross_entropy_value_and_grad(*given, weight=np.array(weight), **options)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14, err_msg=str(weight))


def test_infinite_upstream_makes_infinite_gradient():
    logits = np.array([[1.0, 2.0, -np.inf, 0.5]])
    for dtype in (np.float32, np.float64):
        _, residuals = pce.softmax_cross_entropy_forward(logits.astype(dtype), np.array([0]))
        gradient = pce.softmax_cross_entropy_backward(-np.inf, residuals)
        np.testing.assert_array_equal(gradient, [[np.inf, -np.inf, np.nan, -np.inf]])


def test_overflowing_products_of_weights_are_not_finite():
    for weight, logits in (([1, 1e300], [1.0, -1e9]), ([1, -1e300], [1.0, -1e9]), ([1e300, 1e300], [-1e9, 1.0])):
        loss = pce.softmax_cross_entropy(
            np.array([logits]), np.array([0]), weight=np.array(weight), label_smoothing=0.1
        )
        assert not np.isfinite(loss)


@several_shards
@pytest.mark.parametrize("scale", [64.0, 1e100])
def test_scaled_logits_beyond_float64_are_infinite(comm, scale):
    most = np.finfo(np.float64).max
    rows = [([1.1988e18, 1.7e308], 0, np.inf), ([1.1988e18, 1.7e308], 1, 0.0), ([0.0, -most], 1, np.inf)]
    rows += [([0.0, -most], 0, 0.0), ([most, most], 1, np.log(2.0)), ([1.7e308, most], 0, np.nan)]
    logits, targets, expected = map(np.array, zip(*rows, strict=True))
    start, stop = pce.shard_range(2, comm.size, comm.rank)
    given = {"comm": comm, "class_start": start, "logit_scale": scale, "reduction": "none"}
    with in_step(comm):
        loss, gradient = pce.softmax_cross_entropy_value_and_grad(logits[:, start:stop], targets, **given)
        np.testing.assert_allclose(loss, expected, rtol=1e-15)
        right = scale * np.array([[-1.0, 1], [0, 0], [1, -1], [0, 0], [0.5, -0.5], [-1, 1]])
        np.testing.assert_allclose(gradient, right[:, start:stop], rtol=1e-15)
        smooth = pce.softmax_cross_entropy(logits[:, start:stop], targets, label_smoothing=0.5, **given)
        assert not np.isfinite(smooth).any()
        found = pce.class_statistics(logits[:, start:stop], comm=comm, class_start=start, logit_scale=scale)
        assert found.logsumexp.tolist() == [np.inf, np.inf, 0.0, 0.0, np.inf, np.inf]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_logits_at_ends_of_dtype_do_not_overflow(comm, dtype):
    top = np.finfo(dtype).max
    logits = np.array([[top, -top, 0, 1, -np.inf, 5], [-top, -top, -top, -top, -top, -top]], dtype)
    for targets in (np.array([0, 3]), np.array([1, 0]), np.array([3, 5])):
        with in_step(comm):
            problem = Problem(logits, targets, options={"reduction": "none"})
            results = right_results(comm, problem)
            for loss in results.losses.values():
                assert not np.isnan(loss).any()
            for gradient in results.gradients.values():
                assert np.isfinite(gradient).all()


@pytest.mark.parametrize("mask", [-1e9, -1e30, np.finfo(np.float32).min])
def test_very_low_logit_masks_its_class(comm, mask):
    for classes, kind in product((6, WIDE), TARGETS):
        with in_step(comm):
            numbers = np.arange(6) * (classes // 6)
            logits = np.full((6, classes), mask, np.float32)
            logits[np.arange(6), numbers] = [-30.0, -1.0, 0.0, 1e-3, 2.5, 40.0]
            targets = numbers if kind == "index" else np.eye(classes, dtype=np.float32)[numbers]
            problem = Problem(logits, targets, options={"reduction": "none"})
            results = right_results(comm, problem)
            for loss in results.losses.values():
                assert loss.tolist() == [0.0] * 6
            for gradient in results.gradients.values():
                assert not gradient.any()


@several_shards
@pytest.mark.parametrize("size", [1e240, 1e290, 1.5e308])
def test_largest_float64_logits_have_entropy_and_smoothing(comm, size):
    logits, targets = np.full((2, 50), size), np.array([1, 2])
    logits[1, 3:] = -size
    start, stop = pce.shard_range(50, comm.size, comm.rank)
    given = {"comm": comm, "class_start": start}
    entropy = pce.class_statistics(logits[:, start:stop], targets, **given).entropy
    loss = pce.softmax_cross_entropy(logits[:1, start:stop], targets[:1], label_smoothing=0.1, **given)
    assert entropy == pytest.approx(np.log([50.0, 3.0]), rel=1e-15)
    assert loss == pytest.approx(np.log(50.0), rel=1e-15)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_huge_logits_below_huge_target_have_no_gradient(dtype):
    for row in ([1e21, 5e20], [1e30, 1e20, 1.0], [1e25, -1e25]):
        for others in ({}, {"logit_scale": 2.0}, {"z_loss": 1e-30}):
            loss, gradient = pce.softmax_cross_entropy_value_and_grad(np.array([row], dtype), np.array([0]), **others)
            assert np.isfinite(loss) and not gradient[0, 1:].any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_logit_of_probability_0_spoils_its_row(comm, value):
    problem = draw(3, WIDE, targets="probabilities", reduction="none")
    problem.targets[1] = np.arange(WIDE) == 2
    problem.logits[1, 7] = value
    with in_step(comm):
        for loss in right_results(comm, problem, "balanced").losses.values():
            assert np.isnan(loss).tolist() == [False, True, False]

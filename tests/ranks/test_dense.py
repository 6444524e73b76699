"""The oracle itself: numbers worked out by hand, finite differences, and the rules for special values.

Its accuracy is held against mpmath in test_accuracy.py.
"""

import inspect
from itertools import product
from math import exp, inf, log, log1p, nan

import ml_dtypes
import mpmath
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import dense
from pce_mpi.dense.losses import with_margin
from ulps import DENSE, FINITE_DIFFERENCE, worst

value_and_grad = dense.softmax_cross_entropy_value_and_grad

# Two rows whose softmax is (1, 2, 5)/8 and (4, 4, 2)/10.
P = np.array([[1, 2, 5], [4, 4, 2]]) / [[8], [10]]
X = np.log([[1.0, 2.0, 5.0], [4.0, 4.0, 2.0]])
T = np.array([1, 2])
COSTS = np.log([[8, 4, 8 / 5], [2.5, 2.5, 5]])  # -log p
A, B = log(4), log(5)  # those of the targets
W = np.array([1.0, 3.0, 0.5])
Q = np.array([[0.5, 0.5, 0.0], [0.25, 0.25, 1.0]])  # the second row sums to 1.5
ONE_HOT = np.eye(3)[T]


def agrees(got, expected):
    # A dozen operations, and the logarithms that the logits are rounded from.
    return worst(got, np.asarray(expected, np.float64), np.float64, np.maximum(np.abs(expected), 0.1)) <= 4 * DENSE


# Numbers worked out by hand


# The factor of each -log p, and what a mean divides by.
FACTORS = {
    "class numbers": (T, {}, ONE_HOT, 2),
    "weights": (T, {"weight": W}, W * ONE_HOT, 3.5),
    "smoothing": (T, {"label_smoothing": 0.3}, 0.7 * ONE_HOT + 0.1, 2),
    "smoothing of 1": (T, {"label_smoothing": 1.0}, np.full((2, 3), 1 / 3), 2),
    "smoothing and weights": (T, {"label_smoothing": 0.3, "weight": W}, W * (0.7 * ONE_HOT + 0.1), 3.5),
    "probabilities": (Q, {}, Q, 2),
    "probabilities and weights": (Q, {"weight": W}, W * Q, 2),
    "smoothed probabilities": (Q, {"label_smoothing": 0.3}, 0.7 * Q + 0.1, 2),
}


@pytest.mark.parametrize(("targets", "options", "factors", "divisor"), FACTORS.values(), ids=FACTORS)
def test_row_costs_minus_log_probability_of_target(targets, options, factors, divisor):
    rows, gradient_of_rows = (factors * COSTS).sum(axis=1), P * factors.sum(axis=1, keepdims=True) - factors
    shares = {"none": (rows, 1), "sum": (rows.sum(), 1), "mean": (rows.sum() / divisor, divisor)}
    for reduction, (expected, share) in shares.items():
        loss, gradient = value_and_grad(X, targets, reduction=reduction, **options)
        assert agrees(loss, expected)
        assert agrees(gradient, gradient_of_rows / share)
        assert np.array_equal(dense.softmax_cross_entropy(X, targets, reduction=reduction, **options), loss)


def test_results_are_float64_whatever_logits_are():
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        for targets in (T, Q.astype(dtype)):
            loss, gradient = value_and_grad(X.astype(dtype), targets)
            assert loss.dtype == gradient.dtype == np.float64
            assert loss.shape == ()
            assert gradient.shape == X.shape


def test_dense_ignored_rows_count_for_nothing():
    x = np.concatenate([X, [[9.0, -5.0, 2.0]]])
    for ignore_index in (-100, 0, 7):
        targets = np.append(T, ignore_index)
        loss, gradient = value_and_grad(x, targets, ignore_index=ignore_index, label_smoothing=0.2, z_loss=0.1)
        expected, expected_gradient = value_and_grad(X, T, label_smoothing=0.2, z_loss=0.1)
        assert agrees(loss, expected)
        assert agrees(gradient[:2], expected_gradient)
        assert not gradient[2].any()
        loss, _ = value_and_grad(x, targets, ignore_index=ignore_index, reduction="none")
        assert loss[2] == 0


def test_z_loss_adds_square_of_logsumexp_unweighted():
    lse = np.array([log(8), log(10)])
    loss, gradient = value_and_grad(X, T, z_loss=0.25, weight=W)
    assert agrees(loss, (3 * A + 0.5 * B + 0.25 * (lse**2).sum()) / 3.5)
    expected = np.array([[3.0], [0.5]]) * (P - ONE_HOT) + (0.5 * lse)[:, None] * P
    assert agrees(gradient, expected / 3.5)


def test_logit_scale_multiplies_logits():
    loss, gradient = value_and_grad(X / 4, T, logit_scale=4.0, reduction="none")
    assert agrees(loss, [A, B])
    assert agrees(gradient, 4 * (P - ONE_HOT))


def test_softcap_bends_logits():
    z = np.array([[-1.0, 0.5, 1.5]])
    x = 2 * np.arctanh(z / 2)
    plain, plain_gradient = value_and_grad(z, [2], reduction="none")
    loss, gradient = value_and_grad(x, [2], softcap=2.0, reduction="none")
    assert agrees(loss, plain)
    assert agrees(gradient, plain_gradient * (1 - (z / 2) ** 2))
    loss, gradient = value_and_grad(x / 5, [2], logit_scale=5.0, softcap=2.0, reduction="none")
    assert agrees(loss, plain)
    assert agrees(gradient, 5 * plain_gradient * (1 - (z / 2) ** 2))


def test_class_axis_may_be_any():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 5, 2, 3, 2))
    for axis in range(-5, 5):
        targets = rng.integers(0, x.shape[axis], np.delete(x.shape, axis))
        loss, gradient = value_and_grad(x, targets, axis=axis, label_smoothing=0.1)
        flat = np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])
        flat_loss, flat_gradient = value_and_grad(flat, targets.reshape(-1), label_smoothing=0.1)
        assert agrees(loss, flat_loss)
        assert np.array_equal(np.moveaxis(gradient, axis, -1).reshape(flat.shape), flat_gradient)


def test_logits_of_one_row_may_have_one_axis():
    for reduction in ("none", "sum", "mean"):
        loss, gradient = value_and_grad(X[0], T[0], reduction=reduction)
        assert loss.shape == ()
        assert agrees(loss, A)
        assert agrees(gradient, P[0] - ONE_HOT[0])


def test_dense_takes_options_of_the_sharded_loss():
    sharded = inspect.signature(pce.softmax_cross_entropy).parameters
    own = inspect.signature(value_and_grad).parameters
    assert set(sharded) - set(own) == {"comm", "class_start", "batch_comm"}
    for name, parameter in own.items():
        assert parameter.default == sharded[name].default
        assert parameter.kind == sharded[name].kind
    sharded = inspect.signature(pce.class_statistics).parameters
    own = inspect.signature(dense.class_statistics).parameters
    assert set(sharded) - set(own) == {"comm", "class_start", "num_classes", "compute_dtype"}


def test_inputs_stay_as_they_are():
    x, q, w = X.copy(), Q.copy(), W.copy()
    for array in (x, q, w):
        array.flags.writeable = False
    value_and_grad(x, q, weight=w, softcap=2.0, label_smoothing=0.1)
    _, gradient = value_and_grad(x, T, weight=w)
    assert not np.shares_memory(gradient, x)


# Finite differences


def finite_differences(function, x):
    """Central differences of a function of `x`, (N, C), that gives a number."""
    step = np.finfo(np.float64).eps ** (1 / 3)
    gradient = np.empty_like(x)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (function(up) - function(down)) / (up[index] - down[index])
    return gradient


@pytest.mark.ranks(2)  # ranks share the work
@pytest.mark.parametrize("targets", [np.array([1, 0, -100, 4, 2]), "probabilities"], ids=["index", "probabilities"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weight", [None, np.array([0.5, 2.0, 1.0, 0.0, 3.0])], ids=["", "weight"])
def test_gradient_is_that_of_loss(comm, targets, reduction, weight):
    rng = np.random.default_rng(1)
    x = rng.normal(0, 1.5, (5, 5))
    if isinstance(targets, str):
        targets = rng.gamma(0.5, size=(5, 5))
    options = [[0.0, 0.1, 1.0], [0.0, 0.05], [1.0, 0.6], [None, 3.0]]
    for label_smoothing, z_loss, logit_scale, softcap in list(product(*options))[comm.rank :: comm.size]:  # shared out
        arguments = {
            "weight": weight,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
            "logit_scale": logit_scale,
            "softcap": softcap,
        }
        # With reduction="none" the gradient is that of the sum.
        expected = finite_differences(
            lambda x, arguments=arguments: dense.softmax_cross_entropy(x, targets, **arguments).sum(), x
        )
        loss, gradient = value_and_grad(x, targets, **arguments)
        size = max(1.0, float(np.abs(loss).sum()))
        assert worst(gradient, expected, np.float64, np.full(x.shape, size)) <= FINITE_DIFFERENCE, arguments


@pytest.mark.parametrize("options", [{}, {"logit_scale": 0.6}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("name", ["log_prob", "entropy", "logsumexp"])
def test_gradient_of_statistics_is_their_own(name, options):
    rng = np.random.default_rng(1)
    x, targets = rng.normal(0, 1.5, (5, 4)), np.array([1, 0, -100, 3, 2])
    upstream = rng.normal(size=5)

    def weighted(x):
        return (upstream * getattr(dense.class_statistics(x, targets, **options), name)).sum()

    gradient = dense.class_statistics_backward(x, targets, **{name: upstream}, **options)
    assert worst(gradient, finite_differences(weighted, x), np.float64, np.full(x.shape, 4.0)) <= FINITE_DIFFERENCE
    assert gradient.any(axis=1).tolist() == [True, True, name != "log_prob", True, True]
    first = dense.class_statistics_backward(x.T, targets, **{name: upstream}, axis=0, **options)
    assert np.array_equal(first.T, gradient)


def test_gradients_of_statistics_add_up():
    parts = {"log_prob": np.array([2.0, -1.0]), "entropy": np.array(0.5), "logsumexp": np.array([1.0, 3.0])}
    together = dense.class_statistics_backward(X, T, **parts)
    alone = sum(dense.class_statistics_backward(X, T, **{name: part}) for name, part in parts.items())
    assert agrees(together, alone)
    assert not dense.class_statistics_backward(X, T).any()
    with pytest.raises(ValueError, match="needs targets"):
        dense.class_statistics_backward(X, log_prob=1.0)


def test_masked_class_has_no_gradient_of_statistics():
    x = np.array([[log(3), -inf, 0.0]])
    for name in ("log_prob", "entropy", "logsumexp"):
        gradient = dense.class_statistics_backward(x, [0], **{name: 1.0})
        assert np.isfinite(gradient).all() and gradient[0, 1] == 0.0
    assert agrees(dense.class_statistics_backward(x, [0], log_prob=1.0), [[0.25, 0, -0.25]])


def test_finite_differences_notice_error_of_a_millionth():
    x, targets = np.random.default_rng(1).normal(size=(3, 4)), np.array([0, 1, 2])
    expected = finite_differences(lambda x: dense.softmax_cross_entropy(x, targets), x)
    _, gradient = value_and_grad(x, targets)
    assert worst(gradient, expected, np.float64, np.ones(x.shape)) <= FINITE_DIFFERENCE
    assert worst(gradient * (1 + 1e-6), expected, np.float64, np.ones(x.shape)) > FINITE_DIFFERENCE


# Special values


def test_masked_class_has_no_part_in_its_row():
    x = np.array([[log(3), -inf, 0.0, -inf]])
    for options in ({}, {"logit_scale": 1.0}, {"weight": np.array([1.0, 5.0, 1.0, 5.0])}):
        loss, gradient = value_and_grad(x, [0], reduction="none", **options)
        assert agrees(loss, [log(4 / 3)])
        assert agrees(gradient, [[-0.25, 0, 0.25, 0]])
    loss, gradient = value_and_grad(x, [[1.0, 0.0, 0.0, 0.0]], reduction="none")
    assert agrees(loss, [log(4 / 3)])
    for options in (
        *({"logit_scale": scale} for scale in (1e-3, 2.0, 1e3)),
        *({"softcap": softcap} for softcap in (1e-3, 1.0, 3.0)),
        {"logit_scale": 1e-4, "softcap": 1e-3},
    ):
        loss, gradient = value_and_grad(x, [0], reduction="none", **options)
        without, gradient_without = value_and_grad(x[:, [0, 2]], [0], reduction="none", **options)
        assert agrees(loss, without)
        assert agrees(gradient[:, [0, 2]], gradient_without)
        assert gradient[0, 1] == gradient[0, 3] == 0


def test_target_at_masked_class_costs_infinitely_much():
    x = np.array([[log(3), -inf, 0.0, -inf]])
    loss, gradient = value_and_grad(x, [1], reduction="none")
    assert loss[0] == inf
    assert agrees(gradient, [[0.75, -1.0, 0.25, 0.0]])
    loss, _ = value_and_grad(x, [[0.5, 0.5, 0.0, 0.0]], reduction="none")
    assert loss[0] == inf
    loss, _ = value_and_grad(x, [0], label_smoothing=0.1, reduction="none")
    assert loss[0] == inf


@pytest.mark.parametrize(
    "row",
    [
        [-inf, -inf, -inf],
        [inf, 0, 0],
        [0, inf, 0],
        [inf, inf, 0],
        [inf, -inf, -inf],
        [nan, 0, 0],
        [0, nan, 0],
        [nan, inf, -inf],
        [nan, nan, nan],
    ],
    ids=str,
)
@pytest.mark.parametrize("targets", [np.array([0, 1]), np.eye(3)[[0, 1]]], ids=["index", "probabilities"])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"logit_scale": 2.0}, {"label_smoothing": 0.1}], ids=str)
def test_bad_row_is_nan_and_leaves_others_alone(row, targets, options):
    loss, gradient = value_and_grad([row, [0, 0, 0]], targets, reduction="none", **options)
    assert np.isnan(loss).tolist() == [True, False]
    assert np.isnan(gradient).all(axis=1).tolist() == [True, False]
    assert agrees(gradient[1], value_and_grad([[0.0, 0.0, 0.0]], targets[1:], reduction="none", **options)[1][0])
    assert np.isnan(dense.softmax_cross_entropy([row, [0, 0, 0]], targets, **options))


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_ignored_row_may_have_any_logits(value):
    for reduction in ("none", "sum", "mean"):
        options = {"reduction": reduction, "z_loss": 0.1, "label_smoothing": 0.1}
        loss, gradient = value_and_grad([[value] * 3, [0.0, 1, 2], [0, value, 0]], [-100, 2, -100], **options)
        expected, expected_gradient = value_and_grad([[0.0, 1, 2]], [2], **options)
        assert agrees(loss[1:2] if reduction == "none" else loss, expected)
        assert not gradient[[0, 2]].any()
        assert agrees(gradient[1], expected_gradient[0])


def test_dense_loss_of_no_rows():
    none, ignored = np.empty((0, 3)), {"weight": W, "z_loss": 1.0}
    for x, targets, options in ((X, [-100, -100], ignored), (none, np.empty(0, int), {}), (none, none, {})):
        for reduction, expected in (("mean", nan), ("sum", 0.0), ("none", [0.0] * len(x))):
            loss, gradient = value_and_grad(x, targets, reduction=reduction, **options)
            assert np.array_equal(loss, expected, equal_nan=True)
            assert gradient.shape == x.shape
            assert not gradient.any()


@pytest.mark.parametrize("weight", [[0, 0, 0], [0, 2, -2], [5, 0, 0]], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_rows_of_weights_summing_to_0_are_nan(weight, smoothing):
    x = np.concatenate([X, X[:1]])
    loss, gradient = value_and_grad(x, [1, 2, -100], weight=np.array(weight, float), label_smoothing=smoothing)
    assert np.isnan(loss)
    assert np.isnan(gradient[:2]).all()
    assert not gradient[2].any()


def test_single_class_costs_nothing_in_dense():
    for targets in ([0, 0], [[1.0], [0.5]]):
        loss, gradient = value_and_grad([[5.0], [-3e4]], targets, reduction="none")
        assert loss.tolist() == [0, 0]
        assert gradient.tolist() == [[0], [0]]


def test_logits_at_ends_of_float64_do_not_overflow():
    top = np.finfo(np.float64).max
    loss, gradient = value_and_grad([[top, -top, 0.0], [-top, -top, -top]], [0, 2], reduction="none")
    assert agrees(loss, [0.0, log(3)])
    assert agrees(gradient, [[0, 0, 0], [1 / 3, 1 / 3, -2 / 3]])


@pytest.mark.parametrize("mask", [-1e30, float(np.finfo(np.float32).min), -1e300])
@pytest.mark.parametrize("target", [-1.0, 0.0, 2.0])
def test_dense_very_low_logit_masks_its_class(mask, target):
    for targets in ([1], [[0.0, 1.0, 0.0]]):
        loss, gradient = value_and_grad([[mask, target, mask]], targets, reduction="none")
        assert loss.tolist() == [0.0]
        assert gradient.tolist() == [[0.0, 0.0, 0.0]]


# Statistics


def test_statistics():
    statistics = dense.class_statistics(X, T)
    assert agrees(statistics.max, [log(5), log(4)])
    assert agrees(statistics.sum_exp, [8 / 5, 10 / 4])
    assert agrees(statistics.logsumexp, [log(8), log(10)])
    assert agrees(statistics.log_prob, [-A, -B])
    first = log(8) / 8 + log(4) / 4 + log(8 / 5) * 5 / 8
    assert agrees(statistics.entropy, [first, 0.4 * log(2.5) * 2 + 0.2 * log(5)])
    assert statistics.argmax.tolist() == [2, 0]


def test_statistics_are_of_scaled_and_capped_logits():
    z = np.array([[-1.0, 0.5, 1.5]])
    expected = dense.class_statistics(z, [2])
    for x, options in ((z / 3, {"logit_scale": 3.0}), (2 * np.arctanh(z / 2), {"softcap": 2.0})):
        for got, wanted in zip(dense.class_statistics(x, [2], **options), expected, strict=True):
            assert agrees(got, wanted)


def test_statistics_of_ignored_rows_have_log_prob_0():
    statistics = dense.class_statistics(X, [1, -100])
    everywhere = dense.class_statistics(X, T)
    assert statistics.log_prob.tolist() == [everywhere.log_prob[0], 0.0]
    for name in ("max", "sum_exp", "logsumexp", "entropy", "argmax"):
        assert np.array_equal(getattr(statistics, name), getattr(everywhere, name))


def test_entropy_goes_from_0_to_log_of_classes():
    statistics = dense.class_statistics([[0.0] * 4, [0, -inf, -inf, -inf], [0, 0, -inf, -inf]], [0, 0, 0])
    assert agrees(statistics.entropy, [log(4), 0, log(2)])
    assert statistics.argmax.tolist() == [0, 0, 0]


# Errors


@pytest.mark.parametrize("target", [-1, 3, -101, 2**40])
def test_target_out_of_range_is_index_error(target):
    for function in (dense.softmax_cross_entropy, value_and_grad, dense.class_statistics):
        with pytest.raises(IndexError, match=r"\[0, 3\)"):
            function(X, [0, target])


def test_ignored_index_is_never_out_of_range():
    loss = dense.softmax_cross_entropy(X, [1, 3], ignore_index=3)
    assert agrees(loss, A)


def test_num_classes_and_dtype_are_only_checked():
    with pytest.raises(ValueError, match="'none', 'sum' or 'mean'"):
        dense.softmax_cross_entropy(X, T, reduction="average")
    expected = dense.softmax_cross_entropy(X, T)
    assert dense.softmax_cross_entropy(X, T, num_classes=X.shape[-1], compute_dtype=np.float64) == expected
    with pytest.raises(ValueError, match="num_classes = 99"):
        dense.softmax_cross_entropy(X, T, num_classes=99)
    with pytest.raises(ValueError, match="float64, not in float32"):
        dense.softmax_cross_entropy(X, T, compute_dtype=np.float32)


def test_weight_of_absent_target_means_nothing():
    weight = np.ones(X.shape[-1])
    unused = next(c for c in range(X.shape[-1]) if c not in T)
    weight[unused] = np.nan
    assert dense.softmax_cross_entropy(X, T, weight=weight) == dense.softmax_cross_entropy(X, T)


def test_statistics_need_no_targets():
    statistics = dense.class_statistics(X)
    assert statistics.log_prob is None
    assert statistics.entropy.tolist() == dense.class_statistics(X, T).entropy.tolist()


def test_dense_keeps_digits_where_target_weighs_nothing():
    x, w = np.array([[0.0, 18.0, 1.0]]), np.array([0.0, 0.07, 0.0])
    loss, gradient = dense.softmax_cross_entropy_value_and_grad(x, [0], weight=w, label_smoothing=1.0, reduction="sum")
    rest, u = exp(-18) + exp(-17), 0.07 / 3
    assert worst(loss, u * log1p(rest), np.float64) <= DENSE
    exact = [[u * exp(-18) / (1 + rest), -u * rest / (1 + rest), u * exp(-17) / (1 + rest)]]
    assert worst(gradient, exact, np.float64) <= DENSE


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.0, 4.0])
def test_dense_margin_keeps_digits_near_minus_1(factor):
    # Halfway round, m1 arccos x is m1 pi less m1 arccos -x.
    for distance in (1e-12, 1e-6, 0.01):
        x = -1.0 + distance
        z, slope = with_margin(np.array([x]), 1.0, (factor, 0.0, 0.0))
        with mpmath.workdps(50):
            angle = factor * mpmath.acos(mpmath.mpf(x))
            expected = mpmath.cos(angle), factor * mpmath.sin(angle) / mpmath.sin(angle / factor)
        assert worst([z[0], slope[0]], [float(each) for each in expected], np.float64) <= DENSE

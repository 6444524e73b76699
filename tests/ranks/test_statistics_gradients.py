"""Gradients of log-probabilities, entropies and logsumexp: their digits, special rows, unfit arguments."""

import mpmath
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Shard
from ranks.grids import mesh_of

ROWS, CLASSES = 9, 37
NAMES = ("log_prob", "entropy", "logsumexp")


def problem(dtype=np.float64, spread=3.0):
    rng = np.random.default_rng(11)
    logits = spread * rng.standard_normal((ROWS, CLASSES))
    logits[2, ::3] = -np.inf
    targets = rng.integers(0, CLASSES, ROWS)
    targets[:2] = 5
    targets[2] = 1
    targets[3] = logits[3].argmax()
    upstream = {name: rng.standard_normal(ROWS) for name in NAMES}
    return logits.astype(dtype), targets, upstream


def ours(comm, logits, targets, upstream, *, out=None, **options):
    """The gradient of this rank's classes."""
    mine = slice(*pce.shard_range(CLASSES, comm.size, comm.rank))
    shard = np.ascontiguousarray(logits[:, mine])
    _, residuals = pce.class_statistics_forward(shard, targets, comm=comm, **options)
    with pce.trace() as trace:
        gradient = pce.class_statistics_backward(residuals, **upstream, out=out)
    assert trace.count(purpose=None) == 0
    return gradient, mine


def test_entropy_of_almost_certain_row_keeps_its_bits(comm):
    logits = np.zeros((2, CLASSES), np.float32)
    logits[:, 4] = 25.0, 60.0
    for rows, certain in enumerate(logits):
        with mpmath.workprec(200):
            exps = [mpmath.e ** mpmath.mpf(float(value) - float(certain[4])) for value in certain]
            total = sum(exps)
            p = [each / total for each in exps]
            entropy = -sum(each * mpmath.log(each) for each in p)
            exact = [float(-each * (mpmath.log(each) + entropy)) for each in p]
        gradient, mine = ours(comm, certain[None], np.array([4]), {"entropy": 1.0})
        np.testing.assert_allclose(gradient[0], np.array(exact)[mine], rtol=1e-6, err_msg=str(rows))


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"entropy": np.ones(ROWS + 1)}, ValueError, "entropy must be a scalar or have the shape"),
        ({"logsumexp": 1j}, TypeError, "logsumexp must be real"),
        ({"out": np.ones((1, 1))}, ValueError, "out must have the logits' shape"),
        ({"log_prob": 1.0}, ValueError, "without targets"),
        ({"residuals": None, "entropy": 1.0}, TypeError, "residuals must come from class_statistics_forward"),
    ],
    ids=str,
)
def test_unfit_upstream_of_statistics_raises(given, error, text):
    logits, targets, _ = problem()
    if given.keys() & {"residuals", "log_prob"}:
        targets = None
    _, residuals = pce.class_statistics_forward(logits, targets)
    with pytest.raises(error, match=text):
        pce.class_statistics_backward(**({"residuals": residuals} | given))


def test_gradients_of_rows_not_finite_keep_bits(comm):
    logits, targets, upstream = problem(np.float32)
    logits[0], logits[1, 3], logits[4, 7], logits[5, :] = -np.inf, np.nan, np.inf, 2.0
    for wide in (None, np.float64):
        _, residuals = pce.class_statistics_forward(logits, targets, compute_dtype=wide)
        expected = pce.class_statistics_backward(residuals, **upstream)
        gradient, mine = ours(comm, logits, targets, upstream, compute_dtype=wide)
        assert np.isnan(expected).all(axis=1).tolist() == [row in (0, 1, 4) for row in range(ROWS)]
        assert np.nan_to_num(gradient).tobytes() == np.nan_to_num(expected[:, mine]).tobytes()
        assert np.array_equal(np.isnan(gradient), np.isnan(expected[:, mine]))


# ------------------------------------------------------------------------------------------------ distributed arrays


def test_distributed_statistics_without_targets_have_no_log_prob(line):
    logits, _, _ = problem()
    x = pce.distribute(logits.T, line, requires_grad=True, data=Shard(0))
    found = pce.class_statistics(x, axis=0)
    assert found.log_prob is None
    assert [each.requires_grad for each in found if each is not None] == [False, False, True, True, False]
    pce.sum(found.entropy * found.logsumexp).backward()
    wanted, residuals = pce.class_statistics_forward(logits)
    gradient = pce.class_statistics_backward(residuals, entropy=wanted.logsumexp, logsumexp=wanted.entropy)
    assert x.grad.full().tobytes() == np.ascontiguousarray(gradient.T).tobytes()


def test_wrong_targets_of_distributed_statistics_raise_everywhere(comm):
    x = pce.distribute(np.arange(6.0).reshape(2, 3), mesh_of(comm, comm.size), data=Shard(0))
    for targets, error, text in (
        (np.array([0, 3]), IndexError, r"targets\[\d\] = 3 is outside \[0, 3\)"),
        (np.zeros((2, 3)), ValueError, r"targets must be class numbers of shape \(2,\), got float64 of \(2, 3\)"),
        (np.zeros(2), ValueError, "takes index targets, got probabilities"),
    ):
        with pytest.raises(error, match=text):
            pce.class_statistics(x, targets)
    with pytest.raises(TypeError, match="unexpected keyword argument 'comm'"):
        pce.class_statistics(x, comm=comm)
    assert pce.class_statistics(x, np.array([0, 2])).log_prob.shape == (2,)


@pytest.mark.ranks(1, 2)
def test_common_offset_costs_entropy_no_digits(comm):
    # z is scale times the logit, which is rounded unless the scale is a power of two.
    scale, upstream = 3.0, {"entropy": 1.0}
    for offset in (0.0, 50.0, 5000.0):
        logits = np.random.default_rng(12).standard_normal((ROWS, CLASSES)) + offset
        found, mine = ours(comm, logits, None, upstream, logit_scale=scale)
        with mpmath.workdps(60):
            for row, gradient in zip(logits, found, strict=True):
                z = [scale * mpmath.mpf(float(x)) for x in row]
                total = mpmath.log(mpmath.fsum(map(mpmath.exp, z)))
                entropy = mpmath.fsum(mpmath.exp(x - total) * (total - x) for x in z)
                for x, got in zip(z[mine], gradient, strict=True):
                    share = scale * mpmath.exp(x - total)
                    exact, terms = -share * (x - total + entropy), share * (total - x + entropy)
                    assert abs(float(got) - exact) <= 5 * 2.0**-53 * terms, (offset, float(x))


@pytest.mark.ranks(2, 3)
def test_other_shapes_of_targets_raise_on_all(comm):
    logits, targets = np.eye(4, 3) + comm.rank, np.array([0, 1, 2, 0])
    for array in (logits, pce.distribute(np.eye(4, 6), pce.Mesh(comm, classes=comm.size), classes=pce.Shard(1))):
        options = {"comm": comm} if array is logits else {}
        with pytest.raises(pce.CollectiveError, match=r"ranks (disagree|have run different)"):
            pce.class_statistics(array, targets[:, None] if comm.rank else targets, **options)


@pytest.mark.ranks(2, 3)
def test_other_upstream_gradients_of_product_raise_on_all(comm):
    _, residuals = pce.linear_class_statistics_forward(np.ones((4, 2)), np.ones((2, 3)) * comm.rank, comm=comm)
    with pytest.raises(pce.CollectiveError, match="ranks disagree on entropy"):
        pce.linear_class_statistics_backward(residuals, entropy=np.full(4, 1.0 + comm.rank))

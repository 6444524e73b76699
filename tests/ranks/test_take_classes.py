"""The logits of chosen classes, several targets a row, and their gradients: numpy.take_along_axis, and one target."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Replicate, Shard, dense
from ranks.grids import mesh_of, squarest
from ranks.problems import SPLITS, is_same, split
from ulps import FLOAT32, worst

ROWS, CLASSES, CHOSEN = 7, 41, 5
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
NAMES = ("log_prob", "entropy", "logsumexp")


def logits_of(dtype):
    """Numbers of every kind, among them several nan and both zeros."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((ROWS, CLASSES)).astype(dtype)
    logits[0, ::3], logits[1, ::2], logits[2, ::5], logits[3, ::2] = -np.inf, -0.0, np.nan, 0.0
    bits = logits.view(f"u{logits.itemsize}")
    bits[2, ::5] += np.arange(9, dtype=bits.dtype)
    bits[4, ::2] = np.arange(21)  # subnormal
    return logits


def ids_of(chosen=CHOSEN):
    """Chosen classes, of which each row has one twice."""
    ids = np.random.default_rng(4).integers(0, CLASSES, (ROWS, chosen))
    ids[:, -1] = ids[:, 0]
    ids[2] = (ids[2] // 5) * 5 % CLASSES
    return ids


def shard_of(comm, logits, how="balanced"):
    """This rank's classes, which begin at the number that is given too; ranks have them in reverse order."""
    start, stop = split(CLASSES, comm.size, how)[::-1][comm.rank]
    return np.ascontiguousarray(logits[:, start:stop]), {"comm": comm, "class_start": start, "num_classes": CLASSES}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("how", SPLITS)
def test_chosen_logits_keep_all_bits(comm, how, dtype):
    logits, ids = logits_of(dtype), ids_of()
    shard, given = shard_of(comm, logits, how)
    found = pce.take_classes(shard, ids, **given)
    assert found.dtype == dtype
    assert found.tobytes() == np.take_along_axis(logits, ids, 1).tobytes()


def test_chosen_classes_stand_where_top_k_puts_them(comm):
    logits = np.random.default_rng(6).standard_normal((2, CLASSES, 3)).astype(np.float32)
    mine = slice(*pce.shard_range(CLASSES, comm.size, comm.rank))
    shard = logits[:, mine].transpose(2, 1, 0)[::-1]  # strides of every kind
    values, ids = pce.top_k(shard, 4, comm=comm, axis=1)
    assert is_same(pce.take_classes(shard, ids, comm=comm, axis=1), values)
    assert is_same(dense.take_classes(logits.transpose(2, 1, 0)[::-1], ids, axis=1), values.astype(np.float64))
    found = pce.class_statistics(shard, ids, comm=comm, axis=1).log_prob
    one_by_one = [pce.class_statistics(shard, ids[:, k], comm=comm, axis=1).log_prob for k in range(4)]
    assert is_same(found, np.stack(one_by_one, 1))


def test_no_rows_and_no_chosen_classes_are_legal(comm):
    mine = slice(*pce.shard_range(CLASSES, comm.size, comm.rank))
    logits = logits_of(np.float32)[:, mine]
    for rows, chosen in ((0, 3), (ROWS, 0), (0, 0)):
        ids = np.zeros((rows, chosen), np.int64)
        found, residuals = pce.take_classes_forward(logits[:rows], ids, comm=comm)
        assert found.shape == (rows, chosen)
        assert not pce.take_classes_backward(found, residuals).any()
        statistics, residuals = pce.class_statistics_forward(logits[:rows], ids, comm=comm)
        assert statistics.log_prob.shape == (rows, chosen)
        assert pce.class_statistics_backward(residuals, log_prob=1.0).shape == logits[:rows].shape
    one = pce.take_classes(np.arange(3.0), np.array([2]))
    assert one.tolist() == [2.0]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"ids": np.full((ROWS, CHOSEN), CLASSES)},
            IndexError,
            rf"ids\[0, 0\] = {CLASSES} is outside",
        ),
        ({"ids": np.eye(ROWS, CHOSEN, dtype=int) * -100}, IndexError, r"ids\[0, 0\] = -100 is outside"),
        (
            {"ids": np.full((ROWS, CHOSEN), 2**63, np.uint64)},
            IndexError,
            r"9223372036854775808 is no class",
        ),
        ({"ids": np.zeros(ROWS, int)}, ValueError, r"ids must have the logits' shape, .*, got \(7,\)"),
        ({"ids": np.zeros((ROWS, 2))}, TypeError, "ids must be integers, got float64"),
        ({"ids": None}, TypeError, "ids must be"),
        ({"logits": np.zeros((ROWS, 2), int)}, TypeError, "logits must be float16"),
        ({"axis": 2}, ValueError, "axis = 2 is out of bounds"),
    ],
    ids=str,
)
def test_wrong_choice_raises_on_every_rank(comm, change, error, text):
    shard, given = shard_of(comm, logits_of(np.float32))
    right = {"logits": shard, "ids": ids_of(), **given}
    with pytest.raises(error, match=text):
        pce.take_classes(**(right | change if comm.rank == comm.size - 1 else right))
    if comm.size > 1:
        with pytest.raises(pce.CollectiveError, match="ranks disagree on the values of ids"):
            pce.take_classes(**right | {"ids": ids_of() + (comm.rank == 0) * (ids_of() < 3)})
        with pytest.raises(pce.CollectiveError, match="ranks disagree on the values of targets"):
            pce.class_statistics(shard, ids_of() + (comm.rank == 0) * (ids_of() < 3), **given)
    assert pce.take_classes(**right).shape == (ROWS, CHOSEN)


def test_unfit_upstream_of_choice_raises():
    _, residuals = pce.take_classes_forward(np.zeros((2, 3)), np.array([[0, 1], [2, 2]]))
    with pytest.raises(ValueError, match=r"dchosen must be a scalar or have the shape \(2, 2\), got \(2,\)"):
        pce.take_classes_backward(np.ones(2), residuals)
    with pytest.raises(TypeError, match="residuals must come from take_classes_forward, got NoneType"):
        pce.take_classes_backward(1.0, None)
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        residuals.__reduce_ex__(2)


# ---------------------------------------------------------------------------------------------- several targets a row


def several(dtype=np.float32):
    """Targets of which some are equal, ignored, the largest class, masked; and upstream gradients."""
    rng = np.random.default_rng(8)
    logits = (3 * rng.standard_normal((ROWS, CLASSES))).astype(dtype)
    targets = rng.integers(0, CLASSES, (ROWS, CHOSEN))
    targets[0], targets[1, 2], targets[2, 1:3] = logits[0].argmax(), logits[1].argmax(), targets[2, 0]
    targets[3, ::2], logits[4, targets[4, 1]], logits[5, targets[5, 0]] = -100, -np.inf, 60
    upstream = {name: rng.standard_normal((ROWS, CHOSEN) if name == "log_prob" else ROWS) for name in NAMES}
    return logits, targets, upstream


OPTIONS = {
    "plain": {},
    "scale": {"logit_scale": 0.7},
    "softcap": {"softcap": 3.0},
    "wide": {"compute_dtype": np.float64},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("name", OPTIONS)
def test_each_of_several_targets_has_bits_of_one(comm, name, dtype):
    logits, targets, _ = several(dtype)
    logits[6, 3] = np.nan
    shard, given = shard_of(comm, logits, "uneven")
    found = pce.class_statistics(shard, targets, **given, **OPTIONS[name])
    for k in range(CHOSEN):
        one = pce.class_statistics(shard, targets[:, k], **given, **OPTIONS[name])
        assert is_same(np.nan_to_num(found.log_prob[:, k]), np.nan_to_num(one.log_prob))
        assert np.array_equal(np.isnan(found.log_prob[:, k]), np.isnan(one.log_prob))
    for each in ("max", "sum_exp", "logsumexp", "entropy", "argmax"):
        assert np.array_equal(getattr(found, each), getattr(one, each), equal_nan=True)


@pytest.mark.ranks(1)  # the test above shows that others have the same bits
def test_one_among_several_has_gradient_of_one():
    logits, targets, upstream = several()
    for k in range(CHOSEN):
        g = upstream["log_prob"][:, k].copy()
        _, one = pce.class_statistics_forward(logits, targets[:, k])
        _, alone = pce.class_statistics_forward(logits, targets[:, k : k + 1])
        expected = pce.class_statistics_backward(one, log_prob=g)
        assert is_same(pce.class_statistics_backward(alone, log_prob=g[:, None]), expected)
        _, among = pce.class_statistics_forward(logits, targets)
        only = np.where(np.arange(CHOSEN) == k, upstream["log_prob"], 0.0)
        # Other targets are added to: their gradient of 0 makes -0.0 to 0.0.
        assert is_same(pce.class_statistics_backward(among, log_prob=only) + 0.0, expected + 0.0)


@pytest.mark.ranks(1)  # as above
def test_nearly_certain_class_among_several_keeps_bits():
    logits = np.zeros((3, CLASSES), np.float32)
    logits[:, 4] = 20.0, 40.0, 60.0
    targets = np.array([[4, 4, 4]] * 3)
    _, residuals = pce.class_statistics_forward(logits, targets)
    found = pce.class_statistics_backward(residuals, log_prob=np.array([[1.0, 2.0, -1.0]] * 3))
    rest = (CLASSES - 1) * np.exp(-logits[:, 4].astype(np.float64))
    assert worst(found[:, 4], 2.0 * rest / (1.0 + rest), np.float32) <= FLOAT32


def test_cupy_arrays_take_same_classes(comm, cupy):
    for dtype in (np.float16, np.float32, np.float64):
        logits, ids = logits_of(dtype), ids_of()
        shard, given = shard_of(comm, logits, "uneven")
        upstream = np.random.default_rng(9).standard_normal(ids.shape).astype(np.float32)
        wanted, residuals = pce.take_classes_forward(shard, ids, **given)
        gradient = pce.take_classes_backward(upstream, residuals)
        for there in (ids, cupy.asarray(ids)):
            found, residuals = pce.take_classes_forward(cupy.asarray(shard), there, **given)
            assert cupy.asnumpy(found).tobytes() == wanted.tobytes()
            back = pce.take_classes_backward(cupy.asarray(upstream), residuals)
            assert is_same(cupy.asnumpy(back), gradient)
    with pytest.raises(TypeError, match=r"ids \(CuPy, on a GPU\)"):
        pce.take_classes(shard, cupy.asarray(ids), **given)


def test_cupy_arrays_have_same_several_targets(comm, cupy):
    for name, dtype in itertools.product(OPTIONS, (np.float16, np.float32)):
        logits, targets, upstream = several(dtype)
        shard, given = shard_of(comm, logits, "uneven")
        wanted, residuals = pce.class_statistics_forward(shard, targets, **given, **OPTIONS[name])
        gradient = pce.class_statistics_backward(residuals, **upstream)
        found, residuals = pce.class_statistics_forward(cupy.asarray(shard), targets, **given, **OPTIONS[name])
        for each in wanted._fields:
            assert cupy.asnumpy(getattr(found, each)).tobytes() == getattr(wanted, each).tobytes(), each
        on_gpu = {each: cupy.asarray(value) for each, value in upstream.items()}
        assert is_same(cupy.asnumpy(pce.class_statistics_backward(residuals, **on_gpu)), gradient)


# ------------------------------------------------------------------------------------------------ distributed arrays


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float64], ids=lambda dtype: dtype.__name__)
def test_chosen_logits_of_distributed_array_keep_bits(comm, dtype):
    logits, ids = logits_of(dtype), ids_of()
    mesh = mesh_of(comm, *squarest(comm.size))
    for placed in ({"model": Shard(1)}, {"data": Shard(0), "model": Shard(1)}, {"data": Shard(1), "model": Shard(0)}):
        x = pce.distribute(logits, mesh, requires_grad=True, **placed)
        with pce.trace() as trace:
            found = pce.take_classes(x, ids)
        rows = {dim: place if place == Shard(0) else Replicate() for dim, place in x.placements.items()}
        assert found.placements == rows
        assert trace.count() == 1
        # As halves travel in float32, a nan may lose its bits on the way to one rank.
        wanted, whole = np.take_along_axis(logits, ids, 1), found.full()
        assert np.array_equal(np.isnan(whole), np.isnan(wanted))
        assert is_same(whole[~np.isnan(wanted)], wanted[~np.isnan(wanted)])
        upstream = np.arange(ids.size).reshape(ids.shape).astype(dtype)
        with pce.trace() as trace:
            pce.sum(pce.where(ids >= 0, found, 0.0) * 0.0 + found * upstream).backward()
        assert trace.count() == 0
        _, residuals = pce.take_classes_forward(logits, ids)
        assert is_same(x.grad.full(), pce.take_classes_backward(upstream, residuals))


def test_wrong_ids_of_distributed_array_raise_everywhere(comm):
    x = pce.distribute(np.arange(6.0).reshape(2, 3), mesh_of(comm, comm.size), data=Shard(0))
    for ids, error, text in (
        (np.array([[0], [3]]), IndexError, r"ids\[\d, 0\] = 3 is outside \[0, 3\)"),
        (np.zeros(2, int), ValueError, r"ids must be class numbers of shape \(2, 1\), got int64 of \(2,\)"),
        (np.zeros((2, 1)), TypeError, "ids must be integers, got float64"),
        (np.zeros((3, 1), int), ValueError, "ids must be class numbers"),
    ):
        with pytest.raises(error, match=text):
            pce.take_classes(x, ids)
    assert pce.take_classes(x, np.array([[0], [2]])).shape == (2, 1)

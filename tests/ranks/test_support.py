"""Statistics over a support: those of a row of these classes alone, with the bits of one process."""

import ml_dtypes
import mpmath
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Mesh, Replicate, Shard
from pce_mpi.hollow import hollow
from pce_mpi.testing import in_step
from ranks.exact import DIGITS, exact_statistics
from ranks.grids import mesh_of
from ranks.problems import is_same, split
from ulps import STATISTICS, errors

ROWS, CLASSES = 9, 37
NAMES = ("log_prob", "entropy", "logsumexp")
OPTIONS = {
    "plain": {},
    "scale": {"logit_scale": 0.7},
    "softcap": {"softcap": 3.0},
    "wide": {"compute_dtype": np.float64},
}


def problem(dtype=np.float32, spread=3.0, seed=1):
    """Logits, a target in each support, a support of 1 to 20 classes a row, and upstream gradients."""
    rng = np.random.default_rng(seed)
    logits = spread * rng.standard_normal((ROWS, CLASSES))
    members = [np.sort(rng.choice(CLASSES, count, replace=False)) for count in [1, 2, *rng.integers(1, 21, ROWS - 2)]]
    logits[2, members[2][:-1]] = -np.inf
    logits[3, members[3]] = 1.5  # a tie of all
    targets = np.array([rng.choice(each) for each in members])
    targets[4] = members[4][logits[4, members[4]].argmax()]
    offsets = np.cumsum([0, *map(len, members)])
    upstream = {name: rng.standard_normal(ROWS) for name in NAMES}
    return logits.astype(dtype), targets, (np.concatenate(members), offsets), upstream


def shard_of(comm, logits, how="balanced"):
    """This rank's classes, which begin at the number that is given too; ranks have them in reverse order."""
    start, stop = split(CLASSES, comm.size, how)[::-1][comm.rank]
    return np.ascontiguousarray(logits[:, start:stop]), {"comm": comm, "class_start": start, "num_classes": CLASSES}


def rows_of(support):
    ids, offsets = support
    return np.split(ids, offsets[1:-1])


def same_numbers(found, expected):
    """True if two arrays have equal bits, but for which of the many nan a nan is."""
    nan = np.isnan(expected)
    return np.array_equal(np.isnan(found), nan) and is_same(np.where(nan, 0, found), np.where(nan, 0, expected))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64], ids=lambda x: x.__name__)
@pytest.mark.parametrize("name", OPTIONS)
def test_support_has_bits_of_row_of_its_classes(comm, name, dtype):
    logits, targets, support, upstream = problem(dtype)
    logits[5, support[0][support[1][5]]] = np.nan
    logits[6, np.setdiff1d(np.arange(CLASSES), rows_of(support)[6])] = np.nan  # beside the support
    shard, given = shard_of(comm, logits, "uneven")
    mine = slice(given["class_start"], given["class_start"] + shard.shape[1])
    found, residuals = pce.class_statistics_forward(shard, targets, support=support, **given, **OPTIONS[name])
    gradient = pce.class_statistics_backward(residuals, **upstream)
    assert gradient.dtype == dtype
    for row, members in enumerate(rows_of(support)):
        place = np.flatnonzero(members == targets[row])
        one, kept = pce.class_statistics_forward(logits[row : row + 1, members], place, **OPTIONS[name])
        for each in ("max", "sum_exp", "logsumexp", "log_prob", "entropy"):
            assert same_numbers(getattr(found, each)[row : row + 1], getattr(one, each)), (row, each)
        assert found.argmax[row] == members[one.argmax[0]]
        expected = np.zeros(CLASSES, dtype)
        expected[members] = pce.class_statistics_backward(kept, **{k: v[row : row + 1] for k, v in upstream.items()})[0]
        assert same_numbers(gradient[row], expected[mine]), row


@pytest.mark.parametrize("above", [0.0, 5.0, 20.0, 80.0])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_support_is_right_to_last_digit(comm, above, offset):
    rng = np.random.default_rng(5)
    logits = (rng.normal(0, 2, (ROWS, CLASSES)) + offset).astype(np.float32)
    members = [np.sort(rng.choice(CLASSES, 5, replace=False)) for _ in range(ROWS)]
    targets = np.array([each[0] for each in members])
    logits[np.arange(ROWS), targets] += np.float32(above)
    support = np.concatenate(members), np.arange(0, 5 * ROWS + 1, 5)
    shard, given = shard_of(comm, logits)
    by_float32 = pce.class_statistics(shard, targets, support=support, **given)
    by_float64 = pce.class_statistics(shard, targets, support=support, compute_dtype=np.float64, **given)
    of_all = pce.class_statistics(shard, targets, compute_dtype=np.float64, **given)
    with in_step(comm), mpmath.workdps(DIGITS):
        for row, each in enumerate(members):
            exact = exact_statistics(logits[row, each].astype(np.float64), 0)
            for name in ("sum_exp", "logsumexp", "log_prob", "entropy"):
                near, rest = (float(part[0]) for part in getattr(exact, name))
                size = max(1.0, abs(near)) if name == "logsumexp" else near
                found = getattr(by_float32, name)[row]
                assert errors(found, near, np.float32, size, rest) <= STATISTICS, name
            # The mass that the support keeps, by the target's log-probability with and without it.
            whole = [mpmath.exp(mpmath.mpf(float(x)) - float(logits[row].max())) for x in logits[row]]
            mass = mpmath.fsum(whole[c] for c in each) / mpmath.fsum(whole)
            kept = float(of_all.log_prob[row] - by_float64.log_prob[row])
            size = np.maximum(-of_all.log_prob[row], -by_float64.log_prob[row])
            assert errors(kept, float(mpmath.log(mass)), np.float64, size) <= 2 * STATISTICS


def test_row_with_empty_support_is_nan(comm):
    logits, _, _, _ = problem()
    offsets = np.r_[0, np.zeros(ROWS - 1, int), 2]
    shard, given = shard_of(comm, logits)
    found, residuals = pce.class_statistics_forward(shard, support=(np.array([3, 7]), offsets), **given)
    gradient = pce.class_statistics_backward(residuals, entropy=1.0)
    nan = np.arange(ROWS) < ROWS - 1
    for name in ("sum_exp", "logsumexp", "entropy"):
        assert np.array_equal(np.isnan(getattr(found, name)), nan)
    assert np.array_equal(found.max == -np.inf, nan)
    assert found.argmax.tolist() == [-1] * (ROWS - 1) + [3 if logits[-1, 3] >= logits[-1, 7] else 7]
    assert not gradient[nan].any()  # no class is left to have a gradient
    target = np.full(ROWS, 5)
    alone = pce.class_statistics(shard, target, support=(np.zeros(0, int), 0 * offsets), outside="add", **given)
    assert alone.log_prob.tolist() == [0.0] * ROWS
    assert alone.argmax.tolist() == target.tolist()
    nowhere = pce.class_statistics(shard, target, support=(np.zeros(0, int), 0 * offsets), outside="-inf", **given)
    assert np.isnan(nowhere.log_prob).all()


def test_masked_support_has_its_lowest_class_first(comm):
    logits = np.zeros((2, CLASSES), np.float32)
    logits[0, 20:], logits[1] = -np.inf, -np.inf
    shard, given = shard_of(comm, logits, "uneven")
    found = pce.class_statistics(shard, support=(np.array([30, 21, 36, 33]), np.array([0, 3, 4])), **given)
    assert found.argmax.tolist() == [21, 33]
    assert np.isnan(found.logsumexp).all()


def test_order_of_ids_does_not_matter(comm):
    logits, targets, (ids, offsets), upstream = problem()
    shuffled = np.concatenate([np.random.default_rng(6).permutation(each) for each in rows_of((ids, offsets))])
    shard, given = shard_of(comm, logits)
    results = []
    for support in ((ids, offsets), (shuffled.astype(np.int32), list(offsets)), [ids.astype(np.uint64), offsets]):
        found, residuals = pce.class_statistics_forward(shard, targets, support=support, **given)
        results.append([*found, pce.class_statistics_backward(residuals, **upstream)])
    for other in results[1:]:
        assert all(map(is_same, results[0], other))


WRONG = [
    ({"support": 3}, TypeError, r"support must be a pair \(ids, offsets\), or what nucleus gives, got int"),
    ({"support": (np.zeros(3), np.zeros(10, int))}, TypeError, "ids of the support must be integers with one axis"),
    ({"support": (np.zeros(3, int), np.zeros((10, 1), int))}, TypeError, "offsets of the support must be integers"),
    ({"support": (np.zeros(0, int), np.zeros(9, int))}, ValueError, "must be one more than the rows, 10, got 9"),
    ({"support": (np.zeros(3, int), np.zeros(10, int))}, ValueError, "go from 0 to the 3 ids, got 0 to 0"),
    ({"support": (np.zeros(3, int), np.r_[0, 2, 1, [3] * 7])}, ValueError, "must not fall"),
    ({"support": (np.array([4, 2, 4]), np.r_[[0] * 9, 3])}, ValueError, "the support of row 8 has class 4 twice"),
    ({"support": (hollow(2, np.int64), np.r_[0, [2] * 9])}, TypeError, "must have elements, got a hollow array"),
    ({"outside": "raise"}, ValueError, r"targets\[\d\] = 36 is outside the support of its row"),
    ({"outside": "ignore"}, ValueError, "outside must be 'raise', '-inf' or 'add', got 'ignore'"),
    ({"outside": None}, ValueError, "outside must be 'raise', '-inf' or 'add', got None"),
]
EVERYWHERE = [
    ({"support": (np.array([1, CLASSES]), np.r_[0, [2] * 9])}, rf"ids of the support\[1\] = {CLASSES} is outside"),
    ({"support": (np.array([-1, 3]), np.r_[0, [2] * 9])}, r"ids of the support\[0\] = -1 is outside"),
    ({"targets": np.full(ROWS, CLASSES), "outside": "add"}, rf"targets\[0\] = {CLASSES} is outside \[0"),
    ({"targets": np.full((ROWS, 1), -1), "outside": "add"}, r"targets\[0, 0\] = -1 is outside \[0"),
]


def right_arguments():
    """Sound ones; the last target is outside its support."""
    logits, targets, support, _ = problem()
    assert 36 not in rows_of(support)[-1]
    targets[-1] = 36
    return {"logits": logits, "targets": targets, "support": support, "outside": "-inf"}


@pytest.mark.parametrize(("change", "error", "text"), WRONG, ids=str)
def test_wrong_support_raises_on_every_rank(comm, change, error, text):
    right = right_arguments()
    shard, given = shard_of(comm, right["logits"])
    right |= {"logits": shard, **given}
    with pytest.raises(error, match=text):
        pce.class_statistics(**(right | change if comm.rank == comm.size - 1 else right))
    if change == {"outside": "raise"}:
        several = np.stack([right["targets"]] * 2, 1)
        with pytest.raises(error, match=r"targets\[8, 0\] = 36 is outside the support of its row"):
            pce.class_statistics(**right | change | {"targets": several})
    assert pce.class_statistics(**right).max.shape == (ROWS,)


@pytest.mark.parametrize(("change", "text"), EVERYWHERE, ids=str)
def test_class_of_support_out_of_range_raises(comm, change, text):
    right = right_arguments()
    shard, given = shard_of(comm, right["logits"])
    with pytest.raises(IndexError, match=text):
        pce.class_statistics(**right | {"logits": shard, **given} | change)


@pytest.mark.ranks(1, 2)
def test_cupy_arrays_have_same_support(comm, cupy):
    for dtype in (np.float16, np.float32, np.float64):
        logits, targets, support, upstream = problem(dtype)
        shard, given = shard_of(comm, logits, "uneven")
        several = np.stack([targets, targets[::-1]], 1)
        for chosen in (targets, several):
            asked = dict(upstream, log_prob=np.random.default_rng(7).standard_normal(chosen.shape))
            options = {"outside": "-inf", **given}
            wanted, residuals = pce.class_statistics_forward(shard, chosen, support=support, **options)
            gradient = pce.class_statistics_backward(residuals, **asked)
            for there in (support, tuple(map(cupy.asarray, support))):
                found, residuals = pce.class_statistics_forward(cupy.asarray(shard), chosen, support=there, **options)
                for name in wanted._fields:
                    assert same_numbers(cupy.asnumpy(getattr(found, name)), getattr(wanted, name)), name
                on_gpu = {name: cupy.asarray(each) for name, each in asked.items()}
                assert is_same(cupy.asnumpy(pce.class_statistics_backward(residuals, **on_gpu)), gradient)


# ------------------------------------------------------------------------------------------------ distributed arrays


def test_wrong_support_of_one_rank_raises_on_all(comm):
    right = right_arguments()
    logits, targets = right.pop("logits"), right.pop("targets")
    mesh = mesh_of(comm, comm.size)
    for axis in (0, 1):
        x = pce.distribute(logits, mesh, data=Shard(axis))
        for change, error, text in WRONG:
            with pytest.raises(error, match=text):
                pce.class_statistics(x, targets, **(right | change if comm.rank == comm.size - 1 else right))
        for change, text in EVERYWHERE:
            with pytest.raises(IndexError, match=text):
                pce.class_statistics(x, **{"targets": targets} | right | change)
        rows = Shard(0) if axis == 0 else Replicate()
        assert pce.class_statistics(x, targets, **right).log_prob.placements == {"data": rows}


@pytest.mark.ranks(2)  # a mesh without ranks beside one with ranks
@pytest.mark.parametrize("outside", ["raise", "-inf", "add"])
def test_support_on_hollow_mesh_sends_the_same(comm, outside):
    logits, targets, support, _ = problem()
    sent = []
    for mesh in (Mesh(comm, model=comm.size), Mesh.without_ranks({"model": comm.rank}, model=comm.size)):
        with pce.trace() as trace:
            for chosen in (None, targets, np.stack([targets, targets], 1)):
                x = pce.distribute(logits, mesh, model=Shard(1), requires_grad=True)
                found = pce.class_statistics(x, chosen, support=support, outside=outside)
                total = pce.sum(found.entropy + found.logsumexp)
                (total if chosen is None else total + pce.sum(found.log_prob)).backward()
            pce.sum(pce.take_classes(x, np.stack([targets, targets], 1))).backward()
        sent.append(trace.events)
    assert sent[0] == sent[1]

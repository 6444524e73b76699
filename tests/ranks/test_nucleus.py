"""The classes that top-k, top-p and min-p leave: those of exact sums, on any ranks, and their mass."""

from collections import Counter
from fractions import Fraction
import itertools
import math

import ml_dtypes
import mpmath
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Mesh, Shard
from pce_mpi.hollow import hollow
from pce_mpi.kernels import definition
from pce_mpi.kernels.elementary import exponential
from pce_mpi.kernels.interface import DOUBLE, SINGLE, Transform
from ranks.grids import mesh_of, squarest
from ranks.placed import SUM, error_of
from ranks.problems import is_same
from ranks.warpers import drawn, hugging_face, our_limits, reason, vllm
from ulps import MASS, errors

ROWS, CLASSES = 9, 301
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
LIMITS = [
    {},
    {"top_k": 3},
    {"top_k": 1000, "min_p": 0.25},
    {"top_p": 0.9, "logit_scale": 1 / 0.7},
    {"top_k": 40, "top_p": 0.5, "min_p": 0.01},
    {"top_p": 1.0, "min_p": 1.0},
]


def logits_of(dtype, rows=ROWS, classes=CLASSES):
    """Rows with a few and with many equal logits, a peaked and a masked one, and one with each number of no class."""
    x = np.random.default_rng(5).standard_normal((rows, classes)) * 3
    x[1], x[2], x[3] = np.round(x[1]), 0.0, np.where(np.arange(classes) % 3, x[3], -np.inf)
    x[4, classes // 2] += 20
    x[5, ::2] *= 0
    x[6, 7], x[7, 0], x[8] = np.nan, np.inf, -np.inf
    return x.astype(dtype)


def same(found, expected):
    return all(map(is_same, found, expected))


def brute_force(x, precision, top_k=None, top_p=None, min_p=None, logit_scale=1.0):
    """The classes kept of a row of finite logits, one after the other, by Python's integers and fractions."""
    e = exponential(x, Transform(logit_scale), precision)
    unit = precision.width * (int(e.n[x.argmax()]) // precision.width - 2)
    mass = [
        math.floor(int(fixed) * Fraction(2) ** (int(n) - precision.point - unit))
        for fixed, n in zip(e.fixed_point(precision), e.n, strict=True)
    ]
    order = sorted(range(len(x)), key=lambda c: (-float(x[c]), c))
    if top_k is not None:
        order = [c for c in order if x[c] >= x[order[min(top_k, len(x)) - 1]]]
    total = sum(mass[c] for c in order)
    before = itertools.accumulate((mass[c] for c in order), initial=0)
    kept = [c for c, less in zip(order, before, strict=False) if top_p in (None, 1.0) or less < Fraction(top_p) * total]
    if min_p:
        kept = [c for c in kept if float(x[c]) - float(x.max()) >= math.log(min_p) / logit_scale]
    return sorted(kept), Fraction(sum(mass[c] for c in kept), sum(mass))


def test_sets_are_those_of_exact_integers():
    rng = np.random.default_rng(3)
    for dtype, trial in itertools.product(DTYPES, range(12)):
        x = rng.standard_normal((3, int(rng.integers(1, 400)))) * rng.choice([0.1, 2, 40])
        x = (np.round(x * 2) / 2 if trial % 2 else x).astype(dtype)
        limits = {
            "top_k": [None, 1, 7, 500][rng.integers(4)],
            "top_p": [None, 0.5, 0.9, 1 - 2**-20][rng.integers(4)],
            "min_p": [None, 0.3, 1e-9][rng.integers(3)],
            "logit_scale": [1.0, 1.4, 0.25][rng.integers(3)],
        }
        found = pce.nucleus(x, **limits)
        for row, (start, stop) in enumerate(itertools.pairwise(found.offsets)):
            kept, mass = brute_force(x[row], DOUBLE if dtype is np.float64 else SINGLE, **limits)
            assert found.ids[start:stop].tolist() == kept
            assert found.mass[row] == found.mass.dtype.type(float(mass))


# -------------------------------------------------------------------------------------------------------- what is kept


def kept_of(x, **limits):
    return pce.nucleus(np.asarray(x, np.float32), **limits).ids.tolist()


def test_top_k_keeps_all_equal_logits():
    assert kept_of([1, 3, 2, 2, 0, 2], top_k=2) == [1, 2, 3, 5]
    assert kept_of([0.0, -0.0, 0.0, -1], top_k=1) == [0, 1, 2]
    assert kept_of([1, -np.inf, 0], top_k=3) == kept_of([1, -np.inf, 0], top_k=10**30) == [0, 2]


def test_top_p_keeps_lowest_of_equal_logits():
    equal = np.zeros(8)
    assert [len(kept_of(equal, top_p=p)) for p in (1e-9, 0.125, 0.1250001, 0.5, 0.875, 0.876, 1.0)] == [
        1,
        1,
        2,
        4,
        7,
        8,
        8,
    ]
    assert kept_of([0, 5, 0, 5], top_p=0.3) == [1]
    assert kept_of([0, 5, 0, 5], top_p=0.75) == [1, 3]


def test_top_p_is_of_what_top_k_leaves():
    x = np.log([0.4, 0.3, 0.2, 0.1])
    assert kept_of(x, top_p=0.65) == [0, 1]
    assert kept_of(x, top_p=0.55, top_k=2) == [0]  # 0.4 of 0.7
    assert pce.nucleus(x, top_p=0.55, top_k=2).mass == pytest.approx(0.4)


def test_min_p_is_decided_by_distance_from_largest():
    x = np.log(np.array([0.5, 0.26, 0.24]))
    assert kept_of(x, min_p=0.5) == [0, 1]
    assert kept_of(x, min_p=0.0) == [0, 1, 2]
    assert kept_of([3, 3, np.nextafter(np.float32(3), np.float32(0))], min_p=1.0) == [0, 1]
    assert kept_of(x, min_p=0.5, logit_scale=1.1) == [0]
    assert kept_of(x, min_p=1e-300) == [0, 1, 2]
    assert kept_of([5, 5, 5, 0, 0, 0], top_p=0.995) == [0, 1, 2, 3]
    assert kept_of([5, 5, 5, 0, 0, 0], top_p=0.995, min_p=0.5) == [0, 1, 2]


def test_row_without_probabilities_keeps_nothing(comm):
    logits = logits_of(np.float32)
    mine = slice(*pce.shard_range(CLASSES, comm.size, comm.rank))
    for limits in LIMITS:
        found = pce.nucleus(logits[:, mine], comm=comm, **limits)
        assert np.diff(found.offsets)[6:].tolist() == [0, 0, 0]
        assert np.isnan(found.mass).tolist() == np.isnan(found.log_mass).tolist() == [False] * 6 + [True] * 3


def test_all_classes_have_mass_1():
    found = pce.nucleus(np.array([[0.5, -3, 80, -np.inf]]))
    assert (found.ids.tolist(), found.mass.tolist(), found.log_mass.tolist()) == ([0, 1, 2], [1.0], [0.0])


def test_log_of_mass_keeps_digits_near_1():
    for gap in (1, 4, 8, 12):
        x = np.array([0, -gap, -gap])
        with mpmath.workdps(60):
            exact = float(-mpmath.log(1 + 2 * mpmath.exp(-gap)))
        for dtype in (np.float32, np.float64):
            assert errors(pce.nucleus(x.astype(dtype), top_k=1).log_mass, exact, dtype) <= MASS


def test_huge_logits_keep_largest_alone():
    assert kept_of([3e38, -3e38, 2.9e38], top_p=0.99) == [0]
    x = np.array([1e308, -1e308, 1e308])
    found = pce.nucleus(x, top_p=0.99, logit_scale=2.0)
    assert (found.ids.tolist(), float(found.mass)) == ([0, 2], 1.0)


# -------------------------------------------------------------------------------------------------- what samplers keep


def test_rows_are_those_of_samplers_but_for_rounding():
    found = Counter()
    for x, options in drawn(6000):
        nucleus = pce.nucleus(x, **our_limits(options))
        ours = np.zeros(x.shape, np.bool_)
        ours[np.repeat(np.arange(len(x)), np.diff(nucleus.offsets)), nucleus.ids] = True
        for theirs in (hugging_face, vllm) if options["min_p"] is None else (hugging_face,):
            left = theirs(x, **options)
            differ = np.flatnonzero((ours != left).any(1))
            found.update(reason(x[row], ours[row], left[row], options) for row in differ)
            found["same"] += len(x) - len(differ)
    assert "" not in found
    assert found["same"] > 0.9 * found.total()


# ---------------------------------------------------------------------------------------------------- how it is called


def test_sets_are_found_by_bytes_of_rows_alone(comm):
    sent = []
    for classes in (40, 4000):
        mine = slice(*pce.shard_range(classes, comm.size, comm.rank))
        for dtype, bits in ((np.float16, 16), (np.float32, 32), (np.float64, 64)):
            shard = np.ascontiguousarray(logits_of(dtype, classes=classes)[:, mine])
            with pce.trace() as trace:
                found = pce.nucleus(shard, comm=comm, num_classes=classes, top_k=8, top_p=0.7, min_p=0.1)
            assert trace.bytes("all_reduce") == 48 * ROWS * (1 + 2 * bits + 1)
            kept = np.count_nonzero((found.ids >= mine.start) & (found.ids < mine.stop))
            assert trace.bytes("all_gather") == 16 * ROWS + 8 + 8 * kept
            sent.append(trace.count("all_reduce"))
    assert sent[:3] == sent[3:]


def test_kernels_find_same_sets(monkeypatch):
    for dtype, limits in itertools.product(DTYPES, LIMITS):
        logits = logits_of(dtype)
        found = pce.nucleus(logits, **limits)
        with monkeypatch.context() as patch:
            patch.setattr("pce_mpi.loss.problem.kernel_of", lambda _: definition)
            patch.setattr("pce_mpi.loss.passes.host_kernel", lambda: definition)
            assert same(found, pce.nucleus(logits, **limits))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        ({"top_k": 2.0}, TypeError, "top_k must be an integer, got 2.0"),
        ({"top_p": 0.0}, ValueError, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, ValueError, r"top_p must be in \(0, 1\], got 1.5"),
        ({"top_p": math.nan}, ValueError, r"top_p must be in \(0, 1\], got nan"),
        ({"min_p": -0.1}, ValueError, r"min_p must be in \[0, 1\], got -0.1"),
        ({"min_p": "0.1"}, TypeError, "min_p must be a real number, got '0.1'"),
        ({"logit_scale": 0.0}, ValueError, "logit_scale must be positive"),
        ({"logit_scale": 1e-310}, ValueError, "logit_scale must be from"),
        ({"logits": np.zeros((ROWS, 2), int)}, TypeError, "logits must be float16"),
        ({"logits": hollow((ROWS, 2))}, TypeError, "nucleus takes no hollow arrays"),
        ({"axis": 2}, ValueError, "axis = 2 is out of bounds"),
    ],
    ids=str,
)
def test_wrong_limit_of_one_rank_raises_on_all(comm, change, error, text):
    mine = slice(*pce.shard_range(CLASSES, comm.size, comm.rank))
    right = {"logits": logits_of(np.float32)[:, mine], "top_k": 2, "top_p": 0.5, "comm": comm}
    kind, said = error_of(lambda: pce.nucleus(**(right | change if comm.rank == comm.size - 1 else right)))
    assert kind == error.__name__
    with pytest.raises(error, match=text):
        raise error(said)
    assert len(set(comm.allgather(said))) == 1
    assert len(pce.nucleus(**right).offsets) == ROWS + 1


@pytest.mark.ranks(1, 3)
def test_cupy_arrays_give_same_nucleus(comm, cupy):
    for dtype, limits in zip(itertools.cycle((np.float16, np.float32, np.float64)), LIMITS, strict=False):
        logits = logits_of(dtype)
        mine = slice(*pce.shard_range(CLASSES, comm.size, comm.rank))
        found = pce.nucleus(cupy.asarray(np.ascontiguousarray(logits[:, mine])), comm=comm, **limits)
        assert all(isinstance(each, cupy.ndarray) for each in found)
        assert same(map(cupy.asnumpy, found), pce.nucleus(logits, **limits))


# -------------------------------------------------------------------------------------------------- distributed arrays


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float64], ids=lambda dtype: dtype.__name__)
def test_nucleus_of_distributed_array_is_global(comm, dtype):
    logits = np.stack([logits_of(dtype), logits_of(dtype)[::-1]], axis=1)  # (rows, 2, classes)
    mesh = mesh_of(comm, *squarest(comm.size))
    limits = {"top_p": 0.7, "min_p": 0.01}
    for axis, places in {2: ((2, 2), (0, 2), (1, 0), (0, 0)), 0: ((0, 2), (1, 2))}.items():
        one = pce.nucleus(logits, axis=axis, **limits)
        for placed in places:
            x = pce.distribute(
                logits, mesh, requires_grad=True, **dict(zip(mesh.dims, map(Shard, placed), strict=False))
            )
            found = pce.nucleus(x, axis=axis, **limits)
            assert same(found, one)
            assert {type(each) for each in found} == {np.ndarray}


def test_partial_logits_are_reduced_before_sets(comm):
    logits = np.round(logits_of(np.float64)[:6] * 8) / 8
    logits[3] = 1.0
    mesh = mesh_of(comm, comm.size)
    x = pce.distribute(logits, mesh).redistribute(data=SUM)
    assert same(pce.nucleus(x, top_p=0.7), pce.nucleus(logits, top_p=0.7))


def test_wrong_nucleus_of_distributed_array_raises(comm):
    mesh = mesh_of(comm, comm.size)
    x = pce.distribute(np.zeros((3, 6)), mesh, data=Shard(1))
    with pytest.raises(TypeError, match="unexpected keyword argument 'comm'"):
        pce.nucleus(x, comm=comm)
    with pytest.raises(ValueError, match="top_p must be in"):
        pce.nucleus(x, top_p=2.0 if comm.rank == 0 else 0.5)
    nowhere = Mesh.without_ranks(data=2)
    with pytest.raises(TypeError, match="nucleus takes no hollow arrays"):
        pce.nucleus(pce.distribute(hollow((3, 6)), nowhere, data=Shard(1)), top_p=0.5)
    with pytest.raises(TypeError, match="nucleus takes no hollow arrays"):
        pce.nucleus(pce.distribute(np.zeros((3, 6)), nowhere, data=Shard(1)), top_p=0.5)

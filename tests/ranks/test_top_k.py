"""The largest logits and their classes: those of a stable sort of all classes, with the bits of one process."""

import math

from hypothesis import given, settings, strategies as st
import ml_dtypes
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Replicate, Shard
from pce_mpi.kernels import classes as kernel_classes, host_kernel
from ranks.grids import mesh_of, squarest
from ranks.problems import SPLITS, is_same, split

ROWS, CLASSES = 7, 41
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int64, np.uint64, np.int8, np.bool_]


def logits_of(dtype, rows=ROWS, classes=CLASSES):
    """Few different numbers, so that there are ties in each row, and the largest and the smallest of the dtype."""
    rng = np.random.default_rng(5)
    drawn = rng.integers(0, 9, (rows, classes)).astype(dtype)
    if np.dtype(dtype).kind in "iu":
        drawn[0, ::7], drawn[1, 3::5] = np.iinfo(dtype).max, np.iinfo(dtype).min
    elif dtype is not np.bool_:
        drawn[0, ::7], drawn[1, ::2], drawn[2, 3::5], drawn[3] = np.inf, -np.inf, np.nan, -np.inf
        drawn[4, ::2] *= dtype(-0.0)
        drawn[5, 11], drawn[5, 30] = np.nan, np.inf
    return drawn


def expected(logits, k):
    """By a stable sort; Python's, in which a nan is put before any number."""
    order = np.array(
        [sorted(range(len(row)), key=lambda c, row=row: (not np.isnan(row[c]), -row[c])) for row in rows_of(logits)],
        np.int64,
    ).reshape(logits.shape)[:, :k]
    return np.take_along_axis(logits, order, 1), order


def rows_of(logits):
    kind = logits.dtype.kind
    return [[int(x) if kind in "iub" else float(x) for x in row] for row in logits]


@pytest.mark.ranks(1, 3)  # two ranks and four merge alike
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("how", SPLITS)
def test_top_k_of_shards_is_stable_sort(comm, how, dtype):
    logits = logits_of(dtype)
    # Ranks have their classes in reverse order.
    start, stop = split(CLASSES, comm.size, how)[::-1][comm.rank]
    shard = np.ascontiguousarray(logits[:, start:stop])
    for k in (1, 3, CLASSES):
        values, classes = pce.top_k(shard, k, comm=comm, num_classes=CLASSES, class_start=start)
        wanted, order = expected(logits, k)
        assert is_same(classes, order)
        assert is_same(np.nan_to_num(values), np.nan_to_num(wanted))
        assert np.array_equal(values != values, wanted != wanted)
    found = pce.argmax(shard, comm=comm, num_classes=CLASSES, class_start=start)
    assert is_same(found, order[:, 0])
    if dtype is np.float32:
        assert np.array_equal(found, logits.argmax(1))


@pytest.mark.ranks(1)
@given(data=st.data(), dtype=st.sampled_from(["float32", "float64", "float16"]))
@settings(max_examples=60)
def test_kernels_find_the_same(data, dtype):
    rng, columns = np.random.default_rng(data.draw(st.integers(0, 2**32))), data.draw(st.integers(1, 70))
    few = [-math.inf, -0.0, 0.0, 1.0, 1.5, 2.0, math.inf, math.nan, 2.0**-24, -65504.0, *rng.standard_normal(8)]
    rows = rng.choice(few[: data.draw(st.integers(1, len(few)))], (3, columns)).astype(dtype)
    rows = rows[:, :: data.draw(st.sampled_from([1, -1]))]
    k = data.draw(st.integers(1, min(columns, 40)))
    values, places = host_kernel().largest_of(rows, k)
    wanted, order = kernel_classes.largest_of(rows, k)
    assert np.array_equal(places, order)
    np.testing.assert_array_equal(values.astype(dtype), wanted)


@pytest.mark.ranks(2)  # the order of the local classes does not depend on the ranks
@pytest.mark.parametrize("library", ["NumPy", "CuPy"])
def test_many_classes_are_ordered_by_blocks(comm, cupy, monkeypatch, library):
    monkeypatch.setattr(kernel_classes, "_BLOCK" if library == "NumPy" else "_BLOCK_ON_GPU", 3 * 5000)
    to_library, to_host = (np.asarray, np.asarray) if library == "NumPy" else (cupy.asarray, cupy.asnumpy)
    rng = np.random.default_rng(1)
    for drawn in (rng.integers(0, 4000, (4, 5003)), np.sort(rng.integers(0, 60, (4, 5003)), 1)):
        logits = drawn.astype(np.float32)
        mine = slice(*pce.shard_range(5003, comm.size, comm.rank))
        for k in (7, 300):
            values, classes = pce.top_k(to_library(logits[:, mine]), k, comm=comm)
            wanted, order = expected(logits, k)
            assert is_same(to_host(classes), order)
            assert is_same(to_host(values), wanted)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"k": CLASSES + 1}, ValueError, f"k = {CLASSES + 1}, but there are {CLASSES} classes"),
        ({"k": 0}, ValueError, "k must be at least 1, got 0"),
        ({"k": 2.0}, TypeError, "k must be an integer, got 2.0"),
        ({"logits": np.zeros((ROWS, 2), complex)}, TypeError, "logits must be"),
        ({"axis": 2}, ValueError, "axis = 2 is out of bounds"),
        ({"num_classes": 3}, ValueError, "num_classes = 3, but the shards have"),
        ({"softcap": 3.0}, TypeError, "unexpected keyword argument 'softcap'"),
    ],
    ids=str,
)
def test_wrong_top_k_raises_on_every_rank(comm, change, error, text):
    mine = slice(*pce.shard_range(CLASSES, comm.size, comm.rank))
    right = {"logits": logits_of(np.float32)[:, mine], "k": 2, "comm": comm}
    everywhere = change.keys() & {"softcap", "num_classes"} or change.get("k") == CLASSES + 1
    with pytest.raises(error, match=text):
        pce.top_k(**(right | change if everywhere or comm.rank == comm.size - 1 else right))
    if comm.size > 1:
        with pytest.raises(pce.CollectiveError, match=r"ranks disagree on k: 1 \(rank 0\), 2 \(rank"):
            pce.top_k(**right | {"k": 1 + min(1, comm.rank)})
    assert pce.top_k(**right)[1].shape == (ROWS, 2)


# ------------------------------------------------------------------------------------------------ distributed arrays


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.int64], ids=lambda dtype: dtype.__name__)
def test_top_k_of_distributed_array_has_same_bits(comm, dtype):
    logits = logits_of(dtype)
    wanted, order = expected(logits, 3)
    mesh = mesh_of(comm, *squarest(comm.size))
    for placed in ({"model": Shard(1)}, {"data": Shard(0), "model": Shard(1)}, {"data": Shard(1), "model": Shard(0)}):
        x = pce.distribute(logits, mesh, **placed)
        values, classes = pce.top_k(x, 3)
        assert is_same(np.nan_to_num(values.full()), np.nan_to_num(wanted))
        assert is_same(classes.full(), order)
        rows = {dim: place if place == Shard(0) else Replicate() for dim, place in x.placements.items()}
        assert values.placements == classes.placements == rows
        with pce.trace() as trace:
            found = pce.argmax(x)
        assert is_same(found.full(), order[:, 0])
        assert trace.count("all_reduce") == 1


def test_gradient_of_top_k_goes_to_taken_elements(comm):
    logits = logits_of(np.float16)
    _, order = expected(logits, 2)
    x = pce.distribute(logits, mesh_of(comm, comm.size), requires_grad=True, data=Shard(1))
    values, classes = pce.top_k(x, 2)
    assert (values.requires_grad, classes.requires_grad) == (True, False)
    loss = pce.sum(pce.where(pce.abs(values) < 9, values, 0.0) * np.arange(2.0, 16.0, dtype=np.float16).reshape(7, 2))
    with pce.trace() as trace:
        loss.backward()
    assert trace.count() == 0
    gradient = np.zeros(logits.shape, np.float16)
    finite = np.take_along_axis(np.abs(logits) < 9, order, 1)
    np.put_along_axis(gradient, order, np.where(finite, np.arange(2.0, 16.0).reshape(7, 2), 0), 1)
    assert x.grad.placements == {"data": Shard(1)}
    assert is_same(x.grad.full(), gradient)


def test_argmax_of_numpy_is_over_all_elements(comm):
    whole = np.array([[1.0, 5.0, 2.0], [5.0, 0.0, 7.0]])
    x = pce.distribute(whole, mesh_of(comm, comm.size), data=Shard(1))
    assert np.argmax(x).item() == 5
    assert np.argmax(x, axis=0).full().tolist() == [1, 0, 1]
    assert pce.argmax(x).full().tolist() == [1, 2]

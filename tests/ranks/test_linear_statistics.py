"""Statistics of the softmax of `hidden @ w` without its logits: those of `class_statistics` of them, at any chunk."""

import itertools
import tracemalloc
from typing import Any

import ml_dtypes
from mpi4py import MPI
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Partial, Replicate, Shard, dense
from pce_mpi.loss import chunks
from ranks.grids import mesh_of, squarest

# One rank alone, and shards of several lengths.
pytestmark = pytest.mark.ranks(1, 3)

ROWS, FEATURES, CLASSES = 23, 5, 41
NAMES = ("log_prob", "entropy", "logsumexp")
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"logit_scale": 0.7},
    "softcap": {"softcap": 2.0, "logit_scale": 1.5, "compute_dtype": np.float64},
    "ignored": {"ignore_index": 7},
    "bias": {"bias": np.linspace(-3.0, 2.0, CLASSES), "logit_scale": 0.7},
    "masked by bias": {"bias": np.where(np.arange(CLASSES) % 9 == 8, -np.inf, 1.0)},
}


def problem(dtype=np.float64):
    rng = np.random.default_rng(3)
    hidden, w = rng.standard_normal((ROWS, FEATURES)), rng.standard_normal((FEATURES, CLASSES))
    targets = rng.integers(0, CLASSES - 1, ROWS) // 9 * 9 + 2
    targets[[4, 20]] = -100
    targets[[5, 6]] = 7
    upstream = {name: rng.standard_normal(ROWS) for name in NAMES}
    return hidden.astype(dtype), w.astype(dtype), np.where(targets == -100, 7, targets), upstream


def mine_of(comm):
    return slice(*pce.shard_range(CLASSES, comm.size, comm.rank))


def run(comm, hidden, w, targets, upstream=None, **options):
    """The statistics, and the gradients of this rank's columns of w."""
    mine = mine_of(comm)
    if "bias" in options:
        options["bias"] = options["bias"][mine].astype(w.dtype)
    given = {"comm": comm, "num_classes": CLASSES} | options
    statistics, residuals = pce.linear_class_statistics_forward(hidden, w[:, mine], targets, **given)
    return statistics, None if upstream is None else pce.linear_class_statistics_backward(residuals, **upstream)


def oracle(hidden, w, targets, upstream, **options):
    options.pop("compute_dtype", None)
    statistics = dense.linear_class_statistics(hidden, w, targets, **options)
    return statistics, dense.linear_class_statistics_backward(hidden, w, targets, **upstream, **options)


def close(found, expected, mine, bound=1e-13):
    """Assert that gradients are those of all classes, of which this rank has some."""
    for name, part in (("dhidden", slice(None)), ("dw", mine), ("dbias", mine)):
        got, right = getattr(found, name), getattr(expected, name)
        assert (got is None) == (right is None)
        if right is not None:
            scale = np.abs(right).max(initial=1.0)
            np.testing.assert_allclose(got, right[..., part], rtol=0, atol=bound * scale, err_msg=name)


@pytest.mark.parametrize("chunk", [None, 1, 2, 7, 1000])
@pytest.mark.parametrize("name", CALLS)
def test_linear_statistics_and_gradients_are_those_of_oracle(comm, name, chunk):
    hidden, w, targets, upstream = problem()
    expected, gradients = oracle(hidden, w, targets, upstream, **CALLS[name])
    found, got = run(comm, hidden, w, targets, upstream, chunk=chunk, **CALLS[name])
    for each, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, right, rtol=1e-13, atol=1e-14)
    close(got, gradients, mine_of(comm))


@pytest.mark.parametrize("names", [*itertools.combinations(NAMES, 1), *itertools.combinations(NAMES, 2)], ids=str)
def test_each_statistic_has_its_own_gradient(comm, names):
    hidden, w, targets, upstream = problem()
    given = {name: upstream[name] for name in names} | {names[0]: 1.5}
    options = {"bias": np.linspace(0.0, 1.0, CLASSES), "ignore_index": 7}
    close(
        run(comm, hidden, w, targets, given, chunk=7, **options)[1],
        oracle(hidden, w, targets, given, **options)[1],
        mine_of(comm),
    )


def test_statistics_have_bits_of_those_of_logits(comm):
    hidden, w, targets, _ = problem(np.float32)
    logits = np.concatenate([hidden[row : row + 1] @ w[:, mine_of(comm)] for row in range(ROWS)])
    found, _ = run(comm, hidden, w, targets, chunk=1)
    for each, right in zip(found, pce.class_statistics(logits, targets, comm=comm, num_classes=CLASSES), strict=True):
        assert each.tobytes() == right.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=lambda dtype: dtype.__name__)
def test_gradients_of_halves_are_rounded_once(comm, monkeypatch, dtype):
    monkeypatch.setattr(chunks, "_BLOCK", 3 * FEATURES)  # several blocks of columns
    hidden, w, targets, upstream = problem(dtype)
    expected, gradients = oracle(hidden, w, targets, upstream)
    found, got = run(comm, hidden, w, targets, upstream, chunk=8)
    rounded = run(comm, hidden, w, targets, upstream, chunk=8, rounded_gradient=True)[1]
    assert found.entropy.dtype == np.float32
    np.testing.assert_allclose(found.entropy, expected.entropy, rtol=1e-5)
    unit, mine = float(ml_dtypes.finfo(dtype).eps), mine_of(comm)
    for each, coarse, right in zip(got[:2], rounded, (gradients.dhidden, gradients.dw[:, mine]), strict=False):
        scale = np.abs(right).max(initial=0.0)
        assert each.dtype == dtype
        assert np.all(np.abs(each.astype(float) - right) <= 0.51 * unit * np.abs(right) + 3e-6 * scale + 6e-8)
        assert (coarse.tobytes() == each.tobytes()) == (dtype is np.float32 or not each.size)


def test_every_rank_has_same_gradient_of_hidden(comm):
    hidden, w, targets, upstream = problem(np.float32)
    got = run(comm, hidden, w, targets, upstream)[1]
    assert len({each.tobytes() for each in comm.allgather(got.dhidden)}) == 1


def test_residuals_of_linear_statistics_serve_twice(comm):
    hidden, w, targets, upstream = problem()
    _, residuals = pce.linear_class_statistics_forward(hidden, w[:, mine_of(comm)], targets, comm=comm, chunk=6)
    first, second = (pce.linear_class_statistics_backward(residuals, **upstream) for _ in range(2))
    assert [each.tobytes() for each in first[:2]] == [each.tobytes() for each in second[:2]]
    assert not np.shares_memory(first.dw, second.dw)


def test_ignored_rows_give_log_prob_no_gradient(comm):
    hidden, w, targets, _ = problem()
    found, got = run(comm, hidden, w, np.full_like(targets, -100), {"log_prob": 1.0}, chunk=6)
    assert not found.log_prob.any()
    assert found.entropy.all()
    assert not any(each.any() for each in got[:2])


def test_without_targets_no_log_prob_is_given(comm):
    hidden, w, _, upstream = problem()
    found, residuals = pce.linear_class_statistics_forward(hidden, w[:, mine_of(comm)], comm=comm, chunk=6)
    assert found.log_prob is None
    plain = pce.linear_class_statistics(hidden, w[:, mine_of(comm)], comm=comm, chunk=6)
    assert plain.entropy.tobytes() == found.entropy.tobytes()
    with pytest.raises(ValueError, match="without targets"):
        pce.linear_class_statistics_backward(residuals, log_prob=1.0)
    given = {name: upstream[name] for name in NAMES[1:]}
    close(pce.linear_class_statistics_backward(residuals, **given), oracle(hidden, w, None, given)[1], mine_of(comm))


def test_half_chunks_of_statistics_send_their_states(comm):
    hidden, w, targets, upstream = problem()
    with pce.trace() as trace:
        _, residuals = pce.linear_class_statistics_forward(hidden, w[:, mine_of(comm)], targets, comm=comm, chunk=8)
    parts = -(-ROWS // (8 if comm.size == 1 else 4))
    assert (trace.count("all_reduce"), trace.bytes("all_reduce")) == (parts, 88 * ROWS)
    assert trace.count() == parts
    with pce.trace() as trace:
        pce.linear_class_statistics_backward(residuals, **upstream)
    assert (trace.count("all_reduce"), trace.bytes("all_reduce")) == (1, 8 * ROWS * FEATURES)
    assert trace.count() == 1


def test_statistics_hold_one_chunk_of_logits(comm):
    rows, features, classes, chunk = 1024, 16, 12000, 128
    hidden, targets = np.ones((rows, features), np.float32), np.arange(rows)
    w = np.random.default_rng(comm.rank).standard_normal((features, classes), np.float32)
    peaks, started = [], tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        _, residuals = pce.linear_class_statistics_forward(hidden, w, targets, comm=comm, chunk=chunk)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
        kept = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.reset_peak()
        pce.linear_class_statistics_backward(residuals, log_prob=1.0, entropy=np.ones(rows))
        peaks.append(tracemalloc.get_traced_memory()[1] - before - hidden.nbytes - w.nbytes)
    finally:
        if not started:
            tracemalloc.stop()
    assert all(peak <= 1.2 * chunk * classes * 4 for peak in peaks), peaks
    assert kept <= 300 * rows


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"w": np.ones((FEATURES + 1, 2))}, ValueError, "hidden must be"),
        ({"w": np.ones((FEATURES, 2), np.float32)}, TypeError, "one dtype"),
        ({"targets": np.ones(ROWS)}, ValueError, "takes index targets, got probabilities"),
        ({"targets": np.full(ROWS, CLASSES)}, IndexError, r"targets\[0\] = 41 is outside"),
        ({"chunk": 0}, ValueError, "chunk must be at least 1"),
        ({"bias": np.ones(CLASSES + 1)}, ValueError, "bias must have one entry per class of this shard"),
        ({"weight": None}, TypeError, r"argument 'weight'; its options are ignore_index, .*, bias, chunk"),
    ],
    ids=str,
)
def test_wrong_operands_of_statistics_raise_on_every_rank(comm, change, error, text):
    hidden, w, targets, _ = problem()
    one_rank = comm.rank == comm.size - 1 or "weight" in change
    given = {"hidden": hidden, "w": w[:, mine_of(comm)], "targets": targets, "comm": comm}
    for function in (pce.linear_class_statistics, pce.linear_class_statistics_forward):
        with pytest.raises(error, match=text):
            function(**given | (change if one_rank else {}))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"entropy": np.ones(ROWS + 1)}, ValueError, "entropy must be a scalar or have the shape"),
        ({"logsumexp": 1j}, TypeError, "logsumexp must be real"),
        ({"entropy": None}, pce.CollectiveError, "disagree on entropy"),
    ],
    ids=str,
)
def test_wrong_upstream_on_one_rank_raises_on_every(comm, change, error, text, several):
    hidden, w, targets, upstream = problem()
    _, residuals = pce.linear_class_statistics_forward(hidden, w[:, mine_of(comm)], targets, comm=comm)
    with pytest.raises(error, match=text):
        pce.linear_class_statistics_backward(residuals, **upstream | (change if comm.rank == comm.size - 1 else {}))
    pce.linear_class_statistics_backward(residuals, **upstream)


def test_residuals_of_another_function_are_refused():
    with pytest.raises(TypeError, match="must come from linear_class_statistics_forward, got NoneType"):
        pce.linear_class_statistics_backward(None, entropy=1.0)


@pytest.mark.ranks(1, 2)  # as many as GPUs are tested with
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("name", ["plain", "softcap", "bias"])
def test_cupy_arrays_have_statistics_of_their_products(comm, cupy, monkeypatch, name, dtype):
    monkeypatch.setattr(chunks, "_COLUMNS_ON_GPU", 3)  # several blocks of columns
    hidden, w, targets, upstream = problem(dtype)
    mine, options = mine_of(comm), dict(CALLS[name])
    bias = options.pop("bias", None)
    whole = {} if bias is None else {"bias": bias.astype(dtype)}
    on_gpu = {key: cupy.asarray(value[mine]) for key, value in whole.items()}
    given = cupy.asarray(hidden), cupy.asarray(w)[:, mine], cupy.asarray(targets)
    found, residuals = pce.linear_class_statistics_forward(*given, comm=comm, chunk=8, **options, **on_gpu)
    got = pce.linear_class_statistics_backward(
        residuals, **{key: cupy.asarray(value.astype(np.float32)) for key, value in upstream.items()}
    )
    assert all(isinstance(array, cupy.ndarray) for array in (*found, *got[:2]))
    expected, gradients = oracle(hidden, w, targets, upstream, **options, **whole)
    for each, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(cupy.asnumpy(each), right, rtol=1e-5, atol=1e-5)
    unit = float(ml_dtypes.finfo(dtype).eps)
    for each, right in zip(got[:2], (gradients.dhidden, gradients.dw[:, mine]), strict=True):
        assert each.dtype == dtype
        error = np.abs(cupy.asnumpy(each).astype(float) - right)
        assert np.all(error <= 0.51 * unit * np.abs(right) + 2e-5 * np.abs(right).max(initial=1.0))


# ------------------------------------------------------------------------------------------------ distributed arrays

PLACEMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "classes": ({}, {"model": Shard(1)}),
    "rows": ({"data": Shard(0)}, {}),
    "rows and classes": ({"data": Shard(0)}, {"model": Shard(1)}),
    "features": ({"model": Shard(1)}, {"model": Shard(0)}),
    "all classes": ({}, {"data": Shard(1), "model": Shard(1)}),
}


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_statistics_on_the_tape_take_any_placement(comm, name, reproducible):
    mesh = mesh_of(comm, *squarest(comm.size))
    hidden, w, targets, upstream = problem()
    bias, options = np.linspace(-3.0, 2.0, CLASSES), {"logit_scale": 0.7, "ignore_index": 7}
    expected, gradients = oracle(hidden, w, targets, upstream, bias=bias, **options)
    of_hidden, of_w = PLACEMENTS[name]
    h = pce.distribute(hidden, mesh, requires_grad=True, **of_hidden)
    v = pce.distribute(w, mesh, requires_grad=True, **of_w)
    over_classes = [dim for dim, placement in of_w.items() if placement == Shard(1)]
    b = pce.distribute(bias, mesh, requires_grad=True, **dict.fromkeys(over_classes, Shard(0)))
    with pce.reproducible(reproducible):
        found = pce.linear_class_statistics(h, v, targets, bias=b, chunk=6, **options)
        assert [each.requires_grad for each in found] == [False, False, True, True, True, False]
        sum(pce.sum(getattr(found, each) * upstream[each]) for each in NAMES).backward()
    for each, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(each.full(), right, rtol=1e-12, atol=1e-13)
    for x, right in zip((h, v, b), gradients, strict=True):
        np.testing.assert_allclose(x.grad.full(), right, atol=1e-13 * np.abs(right).max())
    if not reproducible and name != "features":
        assert found.entropy.placements == {"data": of_hidden.get("data", Replicate()), "model": Replicate()}
        for dim in mesh.dims:
            assert (h.grad.placements[dim] == Partial("sum")) == (dim in over_classes)
            assert (v.grad.placements[dim] == Partial("sum")) == (dim in of_hidden)
            assert (b.grad.placements[dim] == Partial("sum")) == (dim in of_hidden)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.float64], ids=lambda each: each.__name__)
def test_reproducible_linear_statistics_have_bits_of_one_process(comm, dtype):
    hidden, w, targets, upstream = problem(dtype)
    bias = np.linspace(-3.0, 2.0, CLASSES).astype(dtype)

    def bits(mesh, of_hidden, of_w, of_bias):
        h, v = (
            pce.distribute(hidden, mesh, requires_grad=True, **of_hidden),
            pce.distribute(w, mesh, requires_grad=True, **of_w),
        )
        b = pce.distribute(bias, mesh, requires_grad=True, **of_bias)
        with pce.reproducible():
            found = pce.linear_class_statistics(h, v, targets, bias=b, softcap=30.0, chunk=6)
            sum(pce.sum(getattr(found, each) * upstream[each].astype(np.float32)) for each in NAMES).backward()
        return [each.full().tobytes() for each in (*found, h.grad, v.grad, b.grad)]

    one = bits(pce.Mesh(MPI.COMM_SELF, data=1, model=1), {}, {}, {})
    mesh = mesh_of(comm, *squarest(comm.size))
    assert bits(mesh, {"data": Shard(0)}, {"model": Shard(1)}, {"model": Shard(0)}) == one
    assert bits(mesh, {"model": Shard(1)}, {"model": Shard(0)}, {}) == one


def test_tape_of_statistics_communicates_states_alone(comm):
    mesh = mesh_of(comm, comm.size)
    hidden, w, targets, _ = problem(np.float32)
    h = pce.distribute(hidden, mesh, requires_grad=True)
    v = pce.distribute(w, mesh, requires_grad=True, data=Shard(1))
    with pce.trace() as trace:
        found = pce.linear_class_statistics(h, v, targets, chunk=8)
    assert (trace.count(), trace.bytes("all_reduce")) == (-(-ROWS // (8 if comm.size == 1 else 4)), 88 * ROWS)
    with pce.trace() as trace:
        pce.sum(found.log_prob + found.entropy).backward()
    assert trace.count() == 0


def test_gradients_on_the_tape_multiply_once(comm, monkeypatch):
    calls = []
    made = chunks.Product.make_room
    monkeypatch.setattr(
        chunks.Product, "make_room", lambda self, *given, **more: (calls.append(given), made(self, *given, **more))
    )
    mesh = mesh_of(comm, comm.size)
    hidden, w, _, _ = problem()
    h, v = (pce.distribute(each, mesh, requires_grad=True) for each in (hidden, w))
    pce.sum(pce.linear_class_statistics(h, v, bias=pce.distribute(np.ones(CLASSES), mesh)).entropy).backward()
    assert len(calls) == 2  # the forward pass, and one for the gradients of all operands


def test_wrong_arguments_of_distributed_linear_statistics_raise(comm):
    mesh = mesh_of(comm, comm.size)
    hidden, w, targets, _ = problem()
    h, v = pce.distribute(hidden, mesh), pce.distribute(w, mesh, data=Shard(1))
    for given, error, text in (
        ({"targets": np.full(ROWS, CLASSES)}, IndexError, "is outside"),
        ({"targets": np.zeros(ROWS + 1, int)}, ValueError, "targets must be class numbers of shape"),
        ({"targets": np.zeros(ROWS)}, ValueError, "takes index targets, got probabilities"),
        ({"bias": np.ones(CLASSES + 1)}, ValueError, "bias must have one entry per class"),
        ({"bias": np.ones(CLASSES, np.float32)}, TypeError, "hidden, w, bias must have one dtype"),
        ({"comm": comm}, TypeError, "argument 'comm'"),
        ({"w": w}, TypeError, "w must be a DistArray, got ndarray"),
        ({"hidden": hidden}, TypeError, "hidden must be a DistArray, got ndarray"),
    ):
        with pytest.raises(error, match=text):
            pce.linear_class_statistics(**{"hidden": h, "w": v, "targets": targets} | given)

"""The loss of `hidden @ w` without its logits: the numbers of `softmax_cross_entropy` of them, at any chunk."""

from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import dense
from pce_mpi.loss import chunks
from ranks.grids import mesh_of

# One rank alone, and shards of several lengths.
pytestmark = pytest.mark.ranks(1, 3)

ROWS, FEATURES, CLASSES = 23, 5, 41
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum", "label_smoothing": 0.1},
    "none": {"reduction": "none", "z_loss": 0.01},
    "weights and smoothing": {"weight": np.linspace(0.5, 2.0, CLASSES), "label_smoothing": 0.2, "logit_scale": 0.7},
    "softcap": {"softcap": 2.0, "compute_dtype": np.float64},
    "bias": {"bias": np.linspace(-3.0, 2.0, CLASSES), "reduction": "sum", "logit_scale": 0.7},
    "masked by bias": {"bias": np.where(np.arange(CLASSES) % 9 == 8, -np.inf, 1.0), "weight": np.ones(CLASSES)},
}


def problem(dtype=np.float64):
    rng = np.random.default_rng(3)
    hidden, w = rng.standard_normal((ROWS, FEATURES)), rng.standard_normal((FEATURES, CLASSES))
    targets = rng.integers(0, CLASSES, ROWS)
    targets[4] = -100
    return hidden.astype(dtype), w.astype(dtype), targets


def exact(hidden, w, targets, **options):
    """The loss and the gradients of hidden, w and bias, by the oracle."""
    options.pop("compute_dtype", None)
    return dense.linear_cross_entropy_value_and_grad(hidden, w, targets, **options)


def run(comm, hidden, w, targets, **options):
    """Pass this rank's columns of w."""
    mine = slice(*pce.shard_range(CLASSES, comm.size, comm.rank))
    options |= {name: options[name][mine] for name in ("bias", "weight") if name in options}
    return *pce.linear_cross_entropy_value_and_grad(hidden, w[:, mine], targets, comm=comm, **options), mine


@pytest.mark.parametrize("chunk", [None, 1, 2, 7, 1000])
@pytest.mark.parametrize("name", CALLS)
def test_loss_and_gradients_are_those_of_oracle(comm, name, chunk):
    hidden, w, targets = problem()
    expected = exact(hidden, w, targets, **CALLS[name])
    loss, dhidden, dw, dbias, mine = run(comm, hidden, w, targets, chunk=chunk, **CALLS[name])
    assert (dbias is None) == ("bias" not in CALLS[name])
    if dbias is not None:
        np.testing.assert_allclose(dbias, expected[3][mine], atol=1e-14 * ROWS)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-13)
    np.testing.assert_allclose(dhidden, expected[1], atol=1e-14 * np.abs(expected[1]).max() * CLASSES)
    np.testing.assert_allclose(dw, expected[2][:, mine], atol=1e-14 * np.abs(expected[2]).max() * ROWS)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=lambda dtype: dtype.__name__)
def test_logits_of_halves_are_float32(comm, monkeypatch, dtype):
    monkeypatch.setattr(chunks, "_BLOCK", 3 * FEATURES)  # several blocks of columns
    hidden, w, targets = problem(dtype)
    expected = exact(hidden, w, targets)
    loss, dhidden, dw, _, mine = run(comm, hidden, w, targets, chunk=8)
    assert (loss.dtype, dhidden.dtype, dw.dtype) == (np.float32, dtype, dtype)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    unit = float(ml_dtypes.finfo(dtype).eps)
    for found, right in ((dhidden, expected[1]), (dw, expected[2][:, mine])):
        error = np.abs(found.astype(np.float64) - right)
        assert np.all(error <= 0.5 * unit * np.abs(right) + 2e-6 * np.abs(expected[1]).max() + 6e-8)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=lambda dtype: dtype.__name__)
def test_rounded_gradient_has_precision_of_halves(comm, dtype):
    given = problem(dtype)
    loss, dhidden, dw, _, mine = run(comm, *given)
    rounded = run(comm, *given, rounded_gradient=True)
    assert rounded[0].tobytes() == loss.tobytes()
    wide = exact(*given)
    unit = float(ml_dtypes.finfo(dtype).eps)
    for found, plain, right in ((rounded[1], dhidden, wide[1]), (rounded[2], dw, wide[2][:, mine])):
        assert (found.tobytes() == plain.tobytes()) == (dtype is np.float32 or not plain.size)
        scale = np.abs(wide[1]).max() + np.abs(wide[2]).max()
        assert np.all(np.abs(found.astype(np.float64) - right) <= unit * (np.abs(right) + scale))


def test_loss_has_bits_of_loss_of_logits(comm):
    hidden, w, targets = problem(np.float32)
    mine = slice(*pce.shard_range(CLASSES, comm.size, comm.rank))
    logits = np.concatenate([hidden[row : row + 1] @ w[:, mine] for row in range(ROWS)])
    loss, *_ = run(comm, hidden, w, targets, chunk=1)
    assert loss.tobytes() == pce.softmax_cross_entropy(logits, targets, comm=comm).tobytes()


def test_each_half_of_a_chunk_sends_its_states(comm):
    hidden, w, targets = problem()
    with pce.trace() as trace:
        run(comm, hidden, w, targets, chunk=8)
    parts = -(-ROWS // (8 if comm.size == 1 else 4))
    assert trace.count("all_reduce") == parts + 1
    assert trace.bytes("all_reduce") == 40 * ROWS + 8 * ROWS * FEATURES


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"w": np.ones((FEATURES + 1, 2))}, ValueError, "hidden must be"),
        ({"w": np.ones((FEATURES, 2), np.float32)}, TypeError, "one dtype"),
        ({"hidden": np.ones((ROWS, FEATURES), int)}, TypeError, "hidden must be float16"),
        ({"targets": np.ones((ROWS, CLASSES))}, TypeError, "class numbers"),
        ({"chunk": 0}, ValueError, "chunk must be at least 1"),
        (
            {"axis": 0},
            TypeError,
            r"argument 'axis'; its options are ignore_index, .*, batch_comm, bias, chunk",
        ),
        ({"bias": np.ones(CLASSES + 1)}, ValueError, "bias must have one entry per class of this shard"),
        ({"bias": np.ones(CLASSES, np.float32)}, TypeError, "hidden, w, bias must have one dtype"),
    ],
    ids=str,
)
def test_wrong_call_raises_on_every_rank(comm, change, error, text):
    hidden, w, targets = problem()
    one_rank = comm.rank == comm.size - 1 and "axis" not in change
    given = {"hidden": hidden, "w": w, "targets": targets, "comm": comm} | (
        change if one_rank or "axis" in change else {}
    )
    with pytest.raises(error, match=text):
        pce.linear_cross_entropy_value_and_grad(**given)


@pytest.mark.ranks(3)
def test_ranks_that_differ_raise(comm, several):
    hidden, w, targets = problem()
    first, second = comm.rank == 0, comm.rank == 1
    mine = slice(*pce.shard_range(CLASSES, comm.size, comm.rank))
    halves = {name: x.astype(np.float16 if second else np.float32) for name, x in (("hidden", hidden), ("w", w))}
    features = FEATURES - second
    calls = {
        "bias given: True": {"w": w[:, mine], "bias": np.zeros(CLASSES)[mine] if first else None},
        "chunk": {"chunk": 2 + comm.rank},
        "features: 5": {"hidden": hidden[:, :features], "w": w[:features], "num_classes": 1},
        "dtype of w: 'float32'": halves,
        "the same w of 41 classes.*gathered w": {},
    }
    for text, changes in calls.items():
        given = {"hidden": hidden, "w": w, "targets": targets} | changes
        with pytest.raises(pce.CollectiveError if changes else ValueError, match=text):
            pce.linear_cross_entropy_value_and_grad(**given, comm=comm)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("row", [0, 4], ids=["counts", "ignored"])
def test_hidden_that_differs_by_a_bit_raises(comm, row):
    hidden, w, targets = problem()
    mesh, mine = pce.Mesh(comm, d=comm.size), slice(*pce.shard_range(CLASSES, comm.size, comm.rank))
    sharded = pce.distribute(w, mesh, d=pce.Shard(1))
    if comm.rank == 2:
        hidden[row, 2] = np.nextafter(hidden[row, 2], np.inf)
    replicated = pce.from_local(hidden, mesh)
    for call in (
        lambda: pce.linear_cross_entropy_value_and_grad(hidden, w[:, mine], targets, comm=comm),
        lambda: pce.linear_class_statistics(hidden, w[:, mine], comm=comm),
        lambda: pce.linear_class_statistics_forward(hidden, w[:, mine], targets, comm=comm),
        lambda: pce.linear_cross_entropy(replicated, sharded, targets),
        lambda: pce.linear_class_statistics(replicated, sharded),
    ):
        text = rf"values of hidden: hidden\[{row}, 2\] = [-.\d]+ \(ranks 0, 1( along d)?\), [-.\d]+ \(rank 2"
        with pytest.raises(pce.CollectiveError, match=text):
            call()


def test_logits_are_held_one_chunk_at_a_time(comm, monkeypatch):
    hidden, w, targets = problem()
    held = []
    made = chunks.Product.make_room
    monkeypatch.setattr(
        chunks.Product, "make_room", lambda self, *given: (made(self, *given), held.append(sum(map(len, self.logits))))
    )
    run(comm, hidden, w, targets, chunk=6)
    assert held == [6]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"reduction": "none"}, ValueError, "reduction must be 'sum' or 'mean'"),
        ({"targets": np.zeros(ROWS + 1, int)}, ValueError, "targets must be class numbers of shape"),
        ({"weight": np.ones(CLASSES + 1)}, ValueError, "one entry per class"),
        (
            {"batch_comm": None},
            TypeError,
            r"argument 'batch_comm'; its options are ignore_index, .*, bias, chunk",
        ),
        ({"bias": np.ones(CLASSES + 1)}, ValueError, "bias must have one entry per class"),
        ({"bias": np.ones(CLASSES, np.float32)}, TypeError, "hidden, w, bias must have one dtype"),
    ],
    ids=str,
)
def test_wrong_call_on_the_tape_raises(comm, change, error, text):
    mesh = mesh_of(comm, comm.size)
    hidden, w, targets = problem()
    hidden, w = pce.distribute(hidden, mesh), pce.distribute(w, mesh, data=pce.Shard(1))
    for mode in (nullcontext(), pce.reproducible()):
        with mode, pytest.raises(error, match=text):
            pce.linear_cross_entropy(hidden, w, **{"targets": targets} | change)


@pytest.mark.ranks(1, 2)  # as many as GPUs are tested with
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("name", ["plain", "weights and smoothing", "bias"])
def test_cupy_arrays_have_loss_of_their_products(comm, cupy, monkeypatch, name, dtype):
    monkeypatch.setattr(chunks, "_COLUMNS_ON_GPU", 3)  # several blocks of columns
    hidden, w, targets = problem(dtype)
    mine = slice(*pce.shard_range(CLASSES, comm.size, comm.rank))
    given = cupy.asarray(hidden), cupy.asarray(w)[:, mine], cupy.asarray(targets)
    kinds = {"weight": np.float64, "bias": dtype}
    whole = {each: value.astype(kinds[each]) if each in kinds else value for each, value in CALLS[name].items()}
    options = {each: cupy.asarray(value[mine]) if each in kinds else value for each, value in whole.items()}
    loss, *found = pce.linear_cross_entropy_value_and_grad(*given, comm=comm, chunk=8, **options)
    gradients = [gradient for gradient in found if gradient is not None]
    assert all(isinstance(array, cupy.ndarray) for array in (loss, *gradients))
    expected = exact(hidden, w, targets, **whole)
    wanted = [expected[1], expected[2][:, mine], *([expected[3][mine]] if "bias" in whole else [])]
    np.testing.assert_allclose(loss.item(), expected[0], rtol=1e-6)
    for found, right in zip(gradients, wanted, strict=True):
        assert found.dtype == dtype
        error = np.abs(cupy.asnumpy(found).astype(np.float64) - right)
        unit = float(ml_dtypes.finfo(dtype).eps)
        assert np.all(error <= 0.51 * unit * np.abs(right) + 1e-5 * np.abs(expected[1]).max())


@pytest.mark.parametrize("reproducible", [False, True])
def test_gradients_on_the_tape_are_partial_where_sharded(comm, reproducible):
    mesh = mesh_of(comm, comm.size)
    hidden, w, targets = problem()
    whole, weight = np.linspace(-3.0, 2.0, CLASSES), np.linspace(0.5, 2.0, CLASSES)
    expected = exact(hidden, w, targets, bias=whole)
    for over_rows in (True, False):
        first, last = {"data": pce.Shard(0)}, {"data": pce.Shard(1)}
        h = pce.distribute(hidden, mesh, requires_grad=True, **(first if over_rows else {}))
        v = pce.distribute(w, mesh, requires_grad=True, **({} if over_rows else last))
        bias = pce.distribute(whole, mesh, requires_grad=True, **({} if over_rows else first))
        with pce.reproducible(reproducible):
            loss = pce.linear_cross_entropy(h, v, targets, bias=bias, chunk=6)
            loss.backward()
        if not reproducible:
            summed = [v, bias] if over_rows else [h]
            assert all(x.grad.placements == {"data": pce.Partial("sum")} for x in summed)
            assert over_rows or bias.grad.placements == first
        np.testing.assert_allclose(loss.item(), expected.loss, rtol=1e-13)
        for x, gradient, atol in ((h, expected.dhidden, 1e-15), (v, expected.dw, 1e-14), (bias, expected.dbias, 1e-15)):
            np.testing.assert_allclose(x.grad.full(), gradient, atol=atol)
        plain = pce.linear_cross_entropy(h, v, targets, bias=whole, weight=weight)
        np.testing.assert_allclose(plain.item(), exact(hidden, w, targets, bias=whole, weight=weight).loss, rtol=1e-13)


def test_mean_over_ignored_rows_has_no_gradient(comm):
    hidden, w, targets = problem()
    loss, dhidden, dw, *_ = run(comm, hidden, w, np.full_like(targets, -100))
    assert np.isnan(loss)
    assert not dhidden.any()
    assert not dw.any()


@pytest.mark.parametrize("reproducible", [False, True])
def test_ignored_row_has_no_gradient_beside_weight_0(comm, reproducible):
    # Neither 0 times the inf of 1 / 0, nor the nan in the row itself, nor the number of ranks that share the rows.
    hidden, w, _ = problem()
    targets, weight = np.array([2, -100]), np.where(np.arange(CLASSES) == 2, 0.0, 1.0)
    mesh = mesh_of(comm, comm.size)
    for placed in (pce.Shard(0), pce.Replicate()):
        h = pce.distribute(hidden[:2], mesh, requires_grad=True, data=placed)
        v = pce.distribute(w, mesh, requires_grad=True)
        with pce.reproducible(reproducible):
            pce.linear_cross_entropy(h, v, targets, weight=weight).backward()
        found = h.grad.full()
        assert np.isnan(found[0]).all()
        assert not found[1].any()
        assert np.isnan(v.grad.full()).all()
    dhidden = run(comm, hidden[:2], w, targets, weight=weight)[1]
    assert np.isnan(dhidden[0]).all()
    assert not dhidden[1].any()


@pytest.mark.parametrize("reproducible", [False, True])
def test_nan_in_ignored_row_reaches_no_gradient(comm, reproducible):
    hidden, w, targets = problem()
    expected = exact(hidden, w, targets)
    hidden[4] = np.nan
    mesh = mesh_of(comm, comm.size)
    h = pce.distribute(hidden, mesh, requires_grad=True, data=pce.Shard(0))
    v = pce.distribute(w, mesh, requires_grad=True)
    with pce.reproducible(reproducible):
        loss = pce.linear_cross_entropy(h, v, targets, chunk=6)
        loss.backward()
    whole = run(comm, hidden, w, targets, chunk=6)
    for found in ((loss.item(), h.grad.full(), v.grad.full()), (whole[0], whole[1], None)):
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-13)
        np.testing.assert_allclose(found[1], expected[1], atol=1e-15)
    np.testing.assert_allclose(v.grad.full(), expected[2], atol=1e-14)
    np.testing.assert_allclose(whole[2], expected[2][:, whole[4]], atol=1e-14)


def test_weights_beyond_sums_of_float32_are_refused():
    hidden, w, targets = problem(np.float32)
    for weight in (1e39, 1e-30, np.nan):
        with pytest.raises(ValueError, match="weight must be 0 or from 1e-18 to 1e"):
            pce.linear_cross_entropy_value_and_grad(hidden, w, targets, weight=np.full(CLASSES, weight))

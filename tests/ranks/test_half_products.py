"""Products of halves with sums in float32, as cuBLAS gives them: any layout, gradients of any size."""

import ml_dtypes
import numpy as np
import pytest

from pce_mpi.arrays import to_host
from pce_mpi.kernels import gemm
from pce_mpi.loss import chunks

ROWS, FEATURES, CLASSES = 23, 5, 41
pytestmark = pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=lambda dtype: dtype.__name__)
# A matrix that is part of a larger one, or its transpose.
LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: x.T.copy().T,
    "some columns": lambda x: x.repeat(2, axis=1)[:, 1 : x.shape[1] + 1],
    "every other row": lambda x: x.repeat(2, axis=0)[::2],
    "every other column": lambda x: x.repeat(2, axis=1)[:, ::2],
    "last row first": lambda x: x[::-1],
    "one row": lambda x: x[:1],
    "one column": lambda x: x[:, :1],
    "no column": lambda x: x[:, :0],
}


def problem(dtype):
    rng = np.random.default_rng(3)
    return rng.standard_normal((ROWS, FEATURES)).astype(dtype), rng.standard_normal((FEATURES, CLASSES)).astype(dtype)


def products_of(cupy, hidden, w, dlogits, rounded=False):
    """Logits, and the gradients of hidden and w, which is added to one that there is."""
    results = [cupy.asarray(np.full((len(hidden), w.shape[1]), np.nan, np.float32))]
    results += [cupy.asarray(np.zeros(hidden.shape, np.float32)), cupy.asarray(np.ones(w.shape, np.float32))]
    if gemm.takes(w):
        hidden, w = gemm.readable(hidden), gemm.readable(w)
    chunks.multiply(hidden, w, results[0])
    chunks.add_gradients(hidden, w, cupy.asarray(dlogits), *results[1:], rounded)
    return [to_host(result) for result in results]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_halves_in_any_layout_are_multiplied(cupy, dtype, layout):
    hidden, w = (layout(cupy.asarray(x)) for x in problem(dtype))
    features = min(hidden.shape[1], w.shape[0])
    hidden, w = hidden[:, :features], w[:features]
    h, v = (cupy.asnumpy(x).astype(np.float64) for x in (hidden, w))
    dlogits = np.random.default_rng(4).standard_normal((len(h), v.shape[1])).astype(np.float32)
    found = products_of(cupy, hidden, w, dlogits)
    for product, right in zip(found, (h @ v, dlogits @ v.T, 1 + h.T @ dlogits), strict=True):
        np.testing.assert_allclose(product, right, atol=2.0**-15 * CLASSES)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-9, 1.0, 1e9])
def test_gradients_of_any_size_fit_halves(cupy, dtype, size):
    hidden, w = problem(dtype)
    dlogits = np.exp(-8 * np.random.default_rng(5).random((ROWS, CLASSES))).astype(np.float32) * np.float32(size)
    _, dhidden, dw = products_of(cupy, cupy.asarray(hidden), cupy.asarray(w), dlogits)
    h, v, wide = (x.astype(np.float64) for x in (hidden, w, dlogits))
    np.testing.assert_allclose(dhidden, wide @ v.T, rtol=0, atol=2.0**-16 * size * np.abs(v).sum(1).max())
    np.testing.assert_allclose(dw, 1 + h.T @ wide, rtol=1e-6, atol=2.0**-16 * size * np.abs(h).sum(0).max())


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-9, 1.0, 1e9])
def test_rounded_gradient_is_nearest_half(cupy, dtype, size):
    hidden, w = problem(dtype)
    dlogits = np.exp(-8 * np.random.default_rng(5).random((ROWS, CLASSES))).astype(np.float32) * np.float32(size)
    h, v, wide = (x.astype(np.float64) for x in (hidden, w, dlogits))
    largest = 2.0 ** np.floor(np.log2(wide.max())) if size else 1.0  # float16 has the fewest bits of small elements
    half = (wide / largest).astype(dtype).astype(np.float64) * largest
    for xp in (cupy, np):
        _, dhidden, dw = products_of(xp, xp.asarray(hidden), xp.asarray(w), dlogits, rounded=True)
        np.testing.assert_allclose(dhidden, half @ v.T, rtol=0, atol=2.0**-20 * size * np.abs(v).sum(1).max())
        np.testing.assert_allclose(dw, 1 + h.T @ half, rtol=1e-6, atol=2.0**-20 * size * np.abs(h).sum(0).max())


def test_rounded_gradient_takes_two_products_of_four(cupy, monkeypatch, dtype):
    called, multiply = [], gemm.gemm
    monkeypatch.setattr(gemm, "gemm", lambda *operands, **options: called.append(1) or multiply(*operands, **options))
    for rounded in (False, True):
        products_of(cupy, *map(cupy.asarray, problem(dtype)), np.ones((ROWS, CLASSES), np.float32), rounded)
    assert len(called) == 5 + 3


def test_small_gradients_beside_large_are_kept(cupy, dtype):
    hidden, w = problem(dtype)
    dlogits = np.full((ROWS, CLASSES), 1e-9, np.float32)
    dlogits[0] = 1
    _, dhidden, _ = products_of(cupy, cupy.asarray(hidden), cupy.asarray(w), dlogits)
    np.testing.assert_allclose(dhidden, dlogits.astype(np.float64) @ w.astype(np.float64).T, rtol=2.0**-8)


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_nan_gradient_stays_in_its_row(cupy, dtype, odd):
    dlogits = np.full((ROWS, CLASSES), 1e6, np.float32)
    dlogits[3, 7] = odd
    _, dhidden, dw = products_of(cupy, *map(cupy.asarray, problem(dtype)), dlogits)
    rows, columns = np.arange(ROWS)[:, None] == 3, np.arange(CLASSES) == 7
    np.testing.assert_array_equal(~np.isfinite(dhidden), np.broadcast_to(rows, dhidden.shape))
    np.testing.assert_array_equal(~np.isfinite(dw), np.broadcast_to(columns, dw.shape))


def test_older_gpus_convert_bfloat16(cupy, monkeypatch, dtype):
    monkeypatch.setattr(gemm, "_AMPERE", 10**6)
    called = []  # by us: CuPy multiplies by gemmEx too
    monkeypatch.setattr(gemm, "gemm", lambda *_, **options: called.append(dtype))
    products_of(cupy, *map(cupy.asarray, problem(dtype)), np.ones((ROWS, CLASSES), np.float32))
    assert bool(called) == (dtype == np.float16)

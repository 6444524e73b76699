"""Variances and norms of numbers far from 0, forward and backward, against 60 digits: 4 ulp of the largest number."""

import functools

import mpmath
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Replicate, Shard
from pce_mpi.ops import normalization
from ranks.grids import mesh_of
from ranks.op_cases import alone
from ulps import MOMENTS, OPERATION, worst

ROWS, COLUMNS = 3, 41
EPS = 1e-5
pytestmark = pytest.mark.ranks(1, 3)
each_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
each_mode = pytest.mark.parametrize("reproducible", [False, True], ids=["plain", "reproducible"])


@pytest.fixture(params=["compiled", "NumPy"])
def loops(request, monkeypatch):
    """Rows that are whole, by compiled loops and without them."""
    if request.param == "NumPy":
        monkeypatch.setattr(normalization, "layer_loops", lambda *_: None)


def drawn(dtype, offset, *shape):
    """Numbers `offset` spreads from 0; in the last row the first one is far from the others."""
    x = np.random.default_rng(0).normal(offset, 1, shape)
    x[-1, 0] += 1e3
    return x.astype(dtype)


def exactly(function):
    """Make a function of a row of mpmath numbers and its upstream gradient into one of matrices of float64."""

    @functools.wraps(function)
    def of_rows(x, g):
        with mpmath.workdps(60):
            rows = [
                function([mpmath.mpf(float(v)) for v in row], [mpmath.mpf(float(v)) for v in of_row])
                for row, of_row in zip(x, g, strict=True)
            ]
        return [np.array([np.vectorize(float, otypes=[float])(row[i]) for row in rows]) for i in range(2)]

    return of_rows


def centered(x):
    mean = mpmath.fsum(x) / len(x)
    return [v - mean for v in x]


@exactly
def layer_norm(x, g):
    return rms_norm.__wrapped__(centered(x), centered(g))


@exactly
def rms_norm(x, g):
    deviation = mpmath.sqrt(mpmath.fsum(v * v for v in x) / len(x) + EPS)
    y = [v / deviation for v in x]
    along = mpmath.fsum(a * b for a, b in zip(g, y, strict=True)) / len(x)
    return y, [(a - b * along) / deviation for a, b in zip(g, y, strict=True)]


@exactly
def var(x, g):
    d = centered(x)
    return [mpmath.fsum(v * v for v in d) / (len(x) - 1)], [2 * g[0] * v / (len(x) - 1) for v in d]


@exactly
def std(x, g):
    d = centered(x)
    deviation = mpmath.sqrt(mpmath.fsum(v * v for v in d) / (len(x) - 1))
    return [deviation], [g[0] * v / deviation / (len(x) - 1) for v in d]


FUNCTIONS = {
    "layer_norm": (pce.layer_norm, layer_norm),
    "rms_norm": (pce.rms_norm, rms_norm),
    "var": (lambda x, axis=1: pce.var(x, axis, ddof=1, keepdims=True), var),
    "std": (lambda x, axis=1: pce.std(x, axis, ddof=1, keepdims=True), std),
}


@each_mode
@each_dtype
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_far_from_0_keep_digits(comm, loops, name, dtype, reproducible):
    mesh = mesh_of(comm, comm.size)
    call, exact = FUNCTIONS[name]
    for offset in (0.0, -1e6, 1e6):
        x = drawn(dtype, offset, ROWS, COLUMNS)
        y_shape = (ROWS, 1) if name in ("var", "std") else x.shape
        g = np.random.default_rng(1).normal(0, 1, y_shape).astype(dtype)
        expected, gradient = exact(x, g)
        for axis, placed in [(1, Shard(1)), (1, Shard(0)), (1, Replicate()), (0, Shard(0)), (0, Replicate())]:
            turned = np.ascontiguousarray if axis else np.transpose
            held = pce.distribute(turned(x), mesh, data=placed, requires_grad=True)
            with pce.reproducible(reproducible):
                y = call(held, axis=axis)
                (y * turned(g)).sum().backward()
            found = turned(y.full()), turned(held.grad.full())
            for got, right, size in zip(found, (expected, gradient), (np.abs(expected), np.abs(gradient)), strict=True):
                where = f"offset {offset}, axis {axis}, {placed}"
                assert worst(got, right, dtype, size.max(axis=1, keepdims=True) + 0 * size) <= MOMENTS, where


@each_mode
@each_dtype
def test_equal_elements_have_no_variance(comm, loops, dtype, reproducible):
    mesh = mesh_of(comm, comm.size)
    for value in (0.1, 77.7, 1000003.3, -1e-30, 3e-310, 1e30):
        for shape in ((1, 7), (2, 3), (1, 1000)):
            x = np.full(shape, value, dtype)
            for placed in (Shard(1), Replicate()):
                held = pce.distribute(x, mesh, data=placed, requires_grad=True)
                with pce.reproducible(reproducible):
                    results = [pce.layer_norm(held), pce.var(held, axis=1), pce.std(held, axis=1), pce.std(held)]
                    results[2].sum().backward()
                    of_nothing = pce.layer_norm(held, eps=0.0).full()
                assert np.isnan(of_nothing).all()
                assert [np.count_nonzero(each.full()) for each in results] == [0] * 4, (value, shape, placed)
                assert not held.grad.full().any()


@each_mode
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_gradient_of_short_rows_is_right(comm, loops, name, reproducible):
    # Its terms, about the upstream gradient over the deviation, cancel nearly or wholly.
    mesh, (call, exact) = mesh_of(comm, comm.size), FUNCTIONS[name]
    for columns, offset in ((2, 0.0), (2, 1e6), (3, 0.0), (3, -1e6)):
        rng = np.random.default_rng(columns)
        x, g = rng.normal(offset, 1, (30, columns)), rng.normal(0, 1, (30, columns))
        deviation = x.std(axis=1) if name == "layer_norm" else np.sqrt((x * x).mean(axis=1))
        terms = np.broadcast_to((np.abs(g).max(axis=1) / deviation)[:, None], g.shape)
        for placed in (Shard(0), Shard(1), Replicate()):
            held = pce.distribute(x, mesh, data=placed, requires_grad=True)
            with pce.reproducible(reproducible):
                (call(held) * g).sum().backward()
            assert worst(held.grad.full(), exact(x, g)[1], np.float64, terms) <= 2 * MOMENTS, (columns, offset, placed)


@each_mode
@each_dtype
def test_gradient_along_rows_cancels(comm, loops, dtype, reproducible):
    # That of the sum of normalized rows is 0, and that of equal elements by rms_norm next to 0.
    mesh = mesh_of(comm, comm.size)
    for placed in (Shard(0), Shard(1), Replicate()):
        for call, row in ((pce.layer_norm, [4.0, 5.0, 9.0]), (pce.rms_norm, [3.7, 3.7, 3.7])):
            x = pce.distribute(np.array([row, [np.nan, 1.0, 2.0]], dtype), mesh, data=placed, requires_grad=True)
            with pce.reproducible(reproducible):
                call(x).sum().backward()
            gradient = x.grad.full()
            value = float(x.full()[0, 0])
            exact = 0.0 if call is pce.layer_norm else EPS / (value * value + EPS) ** 1.5
            np.testing.assert_allclose(gradient[0], exact, rtol=1e-6, atol=1e-15)
            assert np.isnan(gradient[1]).all()


def test_infinite_element_leaves_others_0(comm, loops):
    x = np.array([[np.inf, 1.0, -2.0], [3.0, 1.0, 2.0]])
    for placed in (Shard(0), Shard(1), Replicate()):
        y = pce.rms_norm(pce.distribute(x, mesh_of(comm, comm.size), data=placed)).full()
        assert np.array_equal(y[0], [np.nan, 0.0, 0.0], equal_nan=True)
        assert np.isfinite(y[1]).all()


def test_variance_of_halves_is_rounded_once(comm):
    mesh = mesh_of(comm, comm.size)
    x = np.random.default_rng(4).normal(0, 1, (500, 12)).astype(np.float16)
    expected = x.astype(np.float64).var(axis=0)
    for function, right in ((pce.var, expected), (pce.std, np.sqrt(expected))):
        found = function(pce.distribute(x, mesh, data=Shard(0)), axis=0).full()
        assert np.array_equal(found, right.astype(np.float16))


def test_variance_of_neighbours_is_that_of_last_bits(comm):
    last = np.array([0.0, 1.0, 0.0, 1.0]) * np.spacing(77.7)
    x = pce.distribute(77.7 + last, mesh_of(comm, comm.size), data=Shard(0))
    assert pce.var(x).item() == last.var()


def test_many_numbers_are_added_in_pairs():
    x = np.random.default_rng(0).normal(1e6, 1, (2, 100_000))
    expected = np.array([np.var((row - 1e6).astype(np.longdouble)) for row in x])
    for axis, array in ((1, x), (0, np.ascontiguousarray(x.T))):
        assert (
            worst(pce.var(pce.distribute(array, alone()), axis).full(), expected.astype(float), np.float64) <= MOMENTS
        )


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_rows_apart_in_memory_keep_digits(loops, name):
    rng = np.random.default_rng(0)
    g = rng.normal(0, 1, (2, 5000))
    for x in (rng.normal(0, 1, (2, 5000)), np.array([[0.1] * 4999 + [0.3]] * 2)):
        expected, gradient = FUNCTIONS[name][1](x, g)
        of_first = pce.distribute(np.ascontiguousarray(x.T), alone(), requires_grad=True)
        of_fortran = pce.distribute(np.asfortranarray(x), alone(), requires_grad=True)
        for held, axis, upstream in ((of_first, 0, g.T), (of_fortran, 1, g)):
            y = getattr(pce, name)(held, axis=axis)
            (y * upstream).sum().backward()
            for found, exact in ((y.full(), expected), (held.grad.full(), gradient)):
                rows = found.T if axis == 0 else found
                size = np.broadcast_to(np.abs(exact).max(axis=1, keepdims=True), exact.shape)
                assert worst(rows, exact, np.float64, size) <= MOMENTS, (name, axis)


@pytest.mark.parametrize("function", [pce.sum, pce.mean])
def test_sums_along_any_axis_keep_digits(function):
    for dtype in (np.float32, np.float64):
        x = np.full((8200, 3), 0.1, dtype)
        expected = np.full(3, float(dtype(0.1)) * (len(x) if function is pce.sum else 1))
        for array, axes in ((x, 0), (np.asfortranarray(x.T), 1), (np.broadcast_to(x[:, None], (8200, 2, 3)), (0, 1))):
            exact = expected * (2 if axes == (0, 1) and function is pce.sum else 1)
            assert worst(function(pce.distribute(array, alone()), axes).full(), exact, dtype) <= OPERATION

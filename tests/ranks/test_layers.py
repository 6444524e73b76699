"""The compiled loops of layers, with each instruction set, beside what NumPy computes without them."""

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi.kernels import compiled
from pce_mpi.ops import attention, elementwise, normalization
from ranks.op_cases import alone
from ulps import MOMENTS, OPERATION, worst

BEYOND = np.float32(7.5)


@pytest.fixture(params=compiled.instruction_sets())
def instruction_set(request):
    compiled.choose(request.param)
    yield request.param
    compiled.choose("")


def without_loops(monkeypatch):
    """Let NumPy compute what compiled loops would."""
    for module in (attention, elementwise, normalization):
        monkeypatch.setattr(module, "layer_loops", lambda *_: None)


def test_gelu_has_bits_of_exact_functions(instruction_set, monkeypatch):
    rng = np.random.default_rng(0)
    edges = [0.0, np.inf, np.nan, 1e-40, 3e38, 24.0, 24.0001, 9.3, 0.7517915]
    x = np.concatenate([edges, np.negative(edges), np.linspace(-26, 26, 20_011), rng.normal(0, 2, 20_000)])
    held = pce.distribute(x.astype(np.float32), alone(), requires_grad=True)

    def bits():
        held.grad = None
        y = pce.gelu(held)
        y.sum().backward()
        return [np.where(np.isnan(each), np.nan, each).tobytes() for each in (y.full(), held.grad.full())]

    plain = bits()
    with pce.reproducible():
        compiled_bits = bits()
        without_loops(monkeypatch)
        expected = bits()
    assert plain == compiled_bits == expected


def test_gelu_writes_no_number_beyond_its_arrays(instruction_set):
    x = np.linspace(-3, 3, 70, dtype=np.float32)
    for count in range(70):
        y, slope = np.full((2, 70), BEYOND)
        compiled.gelu(x[:count], y[:count], slope[:count], 1.5, 0.07, 24.0)
        assert (y[count:] == BEYOND).all()
        assert (slope[count:] == BEYOND).all()
        assert not (y[:count] == BEYOND).any()


@pytest.mark.parametrize("shape", [(3, 4, 32, 32), (2, 3, 1), (1, 5, 100), (4, 17), (2, 0, 3), (3, 4, 0)])
@pytest.mark.parametrize("first", [0, 3, 1000])
def test_probabilities_of_attention_are_right(instruction_set, shape, first):
    buffer = np.full(np.prod(shape, dtype=int) + 40, BEYOND)
    p = buffer[:-40].reshape(shape)
    p[...] = np.random.default_rng(1).normal(0, 20, shape)
    if p.size > 100:  # a hidden key first, and a hidden row
        p.reshape(-1)[[40, 70]], p[..., 1, 1] = -np.inf, -np.inf
    expected = p.astype(np.float64)
    with np.errstate(all="ignore"):
        attention._softmax(np, expected, first)
    compiled.attend(p, first + 1)
    # The distance from the largest score, up to 150, is a number of float32.
    np.testing.assert_allclose(p, expected, rtol=150 * 2.0**-24, atol=2.0**-126)
    assert (p[expected == 0.0] == 0.0).all()
    assert (buffer[-40:] == BEYOND).all()


def test_many_scores_are_added_with_all_digits(instruction_set):
    for count in (1000, 8193, 200_000):
        p = np.zeros((1, 1 + count), np.float32)
        p[0, 0] = 0.125
        compiled.attend(p, 1 + count)
        np.testing.assert_allclose(p[0, 1:], 1 / (count + np.exp(0.125)), rtol=1e-6)


def test_long_rows_are_normalized_with_all_digits(instruction_set):
    x, g = np.random.default_rng(4).normal([[3.0], [0.0]], 1, (2, 1_000_000))
    held = pce.distribute(x[None], alone(), requires_grad=True)
    y = pce.layer_norm(held)
    (y * g).sum().backward()
    near = x - x.astype(np.longdouble).mean()
    deviation = np.sqrt((near * near).mean() + np.longdouble(1e-5))
    normal = near / deviation
    gradient = (g - g.astype(np.longdouble).mean() - normal * (g * normal).mean()) / deviation
    for got, right in ((y, normal), (held.grad, gradient)):
        right = right.astype(np.float64)
        assert worst(got.full()[0], right, np.float64, np.full_like(right, np.abs(right).max())) <= MOMENTS


@pytest.mark.parametrize("strange", [np.nan, np.inf])
def test_strange_score_makes_its_row_nan(instruction_set, strange):
    p = np.zeros((3, 40), np.float32)
    p[1, 1] = strange
    compiled.attend(p, 1)
    assert np.isnan(p[1]).all()  # also of hidden keys, as by NumPy
    assert np.array_equal(p[[0, 2], :4], [[1, 0, 0, 0], [np.float32(1) / 3] * 3 + [0]])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("function", [pce.layer_norm, pce.rms_norm])
def test_normalized_rows_are_those_of_numpy(instruction_set, monkeypatch, dtype, function):
    rng = np.random.default_rng(2)
    cases = []
    for shape in ((5, 1), (1, 5), (7, 3), (4, 100), (3, 1500), (0, 6), (2, 0), (3, 5, 4)):
        for axis, scaled in ((0, False), (1, False), (0, True), (1, True)):
            mean = np.reshape([3, 0], (2, *[1] * len(shape)))
            x, upstream = rng.normal(mean, 1, (2, *shape)).astype(dtype)
            cases.append((x, upstream, [rng.normal(0, 1, shape[axis]).astype(dtype)] * scaled, axis))

    def results(x, upstream, scale, axis):
        held = [pce.distribute(array, alone(), requires_grad=True) for array in (x, *scale)]
        y = function(*held, axis=axis)
        (y * upstream).sum().backward()
        return [y.full(), *(each.grad.full() for each in held)]

    found = [results(*case) for case in cases]
    without_loops(monkeypatch)
    for case, mine in zip(cases, found, strict=True):
        for got, right in zip(mine, results(*case), strict=True):
            size = np.broadcast_to(np.abs(right).max(initial=1.0), right.shape)
            assert got.dtype == right.dtype == dtype
            assert worst(got, right, dtype, size) <= OPERATION


def test_arrays_without_loops_are_normalized(monkeypatch):
    whole = np.random.default_rng(3).normal(0, 1, (6, 2, 8)).astype(np.float32)
    held = pce.distribute(whole, alone())
    cases = [
        (held[:, ::2], np.ones(8)),  # float64 beside float32
        (held.swapaxes(0, 1), None),
        (held[..., ::2], np.ones(4, np.float32)),
        (held.astype(np.float16), None),
    ]
    found = [pce.layer_norm(*case).full() for case in cases]
    without_loops(monkeypatch)
    for mine, case in zip(found, cases, strict=True):
        expected = pce.layer_norm(*case).full()
        assert mine.dtype == expected.dtype
        np.testing.assert_allclose(mine, expected, rtol=1e-6, atol=1e-6)


def test_loops_take_what_they_can():
    x = np.ones((4, 8), np.float32)
    unaligned = np.frombuffer(b"." + x.tobytes(), np.float32, offset=1)
    assert compiled.takes_layer(x, x)
    for others in ((x, x.astype(np.float64)), (x.astype(np.float16),), (x[:, ::2],), (unaligned,), (x.T,)):
        assert not compiled.takes_layer(*others)

"""Functions of our own arithmetic: how many bits are right, special values, and the same bits everywhere."""

import hashlib

import ml_dtypes
import mpmath
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi.arrays import to_host
from pce_mpi.exact import functions
from pce_mpi.exact.functions import BLOCK
from pce_mpi.ops import elementwise
from ranks.exact import pair
from ranks.op_cases import alone
from ulps import FUNCTION, GELU, GELU_SLOPE, ulp, worst

EXACT = {
    "exp": mpmath.exp,
    "log": mpmath.log,
    "log1p": mpmath.log1p,
    "tanh": mpmath.tanh,
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "sin": mpmath.sin,
    "cos": mpmath.cos,
    "power": mpmath.power,
}
UNARY = [name for name in EXACT if name != "power"]
DTYPES = [np.float32, np.float64]
SPECIAL = [0.0, 1.0, 2.0, 3.0, 0.5, 2.5, 1e-310, 5e-324, 1e-45, 1.7e308, 3.4e38, 2.0**53, 2.0**53 + 2, 2.0**63, 1e5]
SPECIAL = [sign * value for value in (*SPECIAL, np.inf, np.nan) for sign in (1.0, -1.0)]
# The arguments from which a function overflows or underflows, its argument is reduced by one more, its formula changes,
# or its result is next to 0.
ROOT = 1.4142135623730951
EDGES = [709.782712893384, -708.3964185322641, -745.1332191019411, 88.72284, -87.33655, -103.97208]
EDGES += [(k + 0.5) * 0.6931471805599453 for k in range(-4, 4)] + [ROOT / 2, ROOT, ROOT / 2 - 1, ROOT - 1]
EDGES += [k * np.pi / 4 for k in (*range(1, 40), 2 * 10**3, 10**5, 13 * 10**5)] + [
    2.0**20,
    1e22,
    6381956970095103 * 2.0**797,
    1 - 2.0**-53,
    19.06,
]
EDGES += [2.0**-1022, 2.0**-126, 2.0**-28, 2.0**-54, 355.0, 16367173 * 2.0**72]


def drawn(rng, low, high, count):
    """Signed numbers of all sizes from 2^low to 2^high, without a function of libm."""
    size = np.ldexp(1.0 + rng.random(count), rng.integers(low, high, count))
    return np.where(rng.random(count) < 0.5, -size, size)


def cast(dtype, *numbers):
    with np.errstate(over="ignore"):
        return np.concatenate(numbers).astype(dtype)


def arguments(name, dtype, count):
    """Arguments of a function: special ones and edges, and `count` of each of several ranges."""
    rng, edges = np.random.default_rng(1), np.array(EDGES).astype(np.float64)
    edges = cast(dtype, edges, -edges)
    edges = np.concatenate([edges, np.nextafter(edges, dtype(0)), np.nextafter(edges, dtype(np.inf))])
    if name != "power":
        uniform = [scale * (2 * rng.random(count) - 1) for scale in (1, 6, 100, 750)]
        beside_one = [sign * (1.0 + drawn(rng, -52, -2, count)) for sign in (1.0, -1.0)]
        sizes = [drawn(rng, -60, 4, count), drawn(rng, -1074, 1023, count), drawn(rng, 19, 130, count)]
        return [cast(dtype, edges, SPECIAL, *uniform, *beside_one, *sizes)]
    x = [np.abs(drawn(rng, *ends, count)) for ends in ((-1074, 1023), (-120, 120), (-4, 4), (-1, 1))]
    x += [1.0 + drawn(rng, -50, -3, count), -np.rint(100 * rng.random(count))]
    y = [scale * (2 * rng.random(count) - 1) for scale in (1, 1, 300, 2000)]
    y += [drawn(rng, 0, 60, count), np.rint(30 * rng.random(count) - 15)]
    one, other = np.meshgrid(SPECIAL, SPECIAL)
    ones = np.ones(edges.size)
    return [cast(dtype, edges, edges, one.ravel(), *x), cast(dtype, ones / 2, -3 * ones, other.ravel(), *y)]


def called(name, xp, *arrays):
    return to_host(getattr(functions, name)(*map(xp.asarray, arrays)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXACT)
def test_function_has_its_bits(xp, name, dtype):
    operands = arguments(name, dtype, 150)
    found = called(name, xp, *operands)
    assert found.dtype == dtype
    compared, largest = 0, float(np.finfo(dtype).max)
    for *numbers, value in zip(*(operand.tolist() for operand in operands), found.tolist(), strict=True):
        if not np.isfinite([*numbers, value]).all():
            continue
        with mpmath.workdps(60):
            exact = EXACT[name](*map(mpmath.mpf, numbers))
            error = abs(mpmath.mpf(value) - exact) / mpmath.mpf(float(ulp(float(exact), dtype)))
        assert abs(exact) <= largest
        assert error <= FUNCTION[dtype], (numbers, value)
        compared += 1
    assert compared > 500


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in EXACT if name != "sigmoid"])
def test_special_values_are_those_of_numpy(xp, name, dtype):
    operands = arguments(name, dtype, 50)
    with np.errstate(all="raise"):
        found = called(name, xp, *operands)
    with np.errstate(all="ignore"):
        expected = getattr(np, name)(*operands)
    for kind in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(kind(found), kind(expected))
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found[number]), np.signbit(expected[number]))
    plain = np.isfinite(expected)
    close = 8 * ulp(expected[plain], dtype)  # NumPy has functions of less than full accuracy
    assert (np.abs(found[plain].astype(np.float64) - expected[plain]) <= close).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_of_sigmoid(xp, dtype):
    x = np.array([np.nan, np.inf, 800, 0.0, -0.0, -800, -np.inf], dtype)
    np.testing.assert_array_equal(called("sigmoid", xp, x), np.array([np.nan, 1, 1, 0.5, 0.5, 0, 0], dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXACT)
def test_bits_depend_on_elements_alone(xp, name, dtype):
    operands = [xp.asarray(np.resize(each, 2 * BLOCK + 77)) for each in arguments(name, dtype, 100)]
    function = getattr(functions, name)

    def bits(*arrays):
        found = to_host(function(*arrays))
        assert found.shape == arrays[0].shape
        assert found.dtype == dtype
        return found.tobytes()

    whole = to_host(function(*operands))
    assert bits(*(each[::-1] for each in operands)) == whole[::-1].tobytes()
    assert bits(*(each[5::7] for each in operands)) == whole[5::7].tobytes()
    assert bits(*(each[:-1].reshape(4, -1).T for each in operands)) == whole[:-1].reshape(4, -1).T.tobytes()
    pieces = [slice(0, 1), slice(1, 1), slice(1, BLOCK + 3), slice(BLOCK + 3, None)]
    assert b"".join(bits(*(each[piece] for each in operands)) for piece in pieces) == whole.tobytes()
    for index in range(0, whole.size, 997):
        assert bits(*(each[index].reshape(()) for each in operands)) == whole[index].tobytes()


def test_power_broadcasts_its_operands(xp):
    x, y = xp.asarray(np.arange(1.0, 4.0))[:, None], xp.asarray(np.arange(5.0))
    found = to_host(functions.power(x, y))
    assert found.tolist() == [[base**exponent for exponent in range(5)] for base in (1.0, 2.0, 3.0)]


@pytest.mark.parametrize("name", UNARY)
def test_every_nan_has_the_same_bits(xp, name):
    payloads = np.array([0x7FF8000000000001, 0x7FF0000000000001, -1], np.int64).view(np.float64)
    assert called(name, xp, payloads).tobytes() == np.full(3, np.nan).tobytes()


def test_arrays_on_a_gpu_have_same_bits(cupy):
    for name in EXACT:
        operands = arguments(name, np.float64, 20)
        assert called(name, cupy, *operands).tobytes() == called(name, np, *operands).tobytes(), name


# Digests of the results for `arguments` of 1000 each. A change of it is a change of bits: the changelog says which.
DIGESTS = {
    "exp float32": "675745db03925a8a",
    "exp float64": "66a559ea7604f9b5",
    "log float32": "c12c8fd2c9fa7a7d",
    "log float64": "be302f30278065bc",
    "log1p float32": "60129f8d90a02edf",
    "log1p float64": "3c274f9d4e73be57",
    "tanh float32": "ca3e1aae670f138e",
    "tanh float64": "bf56658c3373bff8",
    "sigmoid float32": "cf66fa2cc49f5104",
    "sigmoid float64": "3cd993626fb8f102",
    "sin float32": "7efb9a65cdabeb7b",
    "sin float64": "1986cc28d44f4289",
    "cos float32": "63f7b82304276675",
    "cos float64": "5c15b256eab3c757",
    "power float32": "b80e7c5f6711222d",
    "power float64": "2b02b3b0178afbee",
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXACT)
def test_digest_of_function_is_golden(xp, name, dtype):
    found = called(name, xp, *arguments(name, dtype, 1000))
    assert hashlib.sha256(found.tobytes()).hexdigest()[:16] == DIGESTS[f"{name} {dtype.__name__}"]


def exact_gelu(x):
    """gelu, its derivative and the logistic function in it, of one number."""
    x, k = mpmath.mpf(float(x)), mpmath.mpf(44715) / 10**6
    a = mpmath.sqrt(8 / mpmath.pi)
    share = 1 / (1 + mpmath.exp(-a * x * (1 + k * x * x)))
    return x * share, share * (1 + x * a * (1 + 3 * k * x * x) * (1 - share)), share


@pytest.mark.ranks(1)
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("loops", ["compiled", "NumPy"])
def test_gelu_is_right_far_below_0(monkeypatch, loops, dtype, reproducible):
    if loops == "NumPy":
        monkeypatch.setattr(elementwise, "layer_loops", lambda *_: None)
    lowest = -10.3 if dtype == np.float32 else -21.6  # beyond, exp underflows
    awkward = [
        -9.3,
        -0.7517915,
        -0.75179164,
        1e-30,
        -1e-30,
        12.5,
        30.0,
        3e38,
        float(np.finfo(dtype).smallest_subnormal),
    ]
    x = np.concatenate([np.linspace(lowest, 4, 400), awkward]).astype(dtype)
    held = pce.distribute(x, alone(), requires_grad=True)
    with pce.reproducible(reproducible):
        y = pce.gelu(held)
        y.sum().backward()
    with mpmath.workdps(60):
        exact = [exact_gelu(value) for value in x]
        pairs = [pair([row[i] for row in exact]) for i in range(3)]
    value, slope, share = pairs
    assert worst(y.full(), value.near, dtype, remainder=value.rest) <= GELU[dtype]
    size = np.maximum(np.abs(slope.near), share.near) if dtype == np.float64 else None
    assert worst(held.grad.full(), slope.near, dtype, size, slope.rest) <= GELU_SLOPE[dtype]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_power_of_half_is_that_of_ieee(dtype):
    x, expected = np.array([-np.inf, -0.0, 0.0, 4.0, -1.0, np.inf], dtype), [np.inf, 0.0, 0.0, 2.0, np.nan, np.inf]
    for reproducible in (False, True):
        with pce.reproducible(reproducible):
            base = pce.distribute(x, alone(), requires_grad=True)
            column = pce.distribute(x[:, None] * np.ones(3, dtype), alone())
            powers = [base**0.5, base ** dtype(0.5), base ** np.full(6, 0.5, dtype)]
            powers += [(column ** np.full((6, 1), 0.5, dtype))[:, 1], (column ** np.full(3, 0.5, dtype))[:, 1]]
            (base**1.5).sum().backward()
        for each in powers:
            got = each.full().astype(np.float64)
            np.testing.assert_array_equal(got, expected)
            assert not np.signbit(got[1:3]).any()
        np.testing.assert_array_equal(base.grad.full()[:3].astype(np.float64), [np.inf, 0.0, 0.0])

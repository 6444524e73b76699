"""Nonlinear operations on halves, over all numbers that a half can be: computed in float32 and rounded once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Replicate, Shard
from ranks.op_cases import alone, softmax
from ulps import ROUNDED_ONCE, errors

Array = np.ndarray[Any, Any]

HALVES = [np.float16, ml_dtypes.bfloat16]
each_half = pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: np.dtype(dtype).name)


def every(dtype: Any) -> Array:
    """All finite numbers of `dtype`."""
    numbers = np.arange(2**16, dtype=np.uint16).view(dtype)
    return numbers[np.isfinite(numbers)]


def drawn(dtype: Any, *shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    return np.asarray(np.random.default_rng([seed, *shape]).normal(0, scale, shape).astype(dtype))


def wide(x: Array) -> Array:
    return x.astype(np.float64)


def faults(got: Array, exact: Array, x: Array, size: Array | None = None) -> list[str]:
    """Return the elements of `got` that are not `exact` rounded once, as text, in ulps of `size` or `exact`."""
    dtype = got.dtype
    rounded = exact.astype(dtype)
    # A number too large for a half is infinite; an error in float32 may tip a number on the border.
    largest = float(ml_dtypes.finfo(dtype).max)
    nearest = np.clip(exact, -largest, largest)
    on_the_border = (np.abs(np.abs(exact) / largest - 1) < 2.0**-8) & (np.isinf(got) | (np.abs(wide(got)) == largest))
    same = (got == rounded) | (np.isnan(got) & np.isnan(rounded)) | on_the_border
    far = errors(got, np.where(np.isnan(exact), np.nan, nearest), dtype, size)
    return [
        f"{got[i]} where {exact[i]:.6g} is exact, at {x[i]}: {far[i]:.3g} ulp"
        for i in zip(*np.nonzero(~same & ~(far <= ROUNDED_ONCE)), strict=True)
    ]


def rounded(x: Array, dtype: Any) -> Array:
    """Return float64 numbers as halves, rounded once, by operations of float64 alone."""
    info = ml_dtypes.finfo(dtype)
    step = np.exp2(np.maximum(np.frexp(x)[1] - 1, info.minexp) - info.nmant)
    return np.asarray((np.rint(x / step) * step).astype(dtype))


def is_same(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def pulled(call: Callable[..., Any], g: Array, mesh: pce.Mesh, *operands: Array, **placements: Any) -> list[Array]:
    """This rank's part of the result and the gradients, `g` being the gradient of the result; and its slices."""
    held = [pce.distribute(x, mesh, requires_grad=True, **placements) for x in operands]
    y = call(*held)
    (y * g).sum().backward()
    return [y, *(x.grad for x in held)]


def here(array: Array, like: Any) -> Array:
    """This rank's part of a global array."""
    return array[like.sharding.slices(like.mesh.coordinates)]


@dataclass(frozen=True)
class Function:
    """One function of one number, and its derivative; the reference takes float64."""

    name: str
    call: Callable[[Any], Any]
    exact: Callable[[Array], Array]
    slope: Callable[[Array], Array]


def sech(x: Array) -> Array:
    return 1 / np.cosh(x)


def bent(x: Array) -> tuple[Array, Array]:
    """Return the argument that gelu gives to the logistic function, and its derivative."""
    c, k = 2 * np.sqrt(2 / np.pi), 0.044715
    return c * (x + k * x**3), c * (1 + 3 * k * x**2)


FUNCTIONS = [
    Function("square", pce.square, lambda x: x * x, lambda x: 2 * x),
    Function("exp", pce.exp, np.exp, np.exp),
    Function("log", pce.log, np.log, lambda x: 1 / x),
    Function("log1p", pce.log1p, np.log1p, lambda x: 1 / (1 + x)),
    Function("sin", pce.sin, np.sin, np.cos),
    Function("abs", pce.abs, np.abs, np.sign),
    Function("x % 3", lambda x: x % 3, lambda x: x % 3, np.ones_like),
    Function("sqrt", pce.sqrt, np.sqrt, lambda x: 0.5 / np.sqrt(x)),
    Function("tanh", pce.tanh, np.tanh, lambda x: sech(x) ** 2),
    Function("sigmoid", pce.sigmoid, lambda x: 1 / (1 + np.exp(-x)), lambda x: sech(x / 2) ** 2 / 4),
    Function("relu", pce.relu, lambda x: np.maximum(x, 0), lambda x: 1.0 * (x > 0)),
    Function(
        "gelu",
        pce.gelu,
        lambda x: x / (1 + np.exp(-bent(x)[0])),
        lambda x: 1 / (1 + np.exp(-bent(x)[0])) + x * bent(x)[1] * sech(bent(x)[0] / 2) ** 2 / 4,
    ),
    Function("x**3", lambda x: x**3, lambda x: x**3, lambda x: 3 * x**2),
    Function("x**-1", lambda x: x**-1, lambda x: 1 / x, lambda x: -1 / x**2),
    Function("x**0.5", lambda x: x**0.5, lambda x: x**0.5, lambda x: 0.5 * x**-0.5),
    Function("2**x", lambda x: 2**x, np.exp2, lambda x: np.exp2(x) * np.log(2)),
    Function("x / 3", lambda x: x / 3, lambda x: x / 3, lambda x: np.full_like(x, 1 / 3)),
    Function("3 / x", lambda x: 3 / x, lambda x: 3 / x, lambda x: -3 / x**2),
]


MIXED: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: y - x,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
    "//": lambda x, y: y // x,
    "%": lambda x, y: y % x,
    "**": lambda x, y: x**y,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "clip": lambda x, y: np.clip(x, 1, y),
    "<": lambda x, y: x < y,
    "==": lambda x, y: x == y,
    "where": lambda x, y: np.where(x < 2, x, y),
    "concatenate": lambda x, y: np.concatenate([x, y]),
    "stack": lambda x, y: np.stack([x, y], axis=1),
    "@": lambda x, y: x @ y,
    "einsum": lambda x, y: np.einsum("ij,kj->ik", x, y),
    "mse": lambda x, y: pce.mse(x, y) if isinstance(x, pce.DistArray) else ((x - y) ** 2).mean(dtype=y.dtype),
}


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("name", MIXED)
@np.errstate(all="ignore")
def test_bfloat16_widens_beside_wider_dtypes(name, reproducible):
    x, call = np.array([[0.5, 1.5], [2.5, 3.0]], ml_dtypes.bfloat16), MIXED[name]
    for other in (np.int16, np.uint16, np.int32, np.int64, np.uint64, np.float16):
        y, wider = np.array([[3, 2], [1, 3]], other), np.result_type(np.float32, other)
        expected = call(x.astype(wider), y.astype(wider))
        with pce.reproducible(reproducible):
            mesh = alone()
            held = pce.distribute(x, mesh, requires_grad=True, data=Shard(0))
            results = [call(held, y), call(held, pce.distribute(y, mesh))]
            if results[0].requires_grad:
                results[0].sum().backward()
        assert np.add(x, y).dtype == wider
        assert {each.dtype for each in results} == {expected.dtype}
        for each in results:
            np.testing.assert_array_equal(each.full(), expected)
        assert held.grad is None or held.grad.dtype == x.dtype


def test_bfloat16_widens_beside_numbers_of_numpy():
    x = pce.distribute(np.array([1, 2], ml_dtypes.bfloat16), alone())
    dtypes = {kind: (x * kind(3)).dtype for kind in (int, float, np.int8, np.int16, np.int64, np.float16, np.float32)}
    same, wide = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
    assert list(dtypes.values()) == [same, same, same, wide, np.float64, wide, wide]


NAN = [[2, np.nan, -1, 1], [-np.inf, 0.5, np.nan, 3], [1, -0.0, 0.0, np.nan], [7, 1, 3, 2]]
# Functions that gather. ml_dtypes does not sort a nan, and adds in bfloat16, where a thousand ones are 256.
OF_NUMPY: dict[str, Callable[[Any], Any]] = {
    **{
        each.__name__: each for each in (np.sort, np.argsort, np.nansum, np.nanmean, np.nanstd, np.nancumsum, np.median)
    },
    **{each.__name__: each for each in (np.nan_to_num, np.nanmax, np.nanargmin, np.median, np.gradient, np.ptp)},
    "partition": lambda x: np.partition(x, 2),
    "percentile": lambda x: np.nanpercentile(x, 30, axis=1),
    "isclose": lambda x: np.isclose(x, x, equal_nan=True),
    "unique": lambda x: np.unique(x, return_counts=True),
    "unique by names": lambda x: np.unique_counts(x).counts,
    "histogram": lambda x: np.histogram(x[3:], bins=3),
    "pinv": lambda x: np.linalg.pinv(x[3:]),
    "svd": lambda x: np.linalg.svd(x[3:]).S,
}


@pytest.mark.filterwarnings("ignore:numpy.* has no placement rule", "ignore:All-NaN", "ignore:invalid value")
@pytest.mark.ranks(1, 3)  # the functions gather
def test_functions_of_numpy_are_right_in_bfloat16(line):
    bfloat16 = ml_dtypes.bfloat16
    for name, function in OF_NUMPY.items():
        got, exact = function(pce.distribute(NAN, line, data=Shard(0)).astype(bfloat16)), function(np.float32(NAN))
        for one, due in zip(*(each if isinstance(each, tuple) else (each,) for each in (got, exact)), strict=True):
            due = np.asarray(due)
            due = due.astype(bfloat16) if due.dtype == np.float32 else due
            assert one.dtype == due.dtype, name
            np.testing.assert_array_equal(wide(one.full()), wide(due), err_msg=name)


@pytest.mark.filterwarnings("ignore:numpy.* has no placement rule")
@pytest.mark.ranks(1, 3)  # the functions gather
def test_functions_of_numpy_keep_dtypes_beside_bfloat16(line):
    ones, single = np.ones(1000, ml_dtypes.bfloat16), np.array([1 + 2**-20, 1], np.float32)
    x = pce.distribute(ones, line, data=Shard(0))
    sums = [np.add.reduce(x), np.nansum(x), np.add.reduce(x, dtype=np.float32), np.nansum(x, None, np.float32)]
    beside, after = np.convolve(x, single), np.nextafter(x, ones * 2)
    assert [float(each) for each in sums] == [1000.0] * 4
    assert [each.dtype.name for each in sums] == ["bfloat16", "bfloat16", "float32", "float32"]
    assert is_same(beside.full(), np.convolve(ones.astype(np.float32), single))
    assert is_same(after.full(), ones + ml_dtypes.finfo(ml_dtypes.bfloat16).eps)


@each_half
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
@np.errstate(all="ignore")
def test_functions_of_halves_are_rounded_once(function, dtype):
    x = every(dtype)
    g = drawn(dtype, x.size)
    y, gradient = pulled(function.call, g, alone(), x, data=Shard(0))
    assert (y.dtype, gradient.dtype) == (dtype, dtype)
    mine = here(x, y)
    slope = function.slope(wide(mine))
    exact = slope * wide(here(g, y))
    # A result or a slope that float32 cannot hold makes an infinite gradient.
    infinite = (np.isinf(y.local) | np.isinf(slope.astype(np.float32))) & np.isinf(gradient.local)
    exact = np.where(infinite, np.copysign(np.inf, exact), exact)
    # The slope of gelu is a difference near its turning point.
    size = np.maximum(np.abs(slope), 2.0**-6) * np.abs(wide(here(g, y))) if function.name == "gelu" else None
    assert faults(y.local, function.exact(wide(mine)), mine)[:5] == []
    assert faults(gradient.local, exact, mine, size)[:5] == []


def power_slopes(a: Array, b: Array) -> tuple[Array, Array]:
    return b * a ** (b - 1), a**b * np.log(a)


BINARY: list[tuple[str, Any, Callable[[Array, Array], Any]]] = [
    ("divide", np.divide, lambda a, b: (1 / b, -a / b**2)),
    ("power", np.power, power_slopes),
    ("multiply", np.multiply, lambda a, b: (b, a)),
    ("maximum", np.maximum, lambda a, b: (1.0 * (a > b) + 0.5 * (a == b), 1.0 * (b > a) + 0.5 * (a == b))),
]


@each_half
@pytest.mark.parametrize(("name", "exact", "slopes"), BINARY, ids=[name for name, *_ in BINARY])
def test_functions_of_two_halves_are_rounded_once(name, exact, slopes, dtype):
    rng = np.random.default_rng(1)
    a = np.exp2(rng.uniform(-9, 3, 20_000)).astype(dtype)
    b = np.where(rng.random(a.size) < 0.2, a, rng.uniform(0.25, 1.5, a.size).astype(dtype))
    g = drawn(dtype, a.size)
    y, *gradients = pulled(getattr(pce, name), g, alone(), a, b, data=Shard(0))
    mine = [wide(here(x, y)) for x in (a, b)]
    assert faults(y.local, exact(*mine), mine[0])[:5] == []
    for gradient, slope in zip(gradients, slopes(*mine), strict=True):
        assert gradient.dtype == dtype
        assert faults(gradient.local, slope * wide(here(g, y)), mine[0])[:5] == []


@each_half
@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "the axis"])
def test_softmaxes_of_halves_are_rounded_once(line, axis, dtype):
    x, g = drawn(dtype, 301, 37, scale=4.0), drawn(dtype, 301, 37, seed=1)
    x[:, 0] += dtype(20)  # close to 1, of which the logarithm is a small number
    p, slope = softmax(wide(x)), wide(g)
    total = (slope * p).sum(-1, keepdims=True)
    terms = p * (np.abs(slope) + (np.abs(slope) * p).sum(-1, keepdims=True))
    y, gradient = pulled(pce.softmax, g, line, x, data=Shard(axis))
    assert faults(y.local, here(p, y), here(x, y))[:5] == []
    assert faults(gradient.local, here(p * (slope - total), y), here(x, y), here(terms, y))[:5] == []

    z = wide(x) - wide(x).max(-1, keepdims=True)
    others = np.exp(z)
    np.put_along_axis(others, z.argmax(-1)[:, None], 0.0, -1)
    exact = z - np.log1p(others.sum(-1, keepdims=True))
    summed = slope.sum(-1, keepdims=True)
    terms = np.abs(slope) + p * np.abs(slope).sum(-1, keepdims=True)
    y, gradient = pulled(pce.log_softmax, g, line, x, data=Shard(axis))
    assert faults(y.local, here(exact, y), here(x, y))[:5] == []
    assert faults(gradient.local, here(slope - p * summed, y), here(x, y), here(terms, y))[:5] == []

    g = g[:, 0]
    y, gradient = pulled(lambda x: pce.logsumexp(x, 1), g, line, x, data=Shard(axis))
    exact = wide(x).max(-1) - exact.max(-1)
    assert faults(y.local, here(exact, y), here(exact, y))[:5] == []
    assert faults(gradient.local, here(p * wide(g)[:, None], gradient), here(x, gradient))[:5] == []


@each_half
def test_sums_of_gradients_may_exceed_what_half_holds(line, dtype):
    g = np.full((3, 8), 32_000, dtype)  # eight of which no float16 can hold
    for axis in (0, 1):
        _, gradient = pulled(pce.log_softmax, g, line, np.zeros((3, 8), dtype), data=Shard(axis))
        assert (np.abs(wide(gradient.local)) < 2.0**-18 * float(g[0, 0])).all()


@each_half
def test_norms_of_halves_are_rounded_once(dtype):
    x, scale, bias = drawn(dtype, 29, 64), drawn(dtype, 64, seed=1), drawn(dtype, 64, seed=2)
    g = drawn(dtype, 29, 64, seed=3)
    wx, w, b, dy = map(wide, (x, scale, bias, g))
    for name, call, center, operands in (
        ("layer_norm", pce.layer_norm, wx.mean(-1, keepdims=True), (x, scale, bias)),
        ("rms_norm", pce.rms_norm, 0.0, (x, scale)),
    ):
        deviation = np.sqrt(((wx - center) ** 2).mean(-1, keepdims=True) + 1e-5)
        normal = (wx - center) / deviation
        exact = normal * w + (b if name == "layer_norm" else 0.0)
        # Replicate: the sums over rows, too, are rounded once.
        y, dx, dscale, *dbias = pulled(call, g, alone(), *operands, data=Replicate())
        assert faults(y.local, exact, x, np.abs(normal * w) + np.abs(b))[:5] == []
        dn = dy * w
        along = normal * (dn * normal).mean(-1, keepdims=True)
        shared = dn.mean(-1, keepdims=True) if name == "layer_norm" else 0.0
        terms = (np.abs(dn) + np.abs(along) + np.abs(shared)) / deviation
        assert faults(dx.local, (dn - along - shared) / deviation, x, terms)[:5] == []
        assert faults(dscale.local, (dy * normal).sum(0), scale, np.abs(dy * normal).sum(0))[:5] == []
        for each in dbias:
            assert faults(each.local, dy.sum(0), bias, np.abs(dy).sum(0))[:5] == []


def test_norms_have_dtype_of_all_that_they_take():
    x, scale = np.ones((2, 4), np.float16), np.ones(4, np.float32)
    for array, factor, dtype in (
        (x, scale.astype(np.float16), np.float16),
        (x, scale, np.float32),
        (x.astype(np.float32), scale.astype(np.float16), np.float32),
        (x.astype(np.int8), scale.astype(np.float16), np.float64),
    ):
        assert pce.layer_norm(pce.distribute(array, alone()), factor, factor).dtype == dtype
        assert pce.rms_norm(pce.distribute(array, alone()), factor).dtype == dtype


@each_half
def test_squared_error_of_halves_is_rounded_once(dtype):
    x, y = drawn(dtype, 3001), drawn(dtype, 3001, seed=1)
    held = pce.distribute(x, alone(), requires_grad=True)
    loss = pce.mse(held, y)
    (loss * dtype(1000)).backward()
    difference = wide(x) - wide(y)
    assert loss.dtype == held.grad.dtype == dtype
    assert faults(loss.local[None], (difference**2).mean()[None], x[:1]) == []
    assert faults(held.grad.local, 2000 * difference / 3001, x)[:5] == []


@each_half
def test_gradient_of_what_was_stretched_is_rounded_once(dtype):
    x, scale, g = (np.abs(drawn(dtype, *shape)) + dtype(0.5) for shape in ((2, 1500), (1500,), (2, 1500)))
    a, b, dy = wide(x), wide(scale), wide(g)
    for call, terms in (
        (lambda x, scale: x * scale, dy * a),
        (lambda x, scale: x / scale, -dy * a / b**2),
        (lambda x, scale: scale**x, dy * a * b ** (a - 1)),
        (lambda x, scale: x + scale, dy),
    ):
        _, _, gradient = pulled(call, g, alone(), x, scale, data=Replicate())
        assert faults(gradient.local, terms.sum(0), scale)[:5] == []


@each_half
def test_repeated_rows_of_halves_add_in_float32(dtype):
    ids = np.zeros(4096, np.int64)  # 2048 + 1 is 2048 in float16, and 256 + 1 is 256 in bfloat16
    table = pce.distribute(np.zeros((2, 3), dtype), alone(), requires_grad=True)
    pce.embedding(ids, table).sum().backward()
    assert table.grad.full().tolist() == [[4096.0] * 3, [0.0] * 3]


@pytest.mark.parametrize("dtype", [*HALVES, np.float32, np.float64], ids=lambda dtype: np.dtype(dtype).name)
def test_gelu_has_its_limits_far_from_0(dtype):
    far = 6e4 if dtype == np.float16 else 1e30
    x = np.array([far, 700.0, 30.0, -30.0, -700.0, -far, np.inf, -np.inf, np.nan, 0.0], dtype)
    y, gradient = pulled(pce.gelu, np.ones(10, dtype), alone(), x, data=Replicate())
    np.testing.assert_array_equal(wide(y.local), np.maximum(wide(x), 0))
    np.testing.assert_array_equal(wide(gradient.local), [1, 1, 1, 0, 0, 0, 1, 0, np.nan, 0.5])


# ------------------------------------------------------------------------------------------------ rounded from float64


@pytest.mark.ranks(1)
@each_half
def test_float64_is_rounded_once(dtype):
    halves = np.unique(wide(every(dtype)))
    middles = (halves[1:] + halves[:-1]) / 2
    x = np.concatenate([middles, *(np.nextafter(middles, sign * np.inf) for sign in (-1, 1))])
    expected = rounded(x, dtype)
    assert is_same(pce.distribute(x, alone()).astype(dtype).local, expected)
    _, residuals = pce.take_classes_forward(np.zeros((len(x), 1), dtype), np.zeros((len(x), 1), int))
    assert is_same(pce.take_classes_backward(x[:, None], residuals)[:, 0] + 0, expected + 0)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2], ids=lambda dtype: dtype.__name__)
def test_floats_of_8_bits_are_rounded_once(dtype):
    numbers = np.unique(wide(np.arange(2**8, dtype=np.uint8).view(dtype)))
    middles = (numbers[1:] + numbers[:-1])[np.isfinite(numbers[1:] + numbers[:-1])] / 2
    for x in (middles, *(np.nextafter(middles, sign * np.inf) for sign in (-1, 1))):
        for given in (x, x.astype(np.float32)):
            assert is_same(pce.distribute(given, alone()).astype(dtype).local, rounded(wide(given), dtype))


@pytest.mark.ranks(1)
@each_half
def test_variance_of_float64_is_rounded_once(dtype):
    x = np.random.default_rng(0).integers(-100, 100, (50_000, 4)) / 64  # whose variances float64 has
    assert is_same(pce.distribute(x.astype(dtype), alone()).var(1).local, rounded(x.var(1), dtype))


@pytest.mark.ranks(1)
@each_half
def test_norms_of_halves_are_float32_before(dtype):
    x = drawn(dtype, 400, 500)
    for norm in (pce.layer_norm, pce.rms_norm):
        dtypes = dtype, np.float32, np.float64
        y, near, exact = (norm(pce.distribute(x.astype(each), alone())).local for each in dtypes)
        assert is_same(y, near.astype(dtype))
        assert (y != rounded(exact, dtype)).mean() < 1e-4  # one of 16,000 of float16


@pytest.mark.ranks(1)
@each_half
def test_gradients_in_float64_are_rounded_once(dtype):
    x, y = drawn(dtype, 300, 1000), drawn(dtype, 300, 1000, seed=1)
    targets = np.arange(300)

    def loss(out: Array) -> Array:
        given = x, targets
        return pce.softmax_cross_entropy_value_and_grad(*given, out=out, reduction="sum", compute_dtype=np.float64)[1]

    def divergence(out: Array) -> Array:
        return pce.kl_divergence_value_and_grad(x, y, reduction="sum", out=out)[1]

    for gradient in (loss, divergence):
        assert is_same(gradient(np.empty_like(x)), rounded(gradient(np.empty(x.shape)), dtype))


# ---------------------------------------------------------------------------------------------- sums over several ranks


@each_half
def test_gradient_of_hidden_is_that_of_plain_function(comm, line, dtype):
    hidden, w = drawn(dtype, 40, 24), drawn(dtype, 24, 36, seed=1)
    targets, shard = np.arange(40) % 36, slice(*pce.shard_range(36, comm.size, comm.rank))
    given = hidden, w[:, shard], targets
    plain = pce.linear_cross_entropy_value_and_grad(*given, reduction="sum", comm=comm)
    _, residuals = pce.linear_class_statistics_forward(*given, comm=comm)
    plain_statistics = pce.linear_class_statistics_backward(residuals, entropy=np.ones(40, np.float32))

    def loss(h: Any, w: Any) -> Any:
        return pce.linear_cross_entropy(h, w, targets, reduction="sum")

    def entropies(h: Any, w: Any) -> Any:
        return pce.sum(pce.linear_class_statistics(h, w, targets).entropy)

    for call, expected in ((loss, plain), (entropies, plain_statistics)):
        for computed in (False, True):
            h = pce.distribute(hidden, line, requires_grad=True, data=Replicate())
            columns = pce.distribute(w, line, requires_grad=True, data=Shard(1))
            call(h * 1.0 if computed else h, columns).backward()
            assert is_same(h.grad.full(), expected.dhidden)
            assert is_same(columns.grad.local, expected.dw)


@each_half
def test_gradients_of_attention_add_in_float32(line, dtype):
    operands = [drawn(dtype, 2, 12, 8, seed=seed) for seed in range(3)]
    g = drawn(dtype, 2, 12, 8, seed=3)
    placed = [Shard(1), Replicate(), Replicate()], [Replicate(), Replicate(), Shard(2)]
    for places in placed:
        grads = []
        for each in (dtype, np.float32):
            held = [
                pce.distribute(x.astype(each), line, requires_grad=True, data=place)
                for x, place in zip(operands, places, strict=True)
            ]
            (pce.scaled_dot_product_attention(*held) * g.astype(each)).sum().backward()
            grads.append([x.grad.full() for x in held])
        for got, whole in zip(*grads, strict=True):
            assert is_same(got, rounded(wide(whole), dtype))

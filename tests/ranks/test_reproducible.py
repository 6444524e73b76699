"""Inside `reproducible` results and gradients have the bits of one process, wherever operands are sharded."""

from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from itertools import pairwise, product as product_of
import math
from operator import mul
import sys

from hypothesis import HealthCheck, given, settings, strategies as st
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Partial, Replicate, Shard
from pce_mpi.arrays import to_host
from pce_mpi.autograd import apply as apply_module
from pce_mpi.autograd.apply import Op, apply
from pce_mpi.exact import products
from pce_mpi.exact.products import product
from pce_mpi.exact.sums import slicing, total
from pce_mpi.kernels import compiled
from pce_mpi.testing import in_step
from ranks.grids import factorizations, mesh_of, spread
from ranks.op_cases import CASES, OPS, alone, cases_of, error_of, evaluate, listed, one_process, replicated
from ulps import OPERATION


@cache
def uneven(case):
    """The case with numbers whose sums are rounded: those of the table are multiples of 1/256."""
    rng = np.random.default_rng(len(case.name))

    def blurred(x):
        return x * (1 + rng.random(x.shape) / 8) if x.dtype == np.float64 else x

    drawn = replace(case, operands=tuple(map(blurred, case.operands)))
    drawn.projections[:] = map(blurred, case.projections)
    return drawn


@cache
def bits_of_one_process(case, dtype):
    with pce.reproducible():
        outcome = evaluate(uneven(case), alone(), replicated(case, alone()), dtype=dtype)
    return [x.local.tobytes() for x in outcome.arrays]


def other_bits(case, mesh, shardings, dtype):
    """The arrays that have other bits than those of one process; collective."""
    with pce.reproducible():
        outcome = evaluate(uneven(case), mesh, shardings, dtype=dtype)
        found = [x.full().tobytes() for x in outcome.arrays]
    assert case.op == "redistribute" or not any(x.sharding.partial_dims for x in outcome.arrays), case.name
    expected = bits_of_one_process(case, dtype)
    return [index for index, (here, there) in enumerate(zip(found, expected, strict=True)) if here != there]


def combinations_of(case):
    """Placements of the operands: each placement of each operand, beside others of the others."""
    ways = [[Replicate(), *map(Shard, range(x.ndim))] for x in case.operands]
    for number in range(max(map(len, ways))):
        yield tuple(way[(number + index) % len(way)] for index, way in enumerate(ways))


# An operation of a user's own that sums by a rule has no reproducible form; it has a test below.
REPRODUCIBLE = [op for op in OPS if op != "outer"]


@pytest.mark.ranks(3)  # shards of several lengths
@pytest.mark.parametrize("op", REPRODUCIBLE)
def test_op_at_any_shards_has_bits_of_one(comm, op):
    mesh = mesh_of(comm, comm.size)
    for case in cases_of(op)[:4]:  # the test below draws from all
        for number, placed in enumerate(combinations_of(case)):
            shardings = [
                spread(mesh.dim_sizes, x.shape, each, seed=[number, index] if number % 2 else None)
                for index, (x, each) in enumerate(zip(case.operands, placed, strict=True))
            ]
            assert not other_bits(case, mesh, shardings, np.float32), (case.name, placed)


@pytest.mark.ranks(4)  # a dim of one rank, and none of one
@given(data=st.data(), case=st.sampled_from([case for case in CASES if case.op in REPRODUCIBLE]))
@settings(max_examples=50)
def test_op_over_two_dims_has_bits_of_one(comm, data, case):
    mesh = mesh_of(comm, *data.draw(st.sampled_from(list(factorizations(comm.size, 2)))))
    dtype = data.draw(st.sampled_from([np.float64, np.float32, np.float16]))
    shardings = [
        spread(
            mesh.dim_sizes,
            x.shape,
            *(data.draw(st.sampled_from([Replicate(), *map(Shard, range(x.ndim))])) for _ in mesh.dims),
            seed=data.draw(st.none() | st.tuples(st.integers(0, 9))),
        )
        for x in case.operands
    ]
    with in_step(comm):
        assert not other_bits(case, mesh, shardings, dtype)


@pytest.mark.parametrize("op", REPRODUCIBLE)
def test_numbers_are_those_of_numpy(op):
    for case in cases_of(op):
        with pce.reproducible():
            outcome = evaluate(case, alone(), replicated(case, alone()))
        with np.errstate(all="ignore"):
            results = listed(case.reference(*case.operands))
        # `test_op_gradients.py` compares these with finite differences.
        gradients = [x for x in one_process(case)[1] if x is not None]
        for got, wanted in zip(outcome.arrays, [*results, *gradients], strict=True):
            assert error_of(case, got.local, np.asarray(wanted)) <= OPERATION, case.name


# An operation of a user's own without a rule has the bits of the library that it calls.
@pytest.mark.ranks(1)
@pytest.mark.parametrize("op", [op for op in REPRODUCIBLE if op != "op"])
def test_gpu_has_bits_of_host(cupy, op):
    for case in cases_of(op):
        with pce.reproducible():
            got, expected = (
                evaluate(uneven(case), alone(), replicated(case, alone()), dtype=np.float32, library=library).arrays
                for library in (cupy, np)
            )
        assert list(map(bits_of_numbers, got)) == list(map(bits_of_numbers, expected)), case.name


def bits_of_numbers(x):
    # A GPU writes a nan of other bits.
    local = to_host(x.local)
    return np.where(local != local, np.nan, local).astype(local.dtype).tobytes()


def cut(draw, length):
    return [0, *sorted(draw(st.lists(st.integers(0, length), max_size=3))), length]


numbers = st.floats(-(2.0**99), 2.0**99, width=32) | st.floats(-2, 2, width=32)


def drawn_array(draw, dtype, *shape):
    values = draw(st.lists(numbers, min_size=math.prod(shape), max_size=math.prod(shape)))
    return np.array(values, dtype).reshape(shape)


def fractions(x):
    return [[Fraction(each) for each in row] for row in x.tolist()]


@pytest.mark.ranks(1)
@given(data=st.data(), dtype=st.sampled_from([np.float32, np.float64]))
@settings(max_examples=60)
def test_product_is_exact_however_it_is_cut(data, dtype):
    m, k, n = (data.draw(st.integers(1, 6)) for _ in range(3))
    a, b = drawn_array(data.draw, dtype, m, k), drawn_array(data.draw, dtype, k, n)
    whole = product(a, b, k)
    rows, columns = cut(data.draw, m), cut(data.draw, n)
    pieces = [[product(a[i:j], b[:, u:v], k) for u, v in pairwise(columns)] for i, j in pairwise(rows)]
    assert np.array_equal(np.block(pieces), whole)
    assert np.array_equal(product(np.asfortranarray(a), b[::-1][::-1], k), whole)
    order = data.draw(st.permutations(range(k)))
    assert np.array_equal(product(a[:, order], b[order], k), whole)
    bound = k * np.abs(a).max(1, keepdims=True).astype(float) * np.abs(b).max(0).astype(float)
    exact = [[float(sum(map(mul, row, column))) for column in fractions(b.T)] for row in fractions(a)]
    rounding = np.maximum(np.abs(whole) * np.finfo(dtype).eps, np.finfo(dtype).smallest_subnormal) / 2
    assert np.all(np.abs(whole - exact) <= bound * np.finfo(dtype).eps / 4 + rounding)


@pytest.fixture(params=["numpy", *compiled.instruction_sets()])
def kernel(request, monkeypatch):
    """The kernel that multiplies digits: that of an instruction set, or none, for the definition."""
    before = compiled.instruction_set()
    if request.param == "numpy":
        monkeypatch.setattr(products, "digit_loops", lambda *_: None)
    else:
        compiled.choose(request.param)
    yield compiled
    compiled.choose(before)


def integer_of(x, line):
    """The integer of a number of a line, and the exponent of the line."""
    exponent = max((math.frexp(each)[1] for each in line if each), default=0)
    return round(Fraction(x) * Fraction(2) ** (30 - exponent)), exponent


def digits_of(integer):
    lows = []
    for _ in range(3):
        lows.append((integer + 128) % 256 - 128)
        integer = (integer - lows[-1]) // 256
    return integer, *lows[::-1]


def product_of_digits(row, column):
    """The sum that the documentation defines, in Python's integers, rounded to float64."""
    total, exponents = 0, [0, 0]
    for x, y in zip(row, column, strict=True):
        (i, exponents[0]), (j, exponents[1]) = integer_of(x, row), integer_of(y, column)
        pairs = product_of(enumerate(digits_of(i)), enumerate(digits_of(j)))
        total += sum(a * b * 256 ** (3 - p - q) for (p, a), (q, b) in pairs if p + q <= 3)
    return math.ldexp(float(total), sum(exponents) - 36)


def by_definition(a, b):
    columns = b.T.astype(float).tolist()
    rows = [[product_of_digits(row, column) for column in columns] for row in a.astype(float).tolist()]
    with np.errstate(all="ignore"):
        return np.array(rows, float).reshape(len(a), b.shape[1]).astype(a.dtype)


# The kernel is one for all examples.
@pytest.mark.ranks(1)
@given(data=st.data(), dtype=st.sampled_from([np.float16, np.float32]))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_product_is_that_of_digits(kernel, data, dtype):
    m, k, n = (data.draw(st.integers(0, 9)) for _ in range(3))
    limit = float(np.finfo(dtype).max) / 2
    any_size = st.floats(-limit, limit, width=8 * np.dtype(dtype).itemsize)
    a, b = (
        np.array(data.draw(st.lists(any_size, min_size=x * y, max_size=x * y)), dtype).reshape(x, y)
        for x, y in ((m, k), (k, n))
    )
    assert product(a, b, k).tobytes() == by_definition(a, b).tobytes()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("shape", [(17, 2500, 51), (1, 70, 1), (9, 1, 49), (35, 300, 8)])
def test_product_of_any_layout_is_that_of_digits(kernel, shape):
    m, k, n = shape
    rng = np.random.default_rng(k)
    a, b = (
        (rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 4, shape)).astype(np.float32)
        for shape in ((2, 1, m, k), (3, k, n))
    )
    found = product(a, b, k)
    layouts = [
        (a.swapaxes(-1, -2).copy().swapaxes(-1, -2), b.swapaxes(-1, -2).copy().swapaxes(-1, -2)),
        (a[..., ::-1], b[:, ::-1]),
        (np.repeat(a, 2, -1)[..., ::2], np.repeat(b, 2, -2)[:, ::2]),
    ]
    assert found.shape == (2, 3, m, n)
    for x, y in layouts:
        assert product(x, y, k).tobytes() == found.tobytes()
    places = rng.integers(0, (2, 3, m, n), (3, 4))
    for u, v, i, j in places.tolist():
        assert found[u, v, i, j] == by_definition(a[u, 0, i : i + 1], b[v, :, j : j + 1])


@pytest.mark.ranks(1)
@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (2, 0, 3, 4), (2, 3, 0, 4), (2, 3, 2, 0)])
def test_empty_products_are_zeros(kernel, shape):
    stack, m, k, n = shape
    found = product(np.ones((stack, m, k), np.float32), np.ones((k, n), np.float32), k)
    assert found.shape == (stack, m, n)
    assert not found.any() or k


# Numbers beside 1.0 whose digits are as large as can be, with either sign.
@pytest.mark.ranks(1)
@pytest.mark.parametrize("terms", [504, 2**16 + 8, 2**20])
def test_long_sums_of_largest_digits_do_not_overflow(kernel, terms):
    for x, y in product_of([0x7F7F7F, -0x7F7F7F, -0x808080, 0x3F7F7F7F, -0x3F808080], repeat=2):
        a, b = (np.full(terms, np.float32(each / 2**30), np.float32) for each in (x, y))
        a[0] = b[0] = np.float32(1 - 2**-24)
        ends = product_of_digits([float(a[0])], [float(b[0])])
        i, j = (int(float(each[1]) * 2**30) for each in (a, b))
        pairs = product_of(enumerate(digits_of(i)), enumerate(digits_of(j)))
        each = sum(u * v * 256 ** (3 - p - q) for (p, u), (q, v) in pairs if p + q <= 3)
        assert product(a[None], b[:, None], terms) == np.float32(((terms - 1) * each + ends * 2**36) / 2**36)


@pytest.mark.ranks(1)
@given(data=st.data(), dtype=st.sampled_from([np.float16, np.float32, np.float64]))
@settings(max_examples=60)
def test_sum_is_rounded_once_in_any_order(data, dtype):
    x = np.array(data.draw(st.lists(st.floats(-4, 4, width=16), min_size=1, max_size=40)), dtype)
    found = total(x, (0,), x.size)
    assert found.tolist() == [float(sum(map(Fraction, x.tolist())))]
    assert np.array_equal(found, total(x[data.draw(st.permutations(range(x.size)))], (0,), x.size))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_special_values_multiply_and_add_as_numpy(dtype):
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -2.0]
    rows = np.array(list(product_of(special, repeat=2)), dtype)
    with np.errstate(all="ignore"):
        assert np.array_equal(product(rows, rows.T, 2), rows @ rows.T, equal_nan=True)
        assert np.array_equal(total(rows, (1,), 2), rows.sum(1, keepdims=True), equal_nan=True)
    tiny, huge = np.finfo(dtype).smallest_subnormal, np.finfo(dtype).max
    assert product(np.array([[tiny, tiny]]), np.array([[1.0], [2.0]], dtype), 2) == 3 * float(tiny)
    assert total(np.array([tiny, tiny]), (0,), 2) == 2 * float(tiny)
    assert total(np.array([huge, huge, -huge]), (0,), 3) == huge  # NumPy's sum overflows on the way
    assert product(np.array([[huge, huge]]), np.array([[1], [-1]], dtype), 2) == 0.0
    assert product(np.zeros((2, 0), dtype), np.zeros((0, 3), dtype), 0).tolist() == [[0.0] * 3] * 2


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("dtype", "factors", "count", "longest"),
    [
        (np.float16, 1, 1, 2**21),
        (np.float32, 1, 1, 2**14),
        (np.float64, 1, 2, 2**17),
        (np.float64, 2, 3, 2**10),
    ],
)
def test_longer_sum_takes_another_slice(dtype, factors, count, longest):
    # The docstrings of `total` and `product`, and docs/equal-means-equal.md, have these lengths.
    assert [slicing(np.dtype(dtype), length, factors)[1] for length in (longest, longest + 1)] == [count, count + 1]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_products_of_slices_add_up_to_53_bits(dtype):
    for length in (2**k + more for k in range(30) for more in (0, 1)):
        bits, count = slicing(np.dtype(dtype), length, factors=2)
        most = [2**bits, *[2 ** (bits - 1)] * (count - 1)]  # a slice is the rest of one before it, rounded
        assert all(length * np.dot(most[: d + 1], most[d::-1]) <= 2**53 for d in range(count))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("k", [1, 30, 700, 30_000])
def test_product_errs_less_than_library(k):
    rng = np.random.default_rng(k)
    a, b = rng.standard_normal((7, k), np.float32), rng.standard_normal((k, 5), np.float32)
    exact = a.astype(np.longdouble) @ b.astype(np.longdouble)
    ours, theirs = (np.abs(found - exact).max() for found in (product(a, b, k).astype(np.float32), a @ b))
    assert ours <= theirs
    units = [np.exp2(np.frexp(np.abs(x).max(axis))[1]) for x, axis in ((a, 1), (b, 0))]
    dropped = k * np.outer(*units) * 1.01 * 2.0**-28
    assert np.all(np.abs(product(a, b, k) - exact) <= np.abs(exact) * 2.0**-24 + dropped)


def test_trace_says_what_is_reduced(line):
    x = pce.distribute(np.ones((4, 8), np.float32), line, data=Shard(1))
    w = pce.distribute(np.ones((8, 5), np.float32), line, data=Shard(0))
    with pce.reproducible(), pce.trace() as trace:
        y = x @ w
    assert y.placements == {"data": Replicate()}
    assert [(event.operation, event.reason) for event in trace.select("all_reduce")] == [("matmul", REDUCED)] * 2
    assert [event.bytes for event in trace.select("all_reduce")] == [2 * (4 + 5 + 1), 8 * 4 * 5]


REDUCED = "its sums are reduced exactly"


def test_own_rule_with_a_sum_is_refused(line):
    rows = pce.op(lambda x: x.sum(1), rule=lambda shape: pce.Rule.of("ab->a", shape, reduces="sum"), name="rows")
    whole = pce.op(lambda x: x.sum(1), name="whole")
    x = pce.distribute(np.ones((3, 4)), line, data=Shard(1))
    with pce.reproducible():
        with pytest.raises(NotImplementedError, match=r"rows sums over shards by a rule of its own.*give it no rule"):
            rows(x)
        assert whole(x).full().tolist() == [4.0] * 3


@pytest.mark.parametrize("inside", [True, False])
def test_gradient_is_computed_as_its_operation_was(line, inside):
    values = np.random.default_rng(0).standard_normal((4, 7))

    def gradient(forward, backward):
        w = pce.distribute(values, line, requires_grad=True, data=Shard(1))
        with pce.reproducible(forward):
            loss = pce.sum(pce.exp(w @ w.T))
        with pce.reproducible(backward), pce.trace() as trace:
            loss.backward()
        return w.grad.full(), [event.nbytes for event in trace.events]

    here, there = gradient(inside, inside), gradient(inside, not inside)
    assert here[0].tobytes() == there[0].tobytes()
    assert here[1] == there[1]


@pytest.mark.parametrize("inside", [True, False])
def test_gradients_add_up_as_their_operations_were_computed(line, inside):
    rng = np.random.default_rng(0)
    values, parts = rng.standard_normal((4, 7)), rng.standard_normal((3, 4, 7)) * [[[1.0]], [[1e9]], [[1.0]]]

    def gradient(mesh, placed):
        w = pce.distribute(values, mesh, requires_grad=True)
        with pce.reproducible():
            middle = w * 1.0
            losses = [
                pce.sum(each * pce.distribute(part, mesh, data=how))
                for each in (w, middle)
                for part, how in zip(parts, (Replicate(), placed, Replicate()), strict=True)
            ]
        with pce.reproducible(inside):
            for loss in losses[:3]:
                loss.backward()
            with pce.reproducible():
                together = losses[3] + losses[4] + losses[5]
            together.backward()
        return w.grad

    found, expected = gradient(line, Shard(0)), gradient(alone(), Replicate())
    assert found.placements == {"data": Replicate()}
    assert found.local.tobytes() == expected.local.tobytes()


@pytest.mark.parametrize("inside", [True, False])
def test_redistributed_array_with_two_consumers_has_both_gradients(line, inside):
    w = pce.distribute(np.arange(6.0), line, requires_grad=True)
    with pce.reproducible(inside):
        there = (w * 1.0).redistribute(data=Shard(0))
        loss = pce.sum(there) + pce.sum(there * there)
    with pce.reproducible(not inside):
        loss.backward()
    np.testing.assert_array_equal(w.grad.full(), 1 + 2 * np.arange(6.0))


# NumPy's functions of elements that IEEE 754 defines to the last bit, or that are of integers and bool.
EXACT = set(
    """
    absolute add ceil clip conjugate copysign divide divmod fabs floor floor_divide fmax fmin fmod frexp heaviside
    ldexp maximum minimum modf multiply negative nextafter positive reciprocal remainder rint sign signbit spacing sqrt
    square subtract trunc equal not_equal less less_equal greater greater_equal isfinite isinf isnan isnat logical_and
    logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_xor bitwise_count invert left_shift right_shift
    gcd lcm matmul
    """.split()
)


# Operations whose arrays go to the kernels of the loss, which take NumPy's own type alone.
WITH_KERNELS = {
    *("argmax", "class_statistics", "cross_entropy", "linear_cross_entropy", "log_softmax", "logsumexp", "softmax"),
    *("kl_divergence", "linear_class_statistics", "scaled_dot_product_attention", "take_classes", "top_k"),
}


def of_an_operation():
    """True if an operation computes by itself, and not for `exact`, whose integers add up in any order."""
    frame = sys._getframe(2)
    while not (name := frame.f_globals["__name__"]).startswith(("pce_mpi.exact", "pce_mpi.autograd")):
        frame = frame.f_back
    return name.startswith("pce_mpi.autograd")


class Watched(np.ndarray):
    """An operand that refuses sums, products of matrices and functions in an operation: only `exact` may add floats."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        if of_an_operation() and any(getattr(x, "dtype", np.dtype(bool)).kind == "f" for x in inputs):
            exact = method == "__call__" or ufunc in (np.maximum, np.minimum)
            assert exact and ufunc.__name__ in EXACT - {"matmul"}, f"{method} of {ufunc} decides bits"
        inputs, out = ([plain(x) for x in each] for each in (inputs, out or ()))
        return watched(getattr(ufunc, method)(*inputs, **({"out": tuple(out)} if out else {}), **options))

    def __array_function__(self, function, types, arguments, options):
        sums = (np.einsum, np.dot, np.inner, np.vdot, np.tensordot, np.linalg.norm, np.trace, np.cumsum)
        assert not (of_an_operation() and function in sums and self.dtype.kind == "f"), f"{function} decides bits"
        return super().__array_function__(function, types, arguments, options)


def plain(x):
    return x.view(np.ndarray) if isinstance(x, Watched) else x


def watched(x):
    return x.view(Watched) if type(x) is np.ndarray else x


@pytest.fixture
def nothing_of_a_library(monkeypatch):
    """NumPy refuses floating-point numbers in what it computes its own way, and adds up products in another order."""

    def replace_by(name, function):
        monkeypatch.setattr(np, name, partial(function, getattr(np, name)))

    def refuse(of, *arrays, **_):
        assert all(x.dtype.kind in "iub" for x in arrays), f"{of} decides bits"
        return of(*arrays)

    for name in dir(np):
        function = getattr(np, name)
        if isinstance(function, np.ufunc) and function.__name__ not in EXACT:
            replace_by(name, refuse)
    replace_by("matmul", lambda of, a, b: of(a[..., ::-1], b[..., ::-1, :]))
    for name in ("dot", "inner", "tensordot", "vdot", "average", "mean", "var", "std"):
        replace_by(name, refuse)


@pytest.fixture
def operands_are_watched(monkeypatch):
    monkeypatch.setattr(apply_module, "_LOCAL", lambda x: watched(x.local))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("op", [op for op in REPRODUCIBLE if op != "op"])  # a user's own calls what it likes
def test_library_decides_no_bit(request, op):
    cases = cases_of(op)[:4]
    expected = [bits_of_one_process(case, np.float32) for case in cases]
    request.getfixturevalue("nothing_of_a_library")
    if op not in WITH_KERNELS:
        request.getfixturevalue("operands_are_watched")
    bits_of_one_process.cache_clear()
    assert [bits_of_one_process(case, np.float32) for case in cases] == expected


LIBRARY = {
    "exp": lambda x: np.exp(x),
    "mean": lambda x: x.mean(),
    "numpy's sum": lambda x: np.sum(x),
    "matmul": lambda x: x @ x,
    "einsum": lambda x: np.einsum("i->", x),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", LIBRARY)
def test_operation_of_library_is_caught(nothing_of_a_library, operands_are_watched, name):
    op = Op(name, lambda call, x: LIBRARY[name](x))
    with pce.reproducible(), pytest.raises(AssertionError, match="decides bits"):
        apply(op, pce.distribute(np.ones(3), alone()))


def trained(library, mesh):
    """The fingerprint of the parameters of a small model after three steps."""
    rng = np.random.default_rng(0)
    shapes = {"table": (11, 6), "norm": (6,), "up": (6, 8), "bias": (8,), "down": (8, 7)}
    parameters = {
        name: pce.distribute(library.asarray(rng.standard_normal(shape, np.float32)), mesh, requires_grad=True)
        for name, shape in shapes.items()
    }
    optimizer = pce.AdamW(parameters.values(), lr=0.1)
    for _ in range(3):
        ids, targets = (library.asarray(rng.integers(0, high, (5, 3))) for high in (11, 7))
        x = pce.layer_norm(pce.embedding(ids, parameters["table"]), parameters["norm"])
        x = pce.scaled_dot_product_attention(x, x, x, causal=True)
        hidden = pce.gelu(x @ parameters["up"] + parameters["bias"])
        pce.cross_entropy(hidden @ parameters["down"], targets).backward()
        pce.clip_grad_norm(parameters.values(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return pce.fingerprint(parameters)


@pytest.mark.ranks(1)
def test_gpu_trains_to_fingerprint_of_host(cupy):
    with pce.reproducible():
        assert trained(cupy, alone()) == trained(np, alone())


@pytest.mark.usefixtures("several")
def test_rank_in_other_mode_is_told(line):
    w, x = (pce.distribute(np.ones((2, 4), np.float32), line, requires_grad=True, data=Shard(1)) for _ in range(2))
    partial = pce.from_local(np.ones(4, np.float32), line, data=Partial("sum"))
    w.grad = x.detach()
    for call in (
        lambda: pce.sum(x).full(),
        lambda: partial.redistribute(data=Replicate()),
        lambda: pce.clip_grad_norm([w], 1.0),
        pce.SGD([w], 0.1).step,
    ):
        with pce.reproducible(line.rank == 0), pytest.raises(pce.CollectiveError, match=r"reproducible|operation: sum"):
            call()


def test_partial_is_reduced_with_one_rounding(line):
    terms = np.resize([1.0, 2.0**-23, -1.0, 2.0**-26], line.size).astype(np.float32)
    x = pce.from_local(terms[line.rank : line.rank + 1], line, data=Partial("sum"))
    w = pce.distribute(np.zeros(1, np.float32), line, requires_grad=True)
    w.grad = x
    with pce.reproducible():
        found = x.redistribute(data=Replicate())
        pce.SGD([w], 1.0).step()
    assert found.full().tolist() == [np.float32(math.fsum(terms))]
    assert w.full().tolist() == [-np.float32(math.fsum(terms))]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_zeros_of_two_signs_have_positive_extremes(line, dtype):
    zeros = np.array([0.0, -0.0] * 4, dtype)
    with pce.reproducible():
        for x in (zeros, zeros[::-1].copy()):
            shards = pce.distribute(x, line, data=Shard(0))
            found = [f(shards) for f in (pce.max, pce.min, pce.relu)]
            found += [f(shards, -shards) for f in (pce.maximum, pce.minimum)]
            found += [pce.clip(shards, 0.0, 1.0), pce.clip(shards, -1.0, 0.0)]
            assert not any(np.signbit(each.full()).any() for each in found)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("operator", ["sum", "avg", "max", "min"])
def test_numbers_survive_any_partial_but_negative_zero(line, operator, dtype):
    finfo = np.finfo(dtype)
    edges = [0.0, finfo.max, finfo.smallest_normal, finfo.smallest_subnormal, np.inf, 1 / 3, 1.807, 0.1]
    x = np.concatenate([edges, np.negative(edges), np.random.default_rng(8).standard_normal(200)]).astype(dtype)
    with pce.reproducible():
        for before in (Replicate(), Shard(0)):
            partial = pce.distribute(x, line, data=before).redistribute(data=Partial(operator))
            for after in (Replicate(), Shard(0)):
                found = partial.redistribute(data=after).full()
                assert found.tobytes() == np.where(x == 0, dtype(0), x).tobytes()


def test_infinite_row_changes_no_other_row(line):
    rows = np.array([[np.inf], [-1e-30], [1e-30]], np.float32)
    with pce.reproducible():
        found = (pce.distribute(rows, line, data=Shard(0)) @ pce.distribute(rows[2:], line)).full()
    assert np.signbit(found).tolist() == [[False], [True], [False]]
    assert found.tolist() == [[np.inf], [0.0], [0.0]]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_special_terms_on_any_rank_decide(line, dtype):
    inf, nan = np.inf, np.nan
    ends = [(inf, 1), (-inf, 1), (1, inf), (inf, inf), (inf, -inf), (nan, 1), (1, nan), (0, 2), (3, 2)]
    rows = np.array([[first, 0, 1, 1, 2, 0, last] for first, last in ends], dtype)
    columns = np.array([[1, 0], [1, 1], [2, 1], [inf, 1], [1, 2], [1, 1], [-1, 1]], dtype)
    with pce.reproducible():
        x, y = (pce.distribute(each, line, data=Shard(1 - side)) for side, each in enumerate((rows, columns)))
        found = (x @ y).full()
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(found, rows.astype(float) @ columns.astype(float))


@pytest.mark.ranks(1)
def test_sums_beside_infinity_keep_their_digits(line):
    with pce.reproducible():
        sums = pce.cumsum(pce.distribute(np.array([1e-30, 2e-30, np.inf], np.float32), line), 0)
        table = pce.distribute(np.zeros((3, 1), np.float32), line, requires_grad=True)
        factors = pce.distribute(np.array([[1e-20], [2e-20], [np.nan]], np.float32), line)
        pce.sum(pce.embedding(pce.distribute(np.arange(3), line), table) * factors).backward()
    assert np.array_equal(sums.full(), np.array([1e-30, 3e-30, np.inf], np.float32))
    assert np.array_equal(table.grad.full(), factors.full(), equal_nan=True)
    huge = np.array([1e308, 1e308, -1e308, -1e308, -np.inf])
    for order in ([0, 1, 2, 3, 4], [2, 3, 0, 1, 4], [0, 2, 1, 3, 4]):
        assert total(huge[order], (0,), 5) == -np.inf


def test_norm_does_not_depend_on_meshes(comm):
    meshes = [pce.Mesh(comm, data=comm.size) for _ in range(2)]
    values = np.random.default_rng(0).standard_normal((30, 3), np.float32)

    def norm(count):
        parameters = [pce.distribute(x, meshes[i % count], requires_grad=True) for i, x in enumerate(values)]
        for parameter in parameters:
            parameter.grad = parameter.detach()
        return pce.clip_grad_norm(parameters, 1.0)

    with pce.reproducible():
        assert norm(1) == norm(2)

"""Comparisons, and what operations make of halves, whole numbers, ties and nan."""

from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Shard

HALVES = [np.float16, ml_dtypes.bfloat16]


@pytest.fixture
def sharded(line):
    return lambda array, **options: pce.distribute(np.asarray(array), line, data=Shard(0), **options)


def test_comparisons_are_elementwise_and_placed_as_operands(sharded):
    a, b = np.array([1.0, 2.0, 3.0, np.nan, 2.0]), np.array([2.0, 2.0, 2.0, 2.0, np.nan])
    x = sharded(a)
    for ours, right in (
        (x < b, a < b),
        (x <= b, a <= b),
        (x > b, a > b),
        (x >= b, a >= b),
        (x == b, a == b),
        (x != b, a != b),
        (b < x, b < a),
        (2 == x, a == 2),
    ):
        assert ours.placements == x.placements
        assert ours.dtype == np.bool_
        assert ours.full().tolist() == right.tolist()


def test_distributed_arrays_are_keys_by_identity(sharded):
    x, y = sharded([1.0, 2.0]), sharded([1.0, 2.0])
    assert {x: "x", y: "y"}[x] == "x"
    assert x in [x]
    assert f"{x.sum():.3f}" == "3.000"
    assert f"{x.sum()}" == repr(x.sum())


def test_scalar_parameter_has_array_gradient_and_steps(line):
    scale = pce.distribute(2.0, line, requires_grad=True)
    for _ in range(2):
        (pce.distribute(np.ones(4), line, data=Shard(0)) * scale).sum().backward()
    pce.SGD([scale], lr=0.25).step()
    assert isinstance(scale.grad.local, np.ndarray)
    assert scale.item() == 2.0 - 0.25 * 8


def test_dtype_of_condition_is_not_that_of_result(sharded):
    picked = pce.where(np.array([1, 0, 2]), sharded(np.ones(3, np.float32)), 0.0)
    assert picked.dtype == np.float32
    assert picked.full().tolist() == [1.0, 0.0, 1.0]


def test_whole_numbers_are_normalized_as_real_ones(sharded):
    x = sharded(np.array([[1, 3], [0, 8], [2, 4]]))
    np.testing.assert_allclose(pce.layer_norm(x, eps=0.0).full(), [[-1, 1]] * 3)
    np.testing.assert_allclose(pce.gelu(x).full(), pce.gelu(x.astype(np.float64)).full())


@pytest.mark.parametrize("dtype", HALVES)
def test_more_ties_than_half_can_count_share_gradient(sharded, dtype):
    x = sharded(np.zeros(70_000, dtype), requires_grad=True)
    x.max().backward()
    np.testing.assert_allclose(x.grad.full().astype(float), 1 / 70_000, rtol=2**-6)


def test_gradient_of_maximum_with_nan_is_nan_there(sharded):
    x = sharded([np.nan, 1.0, -1.0], requires_grad=True)
    pce.maximum(x, 0.0).sum().backward()
    np.testing.assert_array_equal(x.grad.full(), [np.nan, 1.0, 0.0])


def test_negative_whole_power_is_refused_without_elements_too(comm, sharded):
    one = sharded(np.array([3]))  # only one rank has an element
    for power in (lambda: one**-1, lambda: 2**-one, lambda: True**-one, lambda: one ** [-1], lambda: (one > 0) ** -1):
        with pytest.raises(ValueError, match="integers to negative integer powers"):
            power()
    assert [(one**3).item(), (2**one).item()] == [27, 8]


@pytest.mark.parametrize("operator", ["sum", "max"])
def test_whole_exponent_may_have_negative_terms(comm, line, operator):
    term = np.array([comm.size + 2 if comm.rank == 0 else -1])
    exponents = pce.from_local(term, line, data=pce.Partial(operator))
    expected = 2 ** (comm.size + 2 if operator == "max" else 3)
    assert (2**exponents).item() == expected
    assert (np.array([2]) ** exponents).item() == expected


def test_softmax_of_no_elements_is_empty(comm, line):
    for placement in (pce.Replicate(), Shard(0), Shard(1)):
        x = pce.distribute(np.zeros((2, 0)), line, data=placement)
        assert pce.softmax(x).full().shape == (2, 0)


def test_numpy_error_flag_stops_no_rank_alone(comm, sharded):
    x = sharded([1.0, 2.0, np.nan, 3.0, 1e300, 5.0])
    with np.errstate(all="raise"):
        assert np.isinf((x * 1e300).full()[4])
        x.astype(np.int64)


@pytest.mark.parametrize("operator", ["sum", "avg"])
@pytest.mark.parametrize("other", [np.array([True, False, True]), np.array([2, 0, 5])], ids=["booleans", "integers"])
def test_partial_meets_numbers_that_cannot_be_partial(line, operator, other):
    whole = np.array([0.5, 1.5, 2.5])
    x = pce.distribute(whole, line, requires_grad=True, **{"data": pce.Partial(operator)})
    results = [x + other, other + x, pce.concatenate([x, other]), pce.where(whole > 1, x, other), pce.mse(x, other)]
    pce.sum(results[0] * np.arange(3.0)).backward()
    expected = [whole + other, other + whole, np.concatenate([whole, other]), np.where(whole > 1, whole, other)]
    for result, right in zip(results, [*expected, np.mean((whole - other) ** 2)], strict=True):
        np.testing.assert_array_equal(result.full(), right)
    np.testing.assert_array_equal(x.grad.full(), np.arange(3.0))


@pytest.mark.ranks(1)  # element by element
@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint8, np.int32, np.uint16])
@pytest.mark.parametrize("name", ["exp", "sqrt", "tanh", "square", "relu", "sigmoid", "gelu"])
def test_functions_of_integers_are_those_of_their_values(sharded, name, dtype):
    values = np.array([0, 1, 3, 2, 5]).astype(dtype)
    if name == "square" and dtype is np.bool_:
        values = values.astype(np.int8)  # NumPy has no square of truth values
    expected = getattr(pce, name)(sharded(values.astype(np.float64))).full()
    for mode in (nullcontext(), pce.reproducible()):
        with mode:
            y = getattr(pce, name)(sharded(values))
            np.testing.assert_allclose(y.full().astype(np.float64), expected, rtol=2e-3)
    inferred = pce.infer_placements(name, [(5,)], [{}], mesh={"data": 1}, dtypes=values.dtype)
    assert inferred.result == {"data": pce.Replicate()}

"""Dtypes, bounds and wrong arguments of operations: as NumPy has them, and gradients as PyTorch has them."""

import operator
import warnings

import ml_dtypes
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Shard
from ranks.grids import mesh_of
from ranks.op_cases import alone
from ranks.placed import error_of

DTYPES = [np.bool_, np.uint8, np.int32, np.int64, np.float16, np.float32, np.float64]
NUMBERS = np.ones((3, 3))
BINARY = [operator.floordiv, operator.mod, operator.and_, operator.or_, np.minimum]
UNARY = [abs, operator.invert, np.sin, np.log1p, np.cumsum, np.var, np.std, lambda x: np.clip(x, 1, 1)]


def result_of(call, *operands):
    """The dtype and the numbers, or the kind of error."""
    try:
        with np.errstate(all="ignore"):
            result = call(*operands)
    except TypeError as error:
        return type(error)
    return result.dtype, (result.full() if isinstance(result, pce.DistArray) else np.asarray(result)).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_new_operations_have_dtypes_of_numpy(dtype):
    x, y = np.array([1, 0, 3, 0]).astype(dtype), np.array([1, 1, 2, 1]).astype(dtype)
    held = pce.distribute(x, alone(), data=Shard(0))
    for call in BINARY:
        assert result_of(call, held, y) == result_of(call, x, y), call
        for number in (2, True) if dtype is not np.bool_ else (True,):
            assert result_of(call, held, number) == result_of(call, x, number), call
            assert result_of(call, number, held + 1) == result_of(call, number, x + 1), call
    for call in UNARY:
        expected = result_of(call, x)
        if call in (np.sin, np.log1p, np.var, np.std) and dtype is not np.bool_ and not isinstance(expected, type):
            found = result_of(call, held)
            assert found[0] == expected[0], call
            np.testing.assert_allclose(found[1], expected[1], rtol=4 * np.finfo(found[0]).eps)
        elif call not in (np.sin, np.log1p):
            assert result_of(call, held) == expected, call


def test_variance_without_freedom_is_that_of_numpy(comm):
    mesh = mesh_of(comm, comm.size)
    for whole, ddof in (
        (np.array([1.0, 2.0, 2.0]), 3),
        (np.array([1.0, 2.0, 2.0]), 9),
        (np.ones(2), 2),
        (np.ones(0), 0),
    ):
        with np.errstate(all="ignore"), pytest.warns(RuntimeWarning):
            expected = np.var(whole, ddof=ddof)
        found = pce.var(pce.distribute(whole, mesh, data=Shard(0)), ddof=ddof)
        np.testing.assert_array_equal(found.full(), expected)


def gradient_of(call, *values):
    x = pce.distribute(np.array(values), alone(), requires_grad=True)
    pce.sum(call(x)).backward()
    return x.grad.full().tolist()


def test_gradients_at_bounds_are_those_of_pytorch():
    assert gradient_of(lambda x: pce.clip(x, 0.0, 1.0), -1.0, 0.0, 0.5, 1.0, 2.0) == [0, 1, 1, 1, 0]
    assert gradient_of(lambda x: pce.clip(0.5, x, 1.0), 0.25, 0.5, 0.75, 3.0) == [0, 0, 1, 0]
    assert gradient_of(lambda x: pce.minimum(x, 1.0), 0.0, 1.0, 2.0) == [1, 0.5, 0]
    assert gradient_of(abs, -2.0, 0.0, 3.0) == [-1, 0, 1]
    assert gradient_of(pce.std, 2.0, 2.0, 2.0) == [0, 0, 0]
    assert gradient_of(lambda x: 7.5 % x + x // 2, 2.0, -2.0) == [-3, 4]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=lambda dtype: dtype.__name__)
def test_gradient_of_repeated_index_is_rounded_once(dtype):
    x = pce.distribute(np.ones(2, dtype), alone(), requires_grad=True)
    pce.sum(x[np.zeros(4097, int)]).backward()
    assert x.grad.full().tolist() == [float(dtype(4097)), 0.0]
    assert pce.cumsum(pce.distribute(np.ones(4097, dtype), alone()))[-1].item() == float(dtype(4097))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: pce.einsum("ij->k", x), ValueError, r"'ij->k' does not fit shapes \(2, 3\)"),
        (lambda x: pce.einsum("ijk", x), ValueError, "does not fit shapes"),
        (lambda x: pce.einsum("ij,jk", x), ValueError, "does not fit shapes"),
        (lambda x: pce.einsum("ij->ii", x), ValueError, "does not fit shapes"),
        (lambda x: pce.einsum("ij,ik", x, x.T), ValueError, "axes 'i' have lengths 2 and 3"),
        (lambda x: pce.einsum("...i->i", x), ValueError, r"the result must have the axes of '\.\.\.'"),
        (lambda x: pce.einsum(x, [0, 1]), TypeError, "subscripts must be a string"),
        (lambda x: pce.einsum("i", np.ones(2)), TypeError, "einsum takes at least one DistArray"),
        (lambda x: pce.squeeze(x, 0), ValueError, r"axes of length 1, got axis 0 of shape \(2, 3\)"),
        (lambda x: pce.expand_dims(x, (0, 0)), ValueError, "names an axis twice"),
        (lambda x: pce.expand_dims(x, 3), ValueError, "axis 3 is out of bounds"),
        (lambda x: pce.stack([x, x.T]), ValueError, r"one shape, got \(2, 3\), \(3, 2\)"),
        (lambda x: pce.stack([]), ValueError, "got no arrays"),
        (lambda x: pce.cumsum(x, 2), ValueError, "axis 2 is out of bounds"),
        (lambda x: pce.var(x, (0, 0)), ValueError, "names an axis twice"),
        (lambda x: x & 1, TypeError, "bitwise_and"),
        (lambda x: pce.clip(x), ValueError, "clip takes min or max, or both"),
        (lambda x: pce.einsum("ii->i", x[:1]), ValueError, "axes 'i' have lengths"),
        (lambda x: pce.squeeze(x[:1], (0, -2)), ValueError, "leaves out each axis once"),
        (lambda x: pce.embedding(np.array([0.0]), x), TypeError, "ids must be integers, got"),
        (lambda x: pce.embedding(x[0], x), TypeError, "ids must be integers, got"),
        (lambda x: pce.embedding(np.array([True]), x), TypeError, "ids must be integers, got"),
        (lambda x: pce.embedding(np.array([0]), x[0]), ValueError, "table has two axes, got shape"),
        (lambda x: pce.top_k(x, 4), ValueError, r"k = 4, but axis 1 of \(2, 3\) has 3 elements"),
        (lambda x: pce.top_k(x, 1.0), TypeError, "k must be an integer, got 1.0"),  # type: ignore[arg-type]
        (lambda x: pce.top_k(x, np.True_), TypeError, "k must be an integer, got np.True_"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda x: pce.top_k(x, 1, axis=2), ValueError, "axis 2 is out of bounds"),
        (lambda x: pce.top_k(x, 1, comm=None), TypeError, r"top_k\(\) got an unexpected keyword argument 'comm'"),
        (lambda x: pce.argmax(x[:, :0]), ValueError, r"argmax of no elements: shape \(2, 0\), axis 1"),
        (lambda _: pce.add(NUMBERS, NUMBERS), TypeError, "takes at least one DistArray"),
        (lambda _: pce.exp(NUMBERS), TypeError, "takes at least one DistArray"),
        (lambda _: pce.matmul(NUMBERS, NUMBERS), TypeError, "takes at least one DistArray"),
        (lambda _: pce.embedding(np.array([0]), NUMBERS), TypeError, "takes at least one DistArray"),
        (lambda _: pce.concatenate([NUMBERS, NUMBERS]), TypeError, "takes at least one DistArray"),
        (lambda _: pce.where(NUMBERS > 0, NUMBERS, 0.0), TypeError, "takes at least one DistArray"),
        (lambda _: pce.op(np.exp)(NUMBERS), TypeError, "takes at least one DistArray"),
        (lambda x: x[0, [0, 3]], IndexError, "index 3 is out of bounds for axis 1 of length 3"),
        (lambda x: x[0, [-4]], IndexError, "index -4 is out of bounds for axis 1 of length 3"),
        (
            lambda x: x[[[True, False]]],
            IndexError,
            r"a mask of shape \(1, 2\) does not fit .* from 0 on",
        ),
        (lambda x: x[:, [True, False]], IndexError, r"a mask of shape \(2,\) does not fit .* from 1 on"),
        (lambda x: x[[0, 1], [0, 1, 2]], IndexError, "arrays of indices do not broadcast"),
        (lambda x: x[[0], [0], [0]], IndexError, "3 indices are too many"),
        (lambda x: x[..., ...], IndexError, "an index can only have a single ellipsis"),
        (lambda x: x[..., 0, ...], IndexError, "an index can only have a single ellipsis"),
        *(
            (lambda _, call=call: call(pce.distribute(1.0, alone())), TypeError, "0-d array")
            for call in (list, iter, set)
        ),
    ],
)
def test_wrong_arguments_of_operations_raise(call, error, text):
    with pytest.raises(error, match=text):
        call(pce.distribute(np.ones((2, 3)), alone()))


# -------------------------------------------------------------------------------------- plain operands, and odd values


@pytest.fixture
def row(comm):
    return mesh_of(comm, comm.size)


def test_clip_takes_plain_array_and_distributed_bound(row):
    plain, bound = np.array([[-1.0, 0.5, 3.0]]), pce.distribute(np.array([[1.0, 0.25, 2.0]]), row, data=pce.Shard(1))
    assert np.array_equal(pce.clip(plain, 0, bound).full(), np.clip(plain, 0, bound.full()))
    assert np.array_equal(np.clip(plain, bound, None).full(), np.clip(plain, bound.full(), None))


def test_einsum_of_lists_gathers_as_numpy_does(row):
    whole = np.arange(6.0).reshape(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = np.einsum(pce.distribute(whole, row, data=pce.Shard(0)), [0, 1], [1, 0])
    assert np.array_equal(found.full(), whole.T)


def test_infinite_gradient_goes_to_larger_element_alone(row):
    x = pce.distribute(np.array([-1.0, 2.0]), row, requires_grad=True, data=pce.Shard(0))
    with np.errstate(divide="ignore"):
        pce.sum(pce.log(pce.maximum(x, 0.0))).backward()
    assert np.array_equal(x.grad.full(), [0.0, 0.5])


@pytest.mark.parametrize("condition", [[True, False, True], [2, 0, 0.5]])
def test_where_takes_condition_as_list(row, condition):
    found = pce.where(condition, pce.distribute(np.arange(3, dtype=np.float32), row, data=pce.Shard(0)), -1.0)
    assert (found.dtype, found.full().tolist()) == (np.float32, [0.0, -1.0, 2.0])


@pytest.mark.ranks(2, 3, 4)
def test_index_out_of_bounds_raises_on_every_rank(comm, row):
    x = pce.distribute(np.arange(6.0), row, data=pce.Shard(0))
    found = error_of(lambda: x[np.array([0, 7 if comm.rank == 0 else 1])])
    assert found[0] == "IndexError" and "index 7 is out of bounds for axis 0 of length 6 (rank 0" in found[1]


@pytest.mark.parametrize(("low", "high"), [(-1, 10), (None, 300), (4, 1000), (-5, None)])
def test_bounds_beyond_dtype_bound_nothing(row, low, high):
    whole = np.array([3, 250], np.uint8)
    found = pce.clip(pce.distribute(whole, row, data=pce.Shard(0)), low, high).full()
    assert found.dtype == np.uint8 and np.array_equal(found, np.clip(whole.astype(int), low, high))

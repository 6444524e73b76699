"""Distributed arrays among what Python and other libraries do with arrays: indices, iteration, copies, pickles."""

import copy
import pickle
import re

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Partial, Replicate, Shard
from ranks.grids import mesh_of
from ranks.op_cases import alone

# -------------------------------------------------------------------------------------------------------------- indices


@pytest.mark.parametrize("index", [True, False, np.True_, np.False_, np.array(True), 1.0, "a", [0.5]], ids=repr)
def test_truth_values_are_no_indices(index):
    x = pce.distribute(np.arange(6.0).reshape(2, 3), alone())
    for each in (index, (0, index), (..., index)):
        with pytest.raises(TypeError, match=r"an index is whole numbers, slices, \.\.\., None, and arrays of .*, got "):
            x[each]


def test_distributed_index_out_of_bounds_raises_everywhere(comm):
    mesh = mesh_of(comm, comm.size)
    x = pce.distribute(np.arange(6.0).reshape(2, 3), mesh)
    wrong = pce.distribute(np.arange(comm.size) * 3, mesh, data=Shard(0))
    if comm.size > 1:
        with pytest.raises(IndexError, match=r"index 3 is out of bounds for axis 1 of length 3 \(rank 1 along data\)"):
            x[:, wrong]
    y = x[:, wrong % 3]
    assert y.placements == {"data": Shard(1)}
    assert y.full().tolist() == [[0.0] * comm.size, [3.0] * comm.size]


def test_mask_of_distributed_array_picks_as_in_numpy(comm):
    whole = np.arange(12.0).reshape(4, 3) % 5
    for placement in (Replicate(), Shard(0), Shard(1), Partial("sum")):
        x = pce.distribute(whole, mesh_of(comm, comm.size), data=placement)
        for pick in (lambda x: x[x > 2], lambda x: x[:, [2, 0]], lambda x: x[[True, False, True, True], 1:]):
            assert pick(x).full().tolist() == pick(whole).tolist()
    assert x[:, [2, 0]].placements == {"data": Partial("sum")}


# ------------------------------------------------------------------------------------------------------------ iteration


def test_array_is_iterated_over_along_its_first_axis(comm):
    mesh, whole = mesh_of(comm, comm.size), np.arange(24.0).reshape(4, 3, 2)
    for placement in (Replicate(), Shard(0), Shard(1), Partial("sum")):
        x = pce.distribute(whole, mesh, data=placement)
        assert [row.full().tolist() for row in x] == whole.tolist()
        assert [row.full().tolist() for row in reversed(x)] == whole[::-1].tolist()
    assert list(pce.distribute(np.zeros((0, 3)), mesh, data=Shard(0))) == []
    first, second = pce.distribute(np.array([1.0, 2.0]), mesh, data=Shard(0))
    assert (first.item(), second.item()) == (1.0, 2.0)


# ------------------------------------------------------------------------------------------------------ complex numbers


def test_complex_results_are_refused():
    x = pce.distribute(np.ones(3), alone())
    for call in (
        lambda: x + 1j,
        lambda: 1j * x,
        lambda: x - np.complex64(1),
        lambda: x * np.ones(3, complex),
        lambda: x @ np.ones((3, 2), complex),
        lambda: pce.where(x > 0, x, 1j),
        lambda: x.astype(complex),
        lambda: np.fft.fft(x),
        lambda: np.multiply.outer(x, np.ones(2, complex)),
        lambda: pce.op(lambda a: a * 1j)(x),
        lambda: pce.op(lambda a: (a, a * 1j))(x),
        lambda: x + np.array(1j),
        lambda: x == 1j,
    ):
        refused = (
            r"must give an array of .* byte order, got \w+ \(complex(64|128)\)|operand \d of \S+ must be .* got complex"
        )
        with pytest.raises(TypeError, match=refused):
            call()
    with pytest.raises(TypeError, match=r"bool, integers, .* byte order, got complex128"):
        pce.distribute(np.ones(3, complex), alone())
    assert np.linalg.det(pce.distribute(np.eye(2), alone())).item() == 1.0


# --------------------------------------------------------------------------------------------------------------- copies


@pytest.fixture
def weights(line):
    w = pce.distribute(np.arange(6.0).reshape(3, 2), line, requires_grad=True, data=Shard(0))
    (w * w).sum().backward()
    return w


def test_deep_copy_is_a_leaf_of_its_own(weights):
    w = weights
    with pce.trace() as trace:
        copied = copy.deepcopy(w)
    assert trace.events == []
    assert copied is not w
    assert (copied.mesh, copied.sharding, copied.dtype) == (w.mesh, w.sharding, w.dtype)
    assert (copied.requires_grad, copied.is_leaf) == (True, True)
    assert copied.grad is not w.grad
    assert copied.grad.placements == w.grad.placements
    for own, theirs in ((copied.local, w.local), (copied.grad.local, w.grad.local)):
        np.testing.assert_array_equal(own, theirs)
        assert not np.may_share_memory(own, theirs)
    before = w.full()
    pce.SGD([copied], lr=1.0).step()
    np.testing.assert_array_equal(w.full(), before)
    np.testing.assert_array_equal(copied.full(), -before)


def test_mean_of_parameters_is_made_by_deep_copy(line):
    shared = pce.distribute(np.ones(4), line, requires_grad=True, data=Shard(0))
    model = {"layers": [shared, shared], "head": pce.distribute(np.ones(2), line), "mesh": line}
    mean = copy.deepcopy(model)
    assert mean["mesh"] is line
    assert mean["layers"][0] is mean["layers"][1]
    assert mean["head"].grad is None
    with pce.no_grad():
        step = mean["layers"][0] * 0.9 + shared * 0.1
    np.testing.assert_allclose(step.full(), 1.0)


def test_deep_copy_of_computed_array_is_refused(weights):
    y = weights * 2
    with pytest.raises(RuntimeError, match=r"on the tape is not deeply copied.*\.detach\(\)"):
        copy.deepcopy(y)
    copied = copy.deepcopy(y.detach())
    assert (copied.requires_grad, copied.is_leaf) == (False, True)
    assert not np.may_share_memory(copied.local, y.local)
    with pce.no_grad():
        np.testing.assert_array_equal(copy.deepcopy(weights * 2).full(), y.full())


def test_shallow_copy_shares_all_that_array_has(weights):
    for x in (weights, weights * 2):
        copied = copy.copy(x)
        assert copied is not x
        assert copied.local is x.local
        assert (copied.mesh, copied.sharding, copied.grad) == (x.mesh, x.sharding, x.grad)
        assert (copied.requires_grad, copied.is_leaf) == (True, x.is_leaf)
    weights.grad = None
    copy.copy(weights * 2).sum().backward()
    np.testing.assert_array_equal(weights.grad.full(), np.full((3, 2), 2.0))


def test_pickling_says_what_to_do_instead():
    x = pce.distribute(np.ones(3), alone())
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match=r"a distributed array is not pickled.*pce_mpi\.save"):
            pickle.dumps({"w": x}, protocol)
        with pytest.raises(TypeError, match="a mesh is not pickled"):
            pickle.dumps(x.mesh, protocol)
    assert pickle.loads(pickle.dumps(x.sharding)) == x.sharding


# ------------------------------------------------------------------------------------------------------ other libraries


class Sparse:
    """A matrix of another library's: like those of scipy.sparse it takes the other operand as a NumPy array."""

    shape = (3, 3)

    def __matmul__(self, other):
        return np.eye(3) @ np.asanyarray(other)

    def toarray(self):
        return np.eye(3)


class Frame(Sparse):
    """A table of another library's: like those of pandas it can be taken as a NumPy array itself."""

    __pandas_priority__ = 4000
    toarray = property()

    def __array__(self, dtype=None, copy=None):
        return np.eye(3)

    def __add__(self, other):
        if getattr(other, "__pandas_priority__", 0) > self.__pandas_priority__:
            return NotImplemented
        return np.eye(3) + np.asanyarray(other)


def test_products_with_other_libraries_say_what_to_convert(comm):
    w = pce.distribute(np.ones((3, 3)), mesh_of(comm, comm.size), data=Shard(0))
    right = "distribute(csr.toarray(), mesh) @ w or csr @ w.full()"
    for left in (Sparse(), Frame()):
        with pytest.raises(TypeError, match=re.escape(right)):
            left @ w
    for call in (lambda: w @ Sparse(), lambda: w * Sparse(), lambda: np.matmul(Sparse(), w)):
        with pytest.raises(TypeError, match=r"operand [01] of \w+ must be .*, got Sparse: take its \.toarray\(\)"):
            call()
    assert (w @ Frame()).full().tolist() == np.ones((3, 3)).tolist()
    assert (Frame() + w).full().tolist() == (w + Frame()).full().tolist() == (np.eye(3) + 1).tolist()

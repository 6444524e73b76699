"""Ranks decide alike whether the copy that an operation moved is kept, whatever their local arrays are in memory."""

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Mesh, Replicate, Shard


@pytest.fixture
def mesh(comm, impatient):
    # Each test has its own mesh: a communicator on which a rank has waited in vain is not used again.
    return Mesh(comm, data=comm.size)


def matrix(rows, columns):
    return np.arange(1.0 * rows * columns).reshape(rows, columns)


def test_reshape_that_copies_on_one_rank_only(comm, mesh):
    # Two rows of a part of the columns are no view of the flat array, one row is.
    whole = matrix(comm.size + 1, 4)
    y = pce.distribute(whole, mesh, data=Shard(0))[:, :2].reshape(-1)
    found = [y.redistribute(data=Replicate()).local for _ in range(2)]
    for each in found:
        np.testing.assert_array_equal(each, whole[:, :2].reshape(-1))


def test_view_that_is_empty_on_most_ranks(mesh):
    y = pce.distribute(matrix(1, 4), mesh, data=Shard(0)).T
    found = [y.redistribute(data=Replicate()).local for _ in range(2)]
    for each in found:
        np.testing.assert_array_equal(each, matrix(1, 4).T)


def test_backward_through_slices_of_uneven_shards(comm, mesh):
    whole = matrix(comm.size + 1, 4) / 8
    x = pce.distribute(whole, mesh, data=Shard(0), requires_grad=True)
    y = x[:, :2].reshape(-1)
    (pce.sum(pce.softmax(y[:3]) * np.arange(3.0)) + pce.sum(pce.square(y[3:]))).backward()
    flat = whole[:, :2].reshape(-1)
    p = np.exp(flat[:3]) / np.exp(flat[:3]).sum()
    slope = np.concatenate([p * (np.arange(3) - (p * np.arange(3)).sum()), 2 * flat[3:]])
    gradient = x.grad.full()
    np.testing.assert_allclose(gradient[:, :2], slope.reshape(-1, 2), rtol=1e-14, atol=1e-15)
    np.testing.assert_array_equal(gradient[:, 2:], 0)


VIEWS = {
    "redistribute": lambda w: w.redistribute(data=Shard(0)),
    "transpose": lambda w: w.redistribute(data=Shard(1)).T,
}


@pytest.mark.parametrize("view", VIEWS)
def test_view_of_parameter_is_one_array_after_step(mesh, view):
    w = pce.distribute(matrix(3, 4), mesh, requires_grad=True)
    v = VIEWS[view](w)
    v.redistribute(data=Replicate())  # of what is computed this copy would be kept
    w.grad = pce.distribute(np.ones((3, 4)), mesh)
    pce.SGD([w], lr=1.0).step()
    replicated, whole = v.redistribute(data=Replicate()).local, v.full()
    np.testing.assert_array_equal(replicated, whole)


MADE = {"computed": lambda z: z, "detached": lambda z: z.detach(), "view": lambda z: z.T.T.detach()}


@pytest.mark.parametrize("made", MADE)
def test_computed_array_may_become_parameter(mesh, made):
    z = pce.distribute(matrix(3, 4), mesh, data=Shard(0)) * 0.5
    z.redistribute(data=Replicate())  # this copy is kept
    w = MADE[made](z)
    w.requires_grad = True
    optimizer = pce.SGD([w], lr=1.0)
    for _ in range(2):
        w.grad = pce.distribute(np.ones((3, 4)), mesh, data=Shard(0))
        optimizer.step()
        for x in (w, z):
            np.testing.assert_array_equal(x.redistribute(data=Replicate()).local, x.full())
    np.testing.assert_array_equal(w.full(), matrix(3, 4) * 0.5 - 2)

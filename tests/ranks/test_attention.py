"""`scaled_dot_product_attention`: what it sends, its halves, what it refuses. `op_cases.py` has its numbers."""

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Mesh, Partial, Replicate, Shard
from ranks.placed import ROUNDING


def drawn(*shapes, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def test_sharded_queries_send_nothing(comm):
    mesh = Mesh(comm, context=comm.size)
    arrays = drawn((2, 5, 4), (2, 5, 4), (2, 5, 3), dtype=np.float64)
    q, k, v = (
        pce.distribute(array, mesh, context=placement, requires_grad=True)
        for array, placement in zip(arrays, (Shard(1), Replicate(), Replicate()), strict=True)
    )
    with pce.trace() as trace:
        y = pce.scaled_dot_product_attention(q, k, v, causal=True)
        pce.sum(y).backward()
    whole = [pce.distribute(array, mesh, requires_grad=True) for array in arrays]
    pce.sum(pce.scaled_dot_product_attention(*whole, causal=True)).backward()
    assert trace.count() == 0
    assert [x.placements["context"] for x in (y, q.grad, k.grad, v.grad)] == [Shard(1), Shard(1), Partial(), Partial()]
    for mine, expected in zip((q, k, v), whole, strict=True):
        np.testing.assert_allclose(mine.grad.full(), expected.grad.full(), rtol=ROUNDING, atol=ROUNDING)


def test_sharded_heads_send_nothing(comm):
    mesh = Mesh(comm, model=comm.size)
    q, k, v = (pce.distribute(array, mesh, model=Shard(1), requires_grad=True) for array in drawn(*[(2, 6, 5, 4)] * 3))
    with pce.trace() as trace:
        pce.sum(pce.scaled_dot_product_attention(q, k, v)).backward()
    assert trace.count() == 0


def test_attention_of_halves_is_rounded_once(comm):
    mesh = Mesh(comm, data=comm.size)
    halves = drawn((3, 4), (5, 4), (5, 2), dtype=np.float16)
    y = pce.scaled_dot_product_attention(*(pce.distribute(array, mesh) for array in halves))
    wide = pce.scaled_dot_product_attention(*(pce.distribute(array.astype(np.float32), mesh) for array in halves))
    assert y.dtype == np.float16
    np.testing.assert_array_equal(y.full(), wide.full().astype(np.float16))


@pytest.mark.parametrize("hidden", [1e6, np.inf, np.nan])
def test_hidden_keys_and_values_do_not_count(comm, hidden):
    mesh = Mesh(comm, data=comm.size)
    q, k, v = drawn((4, 3), (4, 3), (4, 2))
    k[2:], v[2:] = hidden, 1e6
    y = pce.scaled_dot_product_attention(*(pce.distribute(array, mesh) for array in (q, k, v)), causal=True)
    assert abs(y.full()[:2]).max() < 10
    np.testing.assert_array_equal(y.full()[0], v[0])


@pytest.mark.parametrize(
    "shapes",
    [((3, 4), (5, 3), (5, 2)), ((3, 4), (5, 4), (4, 2)), ((2, 3, 4), (1, 5, 4), (1, 5, 2)), ((4,), (5, 4), (5, 2))],
)
def test_attention_refuses_shapes_that_do_not_fit(comm, shapes):
    mesh = Mesh(comm, data=comm.size)
    operands = [pce.distribute(array, mesh) for array in drawn(*shapes)]
    with pytest.raises(ValueError, match="queries, keys and values of shapes"):
        pce.scaled_dot_product_attention(*operands)


def test_attention_refuses_integers(comm):
    mesh = Mesh(comm, data=comm.size)
    operands = [pce.distribute(array, mesh, data=Replicate()) for array in drawn(*[(3, 3)] * 3, dtype=np.int64)]
    with pytest.raises(TypeError, match="of real numbers, got int64"):
        pce.scaled_dot_product_attention(*operands)

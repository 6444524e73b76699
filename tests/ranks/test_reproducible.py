"""Inside `reproducible` results and gradients have the bits of one process, wherever operands are sharded."""

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Replicate, Shard
from ranks.grids import mesh_of, spread
from ranks.op_cases import OPS, alone, cases_of, evaluate, replicated


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


def placements(ndim):
    return [Replicate(), *map(Shard, range(ndim))]


def other_bits(case, mesh, shardings, dtype):
    """Which arrays have other bits than those of one process: collective."""
    with pce.reproducible(), pce.trace() as trace:
        outcome = evaluate(uneven(case), mesh, shardings, dtype=dtype)
        found = [x.full().tobytes() for x in outcome.arrays]
    assert case.op == "redistribute" or not any(x.sharding.partial_dims for x in outcome.arrays), case.name
    assert not trace.select("reduce_scatter")
    expected = bits_of_one_process(case, dtype)
    return [index for index, (here, there) in enumerate(zip(found, expected, strict=True)) if here != there]


@pytest.mark.sizes(3)
@pytest.mark.parametrize("op", [op for op in OPS if op != "outer"])
def test_op_at_any_shards_has_bits(comm, op):
    mesh = mesh_of(comm, comm.size)
    for case in cases_of(op):
        for number, placed in enumerate(product(*(placements(x.ndim) for x in case.operands))):
            shardings = [
                spread(mesh.dim_sizes, x.shape, each, seed=[number, index] if number % 2 else None)
                for index, (x, each) in enumerate(zip(case.operands, placed, strict=True))
            ]
            assert not other_bits(case, mesh, shardings, np.float32), (case.name, placed)

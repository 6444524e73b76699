"""Meshes of all shapes, and what each rank of a mesh holds of a global array.

`local_of`, of the package, takes a global array apart as a sharding says; `assembled` puts together what all ranks
hold, and refuses replicas that differ by a bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from math import prod
from typing import Any

from mpi4py import MPI
import numpy as np
import pytest

from pce_mpi.distributed.mesh import Mesh
from pce_mpi.distributed.placements import Placement, Shard
from pce_mpi.distributed.sharding import Dims, Sharding, Splits
from pce_mpi.testing.placing import (
    averaged,
    local_of as local_of,
    operators_of,
    placements_of as placements_of,
)

Array = np.ndarray[Any, Any]

NAMES = ("data", "model", "seq")

# One rank of several that do something else, and a mesh whose dims have two ranks each.
LINE_AND_GRID = [
    pytest.param(False, marks=pytest.mark.ranks(3), id="line"),
    pytest.param(True, marks=pytest.mark.ranks(4), id="grid"),
]


def factorizations(ranks: int, ndim: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `ranks` as a product of `ndim` sizes: for 4 and 2 that is (1, 4), (2, 2), (4, 1)."""
    return (sizes for sizes in product(range(1, ranks + 1), repeat=ndim) if prod(sizes) == ranks)


def squarest(ranks: int, ndim: int = 2) -> tuple[int, ...]:
    """The way with the smallest sum, longer dims first: (2, 2) for 4, (3, 1) for 3."""
    return min(factorizations(ranks, ndim), key=lambda sizes: (sum(sizes), [-size for size in sizes]))


def mesh_of(comm: MPI.Intracomm, *sizes: int) -> Mesh:
    """The mesh of these sizes, made once: MPI has some 2,000 communicators to give. `comm` must outlive the tests.

    The communicators along its dims are made with it, so that no test has them in its trace, whichever runs first.
    """
    key = (comm.handle, *sizes)
    if key not in _meshes:
        _meshes[key] = mesh = Mesh(comm, **dict(zip(NAMES, sizes, strict=False)))
        for dim in mesh.dims:
            mesh.comm(dim)
    return _meshes[key]


_meshes: dict[tuple[int, ...], Mesh] = {}


def ranks_of(dims: Dims) -> list[dict[str, int]]:
    """The coordinates of every rank of a mesh of `dims`, in rank order."""
    names = [name for name, _ in dims]
    return [dict(zip(names, index, strict=True)) for index in product(*(range(size) for _, size in dims))]


# Splits


def ragged(length: int, parts: int, seed: Any) -> Splits:
    """Split points at random: blocks of any length, empty ones among them."""
    return (0, *sorted(np.random.default_rng(seed).integers(0, length + 1, parts - 1).tolist()), length)


def spread(dims: Dims, shape: tuple[int, ...], *placements: Placement, seed: Any = None) -> Sharding:
    """The sharding with these placements, balanced, or split at random with `seed`."""
    sharding = Sharding.of(dims, shape, dict(zip((name for name, _ in dims), placements, strict=True)))
    if seed is None:
        return sharding
    splits = {
        axis: ragged(length, sharding.parts(sharding.dims_of(axis)), [*seed, axis])
        for axis, length in enumerate(shape)
        if sharding.dims_of(axis)
    }
    return Sharding.of(dims, shape, sharding.by_dim, splits)


# Terms


def combined(terms: list[Array], sharding: Sharding) -> Array:
    """Combine the terms, in float64 if there are numbers to add."""
    operators = operators_of(sharding)
    if not operators:
        return terms[0]
    if operators <= {"sum", "avg"}:
        total = sum((np.asarray(term, np.float64) for term in terms), start=np.zeros(terms[0].shape))
        return np.asarray(total / averaged(sharding))
    return (np.maximum if operators == {"max"} else np.minimum).reduce(terms)


def assembled(sharding: Sharding, parts: list[Array]) -> Array:
    """The global array of which each rank holds one of `parts`, in rank order.

    Raises `AssertionError` for a part of the wrong shape, for replicas that differ by a bit, and for blocks that
    overlap or leave something out.
    """
    blocks: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    for rank, where in enumerate(ranks_of(sharding.dims)):
        assert parts[rank].shape == sharding.local_shape(where), f"rank {rank} holds shape {parts[rank].shape}"
        block = tuple(where[dim] for dim, placed in sharding.by_dim.items() if isinstance(placed, Shard))
        term = tuple(where[dim] for dim in sharding.partial_dims)
        blocks.setdefault(block, {}).setdefault(term, []).append(rank)
    whole: Array | None = None
    covered = np.zeros(sharding.shape, int)
    for terms in blocks.values():
        for replicas in terms.values():
            assert len({parts[rank].tobytes() for rank in replicas}) == 1, f"replicas on ranks {replicas} differ"
        holders = [replicas[0] for replicas in terms.values()]
        values = combined([parts[rank] for rank in holders], sharding)
        if whole is None:
            whole = np.zeros(sharding.shape, values.dtype)
        slices = sharding.slices(ranks_of(sharding.dims)[holders[0]])
        whole[slices] = values
        covered[slices] += 1
    assert (covered == 1).all(), "blocks overlap or leave something out"
    assert whole is not None
    return whole


# Memory


def fortran(array: Array) -> Array:
    return array.copy(order="F")


def strided(array: Array) -> Array:
    wide = np.zeros([2 * length for length in array.shape], array.dtype)
    every_second: Any = (..., *(slice(None, None, 2) for _ in array.shape))
    view = wide[every_second]
    view[...] = array
    return np.asarray(view)


def backwards(array: Array) -> Array:
    reverse: Any = (..., *(slice(None, None, -1) for _ in array.shape))
    return np.asarray(array[reverse].copy()[reverse])


def read_only(array: Array) -> Array:
    array = array.copy()
    array.flags.writeable = False
    return array


# Each gives an array equal to the one it is given, in memory of its own.
MEMORY_ORDERS = [np.copy, fortran, strided, backwards, read_only]


# Messages


@contextmanager
def awaiting_a_message(comm: MPI.Intracomm) -> Iterator[None]:
    """The caller waits for a message from anyone; what is sent in the block must not reach it, and the next must."""
    inbox, status = np.full(100, -1.0), MPI.Status()
    waiting = comm.Irecv(inbox, MPI.ANY_SOURCE, MPI.ANY_TAG)
    yield
    came_early = waiting.Test()
    comm.Barrier()
    comm.Send(np.full(3, float(comm.rank)), (comm.rank + 1) % comm.size, tag=17)
    waiting.Wait(status)
    assert not came_early
    assert (status.source, status.tag) == ((comm.rank - 1) % comm.size, 17)
    assert inbox[:3].tolist() == [status.source] * 3
    assert (inbox[3:] == -1).all()


# Placements


def nested(whole: Array, sizes: tuple[int, ...], index: tuple[int, ...], axis: int) -> Array:
    """The block at `index` of balanced blocks within blocks, as NumPy splits them."""
    for size, place in zip(sizes, index, strict=True):
        whole = np.array_split(whole, size, axis)[place]
    return whole


def is_tiled(splits: Splits) -> bool:
    """Return whether split points go up from 0."""
    return splits[0] == 0 and all(start <= stop for start, stop in pairwise(splits))

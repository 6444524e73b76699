"""A mesh: which rank is where, who belongs together, and that ranks which disagree about it all hear so."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
import gc
import inspect
from itertools import combinations
from math import prod
import re

from mpi4py import MPI
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi.comm.tracing import Purpose
from pce_mpi.distributed.mesh import Mesh
from ranks.grids import NAMES, awaiting_a_message, factorizations, mesh_of, ranks_of
from ranks.placed import error_of


def all_sizes(comm):
    return [sizes for ndim in (1, 2, 3) for sizes in factorizations(comm.size, ndim)]


def error_everywhere(comm, call: Callable[[], object]) -> tuple[str, str]:
    """The error of `call`, which all ranks get alike; collective."""
    everywhere = comm.allgather(error_of(call))
    assert len(set(everywhere)) == 1
    return everywhere[0]


# ------------------------------------------------------------------------------------------------------------ the ranks


def test_mesh_has_ranks_row_by_row(comm):
    meshes = [mesh_of(comm, *sizes) for sizes in all_sizes(comm)]
    for sizes, mesh in zip(all_sizes(comm), meshes, strict=True):
        assert (mesh.rank, mesh.size) == (comm.rank, comm.size)
        assert tuple(mesh.dims.values()) == sizes
        assert tuple(mesh.coordinates.values()) == np.unravel_index(comm.rank, sizes)
        assert mesh.coordinates == ranks_of(mesh.dim_sizes)[comm.rank]
        assert list(mesh.coordinates) == list(mesh.dims) == list(NAMES[: len(sizes)])


def test_mesh_cannot_be_changed(line):
    for mapping in (line.dims, line.coordinates):
        with pytest.raises(TypeError):
            mapping["data"] = 7


def test_mesh_takes_whole_sizes_and_free_names(comm):
    mesh = Mesh(comm, comm=np.int64(1), self=comm.size, array=1)
    assert mesh.dims == {"comm": 1, "self": comm.size, "array": 1}
    assert {type(size) for size in mesh.dims.values()} == {int}
    assert mesh.dim_sizes == (("comm", 1), ("self", comm.size), ("array", 1))
    assert mesh.coordinates == {"comm": 0, "self": comm.rank, "array": 0}
    if comm.rank == 0:  # asks nobody
        assert repr(mesh) == f"Mesh(comm=1, self={comm.size}, array=1)"
        with pytest.raises(ValueError, match="the mesh has no dim 'rows'; its dims are comm, self, array"):
            mesh.comm("self", "rows")
        with pytest.raises(ValueError, match=r"the mesh has no dim \['self'\]; its dims are comm, self, array"):
            mesh.comm(["self"])
    assert mesh != Mesh(comm, comm=1, self=comm.size, array=1)


def test_wrong_kernel_of_one_rank_is_refused(comm, monkeypatch):
    def refuse():
        raise ValueError("PCE_MPI_KERNEL must be another")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr("pce_mpi.exact.arithmetic.check_choice", refuse)
    name, text = error_of(lambda: Mesh(comm, data=comm.size))
    assert name == "ValueError"
    assert text.startswith("PCE_MPI_KERNEL must be another")


def test_mesh_over_some_of_ranks(comm):
    mine = comm.Split(comm.rank % 2)
    mesh = Mesh(mine, data=mine.size)
    ranks = mesh.comm("data").allgather(comm.rank)
    mine.Free()
    assert ranks == list(range(comm.rank % 2, comm.size, 2))
    assert mesh.coordinates == {"data": comm.rank // 2}


# ---------------------------------------------------------------------------------------------------- sub-communicators


def test_communicator_of_dims_has_last_dim_fastest(comm):
    found = []
    for sizes in all_sizes(comm):
        mesh = mesh_of(comm, *sizes)
        for count in range(len(sizes) + 1):
            for dims in combinations(mesh.dims, count):
                mine = mesh.comm(*dims)
                found.append((mesh, dims, mine.rank, mine.allgather(comm.rank)))
    for mesh, dims, rank, members in found:
        everywhere = ranks_of(mesh.dim_sizes)
        fixed = [dim for dim in mesh.dims if dim not in dims]
        here = everywhere[comm.rank]
        expected = [r for r, there in enumerate(everywhere) if all(there[dim] == here[dim] for dim in fixed)]
        assert members == expected
        assert len(members) == prod(mesh.dims[dim] for dim in dims)
        assert members[rank] == comm.rank


def test_communicator_of_dims_is_made_once(comm):
    mesh = mesh_of(comm, 1, comm.size)
    assert mesh.comm("data", "model") is mesh.comm("model", "data") is mesh.comm("model", "data", "model")
    assert mesh.comm("data") is mesh.comm("data")
    assert mesh.comm() is mesh.comm()
    assert mesh.comm("data") is not mesh.comm("model")
    with pce.trace() as trace:
        mesh.comm("model", "data")
    assert trace.events == []


def test_mesh_and_communicator_are_agreed_and_traced(comm):
    gc.collect()
    kept = [Mesh(comm, data=comm.size)]  # gives back what the meshes of other tests have left
    with pce.trace() as trace:
        mesh = Mesh(comm, data=comm.size, model=1)
        mesh.comm("data")
        mesh.comm("data")
        mesh.comm("data", "model")
    events = [(event.operation, event.collective, event.bytes, event.over) for event in trace.events]
    assert events == [("Mesh", "all_gather", 56, "comm"), ("Mesh.comm", "all_gather", 56, "data, model")]
    assert trace.count(purpose=Purpose.PAYLOAD) == 0
    assert kept


def test_ranks_that_ask_for_different_communicators_raise(comm, impatient):
    mesh = Mesh(comm, data=comm.size, model=1)
    error = error_everywhere(comm, lambda: mesh.comm("data" if comm.rank == 0 else "model"))
    ranks = mesh.comm("data").allgather(comm.rank)
    alone = mesh.comm("model").allgather(comm.rank)
    if comm.size > 1:
        kind, text = error
        others = "rank 1" if comm.size == 2 else f"ranks {', '.join(map(str, range(1, comm.size)))}"
        over = "data, model"
        assert kind == "CollectiveError"
        assert text == f"ranks disagree on dims: ('data',) (rank 0 along {over}), ('model',) ({others} along {over})"
    assert ranks == list(range(comm.size))
    assert alone == [comm.rank]


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("dims", "kind", "text"),
    [
        ({}, "ValueError", "a mesh needs at least one dim, such as data=2"),
        ({"data": 0}, "ValueError", "the size of dim 'data' must be at least 1, got 0"),
        ({"model": -1}, "ValueError", "the size of dim 'model' must be at least 1, got -1"),
        ({"data": 1.0}, "TypeError", "the size of dim 'data' must be an integer, got 1.0"),
        ({"data": "all"}, "TypeError", "the size of dim 'data' must be an integer, got 'all'"),
        ({"data": np.True_}, "TypeError", "the size of dim 'data' must be an integer, got np.True_"),
        ({"data": None}, "TypeError", "the size of dim 'data' must be an integer, got None"),
        (
            {"shape": 1},
            "ValueError",
            "a dim of a mesh cannot be called 'shape': functions take an argument of that name",
        ),
        ({"src_rank": 1}, "ValueError", "a dim of a mesh cannot be called 'src_rank'"),
        ({"requires_grad": 1}, "ValueError", "a dim of a mesh cannot be called 'requires_grad'"),
    ],
)
def test_bad_dims_raise_everywhere(comm, dims, kind, text):
    error = error_everywhere(comm, lambda: Mesh(comm, **dims))
    assert error[0] == kind
    assert error[1].startswith(text)
    assert f"({'ranks' if comm.size > 1 else 'rank'} {', '.join(map(str, range(comm.size)))})" in error[1]


def test_sizes_of_wrong_product_raise_everywhere(comm):
    size = comm.size
    wrong = {"a": 2, "b": size}, {"a": 7}
    errors = [error_everywhere(comm, lambda dims=dims: Mesh(comm, **dims)) for dims in wrong]
    assert [kind for kind, _ in errors] == ["ValueError", "ValueError"]
    two = f"a mesh with a=2, b={size} has 2 * {size} = {2 * size} ranks, but comm.size is {size}: give other sizes"
    assert errors[0][1].startswith(two)
    assert errors[1][1].startswith(f"a mesh with a=7 has 7 ranks, but comm.size is {size}: give other sizes")


def test_mesh_wrong_on_one_rank_names_it_everywhere(comm, impatient):
    last = comm.size - 1
    size = comm.size + (comm.rank == last)
    error = error_everywhere(comm, lambda: Mesh(comm, data=size))
    said = f"a mesh with data={last + 2} has {last + 2} ranks, but comm.size is {last + 1}"
    assert error == ("ValueError", f"{said}: give other sizes, or start {last + 2} ranks (rank {last})")


@pytest.mark.parametrize("how", ["names", "order", "sizes"])
def test_ranks_that_name_different_dims_hear_so(comm, impatient, how):
    first = comm.rank == 0
    dims = {
        "names": {"data" if first else "rows": comm.size},
        "order": {"data": 1, "model": comm.size} if first else {"model": comm.size, "data": 1},
        "sizes": {"data": 1, "model": comm.size} if first else {"data": comm.size, "model": 1},
    }[how]
    error = error_everywhere(comm, lambda: Mesh(comm, **dims))
    mesh = Mesh(comm, data=comm.size)  # the communicator is as good as before
    if comm.size > 1:
        assert error[0] == "CollectiveError"
        assert re.match(r"ranks disagree on dims: \(\('data', \d+\).*\(rank 0\), .*\(ranks? 1", error[1])
    assert mesh.dims == {"data": comm.size}


@pytest.mark.parametrize("value", [None, 4, "world", MPI.COMM_NULL], ids=["None", "4", "world", "COMM_NULL"])
def test_mesh_of_no_communicator_is_type_error(value):
    got = "MPI.COMM_NULL, which has no ranks" if value == MPI.COMM_NULL else repr(value)
    with pytest.raises(TypeError, match=f"comm must be an mpi4py intracommunicator, got {got}$"):
        Mesh(value, data=1)


def test_any_name_of_dim_works_or_is_refused(comm):
    functions = [each for each in (*vars(pce).values(), pce.DistArray.redistribute) if inspect.isfunction(each)]
    takers = [inspect.signature(each).parameters for each in functions]
    takers = [each for each in takers if any(p.kind is p.VAR_KEYWORD and p.name == "placements" for p in each.values())]
    parameters = [each for taker in takers for each in taker.values()]
    assert {"src_rank", "self", "seed"} <= {each.name for each in parameters}
    # The names that these functions and those behind them give their own arguments.
    names = {each.name for each in parameters} | {"x", "comm", "cls", "coordinates", "dims", "destination", "name"}
    refused = []
    for name in sorted(names):
        try:
            mesh = Mesh(comm, **{name: comm.size})
        except ValueError as error:
            assert "functions take an argument of that name" in str(error)
            refused.append(name)
            continue
        sharded = {name: pce.Shard(0)}
        x = pce.distribute(np.arange(6.0), mesh, **sharded)
        y = pce.from_local(x.local, mesh, **sharded).redistribute(**{name: pce.Replicate()}).redistribute(**sharded)
        drawn = [pce.normal((6,), mesh, seed=1, **sharded), pce.uniform((6,), mesh, seed=1, **sharded)]
        assert [each.placements for each in (x, y, *drawn)] == [sharded] * 4
        assert Mesh.without_ranks(**{name: 2}).dims == {name: 2}
    assert refused == sorted({each.name for each in parameters if each.kind is each.KEYWORD_ONLY})


# ------------------------------------------------------------------------------------------------------------ good ways


def test_messages_of_caller_do_not_meet_the_mesh(comm):
    with awaiting_a_message(comm):
        mesh = Mesh(comm, data=1, model=comm.size)
        members = mesh.comm("model").allgather(comm.rank)
    assert members == list(range(comm.size))


# ------------------------------------------------------------------------------------------------- after the last use


@pytest.fixture
def few_communicators():
    """MPICH has 2,048 communicators, of which other tests hold some, and 198 are left while this lasts."""
    taken = []
    with suppress(MPI.Exception):
        taken += (MPI.COMM_SELF.Dup() for _ in range(2048))
    for _ in range(198):
        taken.pop().Free()
    yield
    for each in taken:
        each.Free()


@pytest.mark.ranks(3)  # a pair, and a rank alone
def test_dropped_meshes_give_their_communicators_back(comm, few_communicators):
    # Six communicators each time, and more than there are in all. The ranks let go of them at different times.
    held: deque[Mesh] = deque()
    lag = np.random.default_rng(comm.rank)
    for _ in range(80):
        mesh = Mesh(comm, data=1, model=comm.size)
        mesh.agree(("model",), "a test", {})
        pair = comm.Split(comm.rank // 2)
        of_two = Mesh(pair, data=pair.size)
        pair.Free()
        of_two.agree(("data",), "a test", {})
        held.extend((mesh, of_two))
        while len(held) > lag.integers(2, 20):
            held.popleft()
    ranks = mesh.comm("model").allgather(comm.rank)
    two = of_two.comm("data").allgather(comm.rank)
    assert ranks == list(range(comm.size))
    assert two == [rank for rank in range(comm.size) if rank // 2 == comm.rank // 2]


def test_communicator_outlives_its_mesh(comm):
    own = Mesh(comm, data=1, model=comm.size).comm("model")
    for _ in range(3):
        Mesh(comm, data=comm.size)
    ranks = own.allgather(comm.rank)
    loss = pce.softmax_cross_entropy(np.zeros((2, 3)), np.zeros(2, int), comm=own)
    assert ranks == list(range(comm.size))
    assert loss == pytest.approx(np.log(3 * comm.size))


def test_mesh_that_one_rank_keeps_stays_whole(comm):
    kept = [Mesh(comm, data=comm.size)]
    if comm.rank > 0:
        kept.clear()
    with pce.trace() as trace:
        for _ in range(3):
            Mesh(comm, data=comm.size)
    members = kept[0].comm("data").size if kept else comm.size
    assert members == comm.size
    assert trace.count(operation="Mesh", purpose=Purpose.AGREEMENT) >= 3


def test_communicator_that_user_freed_is_not_freed_again(comm):
    mesh = Mesh(comm, data=comm.size, model=1)
    mesh.comm("model").Free()
    del mesh
    gc.collect()
    assert Mesh(comm, data=comm.size).comm("data").allreduce(1) == comm.size

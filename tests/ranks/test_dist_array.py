"""Distributed arrays: made of a global array or of what ranks have, looked at, put together, and compared."""

from itertools import product
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi.arrays import to_host
from pce_mpi.comm.tracing import Purpose
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.creation import distribute, from_local
from pce_mpi.distributed.fingerprint import check_replicas
from pce_mpi.distributed.mesh import Mesh
from pce_mpi.distributed.placements import Partial, Replicate, Shard
from pce_mpi.distributed.sharding import Sharding
from ranks.grids import assembled, factorizations, mesh_of, placements_of, ragged, ranks_of, spread, squarest
from ranks.placed import error_of

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
INTEGERS = [np.int8, np.uint8, np.int32, np.int64, np.uint64]
EVERYTHING = [*FLOATS, *INTEGERS, np.bool_]

OPERATORS = ("sum", "avg", "max", "min")


@pytest.fixture
def mesh(comm):
    return mesh_of(comm, comm.size)


@pytest.fixture
def grid(comm):
    return mesh_of(comm, *squarest(comm.size))


def numbers(shape: tuple[int, ...], dtype: Any = np.float64):
    return np.asarray(np.random.default_rng(17).integers(0, 50, shape)).astype(dtype)


def same(actual, expected) -> None:
    """Assert equal numbers of one dtype and shape in a NumPy array; nan equals nan."""
    assert type(actual) is np.ndarray
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(actual.astype(np.float64), expected.astype(np.float64))


def ranks_text(ranks) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def everyone_raises(comm, mesh, call) -> tuple[str, str]:
    """The error that `call` raises on every rank alike, after which the mesh is as good as before."""
    error = error_of(call)
    everywhere = comm.allgather(error)
    again = from_local(np.full(comm.rank, 2.0), mesh, data=Shard(0)).shape
    assert everywhere == [error] * comm.size
    assert again == (sum(range(comm.size)),)
    return error


# ----------------------------------------------------------------------------------------------------------- distribute


def test_distribute_gives_each_rank_its_part_silently(comm):
    for sizes in factorizations(comm.size, 2):
        grid = mesh_of(comm, *sizes)
        for shape in [(7, 5), (12, 24), (1, 2), (0, 3), (3, 0, 2)]:
            whole = numbers(shape)
            for one, other in product(placements_of(2), repeat=2):
                with pce.trace() as trace:
                    x = distribute(whole, grid, data=one, model=other)
                assert trace.events == []
                assert x.sharding == spread(grid.dim_sizes, shape, one, other)
                same(x.local, whole[x.sharding.slices(grid.coordinates)])


def test_dims_not_named_replicate(grid):
    x = distribute(numbers((7, 5)), grid, model=Shard(-1))
    assert x.placements == {"data": Replicate(), "model": Shard(1)}
    y = distribute(numbers((7, 5)), grid)
    assert y.placements == {"data": Replicate(), "model": Replicate()}
    same(y.local, numbers((7, 5)))


@pytest.mark.parametrize("operator", OPERATORS)
def test_terms_of_partial_array_are_array_together(comm, grid, operator):
    whole = numbers((7, 5))
    placements = [(Partial(operator), Replicate()), (Shard(0), Partial(operator)), (Partial(operator),) * 2]
    with pce.trace() as trace:
        made = [distribute(whole, grid, data=one, model=other) for one, other in placements]
    everywhere = comm.allgather([x.local for x in made])
    assert trace.events == []
    for number, x in enumerate(made):
        same(assembled(x.sharding, [locals_[number] for locals_ in everywhere]), whole)


def test_distributed_sum_is_kept_by_one_rank(mesh):
    whole = numbers((7, 5)) + 1
    same(distribute(whole, mesh, data=Partial("sum")).local, whole * (mesh.rank == 0))
    for operator in ("avg", "max", "min"):
        same(distribute(whole, mesh, data=Partial(operator)).local, whole)


@pytest.mark.ranks(3)  # shards of several lengths
@pytest.mark.parametrize("dtype", EVERYTHING, ids=lambda dtype: dtype.__name__)
def test_every_way_to_array_keeps_every_dtype(comm, mesh, dtype):
    whole, source, splits = numbers((7, 5), dtype), comm.size - 1, ragged(7, comm.size, 2)
    ways = [*placements_of(2), Partial("max"), Partial("min")] + [Partial("sum")] * (dtype is not np.bool_)
    made = [distribute(whole, mesh, data=placement) for placement in ways]
    mine = whole if comm.rank == source else "is not looked at"
    sent = [distribute(mine, mesh, src_rank=source, data=placement) for placement in ways]
    own = from_local(whole[splits[comm.rank] : splits[comm.rank + 1]], mesh, data=Shard(0))
    full = [x.full() for x in (*made, *sent, own)]
    for together in full:
        same(together, whole)
    for placement, x, y in zip(ways, made, sent, strict=True):
        assert x.placements == y.placements == {"data": placement}
        same(y.local, x.local)
        if isinstance(placement, Shard):
            same(x.local, whole[x.sharding.slices(mesh.coordinates)])
    assert own.dtype == whole.dtype


@pytest.mark.parametrize(
    "value",
    [[[1, 2, 3], [4, 5, 6]], ((1.5, 2.5), (3.5, 4.5)), 3.0, True, range(5), np.float32(2)],
    ids=["list", "tuple", "number", "bool", "range", "scalar"],
)
def test_distribute_takes_what_numpy_takes(mesh, value):
    x = distribute(value, mesh, data=Partial("max"))
    full = x.full()
    same(x.local, np.asarray(value))
    same(full, np.asarray(value))


def test_distributed_memory_is_own_and_in_c_order(comm, mesh):
    shared, orders = [], []
    for whole in (numbers((7, 5)), numbers((5, 7)).T, numbers((7, 10))[:, ::2], np.broadcast_to(1.0, (7, 5))):
        before = whole.tobytes()
        for placement in placements_of(2, *OPERATORS):
            x = distribute(whole, mesh, data=placement)
            shared.append(np.shares_memory(x.local, whole) or x.local.base is not None)
            orders.append(x.local.flags.c_contiguous and x.local.flags.writeable)
            x.local[...] = -1
            shared.append(whole.tobytes() != before)
    assert not any(shared)
    assert all(orders)


def test_cupy_arrays_are_distributed_on_their_device(comm, mesh, cupy):
    whole, source = numbers((7, 5)), comm.size - 1
    ways = placements_of(2, *OPERATORS)
    mine = cupy.asarray(whole) if comm.rank == source else None
    made = [distribute(cupy.asarray(whole), mesh, data=placement) for placement in ways]
    sent = [distribute(mine, mesh, src_rank=source, data=placement) for placement in ways]
    shard = cupy.asarray(np.full((comm.rank, 2), float(comm.rank)))
    own = from_local(shard, mesh, data=Shard(0))
    full = [x.full() for x in (*made, *sent, own)]
    assert own.local is shard
    assert all(isinstance(array, cupy.ndarray) for array in (*full, *(x.local for x in (*made, *sent))))
    for placement, x, y in zip(ways, made, sent, strict=True):
        for array in (x.local, y.local):
            same(to_host(array), distribute(whole, mesh, data=placement).local)
    for together in full[:-1]:
        same(to_host(together), whole)
    same(to_host(full[-1]), np.concatenate([np.full((rank, 2), float(rank)) for rank in range(comm.size)]))


def test_dims_may_have_names_of_first_arguments(comm):
    odd = Mesh(comm, array=comm.size, local=1, mesh=1)
    x = distribute(numbers((7, 5)), odd, array=Shard(0), mesh=Shard(1))
    y = from_local(x.local, odd, array=Shard(0), local=Replicate())
    assert x.placements == {"array": Shard(0), "local": Replicate(), "mesh": Shard(1)}
    assert y.shape == (7, 5)


# --------------------------------------------------------------------------------------------- distribute from one rank


def test_src_rank_sends_to_each_its_part(comm):
    whole = numbers((7, 5))
    placements = [(Shard(0), Replicate()), (Shard(1), Shard(0)), (Shard(0), Shard(0)), (Replicate(), Replicate())]
    made = []
    for sizes, source, (one, other) in product(factorizations(comm.size, 2), range(comm.size), placements):
        mine = whole if comm.rank == source else None
        with pce.trace() as trace:
            x = distribute(mine, mesh_of(comm, *sizes), src_rank=source, data=one, model=other)
        made.append((x, source, (one, other), trace))
    for x, source, (one, other), trace in made:
        assert x.sharding == spread(x.mesh.dim_sizes, (7, 5), one, other)
        same(x.local, whole[x.sharding.slices(x.mesh.coordinates)])
        assert not np.shares_memory(x.local, whole)
        shapes = [x.sharding.local_shape(where) for where in ranks_of(x.mesh.dim_sizes)]
        sent = sum(rows * columns * 8 for rank, (rows, columns) in enumerate(shapes) if rank != source)
        (event,) = trace.select()
        assert (event.collective, event.operation, event.over) == ("all_to_all", "distribute", "data, model")
        assert event.bytes == (sent if comm.rank == source else 0)
        assert event.reason == f"rank {source} has the array"


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,)], ids=str)
def test_src_rank_sends_scalars_and_empty_arrays(comm, mesh, shape):
    whole = numbers(shape)
    mine, ways = whole if comm.rank == 0 else None, placements_of(len(shape), "sum")
    made = [distribute(mine, mesh, src_rank=0, data=placement) for placement in ways]
    full = [x.full() for x in made]
    for placement, x, together in zip(ways, made, full, strict=True):
        same(x.local, distribute(whole, mesh, data=placement).local)
        assert x.local.flags.writeable
        same(together, whole)


@pytest.mark.parametrize(
    ("src_rank", "kind", "text"),
    [
        (-1, "ValueError", "src_rank = -1 is outside [0, {size}) ({all} along data)"),
        (99, "ValueError", "src_rank = 99 is outside [0, {size}) ({all} along data)"),
        ("0", "TypeError", "src_rank must be an integer, got '0' ({all} along data)"),
        (0.0, "TypeError", "src_rank must be an integer, got 0.0 ({all} along data)"),
    ],
)
def test_src_rank_that_is_none_raises_everywhere(comm, mesh, impatient, src_rank, kind, text):
    error = everyone_raises(comm, mesh, lambda: distribute(np.zeros(3), mesh, src_rank=src_rank))
    assert error[0] == kind
    assert error[1].startswith(text.format(size=comm.size, all=ranks_text(range(comm.size))))


@pytest.mark.parametrize("what", ["src_rank", "placements", "requires_grad"])
def test_ranks_that_disagree_on_src_rank_raise(comm, mesh, impatient, what):
    first = comm.rank == 0
    given: dict[str, Any] = {"src_rank": 0, "data": Shard(0), "requires_grad": False}
    given |= {
        "src_rank": {"src_rank": 0 if first else comm.size - 1},
        "placements": {"data": Shard(0) if first else Shard(1)},
        "requires_grad": {"requires_grad": first},
    }[what]
    error = everyone_raises(comm, mesh, lambda: distribute(np.zeros((4, 4)), mesh, **given))
    if comm.size > 1:
        assert error[0] == "CollectiveError"
        assert error[1].startswith(f"ranks disagree on {what}: ")


# ------------------------------------------------------------------------------------------------- errors of distribute


class Explosive:
    """No array, and says so in a way of its own."""

    def __array__(self, *_, **__):
        raise LookupError("boom")


NUMBERS = "a distributed array holds bool, integers, float16, bfloat16, float32 or float64 in native byte order, got"
PLACEMENT = "data must be Shard(axis), Replicate() or Partial(operator)"
WRONG = [
    (np.zeros((4, 3)), {"rows": Shard(0)}, ValueError, "the mesh has no dim 'rows'; its dims are data"),
    (np.zeros((4, 3)), {"data": Shard(2)}, ValueError, "data=Shard(2) is out of bounds for an array of 2 dim"),
    (np.float64(1), {"data": Shard(0)}, ValueError, "data=Shard(0) is out of bounds for an array of 0 dim"),
    (np.zeros(4), {"data": 0}, TypeError, f"{PLACEMENT}, got 0"),
    (np.zeros(4), {"data": None}, TypeError, f"{PLACEMENT}, got None"),
    (np.zeros(4), {"data": [Shard(0)]}, TypeError, PLACEMENT),
    *(
        (np.zeros(4, dtype), {}, TypeError, f"{NUMBERS} {said}")
        for dtype, said in [
            (complex, "complex128"),
            (np.longdouble, np.dtype(np.longdouble).name),
            ("S3", "|S3"),
            ("U4", "<U4"),
            ("M8[s]", "datetime64"),
            (">f8", ">f8"),
            (">i4", ">i4"),
            ([("a", int)], ""),
        ]
    ),
    (None, {}, TypeError, "must be an array of numbers, got NoneType"),
    ([[1, 2], [3]], {}, TypeError, "cannot be taken as an array"),
    (Explosive(), {}, LookupError, "boom"),
    (np.ma.masked_array([1.0]), {}, TypeError, "is a masked array"),
    *(
        (np.zeros(4, dtype), {"data": partial}, TypeError, f"{partial} of {dtype} has no meaning")
        for dtype, partial in (("bool", Partial("sum")), ("bool", Partial("avg")), ("int64", Partial("avg")))
    ),
]


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(("value", "placements", "kind", "text"), WRONG)
def test_wrong_array_or_placement_raises(comm, mesh, impatient, value, placements, kind, text):
    with pce.trace() as trace, pytest.raises(kind, match=re.escape(text)):
        distribute(value, mesh, **placements)
    assert trace.events == []
    last = comm.size - 1
    here = (value, placements) if comm.rank == last else (np.ones(3), {"data": Shard(0)})
    sent = value if comm.rank == last else None
    for call in (
        lambda: from_local(here[0], mesh, **here[1]),
        lambda: distribute(sent, mesh, src_rank=last, **here[1]),
    ):
        name, said = everyone_raises(comm, mesh, call)
        assert name in {each.__name__ for each in np.atleast_1d(kind)}
        assert text in said
        assert said.endswith(f"(rank {last} along data)")


@pytest.mark.parametrize("dtype", [*INTEGERS, np.bool_], ids=lambda dtype: dtype.__name__)
def test_gradients_are_required_of_real_numbers_only(comm, mesh, dtype):
    text = f"only float16, bfloat16, float32 and float64 have a gradient, got {np.dtype(dtype)}"
    with pytest.raises(TypeError, match=text):
        distribute(np.ones(4, dtype), mesh, requires_grad=True)
    errors = [
        error_of(lambda: from_local(np.ones(4, dtype), mesh, requires_grad=True)),
        error_of(lambda: distribute(np.ones(4, dtype), mesh, src_rank=0, requires_grad=True)),
    ]
    assert [kind for kind, _ in errors] == ["TypeError"] * 2
    assert all(said.startswith(text) for _, said in errors)


def test_distributed_array_is_not_distributed_again(mesh):
    x = distribute(np.zeros(3), mesh)
    with pytest.raises(TypeError, match=r"array cannot be taken as an array: .* becomes a NumPy array by \.full\(\)"):
        distribute(x, mesh)


# ----------------------------------------------------------------------------------------------------------- from_local


def test_uneven_shards_are_taken_as_they_are(comm):
    whole, made = numbers((9, 6)), []
    for sizes, (one, other) in product(factorizations(comm.size, 2), product(placements_of(2), repeat=2)):
        grid = mesh_of(comm, *sizes)
        sharding = spread(grid.dim_sizes, (9, 6), one, other, seed=[4])
        x = from_local(whole[sharding.slices(grid.coordinates)], grid, data=one, model=other)
        made.append((sharding, x, x.full()))
    for sharding, x, full in made:
        assert x.sharding == sharding
        assert x.shape == (9, 6)
        same(full, whole)


def test_from_local_takes_empty_shards(comm, mesh):
    one_has_all = from_local(np.ones((5 * (comm.rank == comm.size - 1), 2)), mesh, data=Shard(0))
    nobody_has_any = from_local(np.ones((3, 0)), mesh, data=Shard(1))
    full, empty = one_has_all.full(), nobody_has_any.full()
    assert one_has_all.shape == (5, 2)
    assert one_has_all.sharding.splits == ((0,) * comm.size + (5,), None)
    assert nobody_has_any.shape == (3, 0)
    same(full, np.ones((5, 2)))
    same(empty, np.ones((3, 0)))


@pytest.mark.parametrize("operator", OPERATORS)
def test_terms_and_replicas_have_global_shape(mesh, operator):
    x = from_local(np.ones((3, 2)), mesh, data=Partial(operator))
    y = from_local(np.ones((3, 2)), mesh)
    full = x.full()
    assert x.shape == y.shape == (3, 2)
    assert (x.placements, y.placements) == ({"data": Partial(operator)}, {"data": Replicate()})
    same(full, np.ones((3, 2)) * (mesh.size if operator == "sum" else 1))


def test_array_itself_is_held_unless_it_requires_gradient(mesh):
    mine = np.ones((3, 4))[:, ::2]
    before = mine.copy()
    held = from_local(mine, mesh, data=Shard(0))
    copied = from_local(mine, mesh, data=Shard(0), requires_grad=True)
    assert held.local is mine
    assert not np.shares_memory(copied.local, mine)
    assert copied.local.flags.c_contiguous
    assert (held.requires_grad, copied.requires_grad) == (False, True)
    copied.local[...] = 7
    np.testing.assert_array_equal(mine, before)


def test_from_local_sends_header_and_shapes_only(mesh):
    with pce.trace() as trace:
        from_local(np.ones((100, 20)), mesh, data=Shard(0))
    assert trace.count() == 0
    assert [event.collective for event in trace.events] == ["all_gather"] * 3
    assert trace.bytes(purpose=Purpose.AGREEMENT) == 56 + 8 + len("[100, 20]")
    assert {(event.operation, event.over) for event in trace.events} == {("from_local", "data")}


@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial("sum"), Partial("max")], ids=repr)
def test_lengths_that_differ_raise_everywhere(comm, mesh, impatient, placement):
    # The axis that is not sharded.
    mine = np.ones((3, 4 + (comm.rank == comm.size - 1)))
    error = everyone_raises(comm, mesh, lambda: from_local(mine, mesh, data=placement))
    if comm.size > 1:
        said = f"4 ({ranks_text(range(comm.size - 1))}), 5 (rank {comm.size - 1})"
        text = f"axis 1 must have one length on ranks that hold the same part of it: {said}"
        assert error == ("ValueError", text)


def test_shards_must_fit_replicas_along_other_dim(comm, impatient):
    mine, errors = np.ones((2 + (comm.rank == comm.size - 1), 3)), {}
    for sizes in factorizations(comm.size, 2):
        grid = mesh_of(comm, *sizes)
        errors[sizes] = error_of(lambda grid=grid: from_local(mine, grid, data=Shard(0)))
    everywhere = comm.allgather(errors)
    assert everywhere == [errors] * comm.size
    for sizes, error in errors.items():
        if sizes[1] > 1:
            first = comm.size - sizes[1]
            said = f"2 ({ranks_text(range(first, comm.size - 1))}), 3 (rank {comm.size - 1})"
            assert error[1] == f"axis 0 must have one length on ranks that hold the same part of it: {said}"
        else:
            assert error == ("", "")


def test_global_shape_is_that_of_shards(comm, mesh, impatient):
    rows = 2 * comm.size

    def make(shape):
        return lambda: from_local(np.ones((2, 3)), mesh, data=Shard(0), shape=shape)

    wrong = [everyone_raises(comm, mesh, make(shape)) for shape in [(rows + 1, 3), (3 * rows,), (), "7", (2.0, 3)]]
    right = [make(shape)().shape for shape in [(rows, 3), [np.int64(rows), 3]]]
    assert [kind for kind, _ in wrong] == ["ValueError"] * 3 + ["TypeError"] * 2
    assert wrong[0][1] == f"shape = ({rows + 1}, 3), but the local arrays make up ({rows}, 3)"
    for (_, text), shape in zip(wrong[3:], ["7", (2.0, 3)], strict=True):
        assert text.startswith(f"shape must be an integer or a sequence of integers, got {shape!r}")
        assert text.endswith(f"({ranks_text(range(comm.size))} along data)")
    assert right == [(rows, 3)] * 2


@pytest.mark.parametrize("what", ["shape", "shape of one", "placements", "dtype", "dimensions", "requires_grad"])
def test_ranks_that_disagree_hear_so_on_every_rank(comm, mesh, impatient, what):
    first = comm.rank == 0
    mine = {
        "dtype": np.ones((2, 3), np.float32 if first else np.float64),
        "dimensions": np.ones((2, 3) if first else (2, 3, 1)),
    }.get(what, np.ones((2, 3)))
    given: dict[str, Any] = {
        "shape": {"shape": (2 * comm.size, 3) if first else (2 * comm.size, 4)},
        "shape of one": {"shape": (2 * comm.size, 3) if first else None},
        "placements": {"data": Shard(0) if first else Shard(1)},
        "requires_grad": {"requires_grad": first},
    }.get(what, {})
    error = everyone_raises(comm, mesh, lambda: from_local(mine, mesh, **({"data": Shard(0)} | given)))
    if comm.size > 1:
        assert error[0] == "CollectiveError"
        assert error[1].startswith(f"ranks disagree on {what.removesuffix(' of one')}: ")
        assert re.search(r"\(rank 0 along data\), .* \(ranks? 1", error[1])


# ----------------------------------------------------------------------------------------- what an array says of itself


def test_array_tells_its_global_shape(grid):
    x = distribute(numbers((7, 5, 2), np.float32), grid, data=Shard(0), model=Shard(1))
    assert (x.shape, x.ndim, x.size, len(x), x.dtype) == ((7, 5, 2), 3, 70, 7, np.float32)
    assert x.placements == {"data": Shard(0), "model": Shard(1)}
    assert x.mesh is grid
    assert (x.requires_grad, x.grad, x.is_leaf) == (False, None, True)
    assert distribute(np.ones(3), grid, requires_grad=True).requires_grad
    with pytest.raises(TypeError, match="a 0-d array has no length"):
        len(distribute(1.0, grid))


def test_array_attributes_communicate_nothing(comm, grid):
    x = distribute(numbers((7, 5), np.float32), grid, data=Shard(0), model=Partial("sum"), requires_grad=True)
    with pce.trace() as trace:
        texts = [repr(x), str(x)] if comm.rank == 0 else []  # on one rank only
        x.shape, x.ndim, x.size, x.dtype, x.placements, x.detach(), x.is_leaf, len(x)
    assert trace.events == []
    facts = "shape=(7, 5), dtype=float32, data: Shard(0), model: Partial('sum'), requires_grad=True)"
    term = np.array2string(x.local, separator=", ", prefix="DistArray(term=")
    assert texts in ([], [f"DistArray(term={term}, {facts}"] * 2)


def as_numpy(array, label):
    """The numbers of an array as NumPy shows them after these words."""
    return f"DistArray({label}" + np.array2string(np.asarray(array), separator=", ", prefix=f"DistArray({label}") + ", "


@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16, np.int64, np.bool_])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (40, 50), (1001,), (7, 6, 200), (3, 2, 4, 5, 1, 2, 11)])
def test_repr_shows_numbers_that_rank_holds(comm, mesh, shape, dtype):
    whole = np.random.default_rng(0).integers(-99, 99, shape).astype(dtype)
    x = distribute(whole, mesh)
    assert repr(x) == str(x) == as_numpy(whole, "") + f"shape={shape}, dtype={x.dtype}, {x.sharding})"
    if shape:
        x = distribute(whole, mesh, **dict.fromkeys(mesh.dims, Shard(0)))
        assert repr(x).startswith(as_numpy(x.local, "" if x.local.shape == shape else "local="))


def test_repr_follows_print_options_and_stays_short(mesh):
    x = distribute(np.arange(24.0).reshape(4, 6) / 7, mesh)
    with np.printoptions(precision=2, threshold=5, edgeitems=1):
        assert repr(x).startswith(as_numpy(x.local, ""))
        assert "..." in repr(x)
    # Neither is formatted as a whole: 8 GiB behind one number, and an array whose every axis NumPy shows whole.
    assert len(repr(DistArray(np.broadcast_to(1.0, (2**15, 2**15)), mesh, distribute(0.0, mesh).sharding))) < 1000
    assert repr(distribute(np.zeros((2,) * 16, np.bool_), mesh)).startswith("DistArray(shape=(2, 2, ")


def test_repr_of_hollow_array_has_no_numbers():
    x = distribute(np.ones(3), pce.Mesh.without_ranks(data=2))
    assert repr(x) == "DistArray(shape=(3,), dtype=float64, data: Replicate())"


def test_repr_copies_from_gpu_what_it_shows(mesh, cupy, monkeypatch):
    whole = np.arange(5000.0).reshape(50, 100)
    x, sizes, right = DistArray(cupy.asarray(whole), mesh, distribute(whole, mesh).sharding), [], cupy.asnumpy
    monkeypatch.setattr(cupy, "asnumpy", lambda array, *more: (sizes.append(array.size), right(array, *more))[1])
    assert repr(x).startswith(as_numpy(whole, ""))
    assert sizes == [49]


def test_errors_describe_arrays_without_numbers(mesh):
    x = distribute(np.arange(3.0), mesh)
    with pytest.raises(ValueError, match=r"got DistArray\(shape=\(3,\), dtype=float64, "):
        pce.SGD([x], lr=1.0)


def test_placements_of_array_may_be_changed(mesh):
    x = distribute(np.ones(3), mesh, data=Shard(0))
    x.placements["data"] = Replicate()
    assert x.placements == {"data": Shard(0)}


def test_detached_array_holds_same_memory_and_no_gradient(mesh):
    x = distribute(np.ones(3), mesh, requires_grad=True)
    x.grad = distribute(np.zeros(3), mesh)
    y = x.detach()
    assert y is not x
    assert y.local is x.local
    assert (y.sharding, y.mesh) == (x.sharding, mesh)
    assert (y.requires_grad, y.grad) == (False, None)


def test_arrays_are_equal_to_themselves_only(mesh):
    x, y = distribute(np.ones(3), mesh), distribute(np.ones(3), mesh)
    assert len({x, y, x}) == 2


def test_array_has_no_truth_value_nor_elements(mesh):
    x = distribute(1.0, mesh)
    with pytest.raises(TypeError, match=r"is not true or false; compare the result of \.full\(\) or \.item\(\)"):
        bool(x)
    for make in (np.asarray, np.array, lambda x: np.asarray(x, np.float32), lambda x: np.array([x, x])):
        with pytest.raises(TypeError, match=r"becomes a NumPy array by \.full\(\), which communicates, or \.local"):
            make(x)


@pytest.mark.parametrize("function", ["softmax_cross_entropy", "class_statistics_forward"])
def test_loss_of_plain_arrays_names_cross_entropy(comm, mesh, function):
    x, targets = distribute(np.zeros((2, 3)), mesh), np.zeros(2, int)
    texts = []
    for over in (None, comm):
        with pytest.raises(TypeError, match=r"logits cannot be taken as an array: .*pce_mpi\.cross_entropy") as raised:
            getattr(pce, function)(x, targets, comm=over)
        texts.append(str(raised.value))
    assert all(len(set(said)) == 1 for said in zip(*comm.allgather(texts), strict=True))


def test_full_array_has_its_own_memory(comm, grid):
    whole = numbers((7, 5))
    ways = product(placements_of(2, "sum"), repeat=2)
    made = [distribute(whole, grid, data=one, model=other) for one, other in ways]
    full = [x.full() for x in made]
    for x, together in zip(made, full, strict=True):
        same(together, whole)
        assert not np.shares_memory(together, x.local)
        assert together.flags.writeable
        assert together.flags.c_contiguous


def test_trace_says_that_full_array_was_asked_for(mesh):
    x, replicated = distribute(numbers((7, 5)), mesh, data=Shard(0)), distribute(numbers((7, 5)), mesh)
    with pce.trace() as trace:
        x.full()
    with pce.trace() as silent:
        replicated.full()
    assert {event.operation for event in trace.events} == {"full"}
    assert [event.reason for event in trace.select("all_gather")] == ["the global array is asked for"]
    assert silent.events == []


def test_item_is_the_only_element_at_any_placement(comm, mesh):
    arrays = [
        distribute(2.5, mesh),
        distribute(2.5, mesh, data=Partial("sum")),
        from_local(2.5 / comm.size, mesh, data=Partial("sum")),
        distribute([[2.5]], mesh, data=Shard(1)),
        from_local(np.full(int(comm.rank == comm.size - 1), 2.5), mesh, data=Shard(0)),
        from_local(2.5 - comm.rank, mesh, data=Partial("max")),
    ]
    items = [x.item() for x in arrays]
    floats = [float(x) for x in arrays]
    assert items == floats
    assert items == pytest.approx([2.5] * 6, rel=1e-15)
    assert {type(item) for item in items} == {float}


def test_item_has_the_python_type_of_dtype(mesh):
    values = [np.int8(3), np.bool_(True), np.float16(0.5), np.uint64(2**63), ml_dtypes.bfloat16(0.5)]
    items = [distribute(value, mesh).item() for value in values]
    assert items == [3, True, 0.5, 2**63, 0.5]
    assert [type(item) for item in items] == [int, bool, float, int, float]
    number = float(distribute(3, mesh))
    assert (number, type(number)) == (3.0, float)


@pytest.mark.parametrize("shape", [(2,), (0,), (1, 3)], ids=str)
def test_array_of_several_elements_is_no_number(mesh, shape):
    x = distribute(np.ones(shape), mesh, data=Shard(0))
    text = re.escape(f"only an array of one element is a number, got shape {shape}")
    with pce.trace() as trace:
        for convert in (DistArray.item, float):
            with pytest.raises(ValueError, match=text):
                convert(x)
    assert trace.events == []


# ------------------------------------------------------------------------------------------------------- check_replicas


def spoiled(x: DistArray, comm, *ranks: int) -> DistArray:
    """`x`, but for one element on some ranks."""
    local = x.local.copy()
    if comm.rank in ranks and local.size:
        local.ravel()[-1] += 1
    return DistArray(local, x.mesh, x.sharding)


def test_replicas_that_differ_are_named_on_every_rank(comm, mesh, impatient):
    x = distribute(numbers((7, 5)), mesh)
    last = comm.size - 1
    error = error_of(lambda: check_replicas(spoiled(x, comm, last)))
    everywhere = comm.allgather(error)
    check_replicas(x)
    assert everywhere == [error] * comm.size
    if comm.size == 1:
        assert error == ("", "")
    else:
        assert error[0] == "ValueError"
        pattern = rf"replicas differ: checksum [0-9a-f]{{8}} \({ranks_text(range(last))}\), checksum [0-9a-f]{{8}} "
        assert re.fullmatch(pattern + rf"\(rank {last}\)", error[1])


def test_replicas_are_compared_along_replicate_dims_only(comm):
    last, errors = comm.size - 1, {}
    for sizes, placement in product(factorizations(comm.size, 2), (Shard(0), Partial("sum"), Partial("max"))):
        x = spoiled(distribute(numbers((8, 5)), mesh_of(comm, *sizes), data=placement), comm, last)
        errors[sizes, placement] = error_of(lambda x=x: check_replicas(x))
    everywhere = comm.allgather(errors)
    assert everywhere == [errors] * comm.size
    for (sizes, _), (kind, text) in errors.items():
        group = range(comm.size - sizes[1], comm.size)
        if len(group) == 1:
            assert (kind, text) == ("", "")
        else:
            # The other groups, whose blocks or terms are others, are not even mentioned.
            assert kind == "ValueError"
            assert re.fullmatch(rf"replicas differ: .*\({ranks_text(group[:-1])}\), .*\(rank {last}\)", text)


def test_replicas_that_differ_are_named_by_group(comm, grid):
    x = distribute(numbers((8, 5)), grid, model=Shard(1))
    last_row = [rank for rank, where in enumerate(ranks_of(grid.dim_sizes)) if where["data"] == grid.dims["data"] - 1]
    kind, text = error_of(lambda: check_replicas(spoiled(x, comm, *last_row)))
    if grid.dims["data"] > 1:
        assert kind == "ValueError"
        assert text.count(";") == grid.dims["model"] - 1
        assert all(re.search(rf"\(rank {rank}\)", text) for rank in last_row)
    else:
        assert kind == ""


def test_replicas_are_compared_bit_by_bit(comm, mesh):
    last = comm.rank == comm.size - 1
    check_replicas(from_local(np.array([np.nan, -np.inf, -0.0]), mesh))
    zeros = error_of(lambda: check_replicas(from_local(np.array([-0.0 if last else 0.0]), mesh)))
    other_nan = np.array([0x7FF8000000000001 if last else 0x7FF8000000000000], np.uint64).view(np.float64)
    payloads = error_of(lambda: check_replicas(from_local(other_nan, mesh)))
    shapes = [error_of(lambda s=s: check_replicas(from_local(np.full(s, comm.rank), mesh))) for s in ((), (0,), (3, 0))]
    assert [zeros[0], payloads[0], shapes[0][0]] == ["ValueError" if comm.size > 1 else ""] * 3
    assert shapes[1:] == [("", "")] * 2


def test_replicas_on_device_are_compared(comm, mesh, cupy):
    check_replicas(from_local(cupy.asarray(np.ones((3, 2))), mesh))
    error = error_of(lambda: check_replicas(from_local(cupy.asarray(np.full(3, comm.rank)), mesh)))
    assert error[0] == ("ValueError" if comm.size > 1 else "")


@pytest.mark.ranks(3)  # two replicas against one
@pytest.mark.parametrize("dtype", EVERYTHING, ids=lambda dtype: dtype.__name__)
def test_replicas_of_any_dtype_and_order_are_compared(comm, mesh, dtype):
    whole = numbers((4, 3), dtype) if dtype is not np.bool_ else np.zeros((4, 3), bool)
    last = comm.rank == comm.size - 1
    orders = [whole, whole.copy("F"), np.repeat(whole, 2, 1)[:, ::2]]
    check_replicas(from_local(orders[comm.rank % 3], mesh))
    other = whole.copy()
    other[2, 1] = not other[2, 1] if last else other[2, 1]
    error = error_of(lambda: check_replicas(from_local(other, mesh)))
    assert error[0] == ("ValueError" if comm.size > 1 else "")


def test_checking_sends_checksums_and_no_numbers(mesh):
    x = distribute(np.ones(10_000), mesh)
    with pce.trace() as trace:
        check_replicas(x)
    assert trace.count() == 0
    assert trace.bytes(purpose=Purpose.AGREEMENT) == 56 + 8 + 32
    assert {event.operation for event in trace.events} == {"check_replicas"}


def test_ranks_that_check_different_arrays_hear_so(comm, mesh, impatient):
    first = comm.rank == 0
    calls = [
        lambda: check_replicas(distribute(np.ones((3, 2)), mesh, data=Shard(0) if first else Shard(1))),
        lambda: check_replicas(distribute(np.ones((3, 2) if first else (2, 3)), mesh)),
        lambda: check_replicas(distribute(np.ones(3, np.float32 if first else np.float64), mesh)),
    ]
    errors = [error_of(call) for call in calls]
    everywhere = comm.allgather(errors)
    assert everywhere == [errors] * comm.size
    if comm.size > 1:
        assert [kind for kind, _ in errors] == ["CollectiveError"] * 3
        for (_, text), what in zip(errors, ["sharding", "shape", "dtype"], strict=True):
            assert text.startswith(f"ranks disagree on {what}: ")


def test_sharding_that_ranks_see_differently_is_noticed(comm, mesh):
    # Split points are part of what ranks agree on.
    splits = ((0, *sorted([1 + (comm.rank == 0)] * (comm.size - 1)), 9), None)
    sharding = Sharding(mesh.dim_sizes, (9, 2), (Shard(0),), splits)
    x = DistArray(np.ones(sharding.local_shape(mesh.coordinates)), mesh, sharding)
    error = error_of(lambda: check_replicas(x))
    assert error[0] == ("CollectiveError" if comm.size > 1 else "")


def test_replicas_that_became_nan_are_not_accused(comm, mesh):
    # MPI's own sum of the gradients, nan and inf - inf, would leave a nan of its own on each rank.
    rows = np.full((2 * comm.size, 3), np.inf)
    rows[1::2], rows[:2] = -np.inf, np.nan
    w = distribute(np.ones((3, 2)), mesh, requires_grad=True)
    (distribute(rows, mesh, data=Shard(0)) @ w).sum().backward()
    pce.SGD([w], lr=0.1).step()
    error = error_of(lambda: check_replicas(w))
    assert np.isnan(w.full()).all()
    assert error == ("", "")

"""`infer_placements` says what an operation would do; every operation then does exactly that."""

from collections.abc import Iterator
import importlib
from itertools import islice, product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Inference, Shard, infer_placements
from pce_mpi.comm.communicators import Channel
from pce_mpi.distributed.array import OPERATIONS, DistArray
from pce_mpi.distributed.mesh import Mesh
from pce_mpi.distributed.placements import Placement
from ranks.grids import local_of, mesh_of, spread, squarest
from ranks.op_cases import CASES, DEFINED, Case
from ranks.placed import AVG, MAX, SUM, R, error_of

F, N, B = np.float64, np.int64, np.bool_


pytestmark = pytest.mark.usefixtures("impatient")


# The operands of a case have these dtypes in turn, so that they differ.
FLOATS = (F, np.float32, np.float16, ml_dtypes.bfloat16)


class Call(NamedTuple):
    """An operation, as `infer_placements` takes it and as it is called."""

    name: str
    case: Case
    operands: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.case.name}, of {', '.join(x.dtype.name for x in self.operands)}"

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [x.shape for x in self.operands]

    @property
    def dtypes(self) -> list[Any]:
        return [x.dtype for x in self.operands]


def calls() -> Iterator[Call]:
    for number, case in enumerate(case for case in CASES if case.parameters is not None):
        turns = [case.in_dtype(FLOATS[(number + index) % len(FLOATS)])[index] for index in range(len(case.operands))]
        yield Call({"slice": "getitem"}.get(case.op, case.op), case, tuple(turns))


def test_inference_cases_have_every_operation():
    assert {call.name for call in calls()} == DEFINED


def ways_of(x: Any) -> list[Placement]:
    """The placements that an operand may have along one dim."""
    meaningful = {"b": (MAX,), "i": (SUM, MAX)}.get(x.dtype.kind, (SUM, AVG, MAX))
    return [*(Shard(axis) for axis in range(x.ndim)), R, *meaningful]


def mixes(placed: tuple[Placement, ...]) -> bool:
    return len({each for each in placed if each in (SUM, AVG)} and {each for each in placed if each == MAX}) == 0


def on_a_line(call: Call) -> list[list[tuple[Placement, ...]]]:
    """Every combination of placements of the operands over one dim."""
    return [[(placement,) for placement in each] for each in product(*map(ways_of, call.operands))]


def on_a_grid(call: Call) -> list[list[tuple[Placement, ...]]]:
    """Return every combination of the operands' placements over two dims, up to 5,000."""
    each = [[ways for ways in product(ways_of(x), repeat=2) if mixes(ways)] for x in call.operands]
    return [list(ways) for ways in islice(product(*each), 5000)]


def drawn(combinations: list[Any], most: int, *seed: int) -> list[Any]:
    """At most so many of them, the same on every rank."""
    if len(combinations) <= most:
        return combinations
    chosen = np.random.default_rng(seed).choice(len(combinations), most, replace=False)
    return [combinations[index] for index in chosen]


class Outcome(NamedTuple):
    """The placements, collectives and error of an operation, done or foreseen."""

    operands: tuple[dict[str, Placement], ...] = ()
    result: Any = None
    sent: tuple[Any, ...] = ()
    error: str = ""


def done(call: Call, mesh: Mesh, placed: list[tuple[Placement, ...]], needed: dict[int, Any]) -> Outcome:
    operands = []
    for whole, placements in zip(call.operands, placed, strict=True):
        sharding = spread(mesh.dim_sizes, whole.shape, *placements)
        operands.append(DistArray(local_of(whole, sharding, mesh.coordinates), mesh, sharding))
    needed.clear()
    try:
        with pce.trace() as trace, np.errstate(all="ignore"):
            result = call.case.call(*operands)
    except (TypeError, ValueError) as error:
        return Outcome(error=f"{type(error).__name__}: {error}")
    first = result[0] if isinstance(result, list | tuple) else result
    return Outcome(
        tuple(needed.get(id(operand), operand.sharding.by_dim) for operand in operands),
        first.placements,
        tuple(trace.select()),
    )


def foreseen(call: Call, mesh: Any, placed: list[tuple[Placement, ...]]) -> Outcome:
    dims = list(mesh.dims if isinstance(mesh, Mesh) else mesh)
    placements = [dict(zip(dims, each, strict=True)) for each in placed]
    try:
        parameters = call.case.parameters or {}
        found = infer_placements(call.name, call.shapes, placements, mesh=mesh, dtypes=call.dtypes, **parameters)
    except (TypeError, ValueError) as error:
        return Outcome(error=f"{type(error).__name__}: {error}")
    assert found.bytes == sum(sent.bytes for sent in found.collectives)
    return Outcome(found.operands, found.result, found.collectives)


@pytest.fixture
def needed(monkeypatch) -> dict[int, Any]:
    """The placements that an operation needed each array in when it first used it, by the id of the array."""
    seen: dict[int, Any] = {}

    def see(x: DistArray, sharding: Any) -> None:
        seen.setdefault(id(x), dict(sharding.by_dim))
        seen[-id(x)] = x  # so that no other array gets its id

    run = importlib.import_module("pce_mpi.autograd.apply")
    inputs = run._inputs

    def watched_inputs(op: Any, operands: Any, call: Any) -> Any:
        for x, sharding in zip(operands, call.plan.operands, strict=True):
            see(x, sharding)
        return inputs(op, operands, call)

    monkeypatch.setattr(run, "_inputs", watched_inputs)
    embedding = importlib.import_module("pce_mpi.ops.embedding")
    redistributed = embedding.redistributed

    def watched(x: DistArray, sharding: Any) -> DistArray:
        see(x, sharding)
        return redistributed(x, sharding)

    monkeypatch.setattr(embedding, "redistributed", watched)
    return seen


def differences(comm, mesh: Mesh, combinations: Any, most: int, needed: dict[int, Any]) -> list[str]:
    """Return what rank 0, at the origin of the mesh, did otherwise than foreseen; the same list on every rank."""
    wrong = []
    for number, each in enumerate(calls()):
        for placed in drawn(combinations(each), most, number, comm.size):
            did = done(each, mesh, placed, needed)
            if comm.rank == 0 and did != (would := foreseen(each, mesh, placed)):
                wrong.append(f"{each}, spread as {placed}:\n    did      {did}\n    foreseen {would}")
    return comm.bcast(wrong[:20])


def test_inference_knows_dtype_after_astype():
    # In float32, in which halves are normalized, both operands take as many bytes: the first stays where it is.
    placed, dtypes = [{"data": Shard(1)}, {"data": Shard(0)}], [ml_dtypes.bfloat16, F]
    found = infer_placements("rms_norm", [(3, 4), (3,)], placed, mesh={"data": 2}, dtypes=dtypes, axis=0)
    assert found.result == {"data": Shard(1)}


@pytest.mark.ranks(3)
def test_operation_on_line_does_what_was_inferred(comm, needed):
    wrong = differences(comm, mesh_of(comm, comm.size), on_a_line, 4, needed)
    assert not wrong, "\n".join(wrong)


@pytest.mark.ranks(4)
def test_operation_on_grid_does_what_was_inferred(comm, needed):
    wrong = differences(comm, mesh_of(comm, *squarest(comm.size)), on_a_grid, 2, needed)
    assert not wrong, "\n".join(wrong)


# ------------------------------------------------------------------------------------------------- without any ranks


def inferred(name: str, shapes: Any, *placed: Placement, **options: Any) -> Inference:
    return infer_placements(name, shapes, [{"model": each} for each in placed], mesh={"model": 4}, **options)


def test_example_of_two_products():
    found = inferred("matmul", [(16, 784), (784, 784)], R, Shard(1))
    assert (found.result, found.bytes) == ({"model": Shard(1)}, 0)
    found = inferred("matmul", [(16, 784), (784, 10)], Shard(1), Shard(0))
    assert found == Inference(({"model": Shard(1)}, {"model": Shard(0)}), {"model": SUM}, ())
    found = inferred("square", [(16, 10)], SUM)
    assert found.result == {"model": R}
    (event,) = found.collectives
    assert (event.collective, event.over, event.bytes) == ("all_reduce", "model", 640)
    assert (event.before, event.after) == ("Partial('sum')", "Replicate()")


def test_bytes_are_those_of_rank_with_longest_shards():
    found = inferred("matmul", [(5, 6), (6, 100)], Shard(0), Shard(1))
    assert [(sent.collective, sent.bytes) for sent in found.collectives] == [("all_gather", 2 * 6 * 4)]
    assert inferred("tanh", [(5, 6)], SUM, dtypes=np.float64).bytes == 5 * 6 * 8
    assert inferred("tanh", [(5, 6)], SUM, dtypes=np.float16).bytes == 5 * 6 * 4, "halves travel as float32"


def test_inference_takes_one_dtype_or_one_each():
    shapes = [(8, 8), (8, 8)]
    assert inferred("add", shapes, SUM, AVG, dtypes="float64").bytes == 512
    assert inferred("add", shapes, SUM, AVG, dtypes=["float32", "float32"]).bytes == 256
    assert inferred("embedding", [(3,), (8, 2)], R, Shard(0), dtypes=(np.int32, np.float32)).result == {"model": SUM}


def test_mesh_may_be_given_for_its_dims(square):
    placements = [{"data": Shard(0)}, {"model": Shard(1)}]
    by_mesh = infer_placements("matmul", [(5, 4), (4, 3)], placements, mesh=square)
    assert by_mesh == infer_placements("matmul", [(5, 4), (4, 3)], placements, mesh=dict(square.dims))
    assert by_mesh.result == {"data": Shard(0), "model": Shard(1)}


def test_inference_replicates_dims_not_named():
    mesh = {"data": 2, "model": 3}
    found = infer_placements("add", [(6, 4), (4,)], [{"model": Shard(-1)}, {}], mesh=mesh)
    assert found.operands == ({"data": R, "model": Shard(1)}, {"data": R, "model": Shard(0)})
    assert found.result == {"data": R, "model": Shard(1)}


def test_large_meshes_and_arrays_cost_nothing():
    mesh = {"pod": 16, "data": 64, "model": 32}
    placements = [{"pod": Shard(0), "data": Shard(0)}, {"model": Shard(1)}]
    found = infer_placements("matmul", [(2**24, 2**14), (2**14, 2**16)], placements, mesh=mesh)
    assert found.result == {"pod": Shard(0), "data": Shard(0), "model": Shard(1)}
    assert found.bytes == 0


@pytest.mark.ranks(2)  # one rank asks and the other does not
def test_inference_communicates_nothing(comm, line, monkeypatch):
    waited = []
    monkeypatch.setattr(Channel, "wait", lambda *arguments, **options: waited.append(arguments))
    if comm.rank == comm.size - 1:
        with pce.trace() as trace:
            for each in calls():
                for placed in on_a_line(each)[:3]:
                    foreseen(each, line, placed)
        assert trace.events == []
    assert waited == []


def test_inference_records_nothing_and_keeps_parameters():
    weight = np.ones(3)
    infer_placements("cross_entropy", [(5, 3), (5,)], [{}, {}], mesh={"m": 2}, dtypes=(F, N), weight=weight)
    np.testing.assert_array_equal(weight, np.ones(3))


@pytest.mark.parametrize(
    "name", ["no_such", "", "Rule", "op", "infer_placements", "redistribute", "_attach", "Any", "DistArray"]
)
def test_operation_that_does_not_exist_is_refused(name):
    with pytest.raises(ValueError, match=f"^there is no operation '{name}'"):
        inferred(name, [(3, 3)], R)


@pytest.mark.parametrize(
    ("name", "shapes", "placements", "options", "kind", "message"),
    [
        ("add", [(3, 3)], [{}, {}], {}, ValueError, "1 shapes, 2 placements and 1 dtypes"),
        ("add", [(3, 3), (3, 3)], [{}, {}], {"dtypes": [F]}, ValueError, "2 shapes, 2 placements and 1 dtypes"),
        ("add", [(3, 3), (4, 3)], [{}, {}], {}, ValueError, "broadcast"),
        ("matmul", [(3, 3), (4, 3)], [{}, {}], {}, ValueError, "differ"),
        ("matmul", [(), (4, 3)], [{}, {}], {}, ValueError, "scalars"),
        ("reshape", [(3, 3)], [{}], {"shape": (4, 2)}, ValueError, "cannot reshape"),
        ("sum", [(3, 3)], [{}], {"axis": 2}, ValueError, "axis 2 is out of bounds"),
        ("sum", [(3, 3)], [{"m": Shard(2)}], {}, ValueError, r"Shard\(2\) is out of bounds"),
        ("sum", [(3, 3)], [{"n": Shard(0)}], {}, ValueError, "the mesh has no dim 'n'"),
        ("sum", [(3, 3)], [{"m": 0}], {}, TypeError, "m must be Shard"),
        ("sum", [(3, -3)], [{}], {}, ValueError, "no negative lengths"),
        ("sum", [(3, 3)], [{}], {"no_such": 1}, TypeError, "no_such"),
        ("embedding", [(3,), (3, 3)], [{}, {}], {}, TypeError, "ids must be integers, got float32"),
        ("logsumexp", [(0,)], [{}], {}, ValueError, "no elements"),
        ("cross_entropy", [(3, 3), (4,)], [{}, {}], {"dtypes": (F, N)}, ValueError, "targets must have shape"),
        ("sum", [(3, 3)], [{}], {"mesh": {"m": 0}}, ValueError, "the size of dim 'm' must be at least 1, got 0"),
        ("sum", [(3, 3)], [{}], {"mesh": {"m": 1.5}}, TypeError, "the size of dim 'm' must be an integer, got 1.5"),
        ("sum", [(3, 3)], [{}], {"mesh": {}}, ValueError, "a mesh needs at least one dim"),
    ],
)
def test_inference_refuses_what_does_not_fit(name, shapes, placements, options, kind, message):
    with pytest.raises(kind, match=message):
        infer_placements(name, shapes, placements, **{"mesh": {"m": 2}, **options})


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        *product(["softmax", "log_softmax", "logsumexp"], [[N], [B]]),
        *product(["cross_entropy"], [[N, N], [B, N], [N, F]]),
        ("negative", [B]),
        *product(["subtract", "mse"], [[B, B]]),
    ],
)
def test_inference_refuses_dtypes_that_operation_refuses(comm, name, dtypes):
    mesh = mesh_of(comm, comm.size)
    shapes = [(3, 3)] * len(dtypes)
    operands = [pce.distribute(np.ones(shape, dtype), mesh) for shape, dtype in zip(shapes, dtypes, strict=True)]
    inferring = error_of(lambda: infer_placements(name, shapes, [{}] * len(dtypes), mesh=mesh, dtypes=dtypes))
    running = error_of(lambda: OPERATIONS[name](*operands))
    assert running[0] == "TypeError"
    assert inferring == running


def test_inference_is_of_arithmetic_that_is_current():
    placed = [Shard(1), Shard(0)]
    with pce.reproducible():
        found = inferred("matmul", [(4, 8), (8, 3)], *placed)
    assert found.result == {"model": R}
    assert [event.bytes for event in found.collectives] == [16, 96]

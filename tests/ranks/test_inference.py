"""`infer_placements` says what an operation would do; every operation then does exactly that."""

from collections.abc import Iterator
import importlib
from itertools import product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import Inference, Partial, Replicate, Sent, Shard, infer_placements, ops
from pce_mpi.comm.communicators import Channel
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.mesh import Mesh
from pce_mpi.distributed.placements import Placement
from ranks.grids import local_of, lying, mesh_of, squarest

SUM, AVG, MAX, MIN = (Partial(operator) for operator in ("sum", "avg", "max", "min"))
R = Replicate()

F, N, B = np.float64, np.int64, np.bool_


pytestmark = pytest.mark.usefixtures("impatient")


class Case(NamedTuple):
    """An operation with operands of these shapes, and of these dtypes if they are not all float64."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    parameters: dict[str, Any]
    dtypes: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.name} of {', '.join(map(str, self.shapes))} {self.parameters or ''}"


def case(name: str, *shapes: tuple[int, ...], dtypes: Any = None, **parameters: Any) -> Case:
    return Case(name, shapes, parameters, dtypes or (F,) * len(shapes))


def cases() -> Iterator[Case]:
    for name in ("negative", "square", "exp", "log", "sqrt", "tanh", "sigmoid", "relu", "gelu"):
        yield case(name, (5, 3))
    for name in ("add", "subtract", "multiply", "divide", "power", "maximum", "equal"):
        yield case(name, (5, 3), (5, 3))
        yield case(name, (4,), (1, 4))
    yield case("add", (1, 3), (5, 1))
    yield case("multiply", (6, 2), (2,), dtypes=(np.float16, np.float64))
    yield case("multiply", (6, 2), (6, 1), dtypes=(N, np.float32))
    yield case("add", (6, 2), y=2)
    yield case("power", (6, 2), y=2)
    yield case("power", (6, 2), y=2.5)
    yield case("divide", (6, 2), dtypes=(N,), y=2)
    yield case("where", (5, 3), (5, 3), (3,), dtypes=(B, F, F))
    yield case("where", (5, 1), (5, 3), dtypes=(B, F), y=0.0)
    yield case("astype", (5, 3), dtype=np.float32)
    yield case("astype", (5, 3), dtype=np.int32)
    yield case("matmul", (7, 5), (5, 3))
    yield case("matmul", (2, 40), (40, 2))
    yield case("matmul", (40, 2), (2, 40), dtypes=(np.float32, F))
    yield case("matmul", (3, 4, 5), (5, 2))
    yield case("matmul", (3, 4, 5), (3, 5, 2))
    yield case("matmul", (1, 4, 5), (3, 5, 2))
    yield case("matmul", (5,), (5, 3))
    yield case("matmul", (4, 5), (5,))
    yield case("matmul", (5,), (5,))
    for name in ("sum", "mean", "max", "min", "logsumexp"):
        for axis, keepdims in ((None, False), (0, True), ((0, 2), False)):
            yield case(name, (4, 3, 5), axis=axis, keepdims=keepdims)
    yield case("sum", (4, 3), dtypes=(np.float16,), axis=0)
    yield case("max", (4, 3), dtypes=(ml_dtypes.bfloat16,), axis=0)
    yield case("max", (4, 3), dtypes=(B,), axis=0)
    yield case("mean", (4, 3), dtypes=(N,), axis=0)
    for before, after in [
        ((4, 6), (24,)),
        ((4, 6), (2, 2, 6)),
        ((24,), (4, 6)),
        ((2, 3, 4), (6, -1)),
        ((3, 4), (1, 12)),
    ]:
        yield case("reshape", before, shape=after)
    yield case("transpose", (3, 4, 5))
    yield case("transpose", (3, 4, 5), axes=(1, 0, 2))
    yield case("swapaxes", (3, 4, 5), axis1=0, axis2=-1)
    yield case("broadcast_to", (1, 3), shape=(2, 5, 3))
    yield case("concatenate", (5, 3), (2, 3))
    yield case("concatenate", (5, 3), (5, 1), (5, 2), axis=1)
    yield case("concatenate", (5, 3), (5, 1), axis=None)
    yield case("getitem", (6, 4), index=(slice(1, 3), ...))
    yield case("getitem", (6, 4, 2), index=(2, slice(None, None, -2)))
    yield case("split", (6, 4), indices_or_sections=2)
    yield case("split", (6, 4), indices_or_sections=[1, 2], axis=1)
    yield case("embedding", (4, 3), (7, 3), dtypes=(N, F))
    yield case("embedding", (4,), (100, 3), dtypes=(N, np.float16))
    for name in ("softmax", "log_softmax"):
        yield case(name, (5, 3))
        yield case(name, (5, 3, 2), axis=0)
    yield case("layer_norm", (5, 3))
    yield case("layer_norm", (5, 3), (3,), (3,))
    yield case("layer_norm", (5, 3), axis=0)
    yield case("rms_norm", (5, 3), (3,))
    yield case("rms_norm", (5, 3), dtypes=(np.float16,))
    for reduction in ("mean", "none"):
        yield case("cross_entropy", (5, 3), (5,), dtypes=(F, N), reduction=reduction)
    yield case("cross_entropy", (5, 3), (5,), dtypes=(np.float16, N), label_smoothing=0.1, z_loss=0.1, logit_scale=0.5)
    yield case("cross_entropy", (5, 3), (5,), dtypes=(F, N), weight=np.ones(3), softcap=5.0, logit_scale=0.5)
    yield case("cross_entropy", (5, 3, 2), (5, 2), dtypes=(F, N), axis=1, reduction="sum")
    yield case("cross_entropy", (5, 3), (5, 3), label_smoothing=0.1)
    yield case("mse", (5, 3), (5, 3))


NOT_OPERATIONS = {"Inference", "Rule", "Sent", "infer_placements", "op"}


def test_inference_cases_have_every_operation():
    assert {case.name for case in cases()} == set(ops.__all__) - NOT_OPERATIONS


def placements_of(shape: tuple[int, ...], dtype: Any, operators: tuple[Partial, ...]) -> list[Placement]:
    """Where an operand may lie along one dim."""
    meaningful = {B: (MAX,), N: (SUM, MAX)}.get(dtype, (SUM, AVG, MAX))
    return [*(Shard(axis) for axis in range(len(shape))), R, *(each for each in operators if each in meaningful)]


def mixes(lies: tuple[Placement, ...]) -> bool:
    return len({each for each in lies if each in (SUM, AVG)} and {each for each in lies if each == MAX}) == 0


def on_a_line(case: Case) -> list[list[tuple[Placement, ...]]]:
    """For every combination of placements over one dim, where each operand lies."""
    each = [placements_of(*of, (SUM, AVG, MAX)) for of in zip(case.shapes, case.dtypes, strict=True)]
    return [[(placement,) for placement in lies] for lies in product(*each)]


def on_a_grid(case: Case) -> list[list[tuple[Placement, ...]]]:
    """The same over two dims."""
    each = [
        [lies for lies in product(placements_of(*of, (SUM, AVG, MAX)), repeat=2) if mixes(lies)]
        for of in zip(case.shapes, case.dtypes, strict=True)
    ]
    return [list(lies) for lies in product(*each)]


def drawn(combinations: list[Any], most: int, *seed: int) -> list[Any]:
    """At most so many of them, the same on every rank."""
    if len(combinations) <= most:
        return combinations
    chosen = np.random.default_rng(seed).choice(len(combinations), most, replace=False)
    return [combinations[index] for index in chosen]


def whole(index: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    rng = np.random.default_rng([index, *shape])
    return rng.integers(0, 2 if dtype is B else 3, shape).astype(dtype) + (dtype in (F, np.float32, np.float16))


class Outcome(NamedTuple):
    """What an operation did or would do."""

    operands: tuple[dict[str, Placement], ...] = ()
    result: Any = None
    sent: tuple[Any, ...] = ()
    error: str = ""


def done(case: Case, mesh: Mesh, lies: list[tuple[Placement, ...]], needed: dict[int, Any]) -> Outcome:
    operands = []
    for index, (shape, dtype, placements) in enumerate(zip(case.shapes, case.dtypes, lies, strict=True)):
        sharding = lying(mesh.dim_sizes, shape, *placements)
        local = local_of(whole(index, shape, dtype), sharding, mesh.coordinates)
        operands.append(DistArray(local, mesh, sharding))
    needed.clear()
    function = getattr(ops, case.name)
    try:
        with pce.trace() as trace:
            arguments = [operands] if case.name == "concatenate" else operands
            result = function(*arguments, **case.parameters)
    except (TypeError, ValueError) as error:
        return Outcome(error=f"{type(error).__name__}: {error}")
    first = result[0] if isinstance(result, list) else result
    return Outcome(
        tuple(needed.get(id(operand), operand.sharding.by_dim) for operand in operands),
        first.placements,
        tuple(Sent(e.collective, e.over, e.bytes, e.before, e.after) for e in trace.select()),
    )


def foreseen(case: Case, mesh: Any, lies: list[tuple[Placement, ...]]) -> Outcome:
    dims = list(mesh.dims if isinstance(mesh, Mesh) else mesh)
    placements = [dict(zip(dims, each, strict=True)) for each in lies]
    try:
        found = infer_placements(case.name, case.shapes, placements, mesh=mesh, dtypes=case.dtypes, **case.parameters)
    except (TypeError, ValueError) as error:
        return Outcome(error=f"{type(error).__name__}: {error}")
    assert found.bytes == sum(sent.bytes for sent in found.collectives)
    return Outcome(found.operands, found.result, found.collectives)


@pytest.fixture
def needed(monkeypatch) -> dict[int, Any]:
    """How each array had to lie when an operation first needed it, by the id of the array."""
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

    def watched(x: DistArray, sharding: Any, **options: Any) -> DistArray:
        see(x, sharding)
        return redistributed(x, sharding, **options)

    monkeypatch.setattr(embedding, "redistributed", watched)
    return seen


def differences(comm, mesh: Mesh, combinations: Any, most: int, needed: dict[int, Any]) -> list[str]:
    """What rank 0, at the origin of the mesh, did otherwise than it had foreseen; the same list on every rank."""
    wrong = []
    for number, each in enumerate(cases()):
        for lies in drawn(combinations(each), most, number, comm.size):
            did = done(each, mesh, lies, needed)
            if comm.rank == 0 and did != (would := foreseen(each, mesh, lies)):
                wrong.append(f"{each}, lying as {lies}:\n    did      {did}\n    foreseen {would}")
    return comm.bcast(wrong[:20])


@pytest.mark.sizes(3)
def test_operation_on_line_does_what_was_inferred(comm, needed):
    wrong = differences(comm, mesh_of(comm, comm.size), on_a_line, 10, needed)
    assert not wrong, "\n".join(wrong)


@pytest.mark.sizes(4)
def test_operation_on_grid_does_what_was_inferred(comm, needed):
    wrong = differences(comm, mesh_of(comm, *squarest(comm.size)), on_a_grid, 5, needed)
    assert not wrong, "\n".join(wrong)


# ------------------------------------------------------------------------------------------------- without any ranks


def inferred(name: str, shapes: Any, *lies: Placement, **options: Any) -> Inference:
    return infer_placements(name, shapes, [{"model": each} for each in lies], mesh={"model": 4}, **options)


def test_example_of_two_products():
    found = inferred("matmul", [(16, 784), (784, 784)], R, Shard(1))
    assert (found.result, found.bytes) == ({"model": Shard(1)}, 0)
    found = inferred("matmul", [(16, 784), (784, 10)], Shard(1), Shard(0))
    assert found == Inference(({"model": Shard(1)}, {"model": Shard(0)}), {"model": SUM}, ())
    found = inferred("square", [(16, 10)], SUM)
    assert found.result == {"model": R}
    assert found.collectives == (Sent("all_reduce", "model", 640, "Partial('sum')", "Replicate()"),)


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


def test_mesh_may_be_given_for_its_dims(comm):
    mesh = mesh_of(comm, *squarest(comm.size))
    placements = [{"data": Shard(0)}, {"model": Shard(1)}]
    by_mesh = infer_placements("matmul", [(5, 4), (4, 3)], placements, mesh=mesh)
    assert by_mesh == infer_placements("matmul", [(5, 4), (4, 3)], placements, mesh=dict(mesh.dims))
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


def test_inference_communicates_nothing(comm, monkeypatch):
    mesh = mesh_of(comm, comm.size)
    waited = []
    monkeypatch.setattr(Channel, "wait", lambda *arguments, **options: waited.append(arguments))
    if comm.rank == comm.size - 1:
        with pce.trace() as trace:
            for each in cases():
                for lies in on_a_line(each)[:3]:
                    foreseen(each, mesh, lies)
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
        ("sum", [(3, 3)], [{}], {"mesh": {"m": 1.5}}, TypeError, "the size of dim 'm' must be a whole number, got 1.5"),
        ("sum", [(3, 3)], [{}], {"mesh": {}}, ValueError, "a mesh needs at least one dim"),
    ],
)
def test_inference_refuses_what_does_not_fit(name, shapes, placements, options, kind, message):
    with pytest.raises(kind, match=message):
        infer_placements(name, shapes, placements, **{"mesh": {"m": 2}, **options})

"""Redistribution is the identity on the global array, sends what its steps say, and leaves replicas with equal bits."""

from collections.abc import Iterable, Mapping
from itertools import product
from math import prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi.arrays import to_host
from pce_mpi.comm.collectives import all_gather, all_reduce
from pce_mpi.comm.tracing import Purpose, cause
from pce_mpi.distributed import array as dist_array, redistribution
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.creation import distribute, from_local
from pce_mpi.distributed.mesh import Mesh
from pce_mpi.distributed.placements import Partial, Replicate, Shard
from pce_mpi.distributed.sharding import Sharding, Step, steps
from pce_mpi.exact import arithmetic
from ranks.grids import (
    MEMORY_ORDERS,
    Array,
    assembled,
    combined,
    local_of,
    mesh_of,
    placements_of,
    spread,
    squarest,
)
from ranks.placed import error_of
from ulps import worst

OPERATORS = ("sum", "avg", "max", "min")

WHY = {"operation": "a test", "reason": "to see what comes"}


def redistribute(x: DistArray, target: Sharding, **why: str) -> DistArray:
    with cause(**why):
        return dist_array.redistribute(x, target)


# ------------------------------------------------------------------------------------------------------------ the check


class Case(NamedTuple):
    """A global array, its sharding, and its destination."""

    whole: Array
    source: Sharding
    target: Sharding

    def __str__(self) -> str:
        return f"{self.whole.dtype} {self.whole.shape} [{self.source}] -> [{self.target}]"


def differences(comm, mesh: Mesh, cases: Iterable[Case], library: Any = np) -> list[str]:
    """Redistribute each case and return what goes wrong, the same list on every rank: nothing should."""
    cases = list(cases)
    mine, wrong = [], []
    for case in cases:
        local = library.asarray(local_of(case.whole, case.source, mesh.coordinates))
        before = to_host(local).tobytes()
        x = DistArray(local, mesh, case.source)
        with pce.trace() as trace:
            y = redistribute(x, case.target, **WHY)
        if (y.sharding, y.mesh, y.dtype) != (case.target, mesh, case.whole.dtype) or not isinstance(
            y.local, library.ndarray
        ):
            wrong.append(f"{case}: came as {y!r} of {type(y.local)}")
        if x.local is not local or to_host(local).tobytes() != before:
            wrong.append(f"{case}: the argument changed")
        if (sent := [event[1:] for event in payload(trace)]) != (due := [event[1:] for event in expected(case, mesh)]):
            wrong.append(f"{case}: sent {sent}, not {due}")
        mine.append(to_host(y.local))
    everywhere = comm.allgather((mine, wrong))
    wrong = [f"rank {rank}: {text}" for rank, (_, texts) in enumerate(everywhere) for text in texts]
    for number, case in enumerate(cases):
        try:
            whole = assembled(case.target, [arrays[number] for arrays, _ in everywhere])
            np.testing.assert_array_equal(whole.astype(np.float64), case.whole.astype(np.float64))
        except AssertionError as error:
            wrong.append(f"{case}: {error}")
    return wrong


def payload(trace: pce.Trace) -> list[tuple[Any, ...]]:
    return [
        (event.reason, event.collective, event.over, event.ranks, event.bytes, event.before, event.after)
        for event in trace.select(operation=WHY["operation"])
    ]


def sent_bytes(step: Step, coordinates: Mapping[str, int], itemsize: int) -> int:
    """The bytes that the rank at `coordinates` puts in: an all_to_all sends what it loses."""
    put = prod(step.before.local_shape(coordinates))
    if step.verb == "all_to_all":
        before, after = (sharding.slices(coordinates) for sharding in (step.before, step.after))
        put -= prod(max(0, min(a.stop, b.stop) - max(a.start, b.start)) for a, b in zip(before, after, strict=True))
    return put * itemsize


def expected(case: Case, mesh: Mesh) -> list[tuple[Any, ...]]:
    """The events of the steps that send."""
    size = case.whole.dtype.itemsize
    itemsize = 4 if case.whole.dtype.name in ("float16", "bfloat16") else size  # halves travel as float32
    return [
        (
            WHY["reason"],
            step.verb,
            ", ".join(step.dims),
            step.before.parts(step.dims),
            sent_bytes(step, mesh.coordinates, itemsize),
            step.placement_before,
            step.placement_after,
        )
        for step in steps(case.source, case.target)
        if step.sends
    ]


def numbers(shape: tuple[int, ...], dtype: Any = np.float64) -> Array:
    """Whole numbers that leave room for terms in every dtype; each block of them is unlike the others."""
    values = np.random.default_rng(7).integers(10, 40, shape)
    return (values % 2 if np.dtype(dtype) == np.bool_ else values).astype(dtype)


SPLITS = ["even", "uneven", "empty", "ragged"]


def cases_of(mesh: Mesh, splits: str, pairs: Iterable[Any], dtype: Any = np.float64) -> list[Case]:
    """A case for each pair of tuples of placements; ragged split points are never the same."""
    shape = {"even": (12, 24), "uneven": (7, 5), "empty": (1, 2), "ragged": (7, 5)}[splits]
    whole, cases = numbers(shape, dtype), []
    for number, (one, other) in enumerate(pairs):
        seeds = ([number, 0], [number, 1]) if splits == "ragged" else (None, None)
        source = spread(mesh.dim_sizes, shape, *one, seed=seeds[0])
        cases.append(Case(whole, source, spread(mesh.dim_sizes, shape, *other, seed=seeds[1])))
    return cases


def pairs(ndim: int, *operators: Any) -> list[Any]:
    return list(product(product(placements_of(2, *operators), repeat=ndim), repeat=2))


def has_partial(pair: Any) -> bool:
    return any(isinstance(placement, Partial) for placements in pair for placement in placements)


# ----------------------------------------------------------------------------------------------------------- every pair


MIXED = [(Partial("sum"), Partial("avg")), (Partial("avg"), Partial("sum"))]
EXTREMES = [(Partial("max"), Replicate()), (Shard(0), Partial("min"))]
PAIRS = {
    "one dim": pairs(1, *OPERATORS),
    # Both dims on one axis, in both directions, are among them.
    "shards and replicas on two dims": pairs(2),
    "sums on two dims": list(filter(has_partial, pairs(2, "sum"))),
    # Those of one operator differ from sums in nothing but what they combine by.
    "other operators on two dims": [
        pair for operator in ("avg", "max", "min") for pair in filter(has_partial, pairs(2, operator))
    ][::4],
    "sums mixed with averages": list(product(MIXED, [*product(placements_of(2, "sum", "avg"), repeat=2), *EXTREMES])),
}


@pytest.mark.ranks(1, 3, 4)  # shards of several lengths, and two by two
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("every", PAIRS.values(), ids=PAIRS)
def test_redistribute_between_any_two_placements(comm, line, square, every, splits):
    mesh = line if every is PAIRS["one dim"] else square
    wrong = differences(comm, mesh, cases_of(mesh, splits, every))
    assert wrong == []


def test_redistribute_on_three_dims(comm):
    rng = np.random.default_rng(3)
    some = rng.permutation(len(every := pairs(3, "sum")))[:60]
    wrong = []
    for number, sizes in enumerate([squarest(comm.size, 3), squarest(comm.size, 3)[::-1]]):
        mesh = mesh_of(comm, *sizes)
        wrong += differences(comm, mesh, cases_of(mesh, "ragged", (every[index] for index in some[number::2])))
    assert wrong == []


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (3, 0, 2)], ids=str)
def test_arrays_without_axes_and_without_elements(comm, line, shape):
    every = product(placements_of(len(shape), *OPERATORS), repeat=2)
    shardings = [(spread(line.dim_sizes, shape, one), spread(line.dim_sizes, shape, other)) for one, other in every]
    wrong = differences(comm, line, [Case(numbers(shape), *both) for both in shardings])
    assert wrong == []


FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32]
INTEGERS = [np.int8, np.uint8, np.int64]


@pytest.mark.ranks(3)  # shards of several lengths
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, np.bool_], ids=lambda dtype: dtype.__name__)
def test_redistribute_keeps_every_dtype(comm, line, dtype):
    operators = {np.bool_: ("max", "min")}.get(dtype, ("sum", "max", "min") if dtype in INTEGERS else OPERATORS)
    wrong = differences(comm, line, cases_of(line, "ragged", pairs(1, *operators), dtype))
    assert wrong == []


@pytest.mark.parametrize("dtype", [np.float64, np.float16], ids=lambda dtype: dtype.__name__)
def test_cupy_arrays_stay_on_their_device(comm, cupy, dtype):
    one_dim, two_dims = mesh_of(comm, comm.size), mesh_of(comm, *squarest(comm.size))
    wrong = differences(comm, one_dim, cases_of(one_dim, "ragged", pairs(1, *OPERATORS), dtype), cupy)
    some = pairs(2, "sum")[::7]
    wrong += differences(comm, two_dims, cases_of(two_dims, "ragged", some, dtype), cupy)
    assert wrong == []


# ----------------------------------------------------------------------------------------------------- what is combined


def terms(comm, shape=(7, 5), dtype: Any = np.float64) -> list[Array]:
    return [np.random.default_rng([11, rank]).normal(0, 100, shape).astype(dtype) for rank in range(comm.size)]


# At most four terms are each divided, and all but one are added, in ulps of the sum of their sizes; the sum to compare
# with errs by as much.
SUM = 4
# A float16 is at most half an ulp from the sum; float32's own error may tip a sum in the middle to the other side.
ROUNDED_ONCE = 0.5 + 2**-11
# The sum of equal numbers is rounded a few times, and so is its quotient. An average of equal halves is that half.
EQUAL = 1


def targets_of(x: DistArray) -> list[Sharding]:
    return [x.sharding.with_placements({"data": placement}) for placement in (Replicate(), Shard(0), Shard(1))]


def brought_to(comm, x: DistArray, targets: Iterable[Sharding]) -> list[Array]:
    """The global array, put together from what ranks hold of each of `targets`."""
    moved = [redistribute(x, target, **WHY) for target in targets]
    everywhere = comm.allgather([to_host(y.local) for y in moved])
    return [assembled(y.sharding, [arrays[number] for arrays in everywhere]) for number, y in enumerate(moved)]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("operator", OPERATORS)
def test_terms_become_what_they_are_together(comm, operator, dtype):
    mesh, theirs = mesh_of(comm, comm.size), terms(comm, dtype=dtype)
    x = from_local(theirs[comm.rank], mesh, data=Partial(operator))
    expected = combined(theirs, x.sharding)
    results = brought_to(comm, x, targets_of(x))
    if operator in ("max", "min"):
        for result in results:
            np.testing.assert_array_equal(result.astype(np.float64), expected.astype(np.float64))
    else:
        sizes = combined([np.abs(term) for term in theirs], x.sharding)
        for result in results:
            assert worst(result, expected, dtype, size=sizes) <= SUM


def test_terms_of_shards_keep_sign_of_zero(line):
    zeros = np.array([-0.0, 0.0, -0.0, 0.0, -0.0])
    for place in (Shard(0), Replicate()):
        x = pce.distribute(zeros, line, data=place)
        whole = x.redistribute(data=Partial()).redistribute(data=Replicate()).local
        assert whole.tobytes() == zeros.tobytes()


@pytest.mark.ranks(3)  # quotients that are rounded
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64], ids=lambda d: d.__name__)
def test_redistribute_there_and_back_keeps_numbers(line, dtype):
    finfo = ml_dtypes.finfo(dtype)
    special = [np.nan, np.inf, -np.inf, 0.0, 1 / 3, float(finfo.max) / 2, float(finfo.smallest_normal) * 16]
    half = finfo.bits == 16
    if half:
        special.append(float(finfo.smallest_subnormal))  # divided by anything it would be 0
    whole = np.array(special * 3).astype(dtype).reshape(-1, 3)
    x = distribute(whole, line)
    ways = placements_of(2, *OPERATORS)
    with np.errstate(all="raise"):
        there = [redistribute(x, x.sharding.with_placements({"data": placement}), **WHY) for placement in ways]
        back = [redistribute(y, x.sharding, **WHY) for y in there]
    for way, y in zip(ways, back, strict=True):
        assert y.dtype == whole.dtype
        allowed = EQUAL if way == Partial("avg") and not half else 0
        assert worst(y.local, whole, dtype) <= allowed, way


@pytest.mark.parametrize("operator", ["sum", "avg"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda dtype: dtype.__name__)
def test_overflow_on_one_rank_raises_nowhere(comm, dtype, operator):
    first = comm.rank == 0
    tiny, large = float(ml_dtypes.finfo(dtype).smallest_subnormal), 2.0 ** (ml_dtypes.finfo(dtype).maxexp - 1)
    mine = np.array([tiny if first else 0, large], dtype)
    x = from_local(mine, mesh_of(comm, comm.size), data=Partial(operator))
    with np.errstate(all="raise"):
        results = [redistribute(x, x.sharding.with_placements({"data": to}), **WHY) for to in (Replicate(), Shard(0))]
    assert results[0].local[1] == (np.inf if operator == "sum" and comm.size > 1 else mine[1])
    assert results[1].local.tolist() == results[0].local[results[1].sharding.slices(x.mesh.coordinates)].tolist()


def test_average_of_halves_is_rounded_once(comm):
    # Thirds of 1 + 2**-10 are no float16: rounded before they are added, they would not make what the sum makes.
    rng = np.random.default_rng(5)
    theirs = [rng.integers(1024, 2048, 4000).astype(np.float16) / np.float16(1024) for _ in range(comm.size)]
    x = from_local(theirs[comm.rank], mesh_of(comm, comm.size), data=Partial("avg"))
    result = redistribute(x, x.sharding.replicated, **WHY).local
    exact = sum(term.astype(np.float64) for term in theirs) / comm.size
    assert worst(result, exact, np.float16) <= ROUNDED_ONCE


# ----------------------------------------------------------------------------------------------------------- the memory


def test_array_placed_as_asked_is_returned_itself(line):
    for placement in placements_of(2, *OPERATORS):
        x = distribute(numbers((7, 5)), line, data=placement)
        with pce.trace() as trace:
            y = redistribute(x, x.sharding.with_placements({"data": placement}), **WHY)
        assert y is x
        assert trace.events == []


@pytest.mark.parametrize("order", MEMORY_ORDERS[1:], ids=lambda order: order.__name__)
def test_local_arrays_may_have_any_memory_order(comm, line, order):
    whole = numbers((7, 5))
    wrong = []
    for one, other in product(placements_of(2, "sum"), repeat=2):
        source, target = spread(line.dim_sizes, (7, 5), one), spread(line.dim_sizes, (7, 5), other)
        local = order(local_of(whole, source, line.coordinates))
        y = redistribute(DistArray(local, line, source), target, **WHY)
        wrong.append((f"{one} -> {other}", y.sharding, y.local))
    everywhere = comm.allgather([local for *_, local in wrong])
    for number, (name, sharding, _) in enumerate(wrong):
        result = assembled(sharding, [locals_[number] for locals_ in everywhere])
        np.testing.assert_array_equal(result, whole, err_msg=name)


def test_result_knows_nothing_of_tape(line):
    x = distribute(numbers((7, 5)), line, data=Shard(0), requires_grad=True)
    y = redistribute(x, x.sharding.replicated, **WHY)
    assert (y.requires_grad, y.grad, y.place) == (False, None, None)
    assert x.requires_grad


# --------------------------------------------------------------------------------------------------- what the trace has


def test_silent_redistribution_does_not_even_agree(line):
    silent = [(Replicate(), other) for other in placements_of(2, *OPERATORS)]
    silent += [(Shard(0), Partial("sum")), (Shard(1), Partial("sum"))]
    with pce.trace() as trace:
        for one, other in silent:
            source, target = spread(line.dim_sizes, (7, 5), one), spread(line.dim_sizes, (7, 5), other)
            redistribute(DistArray(local_of(numbers((7, 5)), source, line.coordinates), line, source), target, **WHY)
    assert trace.events == []


def test_steps_that_send_are_agreed_on_once(line):
    whole = numbers((7, 5))
    x, terms_of_it = distribute(whole, line, data=Shard(0)), distribute(whole, line, data=Partial())
    with pce.trace() as trace:
        redistribute(x, x.sharding.replicated, **WHY)
        redistribute(x, x.sharding.with_placements({"data": Shard(1)}), **WHY)
        redistribute(terms_of_it, x.sharding.replicated, **WHY)
        redistribute(terms_of_it, x.sharding, **WHY)
    purposes = [(event.purpose, event.collective) for event in trace.events]
    agreement = (Purpose.AGREEMENT, "all_gather")
    verbs = ["all_gather", "all_to_all", "all_reduce", "reduce_scatter"]
    assert purposes == [each for verb in verbs for each in (agreement, (Purpose.PAYLOAD, verb))]
    assert trace.bytes(purpose=Purpose.AGREEMENT) == 4 * 56


def test_trace_of_redistribution_has_placements_and_reason(square):
    whole = numbers((8, 4), np.float32)
    x = distribute(whole, square, data=Shard(0), model=Partial("sum"))
    with pce.trace() as trace:
        redistribute(x, x.sharding.replicated, operation="matmul", reason="operand 0 has to be placed so")
    rows = [(event.collective, event.over, event.ranks, event.before, event.after) for event in trace.select()]
    data, model = square.dims.values()
    assert rows == [
        ("all_reduce", "model", model, "Partial('sum')", "Replicate()"),
        ("all_gather", "data", data, "Shard(0)", "Replicate()"),
    ]
    rows_here = x.sharding.local_shape(square.coordinates)[0]
    assert [event.bytes for event in trace.select()] == [rows_here * 4 * 4] * 2
    assert {(event.phase, event.operation) for event in trace.events} == {("forward", "matmul")}
    assert {event.reason for event in trace.select()} == {"operand 0 has to be placed so"}
    assert "Partial('sum')  Replicate()  operand 0 has to be placed so" in str(trace)


# --------------------------------------------------------------------------------------------------------------- errors


def refused(x: DistArray, target: Sharding, **why: str) -> tuple[str, str]:
    return error_of(lambda: redistribute(x, target, **{**WHY, **why}))


def test_ranks_that_ask_for_different_placements_raise(comm, impatient):
    mesh = Mesh(comm, data=comm.size)
    whole = numbers((7, 5))
    x = distribute(whole, mesh, data=Shard(0))
    first = comm.rank == 0
    wanted = x.sharding.with_placements({"data": Replicate() if first else Shard(1)})
    other_splits = spread(mesh.dim_sizes, (7, 5), Shard(0), seed=[1 if first else 2])
    errors = [
        refused(x, wanted),
        refused(x, other_splits),
        refused(x, x.sharding.replicated, operation="one" if first else "another"),
    ]
    everywhere = comm.allgather(errors)
    full = x.full()
    assert everywhere == [errors] * comm.size
    if comm.size > 1:
        others = "rank 1" if comm.size == 2 else f"ranks {', '.join(map(str, range(1, comm.size)))}"
        assert [kind for kind, _ in errors] == ["CollectiveError"] * 3
        assert (
            errors[0][1]
            == f"ranks disagree on to: 'data: Replicate()' (rank 0 along data), 'data: Shard(1)' ({others} along data)"
        )
        assert "axis 0 split at" in errors[1][1]
        assert errors[2][1] == f"ranks disagree on operation: one (rank 0 along data), another ({others} along data)"
    np.testing.assert_array_equal(full, whole)


def test_arrays_of_different_shape_or_dtype_raise(comm, impatient):
    mesh = Mesh(comm, data=comm.size)
    first = comm.rank == 0
    shapes = distribute(np.zeros((6 + first, 5)), mesh, data=Shard(1))
    dtypes = distribute(np.zeros((6, 5), np.float32 if first else np.float64), mesh, data=Shard(0))
    placed = distribute(np.zeros((6, 5)), mesh, data=Shard(0) if first else Partial())
    errors = [refused(x, x.sharding.replicated) for x in (shapes, dtypes, placed)]
    everywhere = comm.allgather(errors)
    assert everywhere == [errors] * comm.size
    if comm.size > 1:
        assert [kind for kind, _ in errors] == ["CollectiveError"] * 3
        assert "shape: (7, 5) (rank 0 along data), (6, 5) (rank" in errors[0][1]
        assert "dtype: 'float32' (rank 0 along data), 'float64' (rank" in errors[1][1]
        assert "from: 'data: Shard(0)' (rank 0 along data), \"data: Partial('sum')\" (rank" in errors[2][1]


def test_ranks_that_agree_hear_no_disagreement(comm, impatient):
    mesh = Mesh(comm, **dict(zip(("data", "model"), squarest(comm.size), strict=True)))
    x = distribute(numbers((7, 5)), mesh, data=Shard(0))
    mesh.comm("data")
    # One rank alone wants something else: those along `data` that meet it hear so, the others have what they want.
    odd = comm.rank == comm.size - 1
    error = refused(x, x.sharding.with_placements({"data": Shard(1) if odd else Replicate()}))
    concerned = mesh.coordinates["model"] == mesh.dims["model"] - 1 and mesh.dims["data"] > 1
    full = x.full()
    assert error[0] == ("CollectiveError" if concerned else "")
    np.testing.assert_array_equal(full, numbers((7, 5)))


@pytest.mark.parametrize(
    ("dtype", "operator"), [(np.bool_, "sum"), (np.bool_, "avg"), (np.int32, "avg"), (np.uint8, "avg")]
)
def test_meaningless_placements_raise(comm, dtype, operator):
    x = distribute(np.ones((3, 2), dtype), mesh_of(comm, comm.size), data=Shard(0))
    kind, text = refused(x, x.sharding.with_placements({"data": Partial(operator)}))
    assert (kind, text) == ("TypeError", f"Partial('{operator}') of {np.dtype(dtype)} has no meaning")


# ----------------------------------------------------------------------------------------------------------- the plants


def rounded_by_rank(array, comm, op):
    return np.nextafter(all_reduce(array, comm, op), np.inf if comm.rank == comm.size - 1 > 0 else 0)


def gathered_twice(array, comm, shapes):
    return [all_reduce(array, comm, "sum"), *all_gather(array, comm, shapes)][1:]


# A fault: the collective that has it, and what takes its place.
WRONG_COLLECTIVES = {
    "shards are joined in the wrong order": ("all_gather", lambda *given: all_gather(*given)[::-1]),
    "the last rank rounds differently": ("all_reduce", rounded_by_rank),
    "more is sent than the steps say": ("all_gather", gathered_twice),
}


@pytest.mark.ranks(2)  # a fault shows at any size above 1
@pytest.mark.parametrize("plant", WRONG_COLLECTIVES)
def test_wrong_collective_is_caught(comm, line, monkeypatch, plant):
    for room in (redistribution, arithmetic):  # sums are those of the arithmetic
        monkeypatch.setattr(room, *WRONG_COLLECTIVES[plant], raising=False)
    assert differences(comm, line, cases_of(line, "even", pairs(1, *OPERATORS))) or comm.size == 1

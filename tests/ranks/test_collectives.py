"""The collectives on arrays: what arrives, for every kind of array, on every rank, and that nobody is disturbed."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
import functools
from functools import partial
import gc
import itertools
from typing import Any, ClassVar

import ml_dtypes
from mpi4py import MPI
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi.arrays import to_host
from pce_mpi.comm import collectives, communicators
from pce_mpi.comm.agreement import agree, local_checks
from pce_mpi.comm.collectives import all_gather, all_reduce, all_to_all, reduce_scatter, start_all_reduce
from pce_mpi.comm.communicators import channel_of
from pce_mpi.comm.errors import CollectiveTimeout
from pce_mpi.comm.tracing import Purpose, cause
from pce_mpi.kernels.interface import SINGLE, Pass, StateFields, Transform
from pce_mpi.loss import passes
from ranks.grids import MEMORY_ORDERS, awaiting_a_message
from ranks.problems import softmax_states

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
INTEGERS = [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64]
NUMBERS = [*FLOATS, *INTEGERS]
EVERYTHING = [*NUMBERS, np.bool_]

SHAPES = [(), (0,), (1,), (7,), (3, 4), (2, 0, 3), (2, 3, 4), (1025,)]


@pytest.fixture(autouse=True)
def why():
    """The cause of every collective here."""
    with cause("a test", reason="to see what arrives"):
        yield


by_name = partial(pytest.mark.parametrize, ids=lambda value: getattr(value, "__name__", str(value)))


@pytest.fixture
def comm(comm, impatient):
    """A communicator of the test's own, on which a rank that waits in vain gives up before the session does."""
    own = comm.Dup()
    yield own
    own.Free()


def small(rank: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of rank `rank` with values that every dtype has, as well as the sums of four of them."""
    values = np.random.default_rng(1 + rank).integers(0, 3, shape)
    return np.asarray(values).astype(dtype)


def check(actual: np.ndarray, expected: np.ndarray) -> None:
    assert type(actual) is np.ndarray
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.flags.writeable
    np.testing.assert_array_equal(actual.astype(np.float64), expected.astype(np.float64))


def folded(union: Any, arrays: list[np.ndarray]) -> np.ndarray:
    """The arrays of all ranks, united two at a time on the host, in their own dtype."""
    return functools.reduce(lambda a, b: np.asarray(union(a, b), arrays[0].dtype), map(to_host, arrays))


@functools.cache
def merge_of(union: Any) -> Any:
    """The function that merges its first argument into the second one; one for each `union`."""

    def merge(a: np.ndarray, b: np.ndarray) -> None:
        b[...] = union(a, b)

    return merge


# -------------------------------------------------------------------------------------- what arrives of each collective

# Each gives the arrays that this rank gets and those that it should get, where a rank has `of(source, to)` for another.
Of = Callable[[int, int], Any]


def reduced(of: Of, comm: MPI.Intracomm, op: Any, union: Any) -> tuple[list[Any], list[Any]]:
    return [all_reduce(of(comm.rank, 0), comm, op)], [folded(union, [of(rank, 0) for rank in range(comm.size)])]


def scattered(of: Of, comm: MPI.Intracomm, op: Any, union: Any) -> tuple[list[Any], list[Any]]:
    ranks = range(comm.size)
    mine = [of(source, comm.rank) for source in ranks]
    return [reduce_scatter([of(comm.rank, to) for to in ranks], comm, op)], [folded(union, mine)]


def gathered(of: Of, comm: MPI.Intracomm) -> tuple[list[Any], list[Any]]:
    arrays = [of(rank, 0) for rank in range(comm.size)]
    return all_gather(of(comm.rank, 0), comm, [array.shape for array in arrays]), arrays


def exchanged(of: Of, comm: MPI.Intracomm) -> tuple[list[Any], list[Any]]:
    ranks = range(comm.size)
    mine = [of(source, comm.rank) for source in ranks]
    return all_to_all([of(comm.rank, to) for to in ranks], comm, [array.shape for array in mine]), mine


OPERATORS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "a merge": np.maximum}
REDUCTIONS = {
    f"{function.__name__} by {name}": partial(function, op=merge_of(union) if name == "a merge" else name, union=union)
    for function in (reduced, scattered)
    for name, union in OPERATORS.items()
}
MOVES = {"gathered": gathered, "exchanged": exchanged}
COLLECTIVES = MOVES | REDUCTIONS

# The shapes of blocks, some of them empty, where ranks may have different ones.
UNEVEN: dict[Any, Callable[[int, int], tuple[int, ...]]] = {
    gathered: lambda source, _: [(2, 3), (0, 3), (), (5,)][source % 4],
    exchanged: lambda source, to: ((source + 2 * to) % 4, 1 + to),
    scattered: lambda _, to: (to, 2),
}


@pytest.mark.ranks(1, 3)  # every dtype goes the same way
@pytest.mark.parametrize("name", COLLECTIVES)
@by_name("dtype", EVERYTHING)
def test_collective_takes_every_dtype_and_shape(comm, dtype, name):
    if dtype is np.bool_ and "sum" in name:
        pytest.skip("booleans have no sum")
    collective = COLLECTIVES[name]
    shapes = [lambda *_, shape=shape: shape for shape in SHAPES]
    for shape_of in [*shapes, UNEVEN.get(getattr(collective, "func", collective), shapes[0])]:
        got, expected = collective(lambda source, to, at=shape_of: small(10 * source + to, at(source, to), dtype), comm)
        for array, wanted in zip(got, expected, strict=True):
            check(array, wanted)


@pytest.mark.parametrize("collective", COLLECTIVES.values(), ids=COLLECTIVES)
def test_ranks_may_have_different_memory_orders(comm, collective):
    for number, shape in itertools.product(range(len(MEMORY_ORDERS)), SHAPES):
        given: list[tuple[np.ndarray, bytes]] = []

        def of(source: int, to: int, number: int = number, shape: Any = shape, given: Any = given) -> np.ndarray:
            order: Any = MEMORY_ORDERS[(number + source) % len(MEMORY_ORDERS)]
            array = order(small(10 * source + to, shape, np.float64))
            given.append((array, array.tobytes()))
            return array

        got, expected = collective(of, comm)
        for array, wanted in zip(got, expected, strict=True):
            check(array, wanted)
        assert all(array.tobytes() == before for array, before in given)
        assert not any(np.shares_memory(array, mine) for array in got for mine, _ in given)


@pytest.mark.ranks(1, 2)  # as those of the host
@pytest.mark.parametrize("collective", [*MOVES.values(), REDUCTIONS["reduced by max"], REDUCTIONS["scattered by max"]])
@by_name("dtype", EVERYTHING)
def test_cupy_arrays_come_back_as_cupy_arrays(comm, cupy, dtype, collective):
    for shape in [(), (0,), (2, 0, 3), (2, 3)]:
        got, _ = collective(lambda source, to, at=shape: cupy.asarray(small(10 * source + to, at, dtype)), comm)
        _, expected = collective(lambda source, to, at=shape: small(10 * source + to, at, dtype), comm)
        assert all(isinstance(array, cupy.ndarray) for array in got)
        for array, on_host in zip(got, expected, strict=True):
            check(cupy.asnumpy(array), on_host)


# ----------------------------------------------------------------------------------------------------------- reductions


def test_collectives_that_were_started_end_in_order(comm):
    with cause("test"):
        finish = [start_all_reduce(np.full(3, comm.rank + factor), comm, "sum") for factor in (0.0, 10.0)]
        sums = [each() for each in finish]
    ranks = sum(range(comm.size))
    assert [each.tolist() for each in sums] == [[ranks] * 3, [ranks + 10.0 * comm.size] * 3]


def test_collective_left_waiting_ends_its_communicator(comm):
    private = comm.Dup()
    with cause("test"):
        start_all_reduce(np.ones(3), private, "sum")
        gc.collect()
        with pytest.raises(CollectiveTimeout, match="test was left waiting"):
            all_reduce(np.ones(3), private, "sum")


@pytest.mark.parametrize("length", [5, 100_003])
@pytest.mark.parametrize("op", ["max", "min"])
@by_name("dtype", FLOATS)
def test_max_and_min_carry_nan_to_every_rank(comm, dtype, op, length):
    def of(rank: int) -> np.ndarray:
        values = np.zeros(length)
        values[0] = rank
        values[1] = np.nan if rank == 0 else 1.0
        values[2] = -np.nan if rank == comm.size - 1 else -np.inf
        values[3] = np.copysign(np.nan, -1.0 if rank % 2 else 1.0)
        values[4] = -0.0 if rank % 2 else 0.0
        values[5:] = np.random.default_rng(rank).normal(0, 1, length - 5)
        values[5 + rank :: 97] = np.nan
        return values.astype(dtype)

    in_numpy = {"max": np.maximum, "min": np.minimum}[op]
    expected = folded(in_numpy, [of(rank).astype(np.float64) for rank in range(comm.size)])
    mine = of(comm.rank)
    with np.errstate(all="raise"):
        reduced = all_reduce(mine, comm, op)
        scattered = reduce_scatter([mine] * comm.size, comm, op)
    for result in (reduced, scattered):
        check(result, expected.astype(dtype))
        bits = comm.allgather(result.tobytes())
        assert bits == [bits[0]] * comm.size


@by_name("dtype", FLOATS)
def test_all_reduce_gives_same_bits_on_every_rank(comm, dtype):
    for length in (1, 3, 1000, 100_003):
        mine = np.random.default_rng(comm.rank).normal(0, 1e3, length).astype(dtype)
        summed = all_reduce(mine, comm, "sum")
        merged = all_reduce(mine, comm, merge_of(np.add))
        for result in (summed, merged):
            bits = comm.allgather(result.tobytes())
            assert bits == [bits[0]] * comm.size


@by_name("dtype", FLOATS)
def test_sum_that_is_nan_has_same_bits_everywhere(comm, dtype):
    # MPI's own sum keeps on each rank the nan of that rank's own addition.
    mine = np.full(5, {0: -np.nan, 1: np.nan}.get(comm.rank, np.inf), dtype)
    mine[1] = np.inf if comm.rank == 0 else -np.inf
    mine[2:] = [np.nan if comm.rank == comm.size - 1 else 1.0, -0.0, np.inf]
    with np.errstate(all="raise"):
        summed = all_reduce(mine, comm, "sum")
    bits = comm.allgather(summed.tobytes())
    assert bits == [bits[0]] * comm.size
    expected = [np.nan, np.nan if comm.size > 1 else np.inf, np.nan, -0.0, np.inf]
    check(summed, np.array(expected, dtype))


def test_reduction_beyond_count_of_library_is_refused_everywhere(comm, monkeypatch):
    monkeypatch.setattr(collectives, "MOST_ELEMENTS", 6 * comm.size - 1)
    monkeypatch.setattr(collectives, "takes_large_counts", lambda: True)  # which Open MPI's does not
    mesh = pce.Mesh(comm, data=comm.size)
    x = pce.from_local(np.ones((comm.size, 6)), mesh, data=pce.Partial())
    calls = [x.full, lambda: x.redistribute(data=pce.Shard(0))]
    taken = [np.asarray(call()) for call in (calls[0], lambda: calls[1]().full())]
    monkeypatch.setattr(collectives, "takes_large_counts", lambda: False)
    errors = []
    for call in calls:
        with pytest.raises(ValueError) as raised:
            call()
        errors.append(str(raised.value))
    everyones = comm.allgather(errors)
    assert all((each == comm.size).all() for each in taken)
    assert everyones == [everyones[0]] * comm.size
    assert all(
        f"reduces at most {6 * comm.size - 1} elements at a time, got {6 * comm.size}" in each for each in errors
    )


def test_halves_are_summed_in_float32_and_rounded_once(comm):
    # 2048 + 1 is 2048 in float16, however often: a sum in float16 would lose every 1.
    mine = np.array([2048.0 if comm.rank == 0 else 1.0, 1.0], np.float16)
    result = all_reduce(mine, comm, "sum")
    check(result, np.array([2048 + comm.size - 1, comm.size], np.float32).astype(np.float16))


def test_halves_that_overflow_are_infinite_and_raise_nothing(comm):
    blocks = [np.array([60_000.0 if to == comm.size - 1 else 1.0], np.float16) for to in range(comm.size)]
    with np.errstate(all="raise"):
        result = reduce_scatter(blocks, comm, "sum")
    overflows = comm.size > 1 and comm.rank == comm.size - 1
    check(result, np.array([np.inf], np.float16) if overflows else blocks[comm.rank] * np.float16(comm.size))


LARGEST = np.dtype([("value", np.float64), ("rank", np.int64), ("count", np.int16)])


def largest(a, b):
    """The state with the larger value, of the lower rank on ties; counts add up. LARGEST is 18 bytes, unaligned."""
    swap = (b["value"] > a["value"]) | ((b["value"] == a["value"]) & (b["rank"] < a["rank"]))
    merged = np.where(swap, b, a)
    merged["count"] = a["count"] + b["count"]
    return merged


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (100_003,)], ids=str)
@by_name("reduction", [reduced, scattered])
def test_reductions_take_merge_of_states(comm, reduction, shape):
    def of(source: int, to: int) -> np.ndarray:
        states = np.zeros(shape, LARGEST)
        states["value"], states["rank"], states["count"] = small(10 * source + to, shape, np.float64), source, 1
        order: Any = MEMORY_ORDERS[source % len(MEMORY_ORDERS)]
        return np.asarray(order(states))

    (got,), (expected,) = reduction(of, comm, merge_of(largest), largest)
    assert (got.dtype, got.shape, got.tobytes()) == (LARGEST, shape, expected.tobytes())


STATE_FIELDS = [StateFields(*flags) for flags in itertools.product((False, True), repeat=7)]


def test_all_reduce_merges_states_of_any_fields(comm):
    # MPI implementations and mpi4py have room for a few dozen user-defined operators.
    differing = []
    for fields in STATE_FIELDS:
        if not fields.hold_largest and (fields.argmax or fields.target or fields.entropy):
            continue  # these are of the largest logit
        merge = passes.merge_of(Pass(fields, Transform(), SINGLE))
        parts = [softmax_states(rank, fields) for rank in range(comm.size)]
        result = all_reduce(parts[comm.rank], comm, merge)
        for part in parts[:-1]:
            merge(part, parts[-1])
        if result.tobytes() != parts[-1].tobytes():
            differing.append(fields)
    assert differing == []


# ------------------------------------------------------------------------------------------------------------ the trace


def test_trace_of_collective_has_dims_bytes_and_reason(comm):
    ranks = range(comm.size)
    with pce.trace() as trace:
        with cause("one", "data", "because", before="Shard(0)", after="Shard(1)"):
            all_reduce(np.zeros((2, 3), np.float32), comm, "sum")
        with cause("two", reason="states"):
            all_reduce(np.zeros(4, LARGEST), comm, largest)
            with cause("three", reason="all"):
                all_gather(np.zeros(comm.rank, np.int16), comm, [(rank,) for rank in ranks])
            all_to_all([np.zeros(5, np.int8)] * comm.size, comm, [(5,)] * comm.size)
        reduce_scatter([np.zeros(3)] * comm.size, comm, "sum")
    events = [(event.operation, event.collective, event.over, event.bytes, event.reason) for event in trace.events]
    assert events == [
        ("one", "all_reduce", "data", 24, "because"),
        ("two", "all_reduce", "comm", 4 * LARGEST.itemsize, "states"),
        ("three", "all_gather", "comm", 2 * comm.rank, "all"),
        ("two", "all_to_all", "comm", 5 * (comm.size - 1), "states"),
        ("a test", "reduce_scatter", "comm", 24 * comm.size, "to see what arrives"),
    ]
    assert {event.ranks for event in trace.events} == {comm.size}
    assert {event.purpose for event in trace.events} == {Purpose.PAYLOAD}
    assert {event.phase for event in trace.events} == {"forward"}
    assert [(event.before, event.after) for event in trace.events] == [("Shard(0)", "Shard(1)")] + [("", "")] * 4


@by_name("dtype", [np.float16, ml_dtypes.bfloat16])
def test_trace_counts_halves_as_float32_that_travel(comm, dtype):
    with pce.trace() as trace:
        all_reduce(np.zeros(10, dtype), comm, "sum")
        all_gather(np.zeros(10, dtype), comm, [(10,)] * comm.size)
    assert [event.bytes for event in trace.events] == [40, 40]


# ------------------------------------------------------------------------- the caller's own messages, and the duplicate


class Counting(MPI.Intracomm):
    """Counts how often it is duplicated."""

    duplicated = 0

    def Idup(self, info=None):
        type(self).duplicated += 1
        return super().Idup(info)

    def Dup(self, info=None):
        type(self).duplicated += 1
        return super().Dup(info)


def test_communicator_is_duplicated_once(comm):
    Counting.duplicated = 0
    counting = Counting(comm)
    counts = []
    for _ in range(3):
        agree(counting, "a test", {})
        all_reduce(np.zeros(3), counting, "sum")
        all_gather(np.zeros(3), counting, [(3,)] * comm.size)
        pce.softmax_cross_entropy(np.zeros((2, 3)), np.zeros(2, int), comm=counting)
        counts.append(Counting.duplicated)
    # Another Python object of the same communicator finds the duplicate too.
    all_reduce(np.zeros(3), Counting(comm), "sum")
    counts.append(Counting.duplicated)
    assert counts == [1, 1, 1, 1]


def test_duplicate_of_communicator_gets_duplicate_of_its_own(comm):
    all_reduce(np.zeros(1), comm, "sum")
    Counting.duplicated = 0
    other = Counting(comm.Dup())
    all_reduce(np.zeros(1), other, "sum")
    other.Free()
    still = all_reduce(np.ones(1), comm, "sum")
    assert Counting.duplicated == 1
    assert still[0] == comm.size


@pytest.mark.ranks(2)  # a rank counts its own communicators
def test_duplicate_is_freed_with_its_communicator(comm):
    # MPI implementations have some 2,000 communicators to give at a time.
    wrong = []
    for number in range(2500):
        passing = comm.Dup()
        total = all_reduce(np.ones(1), passing, "sum")
        passing.Free()
        wrong += [number] * bool(total[0] != comm.size)
    assert wrong == []


class Watched(MPI.Intracomm):
    """Says in `freed` that it is freed, and whether within a reduction operator."""

    freed: ClassVar[list[bool]] = []
    reducing = False

    def Free(self):
        self.freed.append(self.reducing)
        super().Free()


def dropped(comm: MPI.Intracomm) -> list[Any]:
    """The only reference to the channel of a communicator that was freed, in a cycle that garbage collection finds."""
    passing = Watched(comm.Dup())
    all_reduce(np.ones(1), passing, "sum")
    cycle: list[Any] = [channel_of(passing, "a test")]
    cycle.append(cycle)
    MPI.Intracomm.Free(passing)
    return cycle


def make_another(comm: MPI.Intracomm) -> None:
    """Make a private communicator, which frees those that were dropped."""
    another = comm.Dup()
    all_reduce(np.ones(1), another, "sum")
    another.Free()


def test_local_checks_keep_errors_but_no_timeout():
    with local_checks() as checks:
        raise KeyError("of one rank")
    with pytest.raises(CollectiveTimeout), local_checks() as broken:
        raise CollectiveTimeout("nobody can be told")
    with pytest.raises(KeyboardInterrupt), local_checks() as interrupted:
        raise KeyboardInterrupt
    assert isinstance(checks.error, KeyError)
    assert broken.error is interrupted.error is None


def test_channel_collected_within_reduction_is_freed_later(comm, monkeypatch):
    make_another(comm)
    monkeypatch.setattr(Watched, "freed", [])
    held = [dropped(comm)]

    def collecting(a: np.ndarray, b: np.ndarray) -> None:
        Watched.reducing = True
        held.clear()
        gc.collect()
        Watched.reducing = False
        b += a

    total = all_reduce(np.ones(1), comm, collecting)
    collecting(np.ones(1), np.ones(1))  # a library may leave a rank without a reduction, as a rank alone is
    before = list(Watched.freed)
    make_another(comm)
    assert total[0] == comm.size
    assert before == []
    assert Watched.freed == [False]


def test_channels_dropped_in_any_order_free_alike(comm, monkeypatch):
    monkeypatch.setattr(Watched, "freed", order := [])
    held = [dropped(comm) for _ in range(4)]
    for number, (channel, _) in enumerate(held):
        channel.comm.Free = lambda number=number, comm=channel.comm: (order.append(number), MPI.Intracomm.Free(comm))
    del channel
    for index in np.random.default_rng(comm.rank).permutation(4).tolist():
        held[index].clear()
    make_another(comm)
    orders = comm.allgather(order)
    assert sorted(order) == [0, 1, 2, 3]
    assert orders == [order] * comm.size


def test_channel_of_one_rank_alone_is_freed(comm, monkeypatch):
    others = [comm.Dup(), comm.Dup()]
    all_reduce(np.ones(1), others[0], "sum")  # from here on the other ranks have none to free
    monkeypatch.setattr(Watched, "freed", [])
    last = comm.rank == comm.size - 1
    if last:
        dropped(MPI.COMM_SELF).clear()
    all_reduce(np.ones(1), others[1], "sum")
    for other in others:
        other.Free()
    assert Watched.freed == [False] * last


def test_channel_that_one_rank_holds_stays_whole(comm, monkeypatch):
    monkeypatch.setattr(Watched, "freed", [])
    cycle = dropped(comm)
    if comm.rank > 0:
        cycle.clear()
    make_another(comm)
    while_held = list(Watched.freed)
    cycle.clear()
    make_another(comm)
    assert while_held == []
    assert Watched.freed == [False]


def test_failed_first_use_leaves_communicator_unusable(comm, monkeypatch):
    def fail(*_: object) -> None:
        raise KeyError("planted")

    another = comm.Dup()
    held = dropped(comm)
    held.clear()
    gc.collect()
    with monkeypatch.context() as planted, pytest.raises(KeyError, match="planted"):
        planted.setattr(communicators, "give_back", fail)
        all_reduce(np.ones(1), another, "sum")
    with pytest.raises(CollectiveTimeout, match=r"first use of the communicator\) ended with KeyError"):
        all_reduce(np.ones(1), another, "sum")
    another.Free()


def test_threads_on_own_communicators_do_not_meet(comm):
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("MPI was initialized for one thread; mpi4py.rc.thread_level = 'multiple' would run it")

    def losses(own: MPI.Intracomm) -> list[float]:
        found = []
        for _ in range(20):
            passing = own.Dup()
            logits = np.zeros((1, 2), np.float32)
            found.append(float(pce.softmax_cross_entropy(logits, np.array([0]), comm=passing)))
            passing.Free()
        return found

    each = [comm.Dup() for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        found = [result for results in threads.map(losses, each) for result in results]
    for own in each:
        own.Free()
    assert found == pytest.approx([np.log(2 * comm.size)] * 40)


def everything(comm: MPI.Intracomm) -> list[np.ndarray]:
    """A bit of each collective."""
    one, ranks = np.full(1, float(comm.rank)), range(comm.size)
    return [
        all_reduce(one, comm, "sum"),
        np.concatenate(all_gather(one, comm, [(1,)] * comm.size)),
        np.concatenate(all_to_all([one + 10 * to for to in ranks], comm, [(1,)] * comm.size)),
        reduce_scatter([one] * comm.size, comm, "sum"),
        pce.softmax_cross_entropy(np.zeros((4, 2)), np.zeros(4, int), comm=comm),
    ]


def check_everything(comm: MPI.Intracomm, results: list[np.ndarray]) -> None:
    ranks = np.arange(comm.size, dtype=np.float64)
    expected = [[ranks.sum()], ranks, ranks + 10 * comm.rank, [ranks.sum()], np.log(2 * comm.size)]
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-15)


def test_receive_from_anyone_gets_the_callers_message(comm):
    with awaiting_a_message(comm):
        results = [everything(comm) for _ in range(3)]
    for result in results:
        check_everything(comm, result)


def test_message_of_caller_waits_to_be_received(comm):
    message, inbox = np.array([comm.rank]), np.zeros(1, int)
    sent = comm.Isend(message, (comm.rank + 1) % comm.size, tag=1)
    results = everything(comm)
    comm.Recv(inbox, MPI.ANY_SOURCE, MPI.ANY_TAG)
    sent.Wait()
    assert inbox[0] == (comm.rank - 1) % comm.size
    check_everything(comm, results)


@pytest.mark.parametrize("first_use", [True, False], ids=["first use", "later use"])
def test_unfinished_collectives_of_caller_do_not_interfere(comm, first_use):
    if not first_use:
        everything(comm)
    total, everyone = np.zeros(2), np.zeros(comm.size)
    mine = np.array([float(comm.rank), 1.0])
    me = mine[:1].copy()
    requests = [comm.Iallreduce(mine, total), comm.Ibarrier(), comm.Iallgather(me, everyone)]
    results = everything(comm)
    MPI.Request.Waitall(requests)
    assert total.tolist() == [sum(range(comm.size)), comm.size]
    assert everyone.tolist() == list(range(comm.size))
    check_everything(comm, results)


def test_collectives_of_caller_may_start_in_another_order(comm):
    everything(comm)
    one, total = np.ones(1), np.zeros(1)
    requests = []
    if comm.rank < comm.size - 1:
        requests.append(comm.Iallreduce(one, total))
    results = everything(comm)
    if comm.rank == comm.size - 1:
        requests.append(comm.Iallreduce(one, total))
    MPI.Request.Waitall(requests)
    assert total[0] == comm.size
    check_everything(comm, results)


def test_overlapping_communicators_used_in_turn_do_not_meet(comm):
    own = [comm.Split(comm.rank % 2), comm.Split(comm.rank // 2), comm.Create_cart([comm.size], reorder=False)]
    results = [(each, everything(each)) for _ in range(20) for each in (comm, *own, MPI.COMM_SELF)]
    for each, result in results:
        check_everything(each, result)
    for each in own:
        each.Free()


# Last, since whoever uses MPI's operators up leaves none for others.


def test_many_merges_do_not_exhaust_operators_of_mpi(comm):
    wrong = []
    for number in range(1, 100):
        dtype = np.dtype((np.void, number))
        mine = np.full((2, number), 1 + comm.rank, np.uint8).view(dtype)[:, 0]
        result = all_reduce(mine, comm, merge_of(bytewise_maximum))
        wrong += [number] * (result.tobytes() != bytes([comm.size]) * 2 * number)
    for number in range(100):
        # A merge that is made anew for each call, as a closure is.
        result = all_reduce(np.array([float(comm.rank)]), comm, lambda a, b, more=number: np.add(a + more, b, out=b))
        wrong += [-number] * bool(result[0] != sum(range(comm.size)) + (comm.size - 1) * number)
    assert wrong == []


def bytewise_maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.maximum(a.view((np.uint8, a.itemsize)), b.view((np.uint8, b.itemsize))).view(a.dtype)[:, 0]

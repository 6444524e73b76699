"""Rehearsals: what a program would send on a mesh is what it sends there, collective for collective, byte for byte.

A rehearsal has the bytes of the rank that puts in most, so these are compared with the largest of all ranks.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
import math
import tracemalloc
from typing import Any
from weakref import finalize

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi import DistArray, Mesh, Shard
from pce_mpi.autograd import apply
from pce_mpi.comm.tracing import Event, Purpose
from pce_mpi.hollow import Allocation, Ledger
from ranks.grids import factorizations, mesh_of
from ranks.test_random_programs import on_ranks, program_of, run

pytestmark = pytest.mark.usefixtures("impatient")

# For each number of dims, in turn on each mesh of the ranks that has them.
PROGRAMS = 10
ROWS, FEATURES, HIDDEN, CLASSES = 7, 6, 10, 11
# Communicators may have been made before, and a rehearsal makes shards that end anywhere otherwise.
BEFORE = ("Mesh.comm", "from_local")


def outcome(
    events: Callable[[Callable[[Mesh], object], Mesh], list[Event]], program: Callable[[Mesh], object], mesh: Mesh
) -> list[Event] | str:
    """The events of a program, or the error that every rank raises."""
    try:
        return [event for event in events(program, mesh) if event.operation not in BEFORE]
    except NotImplementedError as error:
        return str(error)


def rehearsed(program: Callable[[Mesh], object], mesh: Mesh) -> list[Event]:
    return pce.rehearse(program, mesh).events


def traced(program: Callable[[Mesh], object], mesh: Mesh) -> list[Event]:
    """The events of a run on these ranks, each with the bytes of the rank that put in most; collective."""
    with pce.trace() as trace:
        program(mesh)
    everyones = mesh.comm(*mesh.dims).allgather(trace.events)
    for events in everyones:
        assert [replace(event, bytes=0) for event in events] == [replace(event, bytes=0) for event in everyones[0]]
    return [max(alike, key=lambda event: event.bytes) for alike in zip(*everyones, strict=True)]


def of_text(source: str) -> Callable[[Mesh], None]:
    """Run a random program with its backward pass."""

    def program(mesh: Mesh) -> None:
        parameters: dict[int, DistArray] = {}
        loss = run(source, on_ranks(mesh, parameters))["loss"]
        if loss.requires_grad:
            loss.backward()

    return program


@pytest.mark.parametrize("exact", [False, True], ids=["plain", "reproducible"])
@pytest.mark.parametrize("ndim", [1, 2])
def test_random_programs_send_what_was_rehearsed(comm, ndim, exact):
    sizes = list(factorizations(comm.size, ndim))
    for seed in range(PROGRAMS):
        mesh = mesh_of(comm, *sizes[seed % len(sizes)])
        source = program_of(seed, mesh)
        program = of_text(source)
        with pce.reproducible(exact):
            expected = outcome(traced, program, mesh)
            assert outcome(rehearsed, program, mesh) == expected, f"program {seed} on {mesh}:\n\n{source}"


# The memory of a rank


def classify(mesh: Mesh) -> list[DistArray]:
    """A layer and a loss; the tape holds the features, the hidden units before and after gelu, and the softmax."""
    x = pce.distribute(np.ones((ROWS, FEATURES), np.float32), mesh, data=Shard(0))
    w = pce.distribute(np.ones((FEATURES, HIDDEN), np.float32), mesh, requires_grad=True)
    v = pce.distribute(np.ones((HIDDEN, CLASSES), np.float32), mesh, requires_grad=True, data=Shard(1))
    pce.cross_entropy(pce.gelu(x @ w) @ v, np.arange(ROWS) % CLASSES).backward()
    pce.AdamW([w, v], lr=0.1).step()
    return [w, v]


def attend(mesh: Mesh) -> list[DistArray]:
    """Heads are views of a product, and a product of the attended values needs a copy of them."""
    x = pce.distribute(np.ones((2, 6, 8), np.float32), mesh, data=Shard(1))
    w = pce.distribute(np.ones((8, 24), np.float32), mesh, requires_grad=True)
    heads = (x @ w).reshape(2, 6, 4, -1).swapaxes(1, 2)
    q, k, v = pce.split(heads, 3, axis=-1)
    k, v = (each.redistribute(data=pce.Replicate()) for each in (k, v))
    y = pce.scaled_dot_product_attention(q, k, v, causal=True).swapaxes(1, 2).reshape(2, 6, 8)
    pce.sum(pce.square(pce.layer_norm(y) @ w)).backward()
    pce.SGD([w], lr=0.1, momentum=0.9).step()
    return [w]


def micro_batches(mesh: Mesh) -> list[DistArray]:
    """The tape of one batch is freed before the next one; a gradient is clipped."""
    w = pce.distribute(np.ones((FEATURES, CLASSES), np.float32), mesh, requires_grad=True, data=Shard(1))
    for rows in (3, ROWS, 2):
        x = pce.distribute(np.ones((rows, FEATURES), np.float32), mesh)
        pce.mean(pce.softmax(pce.tanh(x @ w) * 2.0, axis=1)).backward()
    pce.clip_grad_norm([w], 1e-9)
    pce.SGD([w], lr=0.1).step()
    return [w]


def root_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array that has the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


@pytest.mark.parametrize("program", [classify, attend, micro_batches], ids=lambda program: program.__name__)
def test_tape_holds_the_bytes_that_were_rehearsed(comm, monkeypatch, program):
    mesh = mesh_of(comm, comm.size)
    ledger, allocations = Ledger(), dict[int, Allocation]()

    def real_allocations_of(value: Any) -> set[Allocation]:
        found, seen, waiting = set[Allocation](), list[Any](), [value]
        while waiting:
            each = waiting.pop()
            if any(each is other for other in seen):
                continue
            seen.append(each)
            if isinstance(each, np.ndarray):
                root = root_of(each)
                if id(root) not in allocations:
                    allocations[id(root)] = Allocation(ledger, root.nbytes)
                    finalize(root, allocations.pop, id(root))
                found.add(allocations[id(root)])
            else:
                waiting.extend(apply._parts(each))
        return found

    monkeypatch.setattr(apply, "allocations_of", real_allocations_of)
    monkeypatch.setattr(apply, "open_ledger", lambda: ledger)
    distribute = pce.distribute

    def noted(array: Any, mesh: Mesh, **options: Any) -> DistArray:
        made = distribute(array, mesh, **options)
        if made.requires_grad:
            (block,) = real_allocations_of(made.local)
            block.enter("parameters")
        return made

    monkeypatch.setattr(pce, "distribute", noted)
    parameters = program(mesh)
    monkeypatch.undo()
    kept = {"tape": ledger.most["tape"], "parameters": sum(each.local.nbytes for each in parameters)}
    kept["gradients"] = sum(each.grad.local.nbytes for each in parameters)
    everyones = comm.allgather(kept)
    found = pce.rehearse(program, mesh).memory
    assert {what: found[what] for what in kept if what != "gradients"} == {
        what: max(each[what] for each in everyones) for what in kept if what != "gradients"
    }
    assert found["gradients"] >= max(each["gradients"] for each in everyones)


def test_broadcast_gradient_takes_its_own_memory():
    def program(mesh: Mesh) -> None:
        pce.mean(pce.distribute(np.ones((64, 64), np.float32), mesh, requires_grad=True)).backward()

    assert pce.rehearse(program, {"data": 2}).memory["gradients"] == 64 * 64 * 4


@pytest.mark.parametrize("axis", [0, 1])
def test_logsumexp_keeps_no_copy_of_matrix(axis):
    def program(mesh: Mesh) -> None:
        pce.logsumexp(pce.distribute(np.ones((64, 256), np.float32), mesh, requires_grad=True), axis=axis)

    assert pce.rehearse(program, {"data": 2}).memory["tape"] < 64 * 256 * 4


# Programs that a rehearsal refuses, and the words for them


def sharded(mesh: Mesh, *shape: int) -> DistArray:
    return pce.distribute(np.ones(shape), mesh, data=Shard(0))


async def waits(mesh: Mesh) -> None:
    sharded(mesh, 5)


async def waits_and_yields(mesh: Mesh) -> Any:
    yield sharded(mesh, 5)


def of_many_lengths(mesh: Mesh) -> None:
    for length in range(65, 125):
        for dim in mesh.dims:
            sharded_by: dict[str, Any] = {dim: Shard(0)}
            pce.distribute(np.ones(length), mesh, **sharded_by)


@pytest.mark.parametrize(
    ("ask", "error", "text"),
    [
        (lambda mesh: (sharded(mesh, rows) for rows in (5, 6)), TypeError, "generator, of which nothing has run"),
        (waits, TypeError, "coroutine, of which nothing has run"),
        (waits_and_yields, TypeError, "async_generator, of which nothing has run"),
        (lambda mesh: pce.sum(sharded(mesh, 5)).item(), TypeError, "rehearsed=0.0"),
        (lambda mesh: float(pce.sum(sharded(mesh, 5))), TypeError, "rehearsed=0.0"),
        (lambda mesh: f"{pce.sum(sharded(mesh, 5)).full():.3f}", TypeError, "rehearsed=0.0"),
        (lambda mesh: sharded(mesh, 5)[sharded(mesh, 5) > 0], TypeError, "may depend on elements"),
        (lambda mesh: pce.save("file", {"x": sharded(mesh, 5)}), TypeError, "none are saved"),
        (lambda mesh: pce.load("file", mesh), TypeError, "none are saved or loaded"),
        (lambda mesh: mesh.comm("data").allgather(1), AttributeError, "without ranks has no allgather"),
        (lambda mesh: pce.from_local(np.ones(2), mesh, data=Shard(0)), ValueError, "shape must be given"),
        (lambda mesh: pce.from_local(np.ones(2), mesh, shape=(5,), data=Shard(0)), ValueError, "must be balanced"),
        (
            lambda mesh: pce.softmax_cross_entropy(np.ones((2, 3)), np.zeros(2, int), comm=mesh.comm("data")),
            TypeError,
            "arrays with elements need ranks",
        ),
        (
            lambda mesh: sharded(mesh, 4).redistribute(data=pce.Replicate()) if mesh.rank else sharded(mesh, 4),
            ValueError,
            r"at data=1 than at data=0: collective 1 is the all_gather of redistribute over data rather than none",
        ),
    ],
)
def test_rehearsal_refuses_in_words(ask, error, text):
    with pytest.raises(error, match=text):
        pce.rehearse(ask, {"data": 3})


@pytest.mark.parametrize(
    ("program", "mesh", "links", "text"),
    [
        (None, {"data": 2}, None, "program must be a function"),
        (sharded, 3, None, "mesh must be the sizes"),
        (sharded, {}, None, "at least one dim"),
        (sharded, {"data": 2}, {"model": (1.0, 1.0)}, "no dim model to link"),
        (sharded, {"data": 2, "model": 2}, {"data": (1.0, 1.0)}, "for each of data, model"),
        (sharded, {"data": 2}, 3, "for each of data"),
        (sharded, {"data": 2}, {"data": 1.0}, "a latency and a bandwidth"),
        (sharded, {"data": 2}, {"data": (1.0, 0.0)}, "bytes a second"),
    ],
)
def test_rehearsal_refuses_wrong_arguments(program, mesh, links, text):
    with pytest.raises((TypeError, ValueError), match=text):
        pce.rehearse(program, mesh, links=links)


def test_mesh_beyond_measure_is_refused_at_once():
    with pytest.raises(ValueError, match=r"at most 4,194,304 ranks, got 1,000,000,000,000"):
        pce.rehearse(sharded, {"data": 10**12})
    with pytest.raises(ValueError, match=r"would run for 226,981 kinds of ranks; at most 10,000 are rehearsed"):
        pce.rehearse(of_many_lengths, {"a": 64, "b": 64, "c": 64})


def test_agreement_without_ranks_takes_no_messages():
    ranks = 1_000_000
    mesh = Mesh.without_ranks(data=ranks)
    tracemalloc.start()
    assert mesh.agree(["data"], "nothing", {}, fact=3) == [3] * ranks
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 * ranks  # a message of each rank takes 56 bytes, and more as a list


def test_rehearsal_sends_nothing_over_real_ranks(comm):
    def loss(mesh: Mesh | None = None) -> object:
        return pce.softmax_cross_entropy(np.zeros((2, 3)), np.zeros(2, int), comm=comm)

    for program in (loss, lambda _: Mesh(comm, data=comm.size)):
        with pce.trace() as trace, pytest.raises(RuntimeError, match="nothing is sent in a rehearsal"):
            pce.rehearse(program, {"data": 2})
        assert not trace.events
    np.testing.assert_allclose(loss(), np.log(3 * comm.size))


def test_program_gives_numbers_and_arrays_of_its_own():
    given = []

    def program(mesh: Mesh) -> None:
        x = sharded(mesh, 6)
        given.append(pce.sum(x).item(rehearsed=0.5))
        given.append(x[x.full(rehearsed=np.arange(6)) > 2].shape)

    trace = pce.rehearse(program, {"data": 3})
    assert given == [0.5, (3,)]
    assert trace.count("all_reduce", operation="full") == 1


@pytest.mark.parametrize("exact", [False, True], ids=["plain", "reproducible"])
def test_norm_is_finite_on_all_ranks(exact):
    norms = []

    def program(mesh: Mesh) -> None:
        w = pce.distribute(np.ones(2), mesh, requires_grad=True, data=Shard(0))
        pce.sum(pce.square(w)).backward()
        norms.append(pce.clip_grad_norm([w], 2.0))
        if math.isfinite(norms[-1]):
            pce.SGD([w], lr=0.1).step()

    with pce.reproducible(exact):
        assert pce.rehearse(program, {"data": 3}).count(operation="SGD", purpose=None)
    assert norms == [1.0, 1.0]


def test_program_that_keeps_state_is_told_so():
    batches = iter([5, 5])

    def program(mesh: Mesh) -> None:
        for rows in batches:
            sharded(mesh, rows).full()

    with pytest.raises(ValueError, match=r"is none rather than .* of full over data\. It must start anew in each run"):
        pce.rehearse(program, {"data": 3})


def test_most_bytes_of_any_rank_are_reported():
    # The middle shards have all the rows of x[2:7]: of 9 rows over 3 ranks they have 1, 3 and 1.
    trace = pce.rehearse(lambda mesh: sharded(mesh, 9)[2:7].full(), {"data": 3})
    assert [event.bytes for event in trace.select("all_gather")] == [3 * 8]


@pytest.mark.parametrize("dims", [{"a": 4, "b": 3}, {"a": 3, "b": 5}, {"a": 1, "b": 2, "c": 4}])
@pytest.mark.parametrize("shape", [(7, 11), (10, 2), (17, 23)])
def test_program_runs_for_each_pair_of_shapes(dims, shape):
    seen, shardings = list[Any](), list[Any]()
    sharded_by: dict[str, Any] = dict.fromkeys(dims, Shard(0))

    def program(mesh: Mesh) -> None:
        x, y = (pce.distribute(np.ones(each), mesh, **sharded_by) for each in (shape, shape[::-1]))
        seen.append((x.local.shape, y.local.shape))
        shardings.extend([x.sharding, y.sharding])

    pce.rehearse(program, dims)
    x, y, *_ = shardings
    places = [dict(zip(dims, place, strict=True)) for place in product(*map(range, dims.values()))]
    assert seen == list(dict.fromkeys((x.local_shape(at), y.local_shape(at)) for at in places))


def test_uneven_shards_of_large_mesh_take_few_runs():
    places = []

    def program(mesh: Mesh) -> None:
        pce.distribute(np.broadcast_to(np.float32(0), (2049, 4099)), mesh, a=Shard(0), b=Shard(1))
        places.append((mesh.coordinates["a"], mesh.coordinates["b"]))

    pce.rehearse(program, {"a": 1024, "b": 2048})
    assert places == [(0, 0), (0, 3), (1, 0), (1, 3)]


def test_seconds_follow_from_latency_and_bandwidth():
    def program(mesh: Mesh) -> None:
        x = sharded(mesh, 8)
        x.full()
        pce.sum(x).full()

    trace = pce.rehearse(program, {"data": 4}, links={"data": (1.0, 8.0)})
    assert trace.select("all_gather")[0].bytes == 16
    agreements = trace.count("all_gather", purpose=Purpose.AGREEMENT)
    assert trace.seconds == (1 + 3 * 16 / 8) + (1 + 2 * 8 * 3 / 4 / 8) + agreements * (1 + 3 * 56 / 8)
    assert "estimated seconds" in str(trace)
    assert pce.rehearse(program, {"data": 4}, links={"data": (0.0, math.inf)}).seconds == 0.0
    assert pce.rehearse(program, {"data": 4}).seconds is None


def test_table_has_phases_causes_and_dims():
    rows = pce.rehearse(lambda mesh: sharded(mesh, 8).full(), {"data": 4}).rows()
    assert rows[:2] == [
        ("phase", "cause", "over", "collective", "calls", "bytes"),
        ("forward", "full", "data", "all_gather", 1, 16),
    ]
    assert rows[2][1] == "agreement of ranks"

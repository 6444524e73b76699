"""Steps of a loop that fail on ranks at random: each call is right or raises, and takes no numbers of another step."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
import gc
import os
import random
import time
from typing import Any

from hypothesis import given, settings, strategies as st
from mpi4py import MPI
import numpy as np
import pytest

import pce_mpi
from pce_mpi import Partial, Replicate
from pce_mpi.comm import communicators
from pce_mpi.comm.collectives import all_reduce, start_all_reduce
from pce_mpi.comm.tracing import cause
from pce_mpi.jobs.patience import slowdown

pce: Any = pce_mpi  # wrong arguments are the subject of these tests
STEPS = 5


class OwnError(Exception):
    """An error of the program that is made from two arguments, so that other ranks make its base."""

    def __init__(self, batch: int, reason: str) -> None:
        super().__init__(f"batch {batch}: {reason}")


KEPT = ValueError("an object that is raised again and again")


def _own_error(program: "Program", number: float) -> None:
    raise OwnError(int(number), "it is bad")


def _kept_error(program: "Program", number: float) -> None:
    raise KEPT


def _key_error(program: "Program", number: float) -> None:
    raise KeyError(f"batch {number}")


def _interrupt(program: "Program", number: float) -> None:
    raise KeyboardInterrupt


def _wrong_operand(program: "Program", number: float) -> None:
    program.x * np.ones(5)


def _wrong_dim(program: "Program", number: float) -> None:
    program.x.redistribute(other=Replicate())


def _wrong_target(program: "Program", number: float) -> None:
    program.loss(number, 99)


def _wrong_option(program: "Program", number: float) -> None:
    pce.softmax_cross_entropy(np.zeros((1, 2)), np.array([0]), comm=program.mesh.comm(*program.mesh.dims), smooth=0)


def _error_in_operation(program: "Program", number: float) -> None:
    def forward(x: Any) -> Any:
        raise ArithmeticError("in the forward function")

    pce.op(forward)(program.x)


def _skipped_call(program: "Program", number: float) -> None:
    """An error that this rank swallows, with the call that it makes in its place."""


def _swallowed_error(program: "Program", number: float) -> None:
    try:
        program.x.item()
    except ValueError:
        program.all(number)


FAULTS: dict[str, Callable[["Program", float], None]] = {
    fault.__name__.strip("_"): fault
    for fault in (
        *(_own_error, _kept_error, _key_error, _interrupt, _wrong_operand, _wrong_dim, _wrong_target, _wrong_option),
        *(_error_in_operation, _skipped_call, _swallowed_error),
    )
}


class Program:
    """Random calls on two meshes, of all ranks and of half of them; it notes each number that is not due."""

    def __init__(self, comm: Any, is_grid: bool) -> None:
        size, rank = comm.size, comm.rank
        self.mesh = pce.Mesh(comm, **({"data": 2, "model": size // 2} if is_grid else {"data": size}))
        half = comm.Split(rank < size // 2, rank)
        self.part = pce.Mesh(half, half=half.size)
        self.half = half
        self.x = pce.distribute(np.arange(6.0), self.mesh)
        self.step = 0
        self.wrong: list[tuple[int, float, float]] = []

    def alone(self, number: float) -> None:
        """Send nothing."""
        self.x * number

    def all(self, number: float) -> None:
        """Add up over all ranks."""
        self.summed(self.mesh, list(self.mesh.dims), number)

    def along(self, number: float) -> None:
        """Add up along one dim."""
        self.summed(self.mesh, list(self.mesh.dims)[:1], number)

    def of_half(self, number: float) -> None:
        """Add up over the ranks of the other mesh."""
        self.summed(self.part, ["half"], number)

    def softmax(self, number: float) -> None:
        """Compute a softmax over shards: its collective is one of an operation."""
        axis = pce.Shard(0)
        logits = pce.distribute(number // 100 + np.arange(6.0), self.mesh, **{next(iter(self.mesh.dims)): axis})
        self.note(float(pce.max(pce.softmax(logits * 1.0, 0)).full()), 0.6336913225737218)

    def summed(self, mesh: Any, dims: list[str], number: float) -> None:
        partial = pce.from_local(np.full(2, number), mesh, **dict.fromkeys(dims, Partial("sum")))
        total = partial.redistribute(**dict.fromkeys(dims, Replicate()))
        self.note(float(total.local[0]), number * np.prod([mesh.dims[dim] for dim in dims]))

    def loss(self, number: float, target: int = 0) -> None:
        """Compute a loss; the error of a wrong target is found together."""
        comm = self.mesh.comm(*self.mesh.dims)
        logits = np.array([[number, 0.0]])
        loss = pce.softmax_cross_entropy(logits, np.array([target]), comm=comm, num_classes=2 * comm.size)
        self.note(float(loss), np.log(comm.size * (1 + np.exp(-number))))

    def note(self, number: float, due: float) -> None:
        if abs(number - due) > 1e-9:
            self.wrong.append((self.step, float(number), float(due)))


CALLS = ("alone", "all", "along", "of_half", "loss", "softmax")


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Let ranks wait so long for each other, in seconds of an idle machine."""
    before = os.environ.get("PCE_MPI_TIMEOUT")
    os.environ["PCE_MPI_TIMEOUT"] = f"{seconds * slowdown()}"
    try:
        yield
    finally:
        del os.environ["PCE_MPI_TIMEOUT"]
        os.environ |= {"PCE_MPI_TIMEOUT": before} if before else {}


def drawn(seed: int, size: int, way: str) -> tuple[list[list[str]], dict[tuple[int, int], dict[int, str]]]:
    """Draw the calls of each step, and the faults of a step on a rank, by the number of the call."""
    choose = random.Random(seed)
    steps = [[*choose.choices(CALLS, k=choose.randint(1, 4)), "all"] for _ in range(STEPS)]
    rate = choose.choice([0.0, 0.1, 0.3])
    places = [(step, rank) for step in range(STEPS) for rank in range(size) if choose.random() < rate]
    bad = {}
    for step, rank in places or [(choose.randrange(STEPS - 1), choose.randrange(size))]:
        index = choose.randrange(len(steps[step]))
        names = {*FAULTS}
        if steps[step][index] != "loss":  # other ranks must come to the agreement
            names -= {"wrong_target", "wrong_option"}
        if way != "a block" or {"of_half", "along"} & {
            *steps[step]
        }:  # ranks would wait for each other on two communicators
            names -= {"skipped_call"}
        if way == "no block":  # nobody hears of what leaves no call
            names -= {"own_error", "kept_error", "key_error", "interrupt"}
        bad[step, rank] = {index: choose.choice(sorted(names))}
    return steps, bad


def run(program: Program, step: list[str], number: float, faults: dict[int, str]) -> None:
    """Make the calls of a step; `faults` says which of them this rank makes otherwise."""
    for index, name in enumerate(step):
        if index in faults:
            FAULTS[faults[index]](program, number + index)
        else:
            getattr(program, name)(number + index)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("way", ["no block", "a block", "nested blocks"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), is_grid=st.booleans())
def test_each_call_is_right_or_raises(comm, way, seed, is_grid):
    steps, bad = drawn(seed, comm.size, way)
    alone = comm.Dup()
    # Outside blocks, ranks that an error has reached and others may wait for each other on the two meshes.
    with patience(2.0 if way == "no block" else 20.0):
        program = Program(alone, is_grid and comm.size == 4)
        done, errors = [], []
        start = time.monotonic()
        for step, names in enumerate(steps):
            program.step = step
            try:
                with ExitStack() as blocks:
                    if way != "no block":
                        blocks.enter_context(program.mesh.attempt())
                    if way == "nested blocks":
                        blocks.enter_context(program.part.attempt())
                    run(program, names, 100.0 * (step + 1), bad.get((step, comm.rank), {}))
                done.append(step)
            except (Exception, KeyboardInterrupt) as error:
                errors.append(error)
        seconds = (time.monotonic() - start) / slowdown()
    everywhere = comm.allgather((done, seconds))
    # Where a rank has left out a call, the others may have taken its next one of that step, which they all leave.
    skipped = {step for (step, _), fault in bad.items() if "skipped_call" in fault.values()}
    assert {step for step, *_ in program.wrong} <= skipped - set(done)
    assert all(abs(number / due - 1) < 0.06 for _, number, due in program.wrong)
    if way != "no block":
        assert max(seconds for _, seconds in everywhere) < STEPS
        failed = {step for step, _ in bad}
        # A call that is left out or made twice shows at the end of the block at the latest.
        assert [steps for steps, _ in everywhere] == [sorted(set(range(STEPS)) - failed)] * comm.size
    program.half.Free()
    alone.Free()


@pytest.mark.ranks(2, 3, 4)
def test_all_ranks_leave_a_block_by_one_class(comm, several, impatient):
    mesh = pce.Mesh(comm, data=comm.size)
    for raised, due in (
        *((kind, kind) for kind in (KeyError, ZeroDivisionError, AssertionError, TimeoutError, RecursionError)),
        (lambda text: OwnError(3, text), Exception),
        (StopIteration, StopIteration),
        (lambda text: ExceptionGroup(text, [ValueError()]), Exception),
    ):
        with pytest.raises(due) as caught, mesh.attempt():
            if comm.rank == comm.size - 1:
                raise raised("a bad batch")
            mesh.agree(("data",), "a call", {})
        assert type(caught.value) is due
        assert "a bad batch" in str(caught.value)
        assert comm.rank == comm.size - 1 or f"(rank {comm.size - 1} along data)" in str(caught.value)
        assert pce.from_local(np.ones(1), mesh, data=Partial("sum")).full() == comm.size


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_interruption_leaves_as_itself_on_its_rank_alone(comm, several, impatient, raised):
    mesh = pce.Mesh(comm, data=comm.size)
    due = raised if comm.rank == 0 else pce.CollectiveError
    with pytest.raises(due) as caught, mesh.attempt():
        if comm.rank == 0:
            raise raised
        mesh.agree(("data",), "a call", {})
    assert comm.rank == 0 or str(caught.value) == f"{raised.__name__} (rank 0 along data)"
    assert pce.from_local(np.ones(1), mesh, data=Partial("sum")).full() == comm.size


def test_errors_in_one_call_close_nothing(comm, impatient):
    mesh = pce.Mesh(comm, data=comm.size)
    x = pce.distribute(np.arange(6.0), mesh, data=pce.Shard(0))
    for length in (5, 4):
        with pytest.raises(ValueError, match="shape"):
            x * np.ones(length)
        with pytest.raises(ValueError, match="one element"):
            x.item()
    assert x.sum().item() == 15.0


@pytest.mark.ranks(2, 3, 4)
def test_errors_in_different_calls_close_the_mesh(comm, several, impatient):
    mesh = pce.Mesh(comm, data=comm.size)
    x = pce.distribute(np.arange(6.0), mesh, data=pce.Shard(0))
    for rank in range(2):  # each of the two calls raises on some ranks
        with nullcontext() if (comm.rank == 0) == rank else pytest.raises(ValueError, match="shape"):
            x * np.ones(6 if (comm.rank == 0) == rank else 5)
    for _ in range(2):
        with pytest.raises(pce.CollectiveError, match="this mesh is closed since an error"):
            x.sum().item()
    other = pce.Mesh(comm, data=comm.size)
    assert pce.from_local(np.ones(1), other, data=Partial("sum")).full() == comm.size


@pytest.mark.ranks(2, 3, 4)
def test_call_without_communication_tells_nobody(comm, several, impatient):
    mesh = pce.Mesh(comm, data=comm.size)
    x = pce.distribute(np.arange(6.0), mesh, data=pce.Shard(0))
    calls: list[Callable[[], Any]] = [
        lambda: pce.shard_range(-1, 0, 9),
        lambda: pce.op(3),
        lambda: pce.Mesh(MPI.COMM_SELF, d=4),
        lambda: pce.linear_schedule("a", lr=1.0, steps=3),
    ]
    for call in calls:
        if comm.rank == 0:
            with pytest.raises((TypeError, ValueError)):
                call()
        assert x.sum().item() == 15.0


@pytest.mark.ranks(2, 3, 4)
def test_started_sum_does_not_outlive_its_block(comm, several, impatient):
    mesh = pce.Mesh(comm, data=comm.size)
    for step in range(2 * comm.size):
        with pytest.raises(KeyError) as caught, mesh.attempt(), cause("test"):
            finish = start_all_reduce(np.ones(3), mesh.comm("data"), "sum")
            if comm.rank == step % comm.size:
                raise KeyError(step)
            finish()
            start_all_reduce(np.ones(3), mesh.comm("data"), "sum")()
        del caught, finish  # with the collective that this rank has not waited for
        gc.collect()
        with cause("test"):
            np.testing.assert_array_equal(all_reduce(np.ones(3), mesh.comm("data"), "sum"), [comm.size] * 3)


@pytest.mark.ranks(2, 3)
def test_blocks_use_up_nothing(comm, several, impatient):
    mesh = pce.Mesh(comm, data=comm.size)

    def kibibytes() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024

    for step in range(1500):
        with pytest.raises(ValueError, match="bad"), mesh.attempt():
            if step % comm.size == comm.rank:
                raise ValueError("bad")
            with pce.trace():
                pce.from_local(np.ones(3), mesh, data=Partial("sum")).full()
        if step == 500:
            start = kibibytes()
    assert kibibytes() - start < 4000
    assert pce.from_local(np.ones(1), mesh, data=Partial("sum")).full() == comm.size


def block_of(mesh: Any) -> AbstractContextManager[None]:
    return mesh.attempt()


@pytest.mark.ranks(2, 3, 4)
def test_collectives_of_every_kind_are_completed(comm, several, impatient):
    mesh = pce.Mesh(comm, data=comm.size)
    rows = pce.distribute(np.arange(24.0).reshape(4, 6), mesh, data=pce.Shard(0))
    terms = pce.from_local(np.ones((4, 6), np.float32), mesh, data=Partial("sum"))
    largest = pce.from_local(np.ones((4, 6)), mesh, data=Partial("max"))
    moves: list[Callable[[], Any]] = [
        rows.full,
        terms.full,
        largest.full,
        lambda: rows.redistribute(data=pce.Shard(1)),
        lambda: terms.redistribute(data=pce.Shard(0)),
        lambda: largest.redistribute(data=pce.Shard(0)),
        lambda: pce.softmax_cross_entropy(np.ones((2, 3)), np.zeros(2, int), comm=mesh.comm("data")),
    ]
    for move in moves:
        for event in range(3):
            with pytest.raises(ValueError, match="between"), block_of(mesh), failing_at(event, comm.rank == 0):
                move()
                move()
                if comm.rank == 0:
                    raise ValueError("between two calls")
        assert pce.from_local(np.ones(1), mesh, data=Partial("sum")).full() == comm.size
    np.testing.assert_array_equal(rows.full(), np.arange(24.0).reshape(4, 6))


@contextmanager
def failing_at(event: int, is_here: bool) -> Iterator[None]:
    """Raise before this rank's collective of that number."""
    count = 0
    channel: Any = communicators.Channel
    run_before, start_before = channel.run, channel.start

    def counted(original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == event + 1:
                raise ValueError("between two collectives")
            return original(*arguments, **options)

        return call

    if is_here:
        channel.run, channel.start = counted(run_before), counted(start_before)
    try:
        yield
    finally:
        channel.run, channel.start = run_before, start_before

"""Steps of a loop that fail on ranks at random: every rank leaves the step, and none takes numbers of another one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
import random
import time
from typing import Any

import numpy as np
import pytest

import pce_mpi
from pce_mpi import Partial, Replicate
from pce_mpi.comm.board import Board
from pce_mpi.jobs.patience import slowdown
from ranks.grids import LINE_AND_GRID

pce: Any = pce_mpi  # wrong arguments are the subject of these tests
STEPS = 6


class Program:
    """A loop over a step of random calls, which notes the numbers that are not those of its step."""

    def __init__(self, mesh: Any, seed: int) -> None:
        self.mesh, self.x = mesh, pce.distribute(np.arange(6.0), mesh)
        self.wrong: list[tuple[float, float]] = []
        choose = random.Random(seed)
        calls: dict[str, Callable[[float, bool], object]] = {"alone": self.alone, "loss": self.loss, "all": self.all}
        calls |= {f"along_{dim}": partial(self.summed, [dim]) for dim in mesh.dims}
        names = [*choose.choices([*calls, "alone"], k=choose.randint(1, 5)), "all"]
        choose.shuffle(names)
        # Each call has a line of its own, as in a program.
        lines = [f"    {name}({index} + 100 * step, bad == {index})\n" for index, name in enumerate(names)]
        exec(compile("def run(step, bad):\n" + "".join(lines), f"program-{seed}", "exec"), calls)
        self.run: Any = calls["run"]
        # Which call fails, in a step on a rank: in several steps of some programs, on several ranks of others.
        rate = choose.choice([0.0, 0.1, 0.3])
        self.bad = {
            (step, rank): choose.randrange(len(names))
            for step in range(STEPS)
            for rank in range(mesh.size)
            if choose.random() < rate
        } or {(choose.randrange(STEPS - 1), choose.randrange(mesh.size)): choose.randrange(len(names))}

    def alone(self, number: float, bad: bool) -> None:
        """Send nothing."""
        self.x * (np.ones(5) if bad else number)

    def all(self, number: float, bad: bool) -> None:
        """Add up over all ranks."""
        self.summed(list(self.mesh.dims), number, bad)

    def summed(self, dims: list[str], number: float, bad: bool) -> None:
        """Add up along some dims; the error of a wrong dim leaves nobody waiting."""
        one = pce.from_local(np.full(2, number), self.mesh, **dict.fromkeys(dims, Partial("sum")))
        total = one.redistribute(**dict.fromkeys(["other" if bad else dims[0], *dims[1:]], Replicate()))
        self.note(float(total.local[0]), number * np.prod([self.mesh.dims[dim] for dim in dims]))

    def loss(self, number: float, bad: bool) -> None:
        """Compute a loss; the error of a wrong target is found together."""
        comm = self.mesh.comm(*self.mesh.dims)
        logits = np.array([[number, 0.0]])
        found = pce.softmax_cross_entropy(logits, np.array([99 if bad else 0]), comm=comm, num_classes=2 * comm.size)
        self.note(float(found), np.log(comm.size * (1 + np.exp(-number))))

    def note(self, found: float, due: float) -> None:
        """Note a number that is not the one that is due."""
        if abs(found - due) > 1e-9:
            self.wrong.append((found, due))

    def loop(self, rank: int, block: Callable[[], AbstractContextManager[None]]) -> tuple[list[int], int, str]:
        """Run all steps and catch their errors; return those that went through, the errors, and what ended it."""
        done, errors = [], 0
        for step in range(STEPS):
            try:
                with block():
                    self.run(step, self.bad.get((step, rank)))
                done.append(step)
            except pce.CollectiveTimeout as error:
                return done, errors, str(error)
            except Exception:
                errors += 1
        return done, errors, ""


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("grid", LINE_AND_GRID)
@pytest.mark.parametrize("attempts", [False, True], ids=["steps", "attempts"])
def test_no_rank_takes_numbers_of_another_step(comm, attempts, grid, seed, monkeypatch):
    monkeypatch.setenv("PCE_MPI_TIMEOUT", f"{(20 if attempts else 2) * slowdown()}")  # steps may go apart
    alone = comm.Dup()  # errors of the last step, which nobody waits for, are of this test
    program = Program(pce.Mesh(alone, **({"data": 2, "model": comm.size // 2} if grid else {"data": comm.size})), seed)
    start = time.monotonic()
    done, errors, end = program.loop(comm.rank, program.mesh.attempt if attempts else nullcontext)
    seconds = (time.monotonic() - start) / slowdown()
    everywhere = comm.allgather((done, errors, end, seconds))
    assert not program.wrong
    if attempts:
        assert max(seconds for *_, seconds in everywhere) < STEPS
        failed = {step for step, _ in program.bad}
        assert (done, errors, end) == (sorted(set(range(STEPS)) - failed), len(failed), "")
    for _, _, end, _ in everywhere:
        assert not end or "mesh.attempt()" in end or "PCE_MPI_TIMEOUT" in end
    alone.Free()


@pytest.mark.ranks(2, 3, 4)
def test_late_rank_hears_nothing_of_the_library(comm, several, impatient, monkeypatch):
    # Under Open MPI a rank that makes the next communicator sends messages of the library to those that come after it.
    def wait_and_listen(board: Board, *arguments: Any) -> Any:
        said = wait_for(board, *arguments)
        for _ in range(20 if comm.rank == 0 else 0):
            time.sleep(0.01)
            board._listen()
        return said

    wait_for = Board._wait_for
    monkeypatch.setattr(Board, "_wait_for", wait_and_listen)
    mesh = pce.Mesh(comm, data=comm.size)
    with pytest.raises(ValueError, match="a bad batch"), mesh.attempt():
        if comm.rank == 0:
            raise ValueError("a bad batch")
        pce.from_local(np.ones(2), mesh, data=Partial("sum")).full()
    assert pce.from_local(np.ones(1), mesh, data=Partial("sum")).full() == comm.size


@pytest.mark.ranks(2, 3, 4)
def test_own_error_of_the_program_ends_the_attempt(comm, several, impatient):
    mesh = pce.Mesh(comm, data=comm.size)
    for step in range(3):
        with pytest.raises(ValueError, match=r"^a bad batch( \(rank 0 along data\))?$"):
            with mesh.attempt():
                if comm.rank == 0:
                    raise ValueError("a bad batch")
                pce.from_local(np.ones(2), mesh, data=Partial("sum")).full()
        assert pce.from_local(np.ones(1), mesh, data=Partial("sum")).full() == comm.size, step

"""What the tape costs: three pieces of work, each beside the same done without it, the two taking turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import pce_mpi as pce
from pce_mpi.cli.training_step import ByHand, OnTape, parameters
from pce_mpi.comm.collectives import agree, all_reduce
from pce_mpi.optim.synchronization import synchronize

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Cost", "measure"]

Array = np.ndarray[Any, Any]

# The example's language model but for its vocabulary.
_BATCH, _CONTEXT, _EMBED, _HIDDEN = 256, 4, 128, 128
_PARAMETERS, _ELEMENTS = 100, 10_000


@dataclass(frozen=True)
class Cost:
    """One piece of work on the tape and its like without; medians of this rank's seconds, and of their ratios."""

    work: str
    seconds: float
    beside: str
    beside_seconds: float
    ratio: float


def measure(rows: int, classes: int, repeat: int, comm: MPI.Intracomm) -> list[Cost]:
    """Collective over `comm`; the ratio counts, as both of a pair meet the same neighbours on the machine."""
    return [
        _cross_entropy(rows, classes, repeat, comm),
        _training_step(classes, repeat, comm),
        _synchronization(repeat, comm),
    ]


def _cross_entropy(rows: int, classes: int, repeat: int, comm: MPI.Intracomm) -> Cost:
    mesh = pce.Mesh(comm, classes=comm.size)
    rng = np.random.default_rng(comm.rank)
    start, stop = pce.shard_range(classes, comm.size, comm.rank)
    local = rng.standard_normal((rows, stop - start), np.float32)
    targets = np.random.default_rng(comm.size).integers(0, classes, rows)
    logits = pce.from_local(local, mesh, requires_grad=True, classes=pce.Shard(1))

    def on_tape() -> None:
        pce.cross_entropy(logits, targets).backward()
        logits.grad = None

    def without() -> None:
        pce.softmax_cross_entropy_value_and_grad(local, targets, comm=comm)

    return _compared("cross_entropy, forward and backward", on_tape, "value_and_grad", without, repeat, comm)


def _training_step(classes: int, repeat: int, comm: MPI.Intracomm) -> Cost:
    values = parameters(classes, _CONTEXT, _EMBED, _HIDDEN)
    tape, hand = OnTape(values, comm), ByHand(values, _BATCH, comm)
    rng = np.random.default_rng(0)
    contexts, targets = rng.integers(0, classes, (_BATCH, _CONTEXT)), rng.integers(0, classes, _BATCH)
    return _compared(
        "training step of a language model",
        lambda: tape.step(contexts, targets, 0.1),
        "written by hand",
        lambda: hand.step(contexts, targets, 0.1),
        repeat,
        comm,
    )


def _synchronization(repeat: int, comm: MPI.Intracomm) -> Cost:
    mesh = pce.Mesh(comm, data=comm.size)
    made = [pce.distribute(np.zeros(_ELEMENTS, np.float32), mesh, requires_grad=True) for _ in range(_PARAMETERS)]
    terms = [pce.from_local(np.ones(_ELEMENTS, np.float32), mesh, data=pce.Partial("sum")) for _ in made]
    total = np.ones(_PARAMETERS * _ELEMENTS, np.float32)

    def together() -> None:
        for parameter, term in zip(made, terms, strict=True):
            parameter.grad = term
        synchronize(made, "bench", {})

    def once() -> None:
        all_reduce(total, comm, "sum", operation="bench", reason="as many elements at once")

    work = f"{_PARAMETERS} gradients of {_ELEMENTS:,} elements brought together"
    return _compared(work, together, "one all_reduce", once, repeat, comm)


def _compared(
    work: str,
    call: Callable[[], object],
    beside: str,
    other: Callable[[], object],
    repeat: int,
    comm: MPI.Intracomm,
) -> Cost:
    pairs = []
    for repetition in range(repeat + 2):
        pair = _seconds(call, comm), _seconds(other, comm)
        if repetition > 1:  # the first ones warm up
            pairs.append(pair)
    ours, theirs = zip(*pairs, strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    return Cost(work, statistics.median(ours), beside, statistics.median(theirs), ratio)


def _seconds(call: Callable[[], object], comm: MPI.Intracomm) -> float:
    agree(comm, "bench", {})
    start = time.perf_counter()
    call()
    agree(comm, "bench", {})  # until all ranks are done
    return time.perf_counter() - start

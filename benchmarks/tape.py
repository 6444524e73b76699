"""Time the tape: three pieces of work, each beside the same work done without it, the two taking turns.

    mpiexec -n 2 python -m mpi4py benchmarks/tape.py --classes 42858 --repeat 15

The ratio counts: both of a pair meet the same neighbours on the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
import statistics
import time
from typing import Any

from mpi4py import MPI
import numpy as np

import pce_mpi as pce
from pce_mpi.cli.arguments import positive
from pce_mpi.cli.output import progress
from pce_mpi.comm.agreement import agree
from pce_mpi.comm.collectives import all_reduce
from pce_mpi.comm.tracing import cause
from pce_mpi.optim.synchronization import synchronize
from pce_mpi.text import table
from training_step import ByHand, OnTape, parameters

COMM = MPI.COMM_WORLD
Array = np.ndarray[Any, Any]

# The example's language model but for its vocabulary.
BATCH, CONTEXT, EMBED, HIDDEN = 256, 4, 128, 128
PARAMETERS, ELEMENTS = 100, 10_000


@dataclass(frozen=True)
class Cost:
    """One piece of work on the tape and the same without it; medians of this rank's seconds and of their ratios."""

    work: str
    seconds: float
    beside: str
    beside_seconds: float
    ratio: float


def main() -> None:
    options = arguments()
    works = {
        "cross entropy": lambda: cross_entropy(options.rows, options.classes, options.repeat),
        "training step": lambda: training_step(options.classes, options.repeat),
        "synchronization": lambda: synchronization(options.repeat),
    }
    costs = [works[name]() for name in progress("bench", list(works), COMM)]
    if COMM.rank > 0:
        return
    print(f"{COMM.size} rank{'s' * (COMM.size > 1)}, {options.classes} classes, float32, median of {options.repeat}\n")
    lines = [(cost.work, 1e3 * cost.seconds, cost.beside, 1e3 * cost.beside_seconds, cost.ratio) for cost in costs]
    print(table([("work", "ms", "beside", "ms", "ratio"), *lines]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=positive, default=2048, help="rows of the logits of the cross entropy")
    parser.add_argument("--classes", type=positive, default=32000, help="classes of all shards together")
    parser.add_argument("--repeat", type=positive, default=7, help="timed repetitions, of which the median counts")
    return parser.parse_args()


def cross_entropy(rows: int, classes: int, repeat: int) -> Cost:
    mesh = pce.Mesh(COMM, classes=COMM.size)
    rng = np.random.default_rng(COMM.rank)
    start, stop = pce.shard_range(classes, COMM.size, COMM.rank)
    local = rng.standard_normal((rows, stop - start), np.float32)
    targets = np.random.default_rng(COMM.size).integers(0, classes, rows)
    logits = pce.from_local(local, mesh, requires_grad=True, classes=pce.Shard(1))

    def on_tape() -> None:
        pce.cross_entropy(logits, targets).backward()
        logits.grad = None

    def without() -> None:
        pce.softmax_cross_entropy_value_and_grad(local, targets, comm=COMM)

    return compared("cross_entropy, forward and backward", on_tape, "value_and_grad", without, repeat)


def training_step(classes: int, repeat: int) -> Cost:
    values = parameters(classes, CONTEXT, EMBED, HIDDEN)
    tape, hand = OnTape(values, COMM), ByHand(values, BATCH, COMM)
    rng = np.random.default_rng(0)
    contexts, targets = rng.integers(0, classes, (BATCH, CONTEXT)), rng.integers(0, classes, BATCH)
    return compared(
        "training step of a language model",
        lambda: tape.step(contexts, targets, 0.1),
        "written by hand",
        lambda: hand.step(contexts, targets, 0.1),
        repeat,
    )


def synchronization(repeat: int) -> Cost:
    mesh = pce.Mesh(COMM, data=COMM.size)
    made = [pce.distribute(np.zeros(ELEMENTS, np.float32), mesh, requires_grad=True) for _ in range(PARAMETERS)]
    partials = [pce.from_local(np.ones(ELEMENTS, np.float32), mesh, data=pce.Partial("sum")) for _ in made]
    total = np.ones(PARAMETERS * ELEMENTS, np.float32)

    def together() -> None:
        for parameter, partial in zip(made, partials, strict=True):
            parameter.grad = partial
        synchronize(made, [mesh], "bench", [{}])

    def once() -> None:
        with cause("bench", reason="as many elements at once"):
            all_reduce(total, COMM, "sum")

    work = f"{PARAMETERS} gradients of {ELEMENTS:,} elements brought together"
    return compared(work, together, "one all_reduce", once, repeat)


def compared(work: str, call: Callable[[], object], beside: str, other: Callable[[], object], repeat: int) -> Cost:
    pairs = []
    for repetition in range(repeat + 2):
        pair = seconds(call), seconds(other)
        if repetition > 1:  # the first ones warm up
            pairs.append(pair)
    ours, theirs = zip(*pairs, strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    return Cost(work, statistics.median(ours), beside, statistics.median(theirs), ratio)


def seconds(call: Callable[[], object]) -> float:
    agree(COMM, "bench", {})
    start = time.perf_counter()
    call()
    agree(COMM, "bench", {})  # until all ranks are done
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

"""Time the loss of a few rows, where the arithmetic takes next to nothing, beside the collectives that it makes.

    mpiexec -n 2 python -m mpi4py benchmarks/small_loss.py

Each figure is microseconds a call on rank 0, a mean over a block of calls: the least and the median of the blocks. The
cases take turns, so that other work on the machine disturbs all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter
from typing import Any

from mpi4py import MPI
import numpy as np

import pce_mpi as pce
from pce_mpi.cli.arguments import positive

COMM = MPI.COMM_WORLD


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=positive, default=8, help="8 unless given")
    parser.add_argument("--classes", type=positive, default=16, help="of each rank; 16 unless given")
    parser.add_argument("--blocks", type=positive, default=400, help="400 unless given")
    parser.add_argument("--calls", type=positive, default=10, help="in a block; 10 unless given")
    chosen = parser.parse_args()
    logits = np.random.default_rng(COMM.rank).normal(size=(chosen.rows, chosen.classes)).astype(np.float32)
    targets = np.arange(chosen.rows) % chosen.classes
    header, headers = np.zeros(7, np.int64), np.empty((COMM.size, 7), np.int64)
    states = np.zeros((chosen.rows, 5))
    merged = np.empty_like(states)

    def loss(comm: MPI.Intracomm | None) -> Callable[[], Any]:
        return lambda: pce.softmax_cross_entropy(logits, targets, comm=comm)

    cases: dict[str, Callable[[], Any]] = {
        f"MPI's Allgather of {header.nbytes} bytes": lambda: COMM.Allgather(header, headers),
        f"MPI's Allreduce of {states.nbytes} bytes": lambda: COMM.Allreduce(states, merged),
        "loss without a communicator": loss(None),
        "loss on a communicator of one rank": loss(MPI.COMM_SELF),
        f"loss on {COMM.size} ranks": loss(COMM),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for block in range(chosen.blocks + 1):
        for name, case in cases.items():
            COMM.Barrier()
            begin = perf_counter()
            for _ in range(chosen.calls):
                case()
            if block:  # the first one warms up
                seconds[name].append((perf_counter() - begin) / chosen.calls)
    if COMM.rank == 0:
        print(f"{'microseconds':36}{'least':>8}{'median':>8}")
        for name, taken in seconds.items():
            print(f"{name:36}{min(taken) * 1e6:8.1f}{np.median(taken) * 1e6:8.1f}")


if __name__ == "__main__":
    main()

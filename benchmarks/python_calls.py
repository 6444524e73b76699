"""Count the Python calls of one warm loss and of the parts of one training step.

    mpiexec -n 2 python -m mpi4py benchmarks/python_calls.py

A call is one Python function of this package entered on rank 0, as `sys.setprofile` reports it; the second column adds
those of NumPy and of the standard library. A rank that waits for long enters more of them: the least of some calls
counts, which depends neither on the machine nor on what else runs on it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
import sys
from types import FrameType
from typing import Any

from mpi4py import MPI
import numpy as np

import pce_mpi as pce
from pce_mpi import Mesh, Shard

PACKAGE = str(Path(pce.__file__).parent)
COMM = MPI.COMM_WORLD
WARM = 5


def calls(function: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> tuple[int, int]:
    """Count the Python functions that one warm `function()` enters: those of this package, and all."""
    for _ in range(WARM):
        prepare()
        function()
    return min(_of_one_call(function, prepare) for _ in range(WARM))


def _of_one_call(function: Callable[[], Any], prepare: Callable[[], Any]) -> tuple[int, int]:
    prepare()
    COMM.Barrier()
    ours = theirs = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal ours, theirs
        if event == "call":
            mine = PACKAGE in frame.f_code.co_filename
            ours, theirs = ours + mine, theirs + (not mine)

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return ours, ours + theirs


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    rng = np.random.default_rng(0)
    ranks = COMM.size
    logits = np.random.default_rng(COMM.rank).normal(size=(8, 16)).astype(np.float32)
    targets = np.arange(8) % (16 * ranks)
    mesh = Mesh(COMM, model=ranks)
    x = pce.distribute(rng.normal(size=(8, 4)).astype(np.float32), mesh)
    w = pce.distribute(rng.normal(size=(4, 16 * ranks)).astype(np.float32), mesh, model=Shard(1), requires_grad=True)
    optimizer = pce.SGD([w], lr=0.1)
    made: dict[str, Any] = {}

    def forward() -> None:
        made["logits"] = x @ w

    def loss() -> None:
        made["loss"] = pce.cross_entropy(made["logits"], targets)

    def both() -> None:
        forward()
        loss()

    def forward_and_backward() -> None:
        both()
        made["loss"].backward()

    rows = [
        ("softmax_cross_entropy", calls(lambda: pce.softmax_cross_entropy(logits, targets, comm=COMM))),
        ("x @ w", calls(forward)),
        ("cross_entropy on the tape", calls(loss, forward)),
        ("backward", calls(lambda: made["loss"].backward(), both)),
        ("SGD.step", calls(optimizer.step, forward_and_backward)),
    ]
    if COMM.rank == 0:
        print(f"{'':27}{'Python calls':>12}{'with built-in':>15}")
        for name, (python, everything) in rows:
            print(f"{name:27}{python:>12}{everything:>17}")


if __name__ == "__main__":
    main()

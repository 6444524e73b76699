"""Check the examples: every rank compares the results of all ranks together with those of one process."""

from collections.abc import Callable, Mapping
import sys
from typing import Any, NoReturn

from mpi4py import MPI
import numpy as np

import pce_mpi as pce


def stop(comm: MPI.Intracomm, message: str) -> NoReturn:
    """End the job: rank 0 prints why, and every rank exits with status 1."""
    if comm.rank == 0:
        print(message, file=sys.stderr, flush=True)
    comm.Barrier()
    MPI.Finalize()  # otherwise mpi4py takes the exit status for a crash and aborts the job
    raise SystemExit(1)


def compare(comm: MPI.Intracomm, ours: Mapping[str, Any], one_process: Mapping[str, Any], limit: float = 1e-5) -> float:
    """Return the largest relative difference on any rank; if it exceeds `limit`, list what differs and end the job.

    A difference is relative to the largest element of its array, as rounding errors are.
    """
    differences = {}
    for name, expected in one_process.items():
        expected = np.asarray(expected)
        scale = max(np.abs(expected).max(), np.finfo(expected.dtype).tiny)
        differences[name] = float(np.abs(np.asarray(ours[name]) - expected).max() / scale)
    everywhere = comm.allgather(differences)
    wrong = [
        f"  {name} by {found[name]:.1e} (rank {rank})"
        for rank, found in enumerate(everywhere)
        for name in found
        if not found[name] <= limit  # also true for nan
    ]
    if wrong:
        stop(comm, "\n".join([f"further than {limit:.0e} from what one process computes:", *wrong]))
    return max(difference for found in everywhere for difference in found.values())


def compare_steps(
    mesh: pce.Mesh, start: Callable[[pce.Mesh], Any], step: Callable[[Any, int], float], numbers: range
) -> None:
    """Train for some steps on all ranks together, then on each rank alone: losses and parameters must agree.

    `start` makes a model on a mesh; `step` takes the training step of a given number and returns the loss before it.
    """
    results = []
    for ranks in mesh, pce.Mesh(MPI.COMM_SELF, **dict.fromkeys(mesh.dims, 1)):
        model = start(ranks)
        losses = {f"the loss of step {number}": step(model, number) for number in numbers}
        results.append(losses | {f"{name} after that": array.full() for name, array in model.parameters.items()})
    together, alone = results
    # The limit is loose because the gradient of a bias is a sum whose terms nearly cancel, and a bias that starts at 0
    # consists of that gradient alone.
    difference = compare(mesh.comm(*mesh.dims), together, alone, limit=1e-4)
    if mesh.rank == 0:
        print(f"the first steps are those of one process, but for {difference:.0e}", flush=True)

"""How the examples check themselves: every rank compares what all ranks computed with what one process computes."""

from collections.abc import Callable, Mapping
import sys
from typing import Any, NoReturn

from mpi4py import MPI
import numpy as np

import pce_mpi as pce


def stop(comm: MPI.Intracomm, message: str) -> NoReturn:
    """End the job: rank 0 says why, once, and every rank exits with status 1."""
    if comm.rank == 0:
        print(message, file=sys.stderr, flush=True)
    comm.Barrier()
    MPI.Finalize()  # Else mpi4py takes the status for a crash and aborts the job, with a message of its own.
    raise SystemExit(1)


def compare(comm: MPI.Intracomm, ours: Mapping[str, Any], one_process: Mapping[str, Any], limit: float = 1e-5) -> float:
    """The largest relative difference on any rank; more than `limit` ends the job, with a list of what differs.

    A difference is relative to the largest element of the array: rounding does not spare the small ones.
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
        if not found[name] <= limit  # nor is nan
    ]
    if wrong:
        stop(comm, "\n".join([f"further than {limit:.0e} from what one process computes:", *wrong]))
    return max(difference for found in everywhere for difference in found.values())


def compare_steps(
    mesh: pce.Mesh, start: Callable[[pce.Mesh], Any], step: Callable[[Any, int], float], numbers: range
) -> None:
    """Let every rank take steps of training with the others, then alone: losses and parameters must agree.

    `start` makes a model on a mesh; `step` takes it one step further, of this number, and returns the loss before it.
    """
    results = []
    for ranks in mesh, pce.Mesh(MPI.COMM_SELF, **dict.fromkeys(mesh.dims, 1)):
        model = start(ranks)
        losses = {f"the loss of step {number}": step(model, number) for number in numbers}
        results.append(losses | {f"{name} after that": array.full() for name, array in model.parameters.items()})
    together, alone = results
    # Not closer: the gradient of a bias is a sum of terms that nearly cancel, and one that starts at 0 is only that.
    difference = compare(mesh.comm(*mesh.dims), together, alone, limit=1e-4)
    if mesh.rank == 0:
        print(f"the first steps are those of one process, but for {difference:.0e}", flush=True)

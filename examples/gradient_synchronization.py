"""Show which gradients must be summed, and over which ranks, under data, context and sequence parallelism.

    mpiexec -n 4 python -m mpi4py examples/gradient_synchronization.py

    y = x + gelu(layer_norm(x, scale, shift) @ w1 + b1) @ w2 + b2          x (batch, sequence, features)

`data` ranks share the batch, `context` ranks the sequence. `model` ranks share the columns of w1 and the rows of w2,
and the sequence in the operations that all of them would otherwise repeat (sequence parallelism). If a parameter is
used for a part of the batch or of the sequence, its gradient is Partial over the ranks that have the other parts; the
tape records over which. A rule that looks at the batch axis alone sums over `data` ranks; the last column shows the
error of such a sum.
"""

from itertools import chain, combinations
import sys

from mpi4py import MPI
import numpy as np

import pce_mpi as pce
from pce_mpi import Colwise, Partial, Replicate, Rowwise, SequenceParallel, Shard

B, S, D, H = 5, 13, 6, 11  # batch, sequence, features, hidden units
SHARDS = {"data": Shard(0), "context": Shard(1), "model": Shard(1)}
PLAN = {"s*": SequenceParallel(), "[wb]1": Colwise(), "[wb]2": Rowwise()}


def parameters_with_gradients(mesh, dims):
    """Run forward and backward with x sharded over `dims` of the mesh."""
    rng = np.random.default_rng(seed=0)
    shapes = {"scale": D, "shift": D, "w1": (D, H), "b1": H, "w2": (H, D), "b2": D}
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    p = pce.shard_parameters(arrays, mesh, PLAN, dim="model")
    x = pce.distribute(rng.standard_normal((B, S, D), np.float32), mesh, **{dim: SHARDS[dim] for dim in dims})

    normal = pce.layer_norm(x, p["scale"], p["shift"]).redistribute(model=Replicate())
    terms = pce.gelu(normal @ p["w1"] + p["b1"]) @ p["w2"]
    y = x + terms.redistribute(model=x.placements["model"]) + p["b2"]
    pce.square(y).mean().backward()
    return p


def summed_over_data(gradient):
    """Return this rank's part of the gradient by the rule that looks at the batch axis alone."""
    total = np.empty_like(gradient.local)
    gradient.mesh.comm("data").Allreduce(gradient.local, total)
    return total


def compare(comm, ours, one_process, limit=1e-5):
    """Return how far results are from those of one process, by size, on any rank; end the job if that is too far."""
    found = {name: np.abs(ours[name] - x).max() / (np.abs(x).max() or 1.0) for name, x in one_process.items()}
    found = [(name, error, rank) for rank, errors in enumerate(comm.allgather(found)) for name, error in errors.items()]
    wrong = [f"  {name} by {error:.1e} (rank {rank})" for name, error, rank in found if not error <= limit]  # or nan
    if wrong:
        stop(comm, "\n".join([f"further than {limit:.0e} from what one process computes:", *wrong]))
    return max(error for _, error, _ in found)


def stop(comm, message):
    """End the job with status 1; rank 0 prints why."""
    if comm.rank == 0:
        print(message, file=sys.stderr, flush=True)
    comm.Barrier()
    MPI.Finalize()  # otherwise mpi4py takes the status for a crash and aborts the job
    sys.exit(1)


if __name__ == "__main__":
    comm = MPI.COMM_WORLD
    alone = parameters_with_gradients(pce.Mesh(MPI.COMM_SELF, **dict.fromkeys(SHARDS, 1)), SHARDS)
    one_process = {name: parameter.grad.full() for name, parameter in alone.items()}

    for dims in chain.from_iterable(combinations(SHARDS, count) for count in (1, 2, 3)):
        sizes = dict(zip(dims, MPI.Compute_dims(comm.size, len(dims)), strict=True))
        parameters = parameters_with_gradients(pce.Mesh(comm, **dict.fromkeys(SHARDS, 1) | sizes), dims)
        lines = []
        for name, parameter in parameters.items():
            gradient, right = parameter.grad, parameter.grad.redistribute(**parameter.placements).local
            partial = [dim for dim, placement in gradient.placements.items() if placement == Partial("sum")]
            wrong = np.abs(summed_over_data(gradient) - right).max(initial=0) / np.abs(one_process[name]).max()
            lines.append(f"{name:<10}{', '.join(partial) or '-':<28}{comm.allreduce(wrong, MPI.MAX):.0%}")
        with pce.trace() as step:
            pce.SGD(parameters, lr=0.1).step()
        difference = compare(comm, {name: p.grad.full() for name, p in parameters.items()}, one_process)
        if comm.rank == 0:
            title = ", ".join(f"{dim} {size}" for dim, size in sizes.items())
            print(f"\n{title}, within {difference:.0e} of one process")
            print(f"{'gradient':<10}{'Partial over':<28}off by, if summed over data alone", *lines, sep="\n")
            print(f"the step sends {step.bytes()} bytes in {step.count()} collectives")

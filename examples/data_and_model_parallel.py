"""Two matrix products and a loss, forward and backward, under data, model and hybrid parallelism.

    mpiexec -n 4 python -m mpi4py examples/data_and_model_parallel.py

    loss = mean of (image @ w0 @ w1 - label)**2       image (16, 784), w0 (784, 784), w1 (784, 10), label (16, 10)

Only the mesh differs between the three. The dim `data` shards the batch, the dim `model` shards the columns of w0 and
the rows of w1. Data parallelism sends only the gradients, in the optimizer's step. Model parallelism sends the output
once, 640 bytes: each rank's columns and rows give one term of a sum. Any number of ranks will do; 784 columns over 3
ranks are 262, 261 and 261.
"""

import sys

from mpi4py import MPI
import numpy as np

import pce_mpi as pce
from pce_mpi import Shard

SHARDS = {
    "image": {"data": Shard(0)},
    "w0": {"model": Shard(1)},
    "w1": {"model": Shard(0)},
    "label": {"data": Shard(0)},
}


def problem():
    """Return the global arrays, the same on every rank."""
    rng = np.random.default_rng(seed=0)
    shapes = {"image": (16, 784), "w0": (784, 784), "w1": (784, 10), "label": (16, 10)}
    return {name: rng.standard_normal(shape, np.float32) / shape[0] ** 0.5 for name, shape in shapes.items()}


def by_hand(image, w0, w1, label):
    """Compute the loss and both gradients in one process, with NumPy alone."""
    hidden = image @ w0
    difference = hidden @ w1 - label
    doutput = 2 * difference / difference.size
    return {"loss": np.mean(difference**2), "w0": image.T @ (doutput @ w1.T), "w1": hidden.T @ doutput}


def run(kind, mesh):
    """Run forward, backward and a step on `mesh`; rank 0 prints all placements and everything that was sent."""
    arrays = {}
    for name, array in problem().items():
        shards = {dim: shard for dim, shard in SHARDS[name].items() if dim in mesh.dims}
        arrays[name] = pce.distribute(array, mesh, requires_grad=name.startswith("w"), **shards)
    image, w0, w1, label = arrays.values()
    with pce.trace() as trace:
        loss = pce.mse(image @ w0 @ w1, label)
        loss.backward()
        placed = {name: f"{array.shape!s:<12}{array.placements}" for name, array in (arrays | {"loss": loss}).items()}
        placed |= {f"d{name}": f"{'':<12}{w.grad.placements} before the step" for name, w in (("w0", w0), ("w1", w1))}
        pce.SGD([w0, w1], lr=0.1).step()

    ours = {"loss": loss.full(), "w0": w0.grad.full(), "w1": w1.grad.full()}
    difference = compare(MPI.COMM_WORLD, ours, by_hand(**problem()))
    if mesh.rank == 0:
        print(f"{kind} parallelism on {mesh}: loss {ours['loss']:.6f}\n")
        print("\n".join(f"{name:<8}{text}" for name, text in placed.items()), trace, sep="\n\n")
        print(f"\nloss and gradients are those of one process, but for {difference:.0e}\n\n")


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
    data, model = MPI.Compute_dims(comm.size, 2)
    run("data", pce.Mesh(comm, data=comm.size))
    run("model", pce.Mesh(comm, model=comm.size))
    run("hybrid", pce.Mesh(comm, data=data, model=model))

"""A tensor-parallel model with its loss: once with sharded logits, once with gathered logits.

    mpiexec -n 4 python -m mpi4py examples/loss_parallel.py

    x = table[ids];  x = x + gelu(x @ up) @ down;  logits = x @ output;  loss = mean cross entropy of the targets

The rows of the table, the columns of `up` and `output` and the rows of `down` are sharded over all ranks. Therefore the
logits are sharded by class, and `cross_entropy` sends one softmax state a row. The other pipeline has one more line:
it gathers the logits, and every rank computes the loss of all classes. The results are the same.
"""

import sys

from mpi4py import MPI
import numpy as np

import pce_mpi as pce
from pce_mpi import Colwise, Replicate, Rowwise, VocabParallel

ROWS, VOCABULARY, FEATURES, HIDDEN = 64, 10_001, 32, 67
PLAN = {"table": VocabParallel(), "up": Colwise(), "down": Rowwise(), "output": Colwise()}


def loss_and_gradients(mesh, gather):
    """Run forward and backward, and return the results with the trace of both."""
    rng = np.random.default_rng(seed=0)
    shapes = {
        "table": (VOCABULARY, FEATURES),
        "up": (FEATURES, HIDDEN),
        "down": (HIDDEN, FEATURES),
        "output": (FEATURES, VOCABULARY),
    }
    arrays = {name: rng.standard_normal(shape, np.float32) / shape[0] ** 0.25 for name, shape in shapes.items()}
    ids, targets = rng.integers(VOCABULARY, size=(2, ROWS))

    p = pce.shard_parameters(arrays, mesh, PLAN, dim="model")
    with pce.trace() as trace:
        x = pce.embedding(ids, p["table"]).redistribute(model=Replicate())
        x = x + pce.gelu(x @ p["up"]) @ p["down"]
        logits = x @ p["output"]
        if gather:
            logits = logits.redistribute(model=Replicate())
        loss = pce.cross_entropy(logits, targets)
        loss.backward()
    return {"loss": loss, **{f"d{name}": parameter.grad for name, parameter in p.items()}}, trace


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
    mesh, alone = pce.Mesh(comm, model=comm.size), pce.Mesh(MPI.COMM_SELF, model=1)
    one_process = {name: array.full() for name, array in loss_and_gradients(alone, gather=False)[0].items()}
    traces = {}
    for name, gather in (("left sharded", False), ("gathered first", True)):
        arrays, traces[name] = loss_and_gradients(mesh, gather)
        ours = {name: array.full() for name, array in arrays.items()}
        difference = compare(comm, ours, one_process)
        if comm.rank == 0:
            print(f"logits {name:<15} loss {ours['loss']:.6f}, all gradients within {difference:.0e} of one process")

    if comm.rank == 0:
        print(f"\n{'rank 0 sends, with logits':<28}", *(f"{name:>29}" for name in traces), sep="")
        for phase, collective in (("forward", "all_gather"), ("forward", "all_reduce"), ("backward", "all_reduce")):
            what = {"collective": collective, "phase": phase}
            cells = [f"{t.count(**what):>6} calls {t.bytes(**what):>10,} bytes" for t in traces.values()]
            print(f"{phase + ', ' + collective:<28}", *cells, sep="")
        print(f"{'in all':<28}", *(f"{t.count():>6} calls {t.bytes():>10,} bytes" for t in traces.values()), sep="")

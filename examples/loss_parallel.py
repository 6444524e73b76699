"""A tensor-parallel model with its loss: once with sharded logits, once with gathered logits.

    mpiexec -n 4 python -m mpi4py examples/loss_parallel.py

    x = table[ids];  x = x + gelu(x @ up) @ down;  logits = x @ output;  loss = mean cross entropy of the targets

The rows of the table, the columns of `up` and `output` and the rows of `down` are sharded over all ranks. Therefore the
logits are sharded by class, and `cross_entropy` sends one softmax state a row. The other pipeline has one more line:
it gathers the logits, and every rank computes the loss of all classes. The results are the same.
"""

from mpi4py import MPI
import numpy as np

from command_line import no_options
from comparison import compare
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


if __name__ == "__main__":
    comm = MPI.COMM_WORLD
    no_options(comm, __doc__)
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

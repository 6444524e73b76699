"""Train a model that is wrong on a mesh alone, by one letter, and write what finds the letter.

    mpiexec -n 4 python -m mpi4py examples/first_difference.py --model 2

The model adds modulo 29. Its own operation `norm` divides the hidden units of each row by their root mean square. The
rule of `norm` says that the units may be sharded, so each of the `model` ranks takes the mean of its own units alone.
docs/equal-means-equal.md finds this with two runs and `diff`; `--axes t.` mends it.
"""

from argparse import ArgumentParser
from functools import partial

from mpi4py import MPI
import numpy as np

import pce_mpi as pce
from pce_mpi import Colwise, Mesh, Replicate, Replicated, Rowwise, Rule, Shard, VocabParallel

NUMBERS, WIDTH, HIDDEN, LAYERS, BATCH = 29, 48, 96, 3, 50
PLAN = {"numbers": Replicated(), "*.up": Colwise(), "*.down": Rowwise(), "classes": VocabParallel()}


def divided(x):
    root = np.sqrt(np.square(x, dtype=np.float64).mean(-1, keepdims=True))
    return (x / root).astype(x.dtype)


def vjp(g, y, x):
    return (g - y * pce.mean(g * y, -1, keepdims=True)) / pce.sqrt(pce.mean(pce.square(x), -1, keepdims=True))


def initial(mesh):
    """Parameters that are whole numbers by a power of two, so that no library has a say in them."""
    shapes = {"numbers": (NUMBERS, WIDTH), "classes": (NUMBERS, 2 * WIDTH)}
    for layer in range(LAYERS):
        shapes |= {f"{layer}.up": (2 * WIDTH, HIDDEN), f"{layer}.down": (HIDDEN, 2 * WIDTH)}
    draw = np.random.default_rng(0).integers
    arrays = {name: draw(-128, 128, shape).astype(np.float32) / 512 for name, shape in shapes.items()}
    return pce.shard_parameters(arrays, mesh, PLAN, dim="model")


def loss_of(p, mesh, norm, number):
    pairs = np.random.default_rng([1, number]).integers(NUMBERS, size=(BATCH, 2))
    with pce.named_scope("numbers"):
        x = pce.embedding(pce.distribute(pairs, mesh, data=Shard(0)), p["numbers"]).reshape(BATCH, 2 * WIDTH)
    for layer in range(LAYERS):
        with pce.named_scope(f"layer {layer}"):
            hidden = pce.gelu(norm(x @ p[f"{layer}.up"]))
            x = x + (hidden @ p[f"{layer}.down"]).redistribute(model=Replicate())
    with pce.named_scope("loss"):
        return pce.cross_entropy(x @ p["classes"].T, pairs.sum(1) % NUMBERS)


def main(comm, args):
    mesh = Mesh(comm, data=comm.size // max(1, args.model), model=args.model)
    norm = pce.op(divided, vjp, partial(Rule.of, f"{args.axes}->{args.axes}"), name="norm")
    p = initial(mesh)
    optimizer = pce.AdamW(p, lr=0.01)
    for number in range(1, args.steps + 1):
        with pce.trace(fingerprints=number == args.trace) as trace:
            loss = loss_of(p, mesh, norm, number)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        text = f"step {number:3}  loss {loss.item():.4f}"
        text += f"  parameters {pce.fingerprint(p)[:16]}" if args.fingerprint else ""
        if mesh.rank == 0:
            print(*trace.results if number == args.trace else [text], sep="\n", flush=True)


def parse_arguments(comm, parser):
    """Parse the command line on rank 0, so that messages come once; every rank gets the result."""
    outcome = None
    if comm.rank == 0:
        try:
            outcome = parser.parse_args()
        except SystemExit as end:
            outcome = end
    outcome = comm.bcast(outcome)
    if isinstance(outcome, SystemExit):
        MPI.Finalize()  # otherwise mpi4py takes the status for a crash and aborts the job
        raise outcome
    return outcome


if __name__ == "__main__":
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=int, metavar="N", default=1, help="ranks that share hidden units and classes")
    parser.add_argument("--steps", type=int, metavar="N", default=200, help="training steps (default: %(default)s)")
    parser.add_argument("--axes", default="tf", choices=["tf", "t.", ".f", ".."], help='of norm; ".": not sharded')
    parser.add_argument("--fingerprint", action="store_true", help="print that of the parameters after each step")
    parser.add_argument("--trace", type=int, metavar="N", default=0, help="list the results of this step")
    main(MPI.COMM_WORLD, parse_arguments(MPI.COMM_WORLD, parser))

"""The loss of sharded classes equals the loss of all classes, and sends bytes that do not depend on their number.

    mpiexec -n 4 python -m mpi4py examples/sharded_loss.py

prints

    classes of each rank               2501, 2500, 2500, 2500
    loss, sharded                      9.75276
    loss, dense                        9.75276
    gradients agree on each rank       True
    bytes a rank sends: all_gather     56 for agreement
    bytes a rank sends: all_reduce     2560 for payload, 40 a row
    to gather its logits instead       640256, 10004 a row
"""

from mpi4py import MPI
import numpy as np

import pce_mpi
from pce_mpi import dense

comm = MPI.COMM_WORLD
rows, classes = 64, 10_001

# For the comparison every rank draws the whole problem from one seed. A real program has only this rank's columns.
rng = np.random.default_rng(seed=0)
logits = rng.standard_normal((rows, classes), np.float32)
targets = rng.integers(classes, size=rows)
start, stop = pce_mpi.shard_range(classes, comm.size, comm.rank)
shard = logits[:, start:stop]

with pce_mpi.trace() as trace:
    loss, gradient = pce_mpi.softmax_cross_entropy_value_and_grad(shard, targets, comm=comm)

dense_loss, dense_gradient = dense.softmax_cross_entropy_value_and_grad(logits, targets)
difference = np.abs(gradient - dense_gradient[:, start:stop]).max() / np.abs(dense_gradient).max()
agree = comm.allgather(bool(difference < 1e-6))
sizes = comm.allgather(stop - start)

if comm.rank == 0:
    print(f"{'classes of each rank':<35}{', '.join(map(str, sizes))}")
    print(f"{'loss, sharded':<35}{loss:.5f}")
    print(f"{'loss, dense':<35}{dense_loss:.5f}")
    print(f"{'gradients agree on each rank':<35}{all(agree)}")
    for event in trace.events:
        a_row = f", {event.bytes // rows} a row" if event.purpose == "payload" else ""
        print(f"{'bytes a rank sends: ' + event.collective:<35}{event.bytes} for {event.purpose}{a_row}")
    print(f"{'to gather its logits instead':<35}{shard.nbytes}, {shard.nbytes // rows} a row")
if not all(agree):
    raise SystemExit(1)

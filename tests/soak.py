"""mpiexec -n 3 python -m mpi4py tests/soak.py: an hour in which memory, descriptors and communicators stay flat.

Each round makes meshes and communicators and lets them go, trains, saves and loads, computes losses of all dtypes, and
meets errors of one rank. Its losses have the same bits in each round. The resources of each process are noted twenty
times, on the rank that has most; the program fails if the last third has more than the second. UCX, which MPICH may
bring, keeps some 150 bytes for each mapping of a file, and so for each `save`, unless UCX_MEM_EVENTS=n, as here.
"""

import argparse
import gc
import os
from pathlib import Path
import shutil
import sys
import tempfile
import time

os.environ["UCX_MEM_EVENTS"] = "n"

from mpi4py import MPI
import numpy as np

import pce_mpi as pce
from pce_mpi.arrays import dtype_named
from pce_mpi.comm.communicators import Channel, garbage_count

COMM = MPI.COMM_WORLD
SAMPLES = 20
# A process whose memory is in use may still have a few blocks more than before.
ROOM = {"KiB": 1024, "objects": 100}


def train(mesh, folder):
    """Take two steps, save, load, and take one more; return the losses."""
    rng = np.random.default_rng(0)
    rows, targets = rng.standard_normal((12, 8), np.float32), rng.integers(0, 50, 12)
    x = pce.distribute(rows, mesh, data=pce.Shard(0))
    w = pce.distribute(rng.standard_normal((8, 50), np.float32), mesh, requires_grad=True, model=pce.Shard(1))
    optimizer, losses = pce.AdamW([w], lr=0.1), []
    for step in range(3):
        if step == 2:
            path = f"{folder}/saved.safetensors"
            pce.save(path, {"w": w, **optimizer.state()})
            saved = pce.load(path, mesh, {"w": w, **optimizer.state()}, requires_grad=True)
            w = saved.pop("w")
            optimizer = pce.AdamW([w], lr=0.1)
            optimizer.load_state(saved)
        loss = pce.cross_entropy(pce.layer_norm(x) @ w, targets, label_smoothing=0.1)
        loss.backward()
        pce.clip_grad_norm([w], 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def plain_losses(comm):
    """Return losses of each dtype and of the neighbours, of classes that are sharded over `comm`."""
    start, stop = pce.shard_range(1000, comm.size, comm.rank)
    rng, losses = np.random.default_rng(1), []
    logits, targets = rng.standard_normal((16, 1000)), rng.integers(0, 1000, 16)
    for name in ("float16", "bfloat16", "float32", "float64"):
        mine = logits[:, start:stop].astype(dtype_named(name))
        loss, _ = pce.softmax_cross_entropy_value_and_grad(mine, targets, comm=comm, z_loss=1e-4)
        losses.append(float(loss))
    mine = logits[:, start:stop].copy()
    losses.append(float(pce.kl_divergence_value_and_grad(mine, mine[::-1].copy(), comm=comm)[0]))
    losses += pce.class_statistics(mine, targets, comm=comm).entropy.tolist()
    losses += pce.nucleus(mine, top_p=0.9, comm=comm).offsets.tolist()
    return losses


def meet_an_error():
    """Every rank raises what one rank alone does wrong."""
    targets = np.zeros(2 if COMM.rank else 3, int)
    try:
        pce.softmax_cross_entropy_value_and_grad(np.zeros((2, 4)), targets, comm=COMM)
    except ValueError:
        return
    sys.exit("a wrong argument of one rank was not refused on all")


def one_round(folder):
    """Return the numbers of a round."""
    numbers = []
    mesh = pce.Mesh(COMM, data=1, model=COMM.size)
    numbers += train(mesh, folder)
    with pce.reproducible():
        numbers += train(pce.Mesh(COMM, data=COMM.size, model=1), folder)
    with pce.trace(fingerprints=True) as trace:
        numbers += train(mesh, folder)
    numbers.append(len(trace.results))
    own = COMM.Split(COMM.rank % 2, COMM.rank)
    numbers += plain_losses(own)
    own.Free()
    numbers += plain_losses(COMM)
    meet_an_error()
    numbers.append(pce.rehearse(train_hollow, {"data": 64, "model": 8}).bytes())
    return numbers


def train_hollow(mesh):
    x = pce.distribute(np.ones((64, 8), np.float32), mesh, data=pce.Shard(0))
    w = pce.distribute(np.ones((8, 50), np.float32), mesh, requires_grad=True, model=pce.Shard(1))
    pce.cross_entropy(x @ w, np.zeros(64, int)).backward()
    pce.SGD([w], lr=0.1).step()


def in_use():
    """The resources of a process, at most of all ranks."""
    gc.collect()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    objects = gc.get_objects()
    mine = [
        int(status.partition("VmRSS:")[2].split()[0]),
        len(os.listdir("/proc/self/fd")),
        sum(isinstance(each, Channel) for each in objects) + garbage_count(),
        len(objects),
    ]
    most = np.empty(len(mine), np.int64)
    COMM.Allreduce(np.array(mine, np.int64), most, MPI.MAX)
    return dict(zip(("KiB", "descriptors", "communicators", "objects"), most.tolist(), strict=True))


def main():
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition(": ")[2], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default: %(default)s)")
    minutes = parser.parse_args().minutes
    folder = COMM.bcast(tempfile.mkdtemp() if COMM.rank == 0 else None)
    rounds, samples, first = 0, [], one_round(folder)
    began = time.monotonic()
    for sample in range(SAMPLES):
        while COMM.bcast(time.monotonic() - began) < 60 * minutes * (sample + 1) / SAMPLES:
            if one_round(folder) != first:
                sys.exit(f"round {rounds + 1} has other numbers than the first")
            rounds += 1
        samples.append(in_use())
        if COMM.rank == 0:
            print(f"{(time.monotonic() - began) / 60:6.1f} min, {rounds} rounds: {samples[-1]}", flush=True)
    third = SAMPLES // 3
    parts = samples[third:-third], samples[-third:]
    before, after = ({what: max(each[what] for each in part) for what in samples[0]} for part in parts)
    grown = {what: after[what] - before[what] for what in before if after[what] - before[what] > ROOM.get(what, 0)}
    if COMM.rank == 0:
        shutil.rmtree(folder)
        print(f"{rounds} rounds; more in the last third than in the second: {grown or 'nothing'}", flush=True)
    COMM.Barrier()
    sys.exit(bool(grown))


if __name__ == "__main__":
    main()

"""A small student learns from a larger teacher, and from its k most probable classes alone: four losses, on any mesh.

    mpiexec -n 4 python -m mpi4py examples/distillation.py

prints

    all classes        1.017, after 40 steps 0.646
    rest mass dropped  0.698, after 40 steps 0.113
    renormalized       0.160, after 40 steps 0.012
    one more class     0.508, after 40 steps 0.090
    as one process     True

With q the teacher's probabilities, p the student's and K the teacher's k most probable classes, the first loss is the
mean over the rows of sum_c q_c (log q_c - log p_c), at a temperature T and times T^2. The others sum over K alone: with
p and q as they are, renormalized in K, or with the other classes as one class more.

Rows and classes are sharded, and no logits are gathered: for each row the divergence sends 128 bytes, 16 k find the
classes, and 80 + 4 k their log-probabilities. Gradients of the logits send nothing.
"""

import sys

from mpi4py import MPI
import numpy as np

import pce_mpi as pce
from pce_mpi import Shard

ROWS, WIDTH, CLASSES, CHOSEN, T, RATE, STEPS = 64, 32, 1001, 16, 2.0, 40.0, 40


def all_classes(student, teacher, ids):
    return T**2 * pce.kl_divergence(student, teacher, logit_scale=1 / T)


def rest_mass_dropped(student, teacher, ids):
    log_q, log_p = (pce.class_statistics(logits, ids).log_prob for logits in (teacher, student))
    return pce.mean(pce.sum(pce.exp(log_q) * (log_q - log_p), axis=1))


def renormalized(student, teacher, ids):
    return pce.kl_divergence(*(pce.take_classes(logits, ids) for logits in (student, teacher)))


def one_more_class(student, teacher, ids):
    others = [np.setdiff1d(np.arange(CLASSES), row) for row in ids.full(rehearsed=[range(CHOSEN)] * ROWS)]
    rest = np.concatenate(others), np.arange(ROWS + 1) * (CLASSES - CHOSEN)  # 1 - sum_K q would cancel for a q near 1
    log_q, log_p = (pce.class_statistics(x, support=rest).logsumexp - pce.logsumexp(x, 1) for x in (teacher, student))
    return rest_mass_dropped(student, teacher, ids) + pce.mean(pce.exp(log_q) * (log_q - log_p))


def learn(mesh, loss_of):
    """Return the losses of all steps, and the weights that were learned: the student sees a quarter of the features."""
    numbers = np.random.default_rng(0).standard_normal((ROWS + CLASSES, WIDTH), np.float32)
    x, classes = pce.distribute(numbers[:ROWS], mesh, data=Shard(0)), {"classes": Shard(1)}
    teacher, x = x @ pce.distribute(numbers[ROWS:].T / 4, mesh, **classes), x[:, : WIDTH // 4]
    ids = pce.top_k(teacher, CHOSEN)[1]
    w = pce.distribute(np.zeros((WIDTH // 4, CLASSES), np.float32), mesh, requires_grad=True, **classes)
    optimizer, losses = pce.SGD([w], RATE), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        (loss := loss_of(x @ w, teacher, ids)).backward()
        optimizer.step()
        losses.append(loss.item(rehearsed=0.0))
    return {"losses": np.array(losses), "w": w.full()}


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
    data = 2 - comm.size % 2
    mesh, alone = pce.Mesh(comm, data=data, classes=comm.size // data), pce.Mesh(MPI.COMM_SELF, data=1, classes=1)
    for loss_of in (all_classes, rest_mass_dropped, renormalized, one_more_class):
        compare(comm, found := learn(mesh, loss_of), learn(alone, loss_of), limit=1e-4)
        if comm.rank == 0:
            name, (first, *_, last) = loss_of.__name__.replace("_", " "), found["losses"]
            print(f"{name:<18} {first:.3f}, after {STEPS} steps {last:.3f}")
    if comm.rank == 0:
        print("as one process     True")

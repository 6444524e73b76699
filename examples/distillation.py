"""A small student learns from the k most probable classes of a larger teacher: three losses, on any mesh.

    mpiexec -n 4 python -m mpi4py examples/distillation.py

prints

    rest mass dropped              0.6769, after 40 steps 0.1151
    renormalized                   0.1584, after 40 steps 0.0143
    one more class                 0.4894, after 40 steps 0.0893
    weights agree with one process True

With q the teacher's probabilities, p the student's and K the teacher's k most probable classes, each loss is the mean
over the rows of sum_{c in K} q_c (log q_c - log p_c), and the three differ in what becomes of the other classes:

    rest mass dropped   nothing: p and q are those among all classes
    renormalized        p and q are those among the classes of K
    one more class      they are one class, of 1 - sum_{c in K} q_c and 1 - sum_{c in K} p_c

Rows and classes are sharded. No rank gathers a row of logits: for each row 16 k bytes find the classes, and 80 + 4 k
the student's log-probabilities of them. Gradients send nothing.
"""

from mpi4py import MPI
import numpy as np

from command_line import no_options
import pce_mpi as pce
from pce_mpi import Shard

ROWS, WIDTH, WIDER, CLASSES, CHOSEN, RATE, STEPS = 64, 8, 32, 1001, 16, 40.0, 40


def dropped(student, teacher, ids):
    log_q, log_p = (pce.class_statistics(logits, ids).log_prob for logits in (teacher, student))
    return pce.mean(pce.sum(pce.exp(log_q) * (log_q - log_p), axis=1))


def renormalized(student, teacher, ids):
    log_q, log_p = (pce.log_softmax(pce.take_classes(logits, ids)) for logits in (teacher, student))
    return pce.mean(pce.sum(pce.exp(log_q) * (log_q - log_p), axis=1))


def one_more_class(student, teacher, ids):
    log_q, log_p = (pce.class_statistics(logits, ids).log_prob for logits in (teacher, student))
    rest_q, rest_p = (1.0 - pce.sum(pce.exp(each), axis=1) for each in (log_q, log_p))
    kept = pce.sum(pce.exp(log_q) * (log_q - log_p), axis=1)
    return pce.mean(kept + rest_q * (pce.log(rest_q) - pce.log(rest_p)))


def learn(mesh, loss_of):
    """Return the first and the last loss, and the weights that were learned."""
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((ROWS, WIDER), np.float32)
    rows, classes = {"data": Shard(0)}, {"classes": Shard(1)}
    teacher = pce.distribute(wide, mesh, **rows) @ pce.distribute(
        rng.standard_normal((WIDER, CLASSES), np.float32) / 4, mesh, **classes
    )
    ids = pce.top_k(teacher, CHOSEN)[1]
    x = pce.distribute(wide[:, :WIDTH], mesh, **rows)
    w = pce.distribute(np.zeros((WIDTH, CLASSES), np.float32), mesh, requires_grad=True, **classes)
    optimizer, losses = pce.SGD([w], RATE), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(x @ w, teacher, ids)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.full()))
    return losses[0], losses[-1], w.full()


if __name__ == "__main__":
    comm = MPI.COMM_WORLD
    no_options(comm, __doc__)
    data = 2 if comm.size % 2 == 0 else 1
    mesh, alone = pce.Mesh(comm, data=data, classes=comm.size // data), pce.Mesh(MPI.COMM_SELF, data=1, classes=1)
    names, agree = {"rest mass dropped": dropped, "renormalized": renormalized, "one more class": one_more_class}, True
    for name, loss_of in names.items():
        (first, last, w), expected = learn(mesh, loss_of), learn(alone, loss_of)
        agree &= bool(np.allclose(w, expected[-1], rtol=0, atol=1e-4))
        if comm.rank == 0:
            print(f"{name:<30} {first:.4f}, after {STEPS} steps {last:.4f}")
    if comm.rank == 0:
        print(f"weights agree with one process {agree}")

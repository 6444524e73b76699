"""A small student learns from the k most probable classes of a larger teacher: three losses, on any mesh.

    mpiexec -n 4 python -m mpi4py examples/distillation.py

prints

    rest mass dropped  0.698, after 40 steps 0.113
    renormalized       0.160, after 40 steps 0.012
    one more class     0.508, after 40 steps 0.090
    as one process     True

With q the teacher's probabilities, p the student's and K the teacher's k most probable classes, each loss is the mean
over the rows of sum_{c in K} q_c (log q_c - log p_c), and the three differ in what becomes of the other classes:

    rest mass dropped  nothing: p and q are those among all classes
    renormalized       p and q are those among the classes of K
    one more class     they are one class, of 1 - sum_{c in K} q_c and 1 - sum_{c in K} p_c

Rows and classes are sharded. No rank gathers a row of logits: for each row 16 k bytes find the classes, and 80 + 4 k
the student's log-probabilities of them. Gradients of the logits send nothing.
"""

from mpi4py import MPI
import numpy as np

from command_line import no_options
from comparison import compare
import pce_mpi as pce
from pce_mpi import Shard

ROWS, WIDTH, CLASSES, CHOSEN, RATE, STEPS = 64, 32, 1001, 16, 40.0, 40


def rest_mass_dropped(student, teacher, ids):
    log_q, log_p = (pce.class_statistics(logits, ids).log_prob for logits in (teacher, student))
    return pce.mean(pce.sum(pce.exp(log_q) * (log_q - log_p), axis=1))


def renormalized(student, teacher, ids):
    log_q, log_p = (pce.log_softmax(pce.take_classes(logits, ids)) for logits in (teacher, student))
    return pce.mean(pce.sum(pce.exp(log_q) * (log_q - log_p), axis=1))


def one_more_class(student, teacher, ids):
    log_q, log_p = (pce.class_statistics(logits, ids).log_prob for logits in (teacher, student))
    rest_q, rest_p = (1.0 - pce.sum(pce.exp(each), axis=1) for each in (log_q, log_p))
    return rest_mass_dropped(student, teacher, ids) + pce.mean(rest_q * (pce.log(rest_q) - pce.log(rest_p)))


def learn(mesh, loss_of):
    """Return the losses of all steps, and the weights that were learned: the student sees a quarter of the features."""
    numbers = np.random.default_rng(0).standard_normal((ROWS + CLASSES, WIDTH), np.float32)
    features, rows, classes = numbers[:ROWS], {"data": Shard(0)}, {"classes": Shard(1)}
    teacher = pce.distribute(features, mesh, **rows) @ pce.distribute(numbers[ROWS:].T / 4, mesh, **classes)
    ids = pce.top_k(teacher, CHOSEN)[1]
    x = pce.distribute(features[:, : WIDTH // 4], mesh, **rows)
    w = pce.distribute(np.zeros((WIDTH // 4, CLASSES), np.float32), mesh, requires_grad=True, **classes)
    optimizer, losses = pce.SGD([w], RATE), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(loss_of(x @ w, teacher, ids))
        losses[-1].backward()
        optimizer.step()
    return {"losses": np.array([loss.full() for loss in losses]), "w": w.full()}


comm = MPI.COMM_WORLD
no_options(comm, __doc__)
data = 2 - comm.size % 2
mesh, alone = pce.Mesh(comm, data=data, classes=comm.size // data), pce.Mesh(MPI.COMM_SELF, data=1, classes=1)
for loss_of in (rest_mass_dropped, renormalized, one_more_class):
    found = learn(mesh, loss_of)
    compare(comm, found, learn(alone, loss_of), limit=1e-4)
    if comm.rank == 0:
        name, (first, *_, last) = loss_of.__name__.replace("_", " "), found["losses"]
        print(f"{name:<18} {first:.3f}, after {STEPS} steps {last:.3f}")
if comm.rank == 0:
    print("as one process     True")

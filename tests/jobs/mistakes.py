"""A program: makes one of the mistakes below on every rank, uncaught: `mpiexec -n 3 python -m mpi4py mistakes.py NAME`.

Each has the type of its error, and words of its text.
"""

from collections.abc import Callable
import pickle
import sys
from typing import Any, NamedTuple

from mpi4py import MPI
import numpy as np

import pce_mpi

pce: Any = pce_mpi  # wrong arguments are the subject
comm = MPI.COMM_WORLD
ROWS, FEATURES, CLASSES = 8, 3, 100


class Mistake(NamedTuple):
    kind: str
    words: str
    make: Callable[[], Any]


MISTAKES: dict[str, Mistake] = {}


def raises(kind: type[Exception], words: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Enter a mistake of the program, which raises an error of this type with these words."""
    is_builtin = kind.__module__ == "builtins"

    def enter(make: Callable[[], Any]) -> Callable[[], Any]:
        MISTAKES[make.__name__] = Mistake(kind.__name__ if is_builtin else f"pce_mpi.{kind.__name__}", words, make)
        return make

    return enter


class Batch:
    """Logits of all classes, those of this rank, and class numbers."""

    def __init__(self) -> None:
        random = np.random.default_rng(5)
        self.all_logits = random.standard_normal((ROWS, CLASSES))
        self.classes = slice(*pce.shard_range(CLASSES, comm.size, comm.rank))
        self.logits, self.targets = self.all_logits[:, self.classes], random.integers(60, CLASSES, ROWS)


def loss(logits: Any = None, targets: Any = None, **options: Any) -> Any:
    """The loss of plain arrays, which has right arguments in place of those that are left out."""
    batch = Batch()
    logits = batch.logits if logits is None else logits
    targets = batch.targets if targets is None else targets
    return pce.softmax_cross_entropy(logits, targets, **{"comm": comm, "num_classes": CLASSES} | options)


class Tape:
    """A mesh with one dim, an input and a weight whose columns are sharded."""

    def __init__(self) -> None:
        self.mesh = pce.Mesh(comm, model=comm.size)
        self.x = pce.distribute(np.ones((ROWS, FEATURES)), self.mesh)
        self.w = pce.distribute(np.ones((FEATURES, CLASSES)), self.mesh, model=pce.Shard(1), requires_grad=True)

    def loss(self) -> Any:
        return pce.cross_entropy(self.x @ self.w, Batch().targets)


# --------------------------------------------------------------------------------------------- targets of plain arrays


@raises(ValueError, "targets of dtype float64 are probabilities")
def targets_of_floats():
    loss(targets=Batch().targets * 1.0)


@raises(ValueError, "class numbers must be integers")
def targets_of_python_floats():
    loss(targets=[float(number) for number in Batch().targets])


@raises(ValueError, "targets of dtype float32 are probabilities")
def targets_of_all_classes():
    loss(targets=np.eye(CLASSES, dtype=np.float32)[Batch().targets])


@raises(IndexError, "is outside [0, 100)")
def targets_counted_from_the_shard():
    batch = Batch()
    loss(targets=batch.targets - 200 * comm.rank)


@raises(IndexError, "targets[2] = 100 is outside [0, 100)")
def targets_counted_from_one():
    targets = Batch().targets
    targets[2] = CLASSES
    loss(targets=targets)


@raises(ValueError, "without the class axis, (8,), got (8, 1)")
def targets_in_a_column():
    loss(targets=Batch().targets.reshape(-1, 1))


@raises(pce_mpi.CollectiveError, "ranks disagree on the values of targets")
def targets_of_each_rank():
    loss(targets=(Batch().targets + comm.rank) % CLASSES)


# ----------------------------------------------------------------------------------------- arguments beside the arrays


@raises(IndexError, "without comm, these logits are all classes")
def no_comm():
    batch = Batch()
    pce.softmax_cross_entropy(batch.logits, batch.targets)


@raises(ValueError, "num_classes = 100, but without comm these are all classes")
def no_comm_but_number_of_classes():
    batch = Batch()
    pce.softmax_cross_entropy(batch.logits, batch.targets, num_classes=CLASSES)


@raises(TypeError, "takes 2 positional arguments but 3 were given")
def comm_by_position():
    batch = Batch()
    pce.softmax_cross_entropy(batch.logits, batch.targets, comm)


@raises(TypeError, "comm must be an mpi4py intracommunicator")
def module_for_comm():
    loss(comm=MPI)


@raises(ValueError, "num_classes = 99, but the shards have 100 classes together")
def number_of_classes_is_off():
    loss(num_classes=CLASSES - 1)


@raises(pce_mpi.CollectiveError, "ranks disagree on num_classes")
def number_of_classes_of_the_shard():
    loss(num_classes=Batch().logits.shape[1])


@raises(ValueError, "class ranges overlap")
def start_by_floor_division():
    loss(class_start=comm.rank * (CLASSES // comm.size))


@raises(ValueError, "class ranges overlap at class 0")
def start_at_zero_everywhere():
    loss(class_start=0)


@raises(TypeError, "unexpected keyword argument 'num_clases'")
def misspelt_option():
    loss(num_clases=CLASSES)


@raises(TypeError, "unexpected keyword argument 'dim'")
def option_of_torch():
    loss(dim=1)


@raises(ValueError, "axis = 2 is out of bounds")
def axis_that_is_none():
    loss(axis=2)


# ----------------------------------------------------------------------------------------------- logits of plain arrays


@raises(ValueError, "index targets must have the logits' shape without the class axis")
def logits_transposed():
    loss(Batch().logits.T)


@raises(pce_mpi.CollectiveError, "ranks disagree on rows")
def rows_sharded():
    batch = Batch()
    rows = slice(*pce.shard_range(ROWS, comm.size, comm.rank))
    loss(batch.logits[rows], batch.targets[rows])


@raises(ValueError, "ranks pass the same logits of 100 classes")
def logits_gathered():
    batch = Batch()
    pce.softmax_cross_entropy(batch.all_logits, batch.targets, comm=comm)


@raises(TypeError, "logits must be float16, bfloat16, float32 or float64, got int64")
def logits_of_integers():
    loss(np.zeros((ROWS, CLASSES // comm.size), np.int64), num_classes=None)


# ------------------------------------------------------------------------------------------------ meshes and placements


@raises(ValueError, "ranks, but comm.size is")
def mesh_of_other_size():
    pce.Mesh(comm, data=5, model=7)


@raises(TypeError, "takes 2 positional arguments but 3 were given")
def mesh_by_a_list():
    pce.Mesh(comm, [comm.size])


@raises(ValueError, "the mesh has no dim 'tensor'; its dims are model")
def dim_that_is_none():
    pce.distribute(np.ones((4, 4)), Tape().mesh, tensor=pce.Shard(0))


@raises(ValueError, "model=Shard(2) is out of bounds for an array of 2 dimensions")
def shard_of_a_third_axis():
    pce.distribute(np.ones((4, 4)), Tape().mesh, model=pce.Shard(2))


@raises(TypeError, "model must be Shard(axis), Replicate() or Partial(operator), got 0")
def axis_for_placement():
    pce.distribute(np.ones((4, 4)), Tape().mesh, model=0)


@raises(TypeError, "model must be Shard(axis), Replicate() or Partial(operator), got <class")
def placement_not_made():
    pce.distribute(np.ones((4, 4)), Tape().mesh, model=pce.Shard)


@raises(TypeError, "model must be Shard(axis), Replicate() or Partial(operator), got 'sharded'")
def word_for_placement():
    Tape().w.redistribute(model="sharded")


@raises(ValueError, "matmul takes operands of one mesh")
def two_meshes():
    rows = pce.distribute(np.ones((ROWS, FEATURES)), pce.Mesh(comm, rows=comm.size), rows=pce.Shard(0))
    rows @ Tape().w


# ------------------------------------------------------------------------------------------------------------- the tape


@raises(ValueError, "matmul: the last axis of (3, 100) and the last but one of (8, 3) differ")
def operands_exchanged():
    tape = Tape()
    tape.w @ tape.x


@raises(ValueError, "targets of dtype float64 are probabilities")
def targets_of_floats_on_the_tape():
    tape = Tape()
    pce.cross_entropy(tape.x @ tape.w, Batch().targets * 1.0)


@raises(RuntimeError, "has been through a backward pass")
def backward_again():
    value = Tape().loss()
    value.backward()
    value.backward()


@raises(ValueError, "backward starts from a scalar")
def backward_of_a_matrix():
    tape = Tape()
    (tape.x @ tape.w).backward()


@raises(RuntimeError, "nothing that this was computed from requires a gradient")
def backward_without_parameters():
    tape = Tape()
    tape.w = tape.w.detach()
    tape.loss().backward()


@raises(TypeError, "an assignment such as w -= lr * w.grad would not change the parameter")
def step_by_hand():
    tape = Tape()
    tape.loss().backward()
    tape.w -= 0.1 * tape.w.grad


@raises(TypeError, "does not support item assignment")
def row_assigned():
    Tape().w[0] = 1


@raises(AttributeError, "has no attribute 'data'")
def data_of_torch():
    Tape().w.data.fill(0)


@raises(AttributeError, "has no attribute 'numpy'")
def method_of_torch():
    Tape().w.numpy()


@raises(TypeError, "a distributed array becomes a NumPy array by .full()")
def array_taken_for_plain():
    np.asarray(Tape().w)


@raises(TypeError, "a distributed array is not true or false")
def array_as_condition():
    if Tape().w.sum() > 0:
        raise AssertionError("an array was true")


@raises(TypeError, "a distributed array is not pickled")
def array_pickled():
    pickle.dumps(Tape().w)


@raises(TypeError, "numpy.save would write on every rank")
def array_saved_by_numpy():
    np.save("/dev/null", Tape().w)


# ----------------------------------------------------------------------------------------------- optimizers, and files


@raises(ValueError, "parameters[0] must be an array that was made with requires_grad=True")
def parameter_without_gradient():
    pce.SGD([Tape().x], lr=0.1)


@raises(TypeError, "parameters must be a list of distributed arrays")
def parameter_without_list():
    pce.SGD(Tape().w, lr=0.1)


@raises(TypeError, "lr must be a real number, got '0.1'")
def rate_as_text():
    pce.SGD([Tape().w], lr="0.1")


# -------------------------------------------------------------------------------- calls of some ranks, which then wait

ENDED = "ended. Every rank has to make this call"


@raises(pce_mpi.CollectiveTimeout, ENDED)
def loss_on_one_rank():
    loss()
    if comm.rank == 0:
        loss()


@raises(pce_mpi.CollectiveTimeout, ENDED)
def no_comm_on_one_rank():
    loss()
    batch = Batch()
    loss() if comm.rank else pce.softmax_cross_entropy(batch.logits, batch.targets % 30)


@raises(pce_mpi.CollectiveTimeout, ENDED)
def array_printed_on_one_rank():
    tape = Tape()
    if comm.rank == 0:
        print(tape.w.full())


@raises(pce_mpi.CollectiveTimeout, ENDED)
def step_fewer_on_one_rank():
    tape = Tape()
    for _ in range(3 - (comm.rank == 1)):
        tape.loss().item()


# ------------------------------------------------------------------------------------------------------ one rank's own


@raises(FileNotFoundError, "no batch for rank 1")
def file_of_one_rank():
    tape = Tape()
    if comm.rank == 1:
        raise FileNotFoundError("no batch for rank 1")
    tape.loss().item()


if __name__ == "__main__":
    MISTAKES[sys.argv[1]].make()

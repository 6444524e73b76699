"""The whole idea in one file: a loss over sharded classes, and a tape that knows what is partial. NumPy and mpi4py.

    mpiexec -n 4 python -m mpi4py examples/in_one_file.py

It prints the same losses on any number of ranks. They are a grid of data x model. Along each of these dims an array is
sharded (the number of an axis), the same on every rank (None), or PARTIAL: it is the sum of what the ranks hold. One
rule places every gradient: a sum over a sharded axis is PARTIAL over the dim that shards it.
"""

import sys

from mpi4py import MPI
import numpy as np

PARTIAL, DIMS = "partial", ("data", "model")
WORLD = MPI.COMM_WORLD
GRID = WORLD.Create_cart(MPI.Compute_dims(WORLD.size, 2)[::-1])
COMM = {dim: GRID.Sub([other == dim for other in DIMS]) for dim in DIMS}


def block(length, dim):
    """Return the bounds of this rank's block of an axis that `dim` shards."""
    ends = np.cumsum([0] + [len(part) for part in np.array_split(np.arange(length), COMM[dim].size)])
    return ends[COMM[dim].rank], ends[COMM[dim].rank + 1]


def all_reduce(local, dim, op=MPI.SUM, datatype=MPI.DOUBLE):
    """Return the reduction of what the ranks along `dim` hold; nothing else in this file sends."""
    local = np.ascontiguousarray(local)
    total, count = np.empty_like(local), local.nbytes // datatype.Get_size()
    COMM[dim].Allreduce([local, count, datatype], [total, count, datatype], op)
    return total


class Array:
    """This rank's part of a global array, its placement by dim, and the way of its gradient to what it is made of."""

    def __init__(self, local, placed, parents=(), vjp=None):
        self.local, self.placed, self.parents, self.vjp, self.grad = local, placed, parents, vjp, None


def shard(whole, **axes):
    """Return this rank's part of an array that every rank has, sharded along one axis for each dim that is named."""
    for dim, axis in axes.items():
        whole = np.take(whole, range(*block(whole.shape[axis], dim)), axis)
    return Array(whole, {dim: axes.get(dim) for dim in DIMS})


def reduced(x):
    """Return `x` with what is PARTIAL reduced; the gradient of a sum is that of each of its terms."""
    partial, local = [dim for dim in DIMS if x.placed[dim] == PARTIAL], x.local
    for dim in partial:
        local = all_reduce(local, dim)
    return Array(local, x.placed | dict.fromkeys(partial), [x], lambda g: [g]) if partial else x


def product(a, b):
    """Multiply two matrices. Where the axis that is summed is sharded the result is PARTIAL: this is the rule."""
    rule = {(None, None): None, (0, None): 0, (None, 1): 1, (1, 0): PARTIAL}
    return Array(a.local @ b.local, {dim: rule[a.placed[dim], b.placed[dim]] for dim in DIMS})


def matmul(a, b):
    """Multiply two matrices, on the tape."""

    def transposed(x):
        return Array(x.local.T, {dim: {0: 1, 1: 0, None: None}[x.placed[dim]] for dim in DIMS})

    a, b = reduced(a), reduced(b)
    y = product(a, b)
    y.parents, y.vjp = [a, b], lambda g: [product(g, transposed(b)), product(transposed(a), g)]
    return y


def relu(x):
    """Return max(x, 0), on the tape."""
    x = reduced(x)  # max(a + b, 0) is not max(a, 0) + max(b, 0)
    return Array(np.maximum(x.local, 0), x.placed, [x], lambda g: [Array(g.local * (x.local > 0), g.placed)])


STATE = MPI.DOUBLE.Create_contiguous(3).Commit()  # of a row: largest logit, sum of exponentials over it, target's logit


@lambda function: MPI.Op.Create(function, commute=True)
def merge(a, b, _):
    """Merge states of some classes into those of others; both sums are brought to the common largest logit."""
    (top, total, target), (b_top, b_total, b_target) = (np.frombuffer(each).reshape(-1, 3).T for each in (a, b))
    largest = np.maximum(top, b_top)
    b_total[:] = total * np.exp(top - largest) + b_total * np.exp(b_top - largest)
    b_top[:], b_target[:] = largest, target + b_target


def cross_entropy(logits, targets, rows, classes):
    """Return the mean loss of all `rows`, whose `classes` model shards: one Allreduce of 24 bytes a row, none back."""
    logits, index = reduced(logits), np.arange(len(targets.local))
    z, (start, stop) = logits.local, block(classes, "model")
    mine = (targets.local >= start) & (targets.local < stop)
    column = targets.local[mine] - start
    states = np.zeros((len(z), 3))
    states[:, 0] = z.max(1, initial=-1e300)  # so low is the largest logit of a rank without classes
    states[:, 1] = np.exp(z - states[:, :1]).sum(1)
    states[mine, 2] = z[index[mine], column]
    largest, total, target = all_reduce(states, "model", merge, STATE).T

    def vjp(g):
        dlogits = np.exp(z - largest[:, None]) / total[:, None]
        dlogits[index[mine], column] -= 1
        return [Array(g.local * dlogits / rows, logits.placed)]  # every rank knows its part: nothing is sent

    loss = np.asarray((np.log(total) + largest - target).sum() / rows)
    return reduced(Array(loss, {"data": PARTIAL, "model": None}, [logits], vjp))  # a sum over rows, which data shards


def backward(loss):
    """Leave a gradient on each array that `loss` was computed from; that of a parameter may be PARTIAL."""
    loss.grad, order = Array(np.ones(()), dict.fromkeys(DIMS)), []

    def visit(x):
        if x not in order:
            for parent in x.parents:
                visit(parent)
            order.append(x)

    visit(loss)
    for x in order[::-1]:
        if x.vjp is not None:  # all that was computed from x has contributed: what is PARTIAL is reduced here, once
            for parent, g in zip(x.parents, x.vjp(reduced(x.grad)), strict=True):
                parent.grad = g if parent.grad is None else Array(parent.grad.local + g.local, g.placed)


def step(parameters, rate):
    """Take a step of gradient descent; PARTIAL gradients are reduced first, as data parallelism does."""
    for w in parameters:
        w.local, w.grad = w.local - rate * reduced(w.grad).local, None


if __name__ == "__main__":
    if sys.argv[1:]:  # it takes no options
        print(__doc__ if WORLD.rank == 0 else "", end="")
        MPI.Finalize()
        sys.exit(0 if sys.argv[1:] == ["--help"] else 2)
    rng, rows, classes = np.random.default_rng(0), 30, 7
    x, targets = shard(rng.normal(size=(rows, 5)), data=0), shard(rng.integers(classes, size=rows), data=0)
    w1, w2 = shard(rng.normal(size=(5, 12)) / 2), shard(rng.normal(size=(12, classes)) / 3, model=1)
    for number in range(101):
        loss = cross_entropy(matmul(relu(matmul(x, w1)), w2), targets, rows, classes)
        backward(loss)
        step([w1, w2], rate=0.5)
        if number % 20 == 0 and WORLD.rank == 0:
            print(f"step {number:3}  loss {loss.local.item():.12f}")

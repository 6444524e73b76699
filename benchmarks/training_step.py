"""One training step of a small language model, by the tape and by hand: `tape.py` compares the two.

    x = embedding[contexts], side by side;  h = tanh(x @ w + b);  loss = mean cross entropy of h @ u + c

The classes of u and c are sharded. By hand, the embeddings of the few tokens of a batch are updated and no others.
"""

from __future__ import annotations

from typing import Any

from mpi4py import MPI
import numpy as np

import pce_mpi as pce
from pce_mpi.comm.collectives import all_reduce
from pce_mpi.comm.tracing import cause

Array = np.ndarray[Any, Any]


def parameters(classes: int, context: int, embed: int, hidden: int) -> dict[str, Array]:
    """Draw the initial values, the same on every rank."""
    rng = np.random.default_rng(0)
    shapes = {
        "embedding": (classes, embed),
        "w": (context * embed, hidden),
        "b": (hidden,),
        "u": (hidden, classes),
        "c": (classes,),
    }
    return {name: 0.1 * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


class ByHand:
    """Forward, backward and update as one would write them for this model alone."""

    def __init__(self, values: dict[str, Array], batch: int, comm: MPI.Intracomm) -> None:
        self.comm = comm
        classes = slice(*pce.shard_range(len(values["c"]), comm.size, comm.rank))
        self.embedding, self.w, self.b = (values[name].copy() for name in ("embedding", "w", "b"))
        self.u, self.c = values["u"][:, classes].copy(), values["c"][classes].copy()
        self.du = np.empty_like(self.u)
        self.logits = np.empty((batch, len(self.c)), np.float32)

    def step(self, contexts: Array, targets: Array, rate: float) -> float:
        """Return the loss before the step."""
        x = self.embedding[contexts].reshape(len(contexts), -1)
        h = np.tanh(x @ self.w + self.b)
        logits = np.matmul(h, self.u, out=self.logits)
        logits += self.c
        loss, dlogits = pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=self.comm, out=logits)
        dh = dlogits @ self.u.T
        with cause("step", reason="a sum over all classes"):
            dh = all_reduce(dh, self.comm, "sum", overwrite=True)
        np.matmul(h.T, dlogits, out=self.du)
        self.du *= rate
        self.u -= self.du
        self.c -= rate * dlogits.sum(axis=0)
        da = dh * (1 - h * h)
        dx = (da @ self.w.T).reshape(contexts.size, -1)
        self.w -= rate * (x.T @ da)
        self.b -= rate * da.sum(axis=0)
        order = np.argsort(contexts, axis=None, kind="stable")
        tokens, first = np.unique(contexts.ravel()[order], return_index=True)
        self.embedding[tokens] -= rate * np.add.reduceat(dx[order], first)
        return float(loss)


class OnTape:
    """Make the step with distributed arrays."""

    def __init__(self, values: dict[str, Array], comm: MPI.Intracomm) -> None:
        self.mesh = pce.Mesh(comm, classes=comm.size)
        placements = {"embedding": pce.Shard(0), "u": pce.Shard(1), "c": pce.Shard(0)}
        self.parameters = {
            name: pce.distribute(value, self.mesh, requires_grad=True, classes=placements.get(name, pce.Replicate()))
            for name, value in values.items()
        }
        self.optimizer = pce.SGD(self.parameters.values(), lr=1.0)

    def step(self, contexts: Array, targets: Array, rate: float) -> float:
        """Return the loss before the step."""
        of = self.parameters
        x = pce.embedding(contexts, of["embedding"]).reshape(len(contexts), -1)
        h = pce.tanh(x @ of["w"] + of["b"])
        loss = pce.cross_entropy(h @ of["u"] + of["c"], targets)
        loss.backward()
        self.optimizer.lr = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

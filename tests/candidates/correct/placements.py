"""Functions and moves of this package's distributed arrays, as candidates of `kind="placement"`."""

import numpy as np

import pce_mpi as pce
from pce_mpi.conformance import Gradient, Offer

AXIS = {"sum": pce.sum, "mean": pce.mean, "max": pce.max, "min": pce.min, "logsumexp": pce.logsumexp}
PARTIAL = {"sum": "sum", "mean": "avg", "max": "max", "min": "min"}


class OfArray:
    """A function of the sharded axis; of the terms of a partial array, if they are an axis of their own."""

    dtypes = ("float32", "float64", "bfloat16", "float16")

    def __init__(self, computes, **declared):
        self.offer = Offer(
            kind="placement", computes=computes, dtypes=self.dtypes, gradient=Gradient.BACKWARD, **declared
        )

    def __call__(self, array, *, splits, comm):
        mesh = pce.Mesh(comm, ranks=comm.size)
        x = self.given(array, mesh, splits)
        y = self.result(x)

        def backward(g):
            pce.sum(y * pce.from_local(g, mesh, shape=y.shape, **y.placements)).backward()
            return self.part(x.grad.full(), slice(*splits[comm.rank : comm.rank + 2]))

        return y.local, backward

    def given(self, array, mesh, splits):
        return pce.from_local(array, mesh, shape=(len(array), splits[-1]), requires_grad=True, ranks=pce.Shard(1))

    def result(self, x):
        # The terms of a sum have the dtype of the array, and halves would be rounded before they are added.
        wide = x if x.dtype.itemsize > 2 else x.astype(np.float32)
        return AXIS[self.offer.computes](wide, axis=1).redistribute(ranks=pce.Replicate())

    def part(self, gradient, here):
        """The gradient of what this rank was given, of that of the array."""
        return gradient[:, here]


class OfPartial(OfArray):
    """A partial array that is brought to all ranks: gradients are of the array."""

    def __init__(self, computes):
        super().__init__(computes, partial="array")

    def given(self, array, mesh, splits):
        placement = pce.Partial(PARTIAL[self.offer.computes])
        return pce.from_local(array, mesh, requires_grad=True, ranks=placement)

    def result(self, x):
        return pce.squeeze(x.redistribute(ranks=pce.Replicate()), 1)

    def part(self, gradient, here):
        return gradient


class Replicated(OfArray):
    """Shards that are gathered."""

    def result(self, x):
        return x.redistribute(ranks=pce.Replicate())


class Sharded(OfArray):
    """Replicas that are cut."""

    def given(self, array, mesh, splits):
        return pce.from_local(array, mesh, requires_grad=True)

    def result(self, x):
        return x.redistribute(ranks=pce.Shard(1))

    def part(self, gradient, here):
        return gradient


OURS = [
    *(OfArray(computes) for computes in AXIS),
    *(OfArray(computes, partial="term") for computes in AXIS),
    *map(OfPartial, PARTIAL),
    Replicated("replicate"),
    Sharded("shard", shards="array_split"),
]

"""Norms of a PyLops-MPI array that is distributed along its last axis; PyLops-MPI must be installed."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
from pylops_mpi import DistributedArray

from pce_mpi.conformance import Offer


class InPyLops:
    """A norm of each row: the value that it has on this rank, as there are no gradients."""

    def __init__(self, order, computes):
        self._order = order
        self.offer = Offer(
            kind="placement", computes=computes, dtypes=("float32", "float64"), shards="any", gradient="none"
        )

    def __call__(self, array, *, splits, comm):
        shapes = [(len(array), stop - start) for start, stop in pairwise(splits)]
        x = DistributedArray((len(array), splits[-1]), comm, axis=1, local_shapes=shapes, dtype=array.dtype)
        x[:] = array
        return np.asarray(x.norm(self._order, axis=1))


distributed = SimpleNamespace(norm=InPyLops(2, "norm"), norm_inf=InPyLops(np.inf, "norm-inf"))

"""Functions of a Heat array that is split along its last axis; Heat must be installed, and a torch for it."""

from importlib import import_module
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np

from pce_mpi.conformance import Offer
from pce_mpi.conformance.candidates.torch_tensors import tensor_of

# Heat imports torchvision, for data sets, whose wheels take no torch without CUDA.
sys.modules |= {name: MagicMock() for name in ("torchvision", "torchvision.transforms")}
ht = import_module("heat")


class InHeat:
    """A function of a split array: the value that it has on this rank, as there are no gradients."""

    def __init__(self, function, computes, shards="any"):
        self._function = function
        self.offer = Offer(kind="placement", computes=computes, shards=shards, gradient="none")

    def __call__(self, array, *, splits, comm):
        x = ht.array(tensor_of(array), is_split=1, comm=ht.communication.MPICommunication(comm))
        return np.asarray(self._function(x).larray)


HEAT = {
    "sum": lambda x: ht.sum(x, 1),
    "mean": lambda x: ht.mean(x, 1),
    "max": lambda x: ht.max(x, 1),
    "min": lambda x: ht.min(x, 1),
    "prod": lambda x: ht.prod(x, 1),
    "norm": lambda x: ht.linalg.vector_norm(x, axis=1),
    "norm-inf": lambda x: ht.linalg.vector_norm(x, axis=1, ord=ht.inf),
    "replicate": lambda x: x.resplit(None),
}
split = SimpleNamespace(**{name.replace("-", "_"): InHeat(each, name) for name, each in HEAT.items()})

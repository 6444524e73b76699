"""Softmax cross entropy over a class axis that is sharded across MPI ranks, forward and backward.

>>> import numpy as np, pce_mpi as pce
>>> loss = pce.softmax_cross_entropy(np.zeros((2, 4)), np.array([0, 3]), comm=None)

With a communicator each rank passes its own classes of the same rows; see `pce_mpi.loss` for the options.
"""

from pce_mpi import dense
from pce_mpi.channel import CollectiveError, CollectiveTimeout
from pce_mpi.loss import (
    ClassStatistics,
    Residuals,
    class_statistics,
    softmax_cross_entropy,
    softmax_cross_entropy_backward,
    softmax_cross_entropy_forward,
    softmax_cross_entropy_value_and_grad,
)
from pce_mpi.placements import Partial, Replicate, Shard, shard_range
from pce_mpi.tracing import Trace, trace

__version__ = "0.1.0"

__all__ = [
    "ClassStatistics",
    "CollectiveError",
    "CollectiveTimeout",
    "Partial",
    "Replicate",
    "Residuals",
    "Shard",
    "Trace",
    "class_statistics",
    "dense",
    "shard_range",
    "softmax_cross_entropy",
    "softmax_cross_entropy_backward",
    "softmax_cross_entropy_forward",
    "softmax_cross_entropy_value_and_grad",
    "trace",
]

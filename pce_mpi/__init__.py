"""Softmax cross entropy over a class axis that is sharded across MPI ranks, and distributed arrays with a tape.

The loss of plain arrays. Each rank passes its own classes of the same rows; `softmax_cross_entropy` has the options:

>>> import numpy as np, pce_mpi as pce
>>> loss = pce.softmax_cross_entropy(np.zeros((2, 4)), np.array([0, 3]), comm=None)

Arrays that are distributed over the ranks of a mesh; see `Mesh`, `distribute`, `DistArray`, `cross_entropy` and `SGD`:

>>> from mpi4py import MPI
>>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
>>> w = pce.distribute(np.zeros((3, 4)), mesh, requires_grad=True)
>>> pce.cross_entropy(pce.distribute(np.ones((2, 3)), mesh, data=pce.Shard(0)) @ w, np.array([0, 3])).backward()
>>> w.grad.placements
{'data': Partial('sum')}
"""

from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
    from pce_mpi.public import *  # noqa: F403  # a star hands on all names, without a second list
else:
    from pce_mpi.lazy import public_names

    __getattr__, __dir__ = public_names(__name__)

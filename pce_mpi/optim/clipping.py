"""Clip gradients by the norm of all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
import math
import operator

import numpy as np

from pce_mpi.arrays import Array, compute_dtype_of
from pce_mpi.comm.agreement import local_checks
from pce_mpi.comm.library import same_ranks
from pce_mpi.comm.tracing import cause, phase
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.mesh import Mesh, text_of_dims
from pce_mpi.distributed.placements import Replicate
from pce_mpi.exact.arithmetic import current
from pce_mpi.hollow import enter
from pce_mpi.optim.optimizer import Parameters, check_parameters, listed, not_negative
from pce_mpi.optim.synchronization import meshes_of, synchronize


def clip_grad_norm(parameters: Parameters, max_norm: float) -> float:
    """Scale the gradients so that their norm is at most `max_norm`.

    As in `torch.nn.utils.clip_grad_norm_`, each gradient is multiplied by min(1, max_norm / (norm + 1e-6)).

    Parameters
    ----------
    parameters : iterable or mapping of DistArray
        As for `SGD`. Parameters without a gradient do not count.
    max_norm : float
        The bound, not negative.

    Returns
    -------
    float
        The norm before scaling: the 2-norm of all gradients as one vector, each element of a global array counted once,
        in float64. It is the same on every rank; if it is `nan`, all gradients become `nan`.

    Raises
    ------
    TypeError, ValueError
        As in `SGD` and `SGD.step`; `ValueError` if `max_norm` is negative, or the parameters are over meshes of
        different ranks.
    CollectiveError
        As in `SGD.step`.

    Notes
    -----
    Collective over each mesh of the parameters: one Allgather of 56 bytes, the collectives of `SGD.step`, and one
    Allreduce of 8 bytes. A Partial gradient is reduced first; `SGD.step` then has nothing to reduce. Every rank raises
    the same error, before anything is written.

    In a rehearsal the norm is 1.0, and gradients are scaled whatever `max_norm` is.

    Examples
    --------
    >>> import numpy as np, pce_mpi as pce
    >>> from mpi4py import MPI
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> w = pce.distribute(np.zeros(2), mesh, requires_grad=True)
    >>> w.grad = pce.distribute(np.array([3.0, 4.0]), mesh)
    >>> clip_grad_norm([w], 1.0), w.grad.local.round(3)
    (5.0, array([0.6, 0.8]))
    """
    given = listed(parameters)
    meshes = meshes_of(given)
    called = {}
    with local_checks() as checks:
        check_parameters(given)
        max_norm = called["max_norm"] = not_negative(max_norm, "max_norm", finite=False)
        first, *others = (mesh.comm(*mesh.dims) for mesh in meshes)
        if not all(same_ranks(first, other) for other in others):
            raise ValueError("all parameters must be over the same ranks: not every rank knows the norm of the others")
    with phase("step"):
        synchronize(given, meshes, "clip_grad_norm", [called] * len(meshes), checks.error)
        squares = [each for mesh in meshes for each in _sums_of_squares(given, mesh)]
    # Added one by one, as sum() rounds differently from Python 3.12 on, and in an order that is the same on any mesh.
    hollow = meshes[0].is_hollow
    norm = 1.0 if hollow else math.sqrt(reduce(operator.add, sorted(squares), 0.0))
    scale = max_norm / (norm + 1e-6)
    if hollow or not scale >= 1.0:  # nan as well
        for parameter in given:
            if parameter.grad is not None:
                scaled = _times(parameter.grad.local, scale)
                enter(scaled, "gradients")
                parameter.grad = DistArray(scaled, parameter.mesh, parameter.grad.sharding)
    return norm


@np.errstate(all="ignore")
def _sums_of_squares(parameters: Sequence[DistArray], mesh: Mesh) -> list[float]:
    """Return numbers whose sum is that of all squared gradients over `mesh`, with the same bits on every rank."""
    gradients = [parameter.grad for parameter in parameters if parameter.mesh is mesh and parameter.grad is not None]
    mine = [_counted(gradient) for gradient in gradients]
    reason, comm = "the squares of all gradients, each element counted once", mesh.comm(*mesh.dims)
    with cause("clip_grad_norm", text_of_dims(mesh.dims), reason, "Partial('sum')", "Replicate()"):
        return current().sums_of_squares(mine, [gradient.size for gradient in gradients], comm)


def _counted(gradient: DistArray) -> Array:
    """Return the elements that this rank counts: those of the first of equal replicas."""
    placed = gradient.sharding.by_dim.items()
    other = any(gradient.mesh.coordinates[dim] for dim, placement in placed if placement == Replicate())
    return gradient.local.reshape(-1)[: 0 if other else None]


@np.errstate(all="ignore")
def _times(array: Array, scale: float) -> Array:
    """Return `array` times `scale`, rounded once to its dtype."""
    return (array.astype(compute_dtype_of(array.dtype), copy=False) * scale).astype(array.dtype, copy=False)

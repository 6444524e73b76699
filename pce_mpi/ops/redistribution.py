"""The one verb that changes where an array lies, on the tape."""

from __future__ import annotations

from pce_mpi.autograd.apply import moved
from pce_mpi.autograd.gradients import node_of
from pce_mpi.autograd.tape import Node, is_recording
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.array import redistribute as move
from pce_mpi.distributed.placements import Placement

__all__ = ["redistribute"]


def redistribute(x: DistArray, **placements: Placement) -> DistArray:
    """The same global array with other placements: `x.redistribute(model=Replicate())`; other dims stay.

    ======================================  ==============================================================
    Shard -> Replicate                      all_gather
    Shard -> Shard of another axis          all_to_all; so are other split points, as named dims get even ones
    Partial -> Replicate                    all_reduce
    Partial -> Shard                        reduce_scatter
    Replicate -> anything                   nothing is sent
    Shard -> Partial("sum")                 nothing is sent
    all other                               by way of Replicate
    ======================================  ==============================================================

    Where two dims come to shard one axis, the inner may be gathered first. An Allgather of 56 bytes precedes whatever
    is sent. The gradient goes back to where `x` lies naturally: in the same shards, or Replicate.

    Raises `ValueError` for dims and axes that do not exist, `TypeError` for what is no placement and for a Partial
    that the dtype has no meaning for, `CollectiveError` where ranks do not ask for the same.

    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.array([[1.0, 2.0], [3.0, 4.0]]), mesh, data=pce.Shard(0))
    >>> total = pce.sum(x, axis=0)
    >>> total.placements, total.redistribute(data=pce.Replicate()).placements
    ({'data': Partial('sum')}, {'data': Replicate()})
    """
    target = x.sharding.with_placements(placements)
    reason = "asked for"
    there = moved(x, target, operation="redistribute", reason=reason)
    result = DistArray(there.local, x.mesh, target, computed=there.computed)
    if x.requires_grad and is_recording():
        natural = x.sharding.natural

        def vjp(gradient: DistArray) -> list[DistArray]:
            return [move(gradient, natural, operation="redistribute", reason="back to where its operand lies")]

        result.requires_grad = True
        result.node = Node("redistribute", [node_of(x)], vjp)
    return result

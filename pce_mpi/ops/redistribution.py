"""Change the placements of an array, recorded on the tape."""

from __future__ import annotations

from collections.abc import Sequence

from pce_mpi.autograd.apply import redistributed
from pce_mpi.autograd.gradients import place_of
from pce_mpi.autograd.tape import Node, is_grad_enabled
from pce_mpi.comm.tracing import cause
from pce_mpi.distributed.array import DistArray, redistribute as move
from pce_mpi.distributed.placements import Placement
from pce_mpi.exact.arithmetic import current


def redistribute(x: DistArray, /, **placements: Placement) -> DistArray:
    """Bring `x` to other placements; see `DistArray.redistribute`."""
    destination = x.sharding.with_placements(placements)
    with cause("redistribute", reason="asked for"):
        there = redistributed(x, destination)
    result = DistArray(there.local, x.mesh, destination, computed=there.computed)
    if x.requires_grad and is_grad_enabled():
        natural = x.sharding.natural

        def vjp(gradients: Sequence[DistArray]) -> list[DistArray]:
            with cause("redistribute", reason="back to the placements of its operand"):
                return [move(gradients[0], natural)]

        result.requires_grad = True
        result.place = Node("redistribute", [place_of(x)], vjp, 1, current()), 0
    return result

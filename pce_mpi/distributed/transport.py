"""One step of a transition, carried out: what this rank holds goes where it belongs, and what belongs here comes."""

from __future__ import annotations

from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, is_half
from pce_mpi.comm.collectives import ReduceOp, all_gather, all_reduce, all_to_all, reduce_scatter
from pce_mpi.distributed.mesh import Mesh, over_text
from pce_mpi.distributed.placements import Partial
from pce_mpi.distributed.sharding import Coordinates, within
from pce_mpi.distributed.transitions import Step

__all__ = ["carry_out"]

Array = Any  # numpy.ndarray or cupy.ndarray


@np.errstate(all="ignore")  # an average that underflows on one rank must not raise there alone
def carry_out(step: Step, local: Array, mesh: Mesh, operation: str, reason: str) -> Array:
    """What this rank holds after `step`, given what it holds before."""
    xp = array_namespace(local)
    here = mesh.coordinates
    if step.verb == "slice":
        return local[within(step.before.slices(here), step.after.slices(here))]
    if step.verb == "keep":
        # Of a sum one rank keeps the whole; an average, a largest or a smallest of equal values is that value.
        absent = any(here[dim] for dim in step.dims if step.after.by_dim[dim] == Partial("sum"))
        return xp.zeros_like(local) if absent else local
    if step.verb == "pad":
        padded = xp.zeros(step.after.local_shape(here), local.dtype)
        padded[within(step.after.slices(here), step.before.slices(here))] = local
        return padded
    comm = mesh.comm(*step.dims)
    said = {"from": str(step.before), "to": str(step.after), "shape": step.before.shape, "dtype": local.dtype.name}
    over = over_text(step.dims)
    mesh.agree(step.dims, operation, said)
    traced: dict[str, Any] = {
        "operation": operation,
        "over": over,
        "before": step.placement_before,
        "after": step.placement_after,
        "reason": reason,
    }
    members = list(step.before.members(step.dims, here))
    if step.verb == "all_gather":
        shapes = [step.before.local_shape(member) for member in members]
        return xp.concatenate(all_gather(local, comm, shapes, **traced), axis=step.axis)
    if step.verb == "all_to_all":
        return _exchanged(step, local, comm, members, here, traced)
    placed = [step.before.by_dim[dim] for dim in step.dims]
    reduction: ReduceOp = "max" if Partial("max") in placed else "min" if Partial("min") in placed else "sum"
    term = local
    if step.divisor > 1:
        # A half is rounded once, after the sum.
        term = local.astype(np.float32) if is_half(local.dtype) else local
        term = term / term.dtype.type(step.divisor)
    if step.verb == "all_reduce":
        return all_reduce(term, comm, reduction, **traced).astype(local.dtype, copy=False)
    blocks = [term[within(step.before.slices(here), step.after.slices(member))] for member in members]
    return reduce_scatter(blocks, comm, reduction, **traced).astype(local.dtype, copy=False)


def _exchanged(
    step: Step, local: Array, comm: Any, members: list[dict[str, int]], here: Coordinates, traced: dict[str, Any]
) -> Array:
    """An all_to_all: to each rank what I hold of its part to be, from each rank what it holds of mine."""
    before, after = step.before.slices(here), step.after.slices(here)
    to_send = [_common(before, step.after.slices(member)) for member in members]
    to_come = [_common(after, step.before.slices(member)) for member in members]
    blocks = [local[within(before, part)] for part in to_send]
    shapes = [tuple(part.stop - part.start for part in parts) for parts in to_come]
    exchanged = array_namespace(local).empty(step.after.local_shape(here), local.dtype)
    for part, block in zip(to_come, all_to_all(blocks, comm, shapes, **traced), strict=True):
        exchanged[within(after, part)] = block
    return exchanged


def _common(a: tuple[slice, ...], b: tuple[slice, ...]) -> tuple[slice, ...]:
    """What two parts of the global array have in common; an empty range somewhere, if that is nothing."""
    starts = [max(x.start, y.start) for x, y in zip(a, b, strict=True)]
    stops = [min(x.stop, y.stop) for x, y in zip(a, b, strict=True)]
    return tuple(slice(start, max(start, stop)) for start, stop in zip(starts, stops, strict=True))

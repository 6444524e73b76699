"""Redistribution: how a step from one sharding of a global array to another runs on the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from pce_mpi.arrays import REAL, Array, array_namespace, is_float8, is_floating, is_real
from pce_mpi.comm.collectives import ReduceOp, all_gather, all_reduce, all_to_all, reduce_scatter
from pce_mpi.comm.tracing import cause, current_cause
from pce_mpi.distributed.mesh import Mesh, text_of_dims
from pce_mpi.distributed.placements import Partial, Placements
from pce_mpi.distributed.sharding import Coordinates, Step, within
from pce_mpi.exact.arithmetic import current


@np.errstate(all="ignore")  # an average that underflows on one rank must not raise there alone
def run_step(step: Step, local: Array, mesh: Mesh) -> Array:
    """Return the local array after `step`, given the one before; a step that sends needs an enclosing `cause`."""
    xp = array_namespace(local)
    here = mesh.coordinates
    if step.verb == "slice":
        return local[within(step.before.slices(here), step.after.slices(here))]
    if step.verb == "keep":
        # One rank keeps the whole sum; the average, maximum or minimum of equal values is that value.
        absent = any(here[dim] for dim in step.dims if step.after.by_dim[dim] == Partial("sum"))
        return xp.full_like(local, -0.0) if absent else local
    if step.verb == "pad":
        padded = xp.full(step.after.local_shape(here), -0.0, local.dtype)
        padded[within(step.after.slices(here), step.before.slices(here))] = local
        return padded
    why = current_cause()
    said = {"from": str(step.before), "to": str(step.after), "shape": step.before.shape, "dtype": local.dtype.name}
    mesh.agree(step.dims, why.operation, said)
    with cause(why.operation, text_of_dims(step.dims), why.reason, step.placement_before, step.placement_after):
        return _sent(step, local, mesh)


def _sent(step: Step, local: Array, mesh: Mesh) -> Array:
    """Return the local array after a step that sends."""
    xp, comm, here = array_namespace(local), mesh.comm(*step.dims), mesh.coordinates
    members = list(step.before.members(step.dims, here))
    if step.verb == "all_gather":
        shapes = [step.before.local_shape(member) for member in members]
        parts = all_gather(local, comm, shapes)
        return parts[0] if len(parts) == 1 else xp.concatenate(parts, axis=step.axis)
    if step.verb == "all_to_all":
        return _exchanged(step, local, comm, members, here)
    placed = [step.before.by_dim[dim] for dim in step.dims]
    reduction: ReduceOp = "max" if Partial("max") in placed else "min" if Partial("min") in placed else "sum"
    if step.verb == "reduce_scatter":
        blocks = [local[within(step.before.slices(here), step.after.slices(member))] for member in members]
        if reduction == "sum":
            return current().scattered_total(blocks, comm, step.averaging)
        found = reduce_scatter(blocks, comm, reduction)
    elif reduction == "sum":
        return current().total(local, comm, step.averaging)
    else:
        found = all_reduce(local, comm, reduction)
    if is_floating(found.dtype):
        # The extreme of 0.0 and -0.0 is 0.0 in any order, and so is that of the zeros of one rank.
        bits = found.view(f"i{found.dtype.itemsize}")
        bits[bits == np.iinfo(bits.dtype).min] = 0
    return found


def _exchanged(step: Step, local: Array, comm: Any, members: list[dict[str, int]], here: Coordinates) -> Array:
    """Send each rank the elements of its new part that this rank holds, and receive those of this rank's new part."""
    before, after = step.before.slices(here), step.after.slices(here)
    to_send = [_overlap(before, step.after.slices(member)) for member in members]
    to_come = [_overlap(after, step.before.slices(member)) for member in members]
    blocks = [local[within(before, part)] for part in to_send]
    shapes = [tuple(part.stop - part.start for part in parts) for parts in to_come]
    exchanged = array_namespace(local).empty(step.after.local_shape(here), local.dtype)
    for part, block in zip(to_come, all_to_all(blocks, comm, shapes), strict=True):
        exchanged[within(after, part)] = block
    return exchanged


def _overlap(a: tuple[slice, ...], b: tuple[slice, ...]) -> tuple[slice, ...]:
    """Return the intersection of two parts of the global array; a range is empty if there is none."""
    starts = [max(x.start, y.start) for x, y in zip(a, b, strict=True)]
    stops = [min(x.stop, y.stop) for x, y in zip(a, b, strict=True)]
    return tuple(slice(start, max(start, stop)) for start, stop in zip(starts, stops, strict=True))


def checked_dtype(array: Array, placements: Placements, requires_grad: bool) -> Array:
    """Return `array`; raise `TypeError` if its dtype has no meaning for these placements."""
    dtype = array.dtype
    if not is_real(dtype) and not is_float8(dtype):
        raise TypeError(f"a distributed array holds {REAL}, got {dtype}")
    if requires_grad and not is_floating(dtype):
        raise TypeError(f"only float16, bfloat16, float32 and float64 have a gradient, got {dtype}")
    for placement in placements.values():
        if is_float8(dtype) and isinstance(placement, Partial):
            raise TypeError(f"{placement} of {dtype} has no meaning: nothing is computed in {dtype}")
        sums = isinstance(placement, Partial) and placement.operator in ("sum", "avg")
        if sums and (dtype.kind == "b" or (placement == Partial("avg") and not is_floating(dtype))):
            raise TypeError(f"{placement} of {dtype} has no meaning")
    return array

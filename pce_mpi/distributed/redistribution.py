"""Redistribution: the steps from one sharding of a global array to another, the cost of each, and how to run one.

    Shard -> Replicate                      all_gather
    Shard(i) -> Shard(j), other splits      all_to_all
    Partial -> Replicate                    all_reduce
    Partial -> Shard                        reduce_scatter
    Replicate -> Shard                      slice      sends nothing
    Replicate -> Partial                    keep       sends nothing: one rank keeps a sum, the others hold -0.0
    Shard -> Partial("sum")                 pad        sends nothing: the other blocks are -0.0, which changes no sum

Everything else goes by way of Replicate. `steps` is the only function that decides, from shardings alone: it needs no
data, no MPI and no mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
import math
from typing import Any, Literal

import numpy as np

from pce_mpi.arrays import array_namespace, is_floating
from pce_mpi.comm.collectives import ReduceOp, all_gather, all_reduce, all_to_all, reduce_scatter
from pce_mpi.comm.tracing import cause, current_cause
from pce_mpi.distributed.mesh import Mesh, text_of_dims
from pce_mpi.distributed.placements import Partial, Replicate, Shard
from pce_mpi.distributed.sharding import Coordinates, Sharding, Splits, outer_splits, within
from pce_mpi.exact.arithmetic import current

Verb = Literal["all_gather", "all_to_all", "all_reduce", "reduce_scatter", "slice", "keep", "pad"]
_SILENT = ("slice", "keep", "pad")


@dataclass(frozen=True)
class Step:
    """One step of all ranks along `dims`; `axis` is gathered, sliced, scattered or padded."""

    verb: Verb
    dims: tuple[str, ...]
    before: Sharding
    after: Sharding
    axis: int | None = None

    @property
    def sends(self) -> bool:
        """True if the step communicates."""
        return self.verb not in _SILENT

    @property
    def copies(self) -> bool:
        """True if the result is in memory of its own on every rank."""
        return self.verb not in ("slice", "keep")

    @cached_property
    def averaging(self) -> tuple[int, float]:
        """The divisors of the partials and of their sum, whose product is the number of ranks that are averaged over.

        The first is a power of two. It keeps the sum from overflowing and costs no bit, so that the average of equal
        whole numbers is that number.
        """
        ranks = math.prod(self.before.sizes[dim] for dim in self.dims if self.before.by_dim[dim] == Partial("avg"))
        power = 1 << (ranks - 1).bit_length()
        return power, ranks / power

    @cached_property
    def placement_before(self) -> str:
        """The placement of `dims` before the step, as text."""
        return _common(self.before, self.dims)

    @cached_property
    def placement_after(self) -> str:
        """The placement of `dims` afterwards, as text."""
        return _common(self.after, self.dims)


def _common(sharding: Sharding, dims: tuple[str, ...]) -> str:
    return ", ".join(dict.fromkeys(repr(sharding.by_dim[dim]) for dim in dims))


@lru_cache(maxsize=4096)
def steps(source: Sharding, destination: Sharding) -> tuple[Step, ...]:
    """Return the steps that bring an array from `source` to `destination`; none if they are equal.

    Steps that shrink the array come first, steps that make it grow last. Raises `ValueError` for shardings of different
    shapes or meshes.
    """
    if (source.dims, source.shape) != (destination.dims, destination.shape):
        raise ValueError(
            f"cannot redistribute shape {source.shape} over {dict(source.dims)} to {destination.shape} over "
            f"{dict(destination.dims)}"
        )
    taken: list[Step] = []
    current = source
    while current != destination:
        step = _next(current, destination)
        taken.append(step)
        current = step.after
    return tuple(taken)


def _next(current: Sharding, destination: Sharding) -> Step:
    axes = range(len(current.shape))
    deeper: tuple[tuple[Verb, type[Replicate] | type[Partial]], ...]
    deeper = ("slice", Replicate), ("reduce_scatter", Partial)
    for verb, wanted in deeper:
        for axis in axes:
            if step := _deepen(current, destination, axis, verb, wanted):
                return step
    if dims := tuple(dim for dim in current.partial_dims if current.by_dim[dim] != destination.by_dim[dim]):
        return Step("all_reduce", dims, current, current.replacing(dict.fromkeys(dims, Replicate())))
    for axis in axes:
        if step := _pad(current, destination, axis) or _exchange(current, destination, axis):
            return step
    for axis in axes:
        if step := _gather(current, destination, axis):
            return step
    dims = tuple(dim for dim in destination.partial_dims if current.by_dim[dim] != destination.by_dim[dim])
    return Step("keep", dims, current, current.replacing({dim: destination.by_dim[dim] for dim in dims}))


def _depth(current: Sharding, destination: Sharding, axis: int) -> int:
    """Count the outermost dims of `axis` that split it in `current` as they do in `destination`."""
    mine, wanted = current.dims_of(axis), destination.dims_of(axis)
    for depth in range(min(len(mine), len(wanted)), 0, -1):
        if mine[:depth] == wanted[:depth] and _outer(current, axis, depth) == _outer(destination, axis, depth):
            return depth
    return 0


def _outer(sharding: Sharding, axis: int, depth: int) -> Splits | None:
    """Return the split points of `axis` if only its `depth` outermost dims split it."""
    splits = sharding.splits[axis]
    if splits is None or depth == 0:
        return None
    return outer_splits(splits, sharding.parts(sharding.dims_of(axis)[depth:]))


def _deepen(
    current: Sharding, destination: Sharding, axis: int, verb: Verb, wanted: type[Replicate] | type[Partial]
) -> Step | None:
    """Split `axis` over the next `wanted` dims of `destination`, if all dims before them are right."""
    have = current.dims_of(axis)
    depth = _depth(current, destination, axis)
    if depth < len(have):
        return None
    dims: list[str] = []
    for dim in destination.dims_of(axis)[depth:]:
        if not isinstance(current.by_dim[dim], wanted):
            break
        dims.append(dim)
    if not dims:
        return None
    splits = _outer(destination, axis, depth + len(dims))
    after = current.replacing(dict.fromkeys(dims, Shard(axis)), {axis: splits})
    return Step(verb, tuple(dims), current, after, axis)


def _pad(current: Sharding, destination: Sharding, axis: int) -> Step | None:
    have = current.dims_of(axis)
    if not have or destination.by_dim[have[-1]] != Partial("sum"):
        return None
    after = current.replacing({have[-1]: Partial("sum")}, {axis: _outer(current, axis, len(have) - 1)})
    return Step("pad", have[-1:], current, after, axis)


def _exchange(current: Sharding, destination: Sharding, axis: int) -> Step | None:
    """Return the all_to_all that changes the split points of `axis`, or shards another axis instead."""
    have, wanted = current.dims_of(axis), destination.dims_of(axis)
    if not have:
        return None
    if have == wanted[: len(have)] and _depth(current, destination, axis) < len(have):
        return Step(
            "all_to_all", have, current, current.replacing({}, {axis: _outer(destination, axis, len(have))}), axis
        )
    last = have[-1]
    there = destination.by_dim[last]
    if not isinstance(there, Shard) or there.axis == axis:
        return None
    depth = _depth(current, destination, there.axis)
    if depth < len(current.dims_of(there.axis)) or destination.dims_of(there.axis)[depth] != last:
        return None
    splits = {axis: _outer(current, axis, len(have) - 1), there.axis: _outer(destination, there.axis, depth + 1)}
    return Step("all_to_all", (last,), current, current.replacing({last: there}, splits), axis)


def _gather(current: Sharding, destination: Sharding, axis: int) -> Step | None:
    depth = _depth(current, destination, axis)
    dims = current.dims_of(axis)[depth:]
    if not dims:
        return None
    after = current.replacing(dict.fromkeys(dims, Replicate()), {axis: _outer(current, axis, depth)})
    return Step("all_gather", dims, current, after, axis)


def wire_bytes(step: Step, itemsize: int) -> float:
    """Return the least bytes that a rank sends, on average, by the well-known algorithms; `itemsize` in bytes.

    For P ranks that hold n bytes together: all_reduce 2 (P-1)/P n, all_gather and reduce_scatter (P-1)/P n, all_to_all
    (P-1)/P**2 n.
    """
    if not step.sends:
        return 0.0
    parts = step.before.parts(step.dims)
    sharded = step.after if step.verb == "all_gather" else step.before
    blocks = math.prod(size for dim, size in sharded.dims if isinstance(sharded.by_dim[dim], Shard))
    together = math.prod(sharded.shape) * itemsize / blocks
    if step.verb == "all_to_all":
        return together * (parts - 1) / parts  # `together` is n / P bytes here
    return together * (parts - 1) / parts * (2 if step.verb == "all_reduce" else 1)


Array = Any  # numpy.ndarray or cupy.ndarray


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

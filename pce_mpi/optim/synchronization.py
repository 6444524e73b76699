"""Bring the Partial gradients of parameters to the shardings of the parameters, all together.

After a backward pass the gradient of a parameter may still be Partial. One flat buffer, and so one collective, serves
each mesh, set of dims, kind of collective and dtype, with the parameters in the order in which they are given.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
import math
from typing import Any
import zlib

import numpy as np

from pce_mpi.arrays import Array, array_namespace, check_one_library, compute_dtype_of
from pce_mpi.comm.agreement import local_checks
from pce_mpi.comm.collectives import all_reduce, reduce_scatter
from pce_mpi.comm.tracing import cause
from pce_mpi.distributed.array import DistArray, redistribute
from pce_mpi.distributed.mesh import Mesh, text_of_dims
from pce_mpi.distributed.placements import Partial
from pce_mpi.distributed.sharding import Coordinates, Sharding, Step, Verb, steps, within
from pce_mpi.exact.arithmetic import current
from pce_mpi.hollow import enter


@dataclass(frozen=True)
class _Group:
    """Gradients that go into one collective over the same ranks, as one of these ranks sees them.

    `steps` has the step of each, by the number of its parameter, and `shapes` what it is on this rank afterwards. For a
    reduce_scatter, `parts` has the part of each that goes to each rank. `before` and `after` are for the trace.
    """

    key: _Key
    steps: Mapping[int, Step]
    shapes: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[tuple[slice, ...], ...], ...]
    before: str
    after: str


# The number of a parameter's mesh, the kind and the dims of a collective, and the dtype of the gradients.
_Key = tuple[int, Verb, tuple[str, ...], np.dtype[Any]]
# The number of a parameter's mesh, its sharding, that of its gradient, and the dtype of both.
_Placed = tuple[int, Sharding, Sharding | None, np.dtype[Any]]
# The place of this rank on a mesh.
_Coordinates = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class _Schedule:
    """The collectives for the gradients of a list of parameters, from shardings and dtypes alone.

    `described` and `checksums` have one entry for each mesh. The gradients of the parameters in `alone` are
    redistributed one by one; in an arithmetic that leaves no gradient Partial, these are all parameters.
    """

    described: tuple[Mapping[str, str], ...]
    checksums: tuple[int, ...]
    alone: tuple[int, ...]
    groups: tuple[_Group, ...]


def synchronize(
    parameters: Sequence[DistArray],
    meshes: Sequence[Mesh],
    operation: str,
    called: Sequence[Mapping[str, Hashable]],
    error: Exception | None = None,
) -> None:
    """Bring each gradient to the sharding of its parameter; `called` must be the same on every rank of each mesh.

    Collective over each of `meshes`, those of the parameters. `error` is the error of this rank's own checks.
    """
    schedule: _Schedule | None = None
    with local_checks() as checks:
        if error is not None:
            raise error
        placed = tuple([_checked_gradient(parameter, index, meshes) for index, parameter in enumerate(parameters)])
        here = tuple([tuple(mesh.coordinates.items()) for mesh in meshes])
        schedule = _schedule(placed, here, current().partial_gradients)
    error, named = checks.error, False
    for number, mesh in enumerate(meshes):
        with local_checks() as agreement:
            fact = 0 if schedule is None else schedule.checksums[number]
            checksums = mesh.agree(mesh.dims, operation, called[number], error, fact=fact, ranks_named=named)
            if schedule is not None and checksums != checksums[:1] * len(checksums):
                mesh.agree(mesh.dims, operation, schedule.described[number])  # names the parameters that differ
        if agreement.error is not None:  # to be told to the ranks of the other meshes
            error, named = agreement.error, True
    if error is not None:
        raise error
    assert schedule is not None  # the error would have been raised
    if not schedule.alone and not schedule.groups:
        return
    gradients = {index: each.grad for index, each in enumerate(parameters) if each.grad is not None}
    with cause(operation, reason="the gradient is brought to its parameter"):
        for index in schedule.alone:
            parameters[index].grad = brought = redistribute(gradients[index], parameters[index].sharding)
            enter(brought.local, "gradients")
    partials = {index: gradients[index].local for group in schedule.groups for index in group.steps}
    for group in schedule.groups:
        _bring_together(group, partials, meshes[group.key[0]], operation)
    for index, partial in partials.items():
        parameter = parameters[index]
        # Gradients are views of the reduced buffer, which lives as long as they do: copies would take as long as the
        # rest of this function.
        local = partial.astype(parameter.dtype, copy=False)
        enter(local, "gradients")
        parameter.grad = DistArray(local, parameter.mesh, parameter.sharding)


@lru_cache(maxsize=64)
def _schedule(placed: tuple[_Placed, ...], coordinates: tuple[_Coordinates, ...], together: bool) -> _Schedule:
    described: list[dict[str, str]] = [{} for _ in range(1 + max(mesh for mesh, *_ in placed))]
    alone, pending = [], {}
    for index, (mesh, sharding, gradient, dtype) in enumerate(placed):
        has = "no gradient" if gradient is None else f"gradient {gradient}"
        # Counted within the mesh, whose other ranks need not know of other meshes.
        number = len(described[mesh])
        described[mesh][f"parameters[{number}]"] = f"{dtype.name} {sharding.shape}, {sharding}; {has}"
        if gradient is None or gradient == sharding:
            continue
        taken = steps(gradient, sharding)
        if together and all(step.verb in ("all_reduce", "reduce_scatter") and _is_sum(step) for step in taken):
            pending[index] = list(taken)
        else:
            alone.append(index)
    texts = [repr(sorted(each.items())) for each in described]
    groups = []
    while any(pending.values()):
        waiting = {index: [_key(placed[index], step) for step in taken] for index, taken in pending.items() if taken}
        keys = list(dict.fromkeys(keys[0] for keys in waiting.values()))
        # A collective waits until all gradients that need it are ready, so that one serves them all.
        key = next((key for key in keys if not any(key in later for _, *later in waiting.values())), keys[0])
        group = {index: pending[index].pop(0) for index, keys in waiting.items() if keys[0] == key}
        groups.append(_group(key, group, dict(coordinates[key[0]])))
    groups.sort(key=lambda group: group.key[0])  # one mesh after the other, as they may have different ranks
    return _Schedule(tuple(described), tuple(zlib.crc32(text.encode()) for text in texts), tuple(alone), tuple(groups))


def _key(placed: _Placed, step: Step) -> _Key:
    mesh, _, _, dtype = placed
    return mesh, step.verb, step.dims, dtype


def _is_sum(step: Step) -> bool:
    return all(step.before.by_dim[dim] in (Partial("sum"), Partial("avg")) for dim in step.dims)


def _group(key: _Key, taken: Mapping[int, Step], here: Coordinates) -> _Group:
    """Return the group of the steps `taken`, by the number of their parameters, for the rank at `here`."""
    _, verb, dims, _ = key
    every, parts = taken.values(), []
    if verb == "reduce_scatter":
        for member in next(iter(every)).before.members(dims, here):
            parts.append(tuple(within(step.before.slices(here), step.after.slices(member)) for step in every))
    before = ", ".join(dict.fromkeys(step.placement_before for step in every))
    after = ", ".join(dict.fromkeys(step.placement_after for step in every))
    return _Group(key, taken, tuple(step.after.local_shape(here) for step in every), tuple(parts), before, after)


def _bring_together(group: _Group, partials: dict[int, Array], mesh: Mesh, operation: str) -> None:
    """Replace the local array of each gradient in `group` by its result of the group's collective."""
    _, verb, dims, dtype = group.key
    wide = compute_dtype_of(dtype)  # so that halves are rounded only once
    mine = []
    for index, step in group.steps.items():
        before_sum, _ = step.averaging
        partial = partials[index]
        mine.append(partial.astype(wide, copy=False) / before_sum if before_sum > 1 else partial)
    xp, comm = array_namespace(mine[0]), mesh.comm(*dims)
    reason = "gradients are brought to their parameters, in one buffer"
    with cause(operation, text_of_dims(dims), reason, group.before, group.after):
        if verb == "all_reduce":
            flat = xp.concatenate([partial.reshape(-1) for partial in mine], dtype=wide)
            flat = all_reduce(flat, comm, "sum", overwrite=True)
        else:
            blocks = []
            for parts in group.parts:
                sent = [partial[part].reshape(-1) for partial, part in zip(mine, parts, strict=True)]
                blocks.append(xp.concatenate(sent, dtype=wide))
            flat = reduce_scatter(blocks, comm, "sum")
    end = 0
    for (index, step), shape in zip(group.steps.items(), group.shapes, strict=True):
        start, end = end, end + math.prod(shape)
        if (after_sum := step.averaging[1]) < 1:
            flat[start:end] /= after_sum
        partials[index] = flat[start:end].reshape(shape)


def _checked_gradient(parameter: DistArray, index: int, meshes: Sequence[Mesh]) -> _Placed:
    """Return the shardings of a parameter and its gradient, or raise if the gradient does not fit."""
    gradient, mesh = parameter.grad, meshes.index(parameter.mesh)
    if gradient is None:
        return mesh, parameter.sharding, None, parameter.dtype
    if (
        isinstance(gradient, DistArray)
        and gradient.mesh is parameter.mesh
        and gradient.sharding.shape == parameter.sharding.shape
        and gradient.local.dtype == parameter.local.dtype
        and type(gradient.local) is type(parameter.local)
    ):
        return mesh, parameter.sharding, gradient.sharding, parameter.local.dtype
    what = f"the gradient of parameters[{index}]"
    if not isinstance(gradient, DistArray):
        raise TypeError(f"{what} must be a distributed array or None, got {type(gradient).__name__}")
    if gradient.mesh is not parameter.mesh:
        raise ValueError(f"{what} is over another mesh than its parameter")
    if gradient.shape != parameter.shape:
        raise ValueError(f"{what} must have the parameter's shape, {parameter.shape}, got {gradient.shape}")
    if gradient.dtype != parameter.dtype:
        raise TypeError(f"{what} must have the parameter's dtype, {parameter.dtype}, got {gradient.dtype}")
    check_one_library({f"parameters[{index}]": parameter.local, what: gradient.local})
    return mesh, parameter.sharding, gradient.sharding, parameter.dtype


def meshes_of(parameters: Sequence[Any]) -> list[Mesh]:
    """Return the meshes of `parameters`, in the order in which they appear."""
    return list(dict.fromkeys(parameter.mesh for parameter in parameters if isinstance(parameter, DistArray)))

"""Put the results of an operation on the tape, with what its vjps need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, is_floating
from pce_mpi.autograd.gradients import node_of
from pce_mpi.autograd.op import Op
from pce_mpi.autograd.operands import operands_of
from pce_mpi.autograd.tape import Node, Vjp
from pce_mpi.comm.tracing import cause, current_scope, set_scope
from pce_mpi.distributed.array import DistArray, redistribute
from pce_mpi.exact.mode import is_reproducible


def put_on_tape(
    op: Op,
    result: DistArray,
    operands: Sequence[DistArray],
    inputs: Sequence[DistArray],
    required: tuple[bool, ...],
    parameters: Mapping[str, Any],
    residuals: Mapping[str, Any],
) -> None:
    """Put `result` on the tape."""
    if True not in required or not is_floating(result.local.dtype):
        return
    used = range(-1, len(required)) if op.uses is None else _used(op.uses, required)
    known, mode, scope = _for_tape(result, -1 in used), is_reproducible(), current_scope()
    arguments = [_for_tape(x, index in used) for index, x in enumerate(inputs)]
    wanted = [(x.sharding.shape, x.local.dtype) if x.requires_grad else None for x in operands]

    def vjp(gradient: DistArray) -> list[DistArray | None]:
        set_scope(scope)
        if not op.vjps:
            raise NotImplementedError(f"{op.name} has no vjp: its result has no gradient")
        if is_reproducible() != mode:
            raise _in_two_modes(op.name, mode)
        # All consumers have contributed, so a Partial gradient is reduced here, once.
        destination = known.sharding.natural
        if op.relays:
            destination = destination.with_partial_over(gradient.sharding.summed_dims)
        settled = gradient
        if gradient.sharding is not destination:
            with cause(op.name, reason="its gradient is complete"):
                settled = redistribute(gradient, destination)
        return [
            None if want is None else _contribution(op, index, want, settled, known, arguments, parameters, residuals)
            for index, want in enumerate(wanted)
        ]

    result.requires_grad = True
    result.node = Node(op.name, [node_of(x) if x.requires_grad else None for x in operands], vjp)


def _in_two_modes(name: str, mode: bool) -> RuntimeError:
    sides = ("inside", "outside") if mode else ("outside", "inside")
    return RuntimeError(f"{name} was computed {sides[0]} reproducible(), and its gradient {sides[1]}")


def put_together_on_tape(
    op: Op,
    results: tuple[DistArray, ...],
    operands: Sequence[DistArray],
    inputs: Sequence[DistArray],
    required: tuple[bool, ...],
    parameters: Mapping[str, Any],
) -> None:
    """Put all results of one operation on the tape: the vjps run once, when every gradient is complete."""
    if True not in required or not is_floating(results[0].local.dtype):
        return
    used = range(-1, len(required)) if op.uses is None else _used(op.uses, required)
    known, mode, scope = tuple(_for_tape(result, -1 in used) for result in results), is_reproducible(), current_scope()
    arguments = [_for_tape(x, index in used) for index, x in enumerate(inputs)]
    wanted = [(x.sharding.shape, x.local.dtype) if x.requires_grad else None for x in operands]
    gradients: list[DistArray | None] = [None] * len(results)

    def vjp(_: None) -> list[DistArray | None]:
        set_scope(scope)
        if is_reproducible() != mode:
            raise _in_two_modes(op.name, mode)
        whole = tuple(_zeros_like(y) if g is None else g for g, y in zip(gradients, known, strict=True))
        gradients[:] = [None] * len(results)  # a result that was not passed keeps the others alive no longer
        return [
            None if want is None else _contribution(op, index, want, whole, known, arguments, parameters, {})
            for index, want in enumerate(wanted)
        ]

    def taking(index: int) -> Vjp:
        def take(gradient: DistArray) -> tuple[None]:
            with cause(op.name, reason="its gradient is complete"):
                gradients[index] = redistribute(gradient, known[index].sharding.natural)
            return (None,)

        return take

    together = Node(op.name, [node_of(x) if x.requires_grad else None for x in operands], vjp)
    for index, result in enumerate(results):
        result.requires_grad = True
        result.node = Node(op.name, [together], taking(index))


def _zeros_like(x: DistArray) -> DistArray:
    """Return zeros in the natural sharding of `x`, which may have no elements."""
    sharding = x.sharding.natural
    zeros = array_namespace(x.local).zeros(sharding.local_shape(x.mesh.coordinates), x.local.dtype)
    return DistArray(zeros, x.mesh, sharding)


def _used(uses: Sequence[Sequence[int]], required: Sequence[bool]) -> list[int]:
    """Return the operands, -1 for the result, whose elements the vjps use that will be called."""
    return [index for used, needs in zip(uses, required, strict=False) if needs for index in used]


def _for_tape(x: DistArray, elements: bool) -> DistArray:
    """Return `x` for the tape: without its node, which would be a cycle, and without elements that no vjp uses."""
    local = x.local if elements else _no_elements(array_namespace(x.local), x.local.dtype)
    return DistArray(local, x.mesh, x.sharding)


@cache
def _no_elements(xp: Any, dtype: np.dtype[Any]) -> Any:
    return xp.empty(0, dtype)


def _contribution(
    op: Op,
    index: int,
    want: tuple[tuple[int, ...], np.dtype[Any]],
    gradient: DistArray | tuple[DistArray, ...],
    result: DistArray | tuple[DistArray, ...],
    arguments: Sequence[DistArray],
    parameters: Mapping[str, Any],
    residuals: Mapping[str, Any],
) -> DistArray:
    pull = op.vjps[index] if index < len(op.vjps) else None
    if pull is None:
        raise NotImplementedError(f"{op.name} has no vjp for operand {index}")
    found = pull(gradient, result, *arguments, **parameters, **residuals)
    if found is None:
        raise TypeError(f"the vjp of {op.name} for operand {index} gave None")
    if not isinstance(found, DistArray):
        (found,) = operands_of(op.name, [gradient, found])[1:]
    shape, dtype = want
    if found.shape != shape:
        raise ValueError(f"the vjp of {op.name} for operand {index} gave shape {found.shape}, the operand has {shape}")
    return found if found.dtype == dtype else DistArray(found.local.astype(dtype), found.mesh, found.sharding)

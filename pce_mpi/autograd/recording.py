"""A result is put on the tape: how to get from its gradient to those of the operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pce_mpi.arrays import is_floating
from pce_mpi.autograd.abstract import Abstract
from pce_mpi.autograd.gradient import node_of
from pce_mpi.autograd.op import Op
from pce_mpi.autograd.operands import operands_of
from pce_mpi.autograd.tape import Node
from pce_mpi.distributed.dist_array import DistArray, redistribute
from pce_mpi.distributed.placements import Partial

__all__ = ["record"]


def record(
    op: Op,
    result: DistArray,
    operands: Sequence[DistArray],
    inputs: Sequence[DistArray],
    required: Sequence[bool],
    parameters: Mapping[str, Any],
    kept: Mapping[str, Any],
) -> None:
    """Put `result` on the tape."""
    if not any(required) or not is_floating(result.dtype):
        return
    used = _used(op, required)
    known = _held(result, -1 in used)
    arguments = [_held(x, index in used) for index, x in enumerate(inputs)]
    wanted = [(x.shape, x.dtype) if needs else None for x, needs in zip(operands, required, strict=True)]

    def vjp(gradient: DistArray) -> list[DistArray | None]:
        if not op.vjps:
            raise NotImplementedError(f"{op.name} has no vjp: its result has no gradient")
        # All consumers have contributed: what is left to add up is added up once, here.
        target = known.sharding.natural
        if op.relays:
            placed = gradient.sharding.by_dim
            target = target.with_terms_over(tuple(dim for dim in placed if placed[dim] == Partial("sum")))
        settled = redistribute(gradient, target, operation=op.name, reason="its gradient is complete")
        return [
            None if want is None else _contribution(op, index, want, settled, known, arguments, parameters, kept)
            for index, want in enumerate(wanted)
        ]

    result.requires_grad = True
    nodes = [node_of(x) if needs else None for x, needs in zip(operands, required, strict=True)]
    result.node = Node(op.name, nodes, vjp)


def _used(op: Op, required: Sequence[bool]) -> set[int]:
    """The operands, -1 for the result, whose elements the vjps that will be called use."""
    if op.uses is None:
        return set(range(-1, len(required)))
    return {used for uses, needs in zip(op.uses, required, strict=False) if needs for used in uses}


def _held(x: DistArray, elements: bool) -> DistArray:
    """What the tape holds of `x`: a node never holds what holds it, nor elements that no vjp will look at."""
    return x.detach() if elements else DistArray(Abstract(x.dtype), x.mesh, x.sharding)


def _contribution(
    op: Op,
    index: int,
    want: tuple[tuple[int, ...], np.dtype[Any]],
    gradient: DistArray,
    result: DistArray,
    arguments: Sequence[DistArray],
    parameters: Mapping[str, Any],
    kept: Mapping[str, Any],
) -> DistArray:
    pull = op.vjps[index] if index < len(op.vjps) else None
    if pull is None:
        raise NotImplementedError(f"{op.name} has no vjp for operand {index}")
    found = pull(gradient, result, *arguments, **parameters, **kept)
    if found is None:
        raise TypeError(f"the vjp of {op.name} for operand {index} gave None")
    if not isinstance(found, DistArray):
        (found,) = operands_of(op.name, [gradient, found])[1:]
    shape, dtype = want
    if found.shape != shape:
        raise ValueError(f"the vjp of {op.name} for operand {index} gave shape {found.shape}, the operand has {shape}")
    return found if found.dtype == dtype else DistArray(found.local.astype(dtype), found.mesh, found.sharding)

"""Put the results of an operation on the tape, with what its vjps need and the hollow arrays that these hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, is_floating
from pce_mpi.autograd.gradients import place_of
from pce_mpi.autograd.op import Op, operands_of
from pce_mpi.autograd.tape import Node
from pce_mpi.comm.tracing import cause, current_scope, set_scope
from pce_mpi.distributed.array import DistArray, redistribute
from pce_mpi.distributed.mesh import Mesh
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.exact.arithmetic import converted, current
from pce_mpi.hollow import Allocation, Hollow, open_ledger


def allocations_of(value: Any) -> set[Allocation]:
    """Return the memory of all hollow arrays that `value` refers to, through containers and our own objects."""
    found, seen, waiting = set[Allocation](), set[int](), [value]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if not isinstance(each, Hollow):
            waiting.extend(_parts(each))
        elif each.allocation is not None:
            found.add(each.allocation)
    return found


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, DistArray):
        yield value.local
    elif isinstance(value, tuple | list):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif type(value).__module__.startswith("pce_mpi.") and not isinstance(value, Mesh | Sharding):
        yield from getattr(value, "__dict__", {}).values()
        yield from (getattr(value, name, None) for name in getattr(type(value), "__slots__", ()))


_DTYPE = attrgetter("local.dtype")


def put_on_tape(
    op: Op,
    results: Sequence[DistArray],
    operands: Sequence[DistArray],
    inputs: Sequence[DistArray],
    required: tuple[bool, ...],
    parameters: Mapping[str, Any],
    residuals: Any,
) -> None:
    """Put the `results` that are real numbers on the tape.

    Each vjp takes their gradients, then the results themselves: two tuples, or two arrays if there is one result.
    """
    if True not in required:
        return
    real = results
    if not all(map(is_floating, map(_DTYPE, results))):
        real = [result for result in results if is_floating(result.local.dtype)]
        if not real:
            return
    used = range(-1, len(required)) if op.uses is None else _used(op.uses, required)
    known, scope = list(map(_for_tape, real, repeat(-1 in used))), current_scope()
    arguments = [_for_tape(x, index in used) for index, x in enumerate(inputs)]
    more = parameters if residuals is None else {**parameters, "residuals": residuals}
    wanted = [(x.sharding, x.local.dtype) if x.requires_grad else None for x in operands]

    def vjp(gradients: Sequence[DistArray | None]) -> list[DistArray | None]:
        set_scope(scope)
        if not op.vjps:
            raise NotImplementedError(f"{op.name} has no vjp: its result has no gradient")
        complete = []
        for gradient, result in zip(gradients, known, strict=True):
            destination = result.sharding.natural
            if gradient is None:
                gradient = _zeros(result, destination)
            elif op.relays:
                destination = destination.with_partial_over(gradient.sharding.summed_dims)
            # All consumers have contributed, so a Partial gradient is reduced here, once.
            if gradient.sharding is not destination:
                with cause(op.name, reason="its gradient is complete"):
                    gradient = redistribute(gradient, destination)
            complete.append(gradient)
        g: Any = complete[0] if len(known) == 1 else tuple(complete)
        y: Any = known[0] if len(known) == 1 else tuple(known)
        return [
            None if want is None else _contribution(op, index, want, g, y, arguments, more)
            for index, want in enumerate(wanted)
        ]

    if (ledger := open_ledger()) is not None:
        ledger.hold(allocations_of([known, arguments, more]), vjp)
    node = Node(op.name, [place_of(x) if x.requires_grad else None for x in operands], vjp, len(real), current())
    for value, result in enumerate(real):
        result.requires_grad = True
        result.place = node, value


def _zeros(like: DistArray, sharding: Sharding) -> DistArray:
    zeros = array_namespace(like.local).zeros(sharding.local_shape(like.mesh.coordinates), like.local.dtype)
    return DistArray(zeros, like.mesh, sharding)


def _used(uses: Sequence[Sequence[int]], required: Sequence[bool]) -> list[int]:
    """Return the operands, -1 for the result, whose elements are used by the vjps that will be called."""
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
    want: tuple[Sharding, np.dtype[Any]],
    gradient: DistArray | tuple[DistArray, ...],
    result: DistArray | tuple[DistArray, ...],
    arguments: Sequence[DistArray],
    parameters: Mapping[str, Any],
) -> DistArray:
    pull = op.vjps[index] if index < len(op.vjps) else None
    if pull is None:
        raise NotImplementedError(f"{op.name} has no vjp for operand {index}")
    found = pull(gradient, result, *arguments, **parameters)
    if found is None:
        raise TypeError(f"the vjp of {op.name} for operand {index} gave None")
    if not isinstance(found, DistArray):
        (found,) = operands_of(op.name, [gradient, found])[1:]
    sharding, dtype = want
    if found.shape != sharding.shape:
        has = f"gave shape {found.shape}, the operand has {sharding.shape}"
        raise ValueError(f"the vjp of {op.name} for operand {index} {has}")
    if found.dtype == dtype:
        return found
    if index in op.wide_sums and found.sharding.partial_dims:
        with cause(op.name, reason="the sum is rounded once"):
            found = redistribute(found, sharding.natural)
    return DistArray(converted(found.local, dtype), found.mesh, found.sharding)

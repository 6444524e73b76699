"""Run an operation on distributed arrays.

`apply` brings the operands to the shardings that the rule asks for, runs the forward function on the local arrays, and
records on the tape how the gradients of the operands follow from that of the result. A vjp is made of operations too,
so the same placement rules hold backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
import zlib

import numpy as np

from pce_mpi.arrays import array_namespace, as_array, check_one_library, is_floating
from pce_mpi.autograd.gradients import node_of
from pce_mpi.autograd.inference import Abstract, AbstractMesh, sent_by
from pce_mpi.autograd.op import Layout, Op
from pce_mpi.autograd.rules import Plan, Rule, plan
from pce_mpi.autograd.tape import Node, is_recording
from pce_mpi.distributed.array import DistArray, redistribute
from pce_mpi.distributed.placements import Partial, Replicate
from pce_mpi.distributed.redistribution import steps
from pce_mpi.distributed.sharding import Sharding

__all__ = ["apply", "at_hand", "moved", "operands_of", "record"]


def operands_of(name: str, values: Sequence[Any]) -> list[DistArray]:
    """`values` as distributed arrays of one mesh and one array library: plain arrays and numbers are Replicate."""
    distributed = [value for value in values if isinstance(value, DistArray)]
    if not distributed:
        raise TypeError(f"{name} takes at least one DistArray; make one with pce_mpi.distribute")
    first = distributed[0]
    for other in distributed:
        if other.mesh is not first.mesh:
            raise ValueError(f"{name} takes operands of one mesh, got {first.mesh} and another {other.mesh}")
    operands = []
    for index, value in enumerate(values):
        if isinstance(value, DistArray):
            operands.append(value)
            continue
        if type(value) in (bool, int, float):
            # As in NumPy, a Python number takes the dtype of the arrays that it meets.
            dtype = np.result_type(*(each.dtype for each in values if hasattr(each, "dtype")))
            dtype = dtype if is_floating(dtype) else np.result_type(dtype, value)  # NumPy does not know bfloat16
            abstract = isinstance(first.mesh, AbstractMesh)
            array = Abstract(dtype) if abstract else array_namespace(first.local).asarray(value, dtype)
            shape: tuple[int, ...] = ()
        elif isinstance(value, np.generic) and not isinstance(first.mesh, AbstractMesh):
            array, shape = array_namespace(first.local).asarray(value), ()
        else:
            array = as_array(value, f"operand {index} of {name}")
            shape = array.shape
        operands.append(DistArray(array, first.mesh, Sharding.of(first.mesh.layout, shape, {})))
    kind = type(first.local)
    if any(type(operand.local) is not kind for operand in operands):
        check_one_library({f"operand {index} of {name}": operand.local for index, operand in enumerate(operands)})
    return operands


def at_hand(x: DistArray) -> DistArray:
    """`x`, reduced if it is Partial and has been reduced already: then that costs nothing any more."""
    return x.moved.get(x.sharding.natural, x) if x.moved else x


def moved(x: DistArray, target: Sharding, *, operation: str, reason: str) -> DistArray:
    """`x`, lying as `target` says. What had to be sent for that is kept with a computed array, and not sent twice."""
    if isinstance(x.mesh, AbstractMesh):
        x.mesh.needed.setdefault(id(x), target)
    if x.sharding == target:
        return x
    if x.moved and target in x.moved:
        return x.moved[target]
    taken = steps(x.sharding, target)
    sending = [step for step in taken if step.sends]
    if isinstance(x.mesh, AbstractMesh):
        x.mesh.sent += [sent_by(step, x) for step in sending]
        there = DistArray(x.local, x.mesh, target, computed=x.computed or any(step.copies for step in taken))
    else:
        there = redistribute(x, target, operation=operation, reason=reason)
    if sending and x.moved is not None:
        x.moved[target] = there
    return there


_Said = tuple[int, str]  # a checksum, and what it is of


def apply(op: Op, *values: Any, **parameters: Any) -> Any:
    """The result of `op`; on the tape, if an operand requires a gradient."""
    operands = operands_of(op.name, values)
    mesh = operands[0].mesh
    present = [at_hand(x) for x in operands]
    chosen, (checksum, said) = _plan(op, present, parameters)
    mesh.note(checksum, op.name, said)
    inputs = [
        moved(x, target, operation=op.name, reason=_reason(op, index, x.sharding, target))
        for index, (x, target) in enumerate(zip(present, chosen.operands, strict=True))
    ]
    required = tuple(x.requires_grad for x in operands) if is_recording() else (False,) * len(operands)
    more: dict[str, Any] = {}
    if op.knows_layout:
        more["layout"] = Layout(mesh, chosen.operands, chosen.result, required)
    if isinstance(mesh, AbstractMesh):
        if op.sends:
            mesh.sent += op.sends(*(x.dtype for x in operands), **more, **parameters)
        local = Abstract(np.dtype(op.dtype(*(x.dtype for x in operands))))
        return _settled(DistArray(local, mesh, chosen.result, computed=_computed(op, inputs)), op.name, chosen)
    with np.errstate(all="ignore"):  # what one rank finds in its shard must not raise there alone
        local = op.forward(*(x.local for x in inputs), **parameters, **more)
    kept = {}
    if op.keeps:
        local, kept["kept"] = local
    if isinstance(local, tuple | list) and all(hasattr(part, "shape") for part in local):
        if op.vjps and any(required):
            raise NotImplementedError(f"{op.name} gives {len(local)} results; a vjp is for operations that give one")
        results = [_result(op, part, inputs, chosen) for part in local]
        for result in results:
            record(op, result, operands, inputs, required, parameters, kept)
        made: Any = type(local) if hasattr(local, "_fields") else lambda *parts: parts  # numpy.linalg names some parts
        return made(*results)
    result = _result(op, local, inputs, chosen)
    record(op, result, operands, inputs, required, parameters, kept)
    return result


def _reason(op: Op, index: int, before: Sharding, after: Sharding) -> str:
    """Why an operand is brought from `before` to `after`."""
    if before == after:
        return ""
    if op.rule is None:
        return f"no rule for {op.name}: operand {index} is replicated"
    if set(before.partial_dims) - set(after.partial_dims):
        return f"operand {index} is Partial and has to be reduced first"
    return f"operand {index} lies so for the fewest bytes"


def _plan(op: Op, operands: Sequence[DistArray], parameters: Mapping[str, Any]) -> tuple[Plan, _Said]:
    """How to run `op`, and all that has to be the same on every rank."""
    shardings, dtypes = tuple(x.sharding for x in operands), tuple(x.dtype for x in operands)
    if op.rule is None:  # not kept: many such operations are made for one call, and hold what they were made of
        replicated = Plan(tuple(sharding.replicated for sharding in shardings), shardings[0].replicated)
        return replicated, _said(op, shardings, dtypes, tuple(parameters.items()))
    try:
        return _cached_plan(op, shardings, dtypes, tuple(parameters.items()))
    except TypeError:  # parameters of a user's operation that cannot be hashed; or an error of the rule's, once more
        return _cached_plan.__wrapped__(op, shardings, dtypes, tuple(parameters.items()))


@lru_cache(maxsize=4096)
def _cached_plan(
    op: Op, shardings: tuple[Sharding, ...], dtypes: tuple[np.dtype[Any], ...], parameters: tuple[tuple[str, Any], ...]
) -> tuple[Plan, _Said]:
    assert op.rule is not None
    rule = op.rule(*(sharding.shape for sharding in shardings), **dict(parameters))
    if not isinstance(rule, Rule):
        raise TypeError(f"the rule of {op.name} must be a Rule, got {rule!r}")
    if [len(axes) for axes in rule.operands] != [len(sharding.shape) for sharding in shardings]:
        shapes = ", ".join(str(sharding.shape) for sharding in shardings)
        raise ValueError(f"the rule of {op.name} is for operands of other shapes than {shapes}")
    itemsize = np.dtype(op.dtype(*dtypes)).itemsize
    chosen = plan(rule, shardings, [dtype.itemsize for dtype in dtypes], itemsize)
    return chosen, _said(op, shardings, dtypes, parameters)


def _said(op: Op, shardings: Sequence[Sharding], dtypes: Sequence[Any], parameters: Sequence[Any]) -> _Said:
    lie = [f"{dtype.name} {each.shape}, {each}" for each, dtype in zip(shardings, dtypes, strict=True)]
    said = f"{op.name} of {lie} {_plain(parameters)}"
    return zlib.crc32(said.encode()), said


def _plain(value: Any) -> Any:
    """`value`, alike where values are equal (1 and True), and without what no two ranks share: addresses of objects."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    if isinstance(value, bool | int | float | np.number):
        return float(value)
    return value if value is None or isinstance(value, str | np.dtype) else type(value).__name__


def _result(op: Op, local: Any, inputs: Sequence[DistArray], chosen: Plan) -> DistArray:
    mesh, xp = inputs[0].mesh, array_namespace(local)
    given, local = local, xp.asarray(local)
    if local.dtype.kind not in "biufc" and not is_floating(local.dtype):
        raise TypeError(f"{op.name} gives no array of numbers, but {type(given).__name__} ({local.dtype})")
    computed = _computed(op, inputs)
    if computed and any(not x.computed and xp.may_share_memory(local, x.local) for x in inputs):
        local = local.copy()  # a function of the user's gave its argument, or a view of it
    if op.rule is None:
        return DistArray(local, mesh, Sharding.of(mesh.layout, local.shape, {}), computed=computed)
    shape = chosen.result.local_shape(mesh.coordinates)
    if local.shape != shape:
        raise ValueError(f"the rule of {op.name} says that its result has shape {shape} here, but it has {local.shape}")
    return _settled(DistArray(local, mesh, chosen.result, computed=computed), op.name, chosen)


def _computed(op: Op, inputs: Sequence[DistArray]) -> bool:
    """Whether the result counts as computed: a view of a made array changes when that is written to."""
    return not op.views or all(x.computed for x in inputs)


def _settled(result: DistArray, name: str, chosen: Plan) -> DistArray:
    """New maxima and minima over shards are joined at once: hardly anything could be done with their terms."""
    new = {
        dim: Replicate()
        for dim in result.sharding.partial_dims
        if result.sharding.by_dim[dim] in (Partial("max"), Partial("min"))
        and not any(dim in operand.partial_dims for operand in chosen.operands)
    }
    if not new:
        return result
    joined = result.sharding.replacing(new)
    return moved(result, joined, operation=name, reason="the largest, or smallest, of all shards")


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

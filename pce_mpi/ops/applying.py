"""The one way in which all operations run.

`apply` brings the operands to where the rule wants them, runs the forward function on what this rank then holds, and
notes on the tape how to get from the gradient of the result to those of the operands. A vjp is written in operations
itself, so what holds for placements forward holds backward as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
import zlib

import numpy as np

from pce_mpi.arrays import array_namespace, is_real
from pce_mpi.dist_array import DistArray
from pce_mpi.ops.abstract import Abstract, AbstractMesh
from pce_mpi.ops.definition import Layout, Op
from pce_mpi.ops.operands import at_hand, moved, operands_of
from pce_mpi.ops.recording import record
from pce_mpi.ops.rules import Plan, Rule, plan
from pce_mpi.placements import Partial, Replicate
from pce_mpi.sharding import Sharding
from pce_mpi.tape import is_recording

__all__ = ["apply"]

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
    if not is_real(local.dtype):
        what = f"{type(given).__name__} ({local.dtype})"
        raise TypeError(f"{op.name} gives no array of bool, integers or real numbers, but {what}")
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

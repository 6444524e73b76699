"""Operations: forward, vjp and placement rule together, and the one way in which all of them run.

`apply` brings the operands to where the rule wants them, runs the forward function on what this rank then holds, and
notes on the tape how to get from the gradient of the result to those of the operands. A vjp is written in operations
itself, so what holds for placements forward holds backward as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
import zlib

import numpy as np

from pce_mpi.arrays import array_namespace, as_array, is_floating
from pce_mpi.dist_array import DistArray, over_text, redistribute
from pce_mpi.mesh import Mesh
from pce_mpi.ops.gradient import node_of
from pce_mpi.ops.rules import Plan, Rule, plan
from pce_mpi.placements import Partial, Replicate
from pce_mpi.sharding import Sharding
from pce_mpi.tape import Node, is_recording
from pce_mpi.transitions import Step, sent_bytes, steps

__all__ = ["Abstract", "AbstractMesh", "Layout", "Op", "Sent", "apply", "moved"]

Array = Any  # numpy.ndarray or cupy.ndarray
Vjp = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Op:
    """One operation. Its functions take the operands in order and the parameters by name.

    forward       the local arrays of the operands -> that of the result
    vjps          for each operand: gradient of the result, result, operands -> gradient of the operand, all of them
                  `DistArray`; None for an operand that has none
    rule          the global shapes of the operands -> `Rule`; None: the operation runs on Replicate operands
    dtype         the dtypes of the operands -> that of the result
    knows_layout  `forward` takes `layout` too, to know where the local arrays lie
    uses          for each of `vjps` the operands whose elements it uses, -1 for the result: what the tape has to hold.
                  Of the others a vjp sees where they lie, but no elements. None: all of them
    relays        the vjp gives the same elements in another order, shape or dtype: what is Partial stays so, as
                  it may be on its way to a parameter, whose gradients add up without communication
    keeps         `forward` returns something else besides, which the vjps take as `kept`
    sends         what `forward` sends itself, which only an operation does whose rule has labels that it joins
    """

    name: str
    forward: Callable[..., Any]
    vjps: Sequence[Vjp | None] = ()
    rule: Callable[..., Rule] | None = None
    dtype: Callable[..., Any] = np.result_type
    uses: Sequence[Sequence[int]] | None = None
    knows_layout: bool = False
    relays: bool = False
    keeps: bool = False
    sends: Callable[..., Sequence[Sent]] | None = None


@dataclass(frozen=True)
class Sent:
    """One collective: what this rank puts into it is `bytes`, payload only."""

    collective: str
    over: str
    bytes: int
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class Layout:
    """Where the local arrays of one call lie; `records` says of each operand whether it requires a gradient."""

    mesh: Mesh
    operands: tuple[Sharding, ...]
    result: Sharding
    records: tuple[bool, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result on this rank."""
        return self.result.local_shape(self.mesh.coordinates)

    def dims(self, axes: Sequence[int]) -> tuple[str, ...]:
        """The dims that shard `axes` of the first operand."""
        return tuple(dim for dim in self.mesh.dims if any(dim in self.operands[0].dims_of(axis) for axis in axes))

    def comm(self, axes: Sequence[int]) -> Any:
        """The communicator over those dims; None if there are none."""
        dims = self.dims(axes)
        return self.mesh.comm(*dims) if dims else None


class Abstract:
    """Stands for the local array where only placements are asked for."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype


class AbstractMesh(Mesh):
    """Dims without ranks; keeps what would be sent, and how each operand had to lie when it was first needed."""

    def __init__(self, dims: Mapping[str, int]) -> None:
        self.dims = dims
        self.layout = tuple(dims.items())
        self.coordinates = dict.fromkeys(dims, 0)
        self.sent: list[Sent] = []
        self.needed: dict[int, Sharding] = {}

    def note(self, checksum: int, what: str) -> None:
        """There are no other ranks to compare with."""


def apply(op: Op, *values: Any, **parameters: Any) -> Any:
    """The result of `op`; on the tape, if an operand requires a gradient."""
    operands = _operands(op.name, values)
    mesh = operands[0].mesh
    present = [_at_hand(x) for x in operands]
    chosen, checksum = _plan(op, present, parameters)
    mesh.note(checksum, op.name)
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
        return _settled(DistArray(local, mesh, chosen.result, computed=True), op.name, chosen)
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
            _record(op, result, operands, inputs, required, parameters, kept)
        made: Any = type(local) if hasattr(local, "_fields") else lambda *parts: parts  # numpy.linalg names some parts
        return made(*results)
    result = _result(op, local, inputs, chosen)
    _record(op, result, operands, inputs, required, parameters, kept)
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


def moved(x: DistArray, target: Sharding, *, operation: str, reason: str) -> DistArray:
    """`x`, lying as `target` says. What had to be sent for that is kept with a computed array, and not sent twice."""
    if isinstance(x.mesh, AbstractMesh):
        x.mesh.needed.setdefault(id(x), target)
    if x.sharding == target:
        return x
    if x.moved and target in x.moved:
        return x.moved[target]
    sending = [step for step in steps(x.sharding, target) if step.sends]
    if isinstance(x.mesh, AbstractMesh):
        x.mesh.sent += [_sent(step, x) for step in sending]
        there = DistArray(x.local, x.mesh, target)
    else:
        there = redistribute(x, target, operation=operation, reason=reason)
    if sending and x.moved is not None:  # a made array may be written to, by a step of SGD for one
        x.moved[target] = there
    return there


def _at_hand(x: DistArray) -> DistArray:
    """`x`, reduced if it is Partial and has been reduced already: then that costs nothing any more."""
    return x.moved.get(x.sharding.natural, x) if x.moved else x


def _sent(step: Step, x: DistArray) -> Sent:
    itemsize = max(4, x.dtype.itemsize) if is_floating(x.dtype) else x.dtype.itemsize  # halves travel as float32
    size = sent_bytes(step, x.mesh.coordinates, itemsize)
    return Sent(step.verb, over_text(step.dims), size, step.placement_before, step.placement_after)


def _operands(name: str, values: Sequence[Any]) -> list[DistArray]:
    """`values` as distributed arrays of one mesh: plain arrays and numbers are Replicate."""
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
        else:
            array = as_array(value, f"operand {index} of {name}")
            shape = array.shape
        operands.append(DistArray(array, first.mesh, Sharding.of(first.mesh.layout, shape, {})))
    return operands


def _plan(op: Op, operands: Sequence[DistArray], parameters: Mapping[str, Any]) -> tuple[Plan, int]:
    """How to run `op`, and a checksum of all that has to be the same on every rank."""
    shardings, dtypes = tuple(x.sharding for x in operands), tuple(x.dtype for x in operands)
    if op.rule is None:  # not kept: such operations are made for one call, and hold what they were made of
        replicated = Plan(tuple(sharding.replicated for sharding in shardings), shardings[0].replicated)
        return replicated, _checksum(op, shardings, dtypes, ())
    try:
        return _cached_plan(op, shardings, dtypes, tuple(parameters.items()))
    except TypeError:  # parameters of a user's operation that cannot be hashed; or an error of the rule's, once more
        return _cached_plan.__wrapped__(op, shardings, dtypes, tuple(parameters.items()))


@lru_cache(maxsize=4096)
def _cached_plan(
    op: Op, shardings: tuple[Sharding, ...], dtypes: tuple[np.dtype[Any], ...], parameters: tuple[tuple[str, Any], ...]
) -> tuple[Plan, int]:
    assert op.rule is not None
    rule = op.rule(*(sharding.shape for sharding in shardings), **dict(parameters))
    if not isinstance(rule, Rule):
        raise TypeError(f"the rule of {op.name} must be a Rule, got {rule!r}")
    if [len(axes) for axes in rule.operands] != [len(sharding.shape) for sharding in shardings]:
        shapes = ", ".join(str(sharding.shape) for sharding in shardings)
        raise ValueError(f"the rule of {op.name} is for operands of other shapes than {shapes}")
    itemsize = np.dtype(op.dtype(*dtypes)).itemsize
    chosen = plan(rule, shardings, [dtype.itemsize for dtype in dtypes], itemsize)
    return chosen, _checksum(op, shardings, dtypes, parameters)


def _checksum(op: Op, shardings: Sequence[Sharding], dtypes: Sequence[Any], parameters: Sequence[Any]) -> int:
    shapes = [(sharding.shape, str(sharding)) for sharding in shardings]
    return zlib.crc32(repr((op.name, shapes, [dtype.name for dtype in dtypes], parameters)).encode())


def _result(op: Op, local: Any, inputs: Sequence[DistArray], chosen: Plan) -> DistArray:
    mesh, xp = inputs[0].mesh, array_namespace(local)
    given, local = local, xp.asarray(local)
    if local.dtype.kind not in "biufc" and not is_floating(local.dtype):
        raise TypeError(f"{op.name} gives no array of numbers, but {type(given).__name__} ({local.dtype})")
    # A view of a made array changes when that is written to, and counts as made.
    computed = not any(x.moved is None and xp.may_share_memory(local, x.local) for x in inputs)
    if op.rule is None:
        return DistArray(local, mesh, Sharding.of(mesh.layout, local.shape, {}), computed=computed)
    shape = chosen.result.local_shape(mesh.coordinates)
    if local.shape != shape:
        raise ValueError(f"the rule of {op.name} says that its result has shape {shape} here, but it has {local.shape}")
    return _settled(DistArray(local, mesh, chosen.result, computed=computed), op.name, chosen)


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


def _record(
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
        (found,) = _operands(op.name, [gradient, found])[1:]
    shape, dtype = want
    if found.shape != shape:
        raise ValueError(f"the vjp of {op.name} for operand {index} gave shape {found.shape}, the operand has {shape}")
    return found if found.dtype == dtype else DistArray(found.local.astype(dtype), found.mesh, found.sharding)

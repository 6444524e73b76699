"""Run an operation on distributed arrays.

`apply` brings the operands to the shardings of the plan, runs the forward function on the local arrays, and puts a node
on the tape that computes the gradients of the operands. A vjp is made of operations too, so the same placement rules
hold backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from operator import attrgetter, is_
from typing import Any
import zlib

import numpy as np

from pce_mpi.arrays import REAL, array_namespace, is_float8, is_half, is_real
from pce_mpi.autograd.op import Call, Op, operands_of
from pce_mpi.autograd.recording import put_on_tape
from pce_mpi.autograd.rules import Plan, Rule, plan
from pce_mpi.autograd.tape import is_grad_enabled
from pce_mpi.comm.tracing import cause, listeners
from pce_mpi.distributed.array import DistArray, redistribute
from pce_mpi.distributed.fingerprint import announce_result
from pce_mpi.distributed.mesh import text_of_dims
from pce_mpi.distributed.placements import Partial, Replicate
from pce_mpi.distributed.sharding import Sharding, steps
from pce_mpi.exact.arithmetic import Arithmetic, current

# These run without entering a Python function, several times for every operation.
_SHARDING, _LOCAL, _DTYPE = attrgetter("sharding"), attrgetter("local"), attrgetter("local.dtype")
_REQUIRES_GRAD = attrgetter("requires_grad")

#: the sharding in which each operand was first needed, by its id; None unless `infer_placements` asks
moves: ContextVar[dict[int, Sharding] | None] = ContextVar("moves", default=None)


def redistributed(x: DistArray, destination: Sharding) -> DistArray:
    """Return `x` in sharding `destination`; a computed array keeps a copy that took communication."""
    _note_move(x, destination)
    if x.sharding is destination:
        return x
    if x.copies and destination in x.copies:
        return x.copies[destination]
    there = redistribute(x, destination)
    if x.copies is not None and any(step.sends for step in steps(x.sharding, destination)):
        x.copies[destination] = there
    return there


def _note_move(x: DistArray, destination: Sharding) -> None:
    if (noted := moves.get()) is not None:
        noted.setdefault(id(x), destination)


def apply(op: Op, *values: Any, **parameters: Any) -> Any:
    """Return the result of `op`, or a tuple of them, on the tape if an operand requires a gradient."""
    operands = operands_of(op.name, values)
    mesh = operands[0].mesh
    # A Partial operand that was reduced before has a copy, which costs nothing.
    present = [x.copies.get(x.sharding.natural, x) if x.copies else x for x in operands]
    arithmetic = current()
    planned = _planned(op, present, parameters, arithmetic)
    checksum, text = planned.checksum, planned.text
    for x, value in zip(operands, values, strict=True):
        if x is not value and x.local.shape == ():
            text += _number(value, x)
    mesh.note(checksum if text is planned.text else zlib.crc32(text.encode()), op.name, text)
    if planned.form is op.composition:
        return op.composition(*operands, **parameters)
    inputs = _inputs(op, present, planned)
    required = tuple(map(_REQUIRES_GRAD, operands)) if is_grad_enabled() else (False,) * len(operands)
    call = Call(arithmetic.functions, inputs, planned.plan, required, planned.summed)
    arrays = list(map(_LOCAL, inputs))
    with np.errstate(all="ignore"):  # a value that one rank finds in its shard must not raise there alone
        if planned.form is op.exact:
            local = _exactly(op, call, planned, arrays, parameters)
        elif planned.widens:
            local = op.forward(call, *map(_wide, arrays), **parameters).astype(planned.dtype, copy=False)
        else:
            local = op.forward(call, *arrays, **parameters)
    several = isinstance(local, tuple | list) and all(hasattr(part, "shape") for part in local)
    results = list(map(_result, repeat(op), local if several else (local,), repeat(inputs), repeat(planned)))
    if listeners():
        for result in results:
            announce_result(op.name, result)
    put_on_tape(op, results, operands, inputs, required, parameters, call.residuals)
    return tuple(results) if several else results[0]


def _wide(array: Any) -> Any:
    return array.astype(np.float32) if is_half(array.dtype) else array


def _exactly(op: Op, call: Call, planned: _Planned, arrays: Sequence[Any], parameters: Mapping[str, Any]) -> Any:
    """Return the local array of a result whose sums are reduced at once."""
    if call.summed:
        call.mesh.agree(call.summed, op.name, {"call": planned.text})
    with cause(op.name, text_of_dims(call.summed), "its sums are reduced exactly", "Partial('sum')", "Replicate()"):
        return planned.form(call, *arrays, **parameters)


def _inputs(op: Op, operands: list[DistArray], planned: _Planned) -> list[DistArray]:
    """Return the operands in the shardings of the plan."""
    if all(map(is_, map(_SHARDING, operands), planned.plan.operands)):
        return operands
    inputs = []
    for index, (x, destination) in enumerate(zip(operands, planned.plan.operands, strict=True)):
        _note_move(x, destination)
        if x.sharding is not destination:
            placed = x.sharding.by_dim
            new = any(destination.by_dim[dim] != placed[dim] for dim in destination.partial_dims)
            if new and x.local.dtype != planned.dtype:
                # The operand becomes a partial of the result, in the result's dtype: integers have no Partial("avg").
                x = DistArray(x.local.astype(planned.dtype), x.mesh, x.sharding)
            with cause(op.name, reason=_reason(op, index, x.sharding, destination)):
                x = redistributed(x, destination)
        inputs.append(x)
    return inputs


def _reason(op: Op, index: int, before: Sharding, after: Sharding) -> str:
    """Return the reason for which an operand is brought from `before` to `after`."""
    if op.rule is None:
        return f"no rule for {op.name}: operand {index} is replicated"
    if set(before.partial_dims) - set(after.partial_dims):
        return f"operand {index} is Partial and has to be reduced first"
    return f"operand {index} is placed so for the fewest bytes"


@dataclass(frozen=True)
class _Planned:
    """A planned call; `text`, whose checksum is `checksum`, has all that must be the same on every rank.

    `form` is the function that computes; if `widens`, it takes halves as float32. `dtype` is the expected dtype of the
    result. `reduced` is the sharding of the result after new maxima and minima over shards are reduced: few operations
    take Partial ones. `summed` has the dims over which the operation itself reduces its sums.
    """

    plan: Plan
    form: Callable[..., Any]
    widens: bool
    dtype: np.dtype[Any]
    reduced: Sharding
    checksum: int
    text: str
    summed: tuple[str, ...]

    @staticmethod
    def of(
        op: Op,
        plan: Plan,
        operands: Sequence[Sharding],
        dtypes: Sequence[Any],
        parameters: Iterable[Any],
        arithmetic: Arithmetic,
    ) -> _Planned:
        form = arithmetic.form(op)
        summed = plan.result.summed_dims if form is op.exact else ()
        plan = Plan(plan.operands, plan.result.replacing(dict.fromkeys(summed, Replicate())))
        new = {
            dim: Replicate()
            for dim in plan.result.partial_dims
            if plan.result.by_dim[dim] in (Partial("max"), Partial("min"))
            and not any(dim in operand.partial_dims for operand in plan.operands)
        }
        placed = [f"{dtype.name} {each.shape}, {each}" for each, dtype in zip(operands, dtypes, strict=True)]
        text = f"{arithmetic.prefix}{op.name} of {placed} {_plain(tuple(parameters))}"
        widens = op.wide and any(map(is_half, dtypes))
        return _Planned(
            plan,
            form,
            widens,
            np.dtype(op.dtype(*dtypes)),
            plan.result.replacing(new),
            zlib.crc32(text.encode()),
            text,
            summed,
        )


def _planned(op: Op, operands: Sequence[DistArray], parameters: Mapping[str, Any], arithmetic: Arithmetic) -> _Planned:
    shardings, dtypes = tuple(map(_SHARDING, operands)), tuple(map(_DTYPE, operands))
    items = tuple(parameters.items())
    if op.rule is None:  # not cached: such operations are made for one call, and the cache would keep their functions
        _check_float8(op, dtypes)
        replicated = Plan(tuple(sharding.replicated for sharding in shardings), shardings[0].replicated)
        return _Planned.of(op, replicated, shardings, dtypes, items, arithmetic)
    try:
        return _cached(op, shardings, dtypes, items, arithmetic)
    except TypeError:  # parameters that cannot be hashed, or an error of the rule, which is raised again
        return _cached.__wrapped__(op, shardings, dtypes, items, arithmetic)


@lru_cache(maxsize=4096)
def _cached(
    op: Op,
    shardings: tuple[Sharding, ...],
    dtypes: tuple[np.dtype[Any], ...],
    parameters: tuple[tuple[str, Any], ...],
    arithmetic: Arithmetic,
) -> _Planned:
    assert op.rule is not None
    _check_float8(op, dtypes)
    rule = op.rule(*(sharding.shape for sharding in shardings), **dict(parameters))
    if not isinstance(rule, Rule):
        raise TypeError(f"the rule of {op.name} must be a Rule, got {rule!r}")
    if [len(axes) for axes in rule.operands] != [len(sharding.shape) for sharding in shardings]:
        shapes = ", ".join(str(sharding.shape) for sharding in shardings)
        raise ValueError(f"the rule of {op.name} is for operands of other shapes than {shapes}")
    itemsize = np.dtype(op.dtype(*dtypes)).itemsize
    chosen = plan(arithmetic.rule(op, rule), shardings, [dtype.itemsize for dtype in dtypes], itemsize)
    return _Planned.of(op, chosen, shardings, dtypes, parameters, arithmetic)


def _check_float8(op: Op, dtypes: Sequence[np.dtype[Any]]) -> None:
    if op.name != "astype" and any(map(is_float8, dtypes)):
        given = ", ".join(dtype.name for dtype in dtypes)
        raise TypeError(f"{op.name} takes {REAL}, got {given}: convert it first, as by .astype(np.float32)")


def _number(value: Any, operand: DistArray) -> str:
    """Return the text of the number `value`, from which the 0-d `operand` was made; "" for an array on a GPU.

    Numbers that are equal in the operand's dtype have the same text, and so have all nan; 0.0 and -0.0 differ.
    """
    if not isinstance(value, int | float | np.generic | np.ndarray):
        return ""
    return f" with {np.asarray(value).astype(operand.local.dtype).item()}"


def _plain(value: Any) -> Any:
    """Return `value` in a form that is the same on every rank: 1 for True, and no addresses of objects."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return float(value) + 0.0  # -0.0 is 0.0, which has the same plan in the cache
    return value if value is None or isinstance(value, str | np.dtype) else type(value).__name__


def _result(op: Op, local: Any, inputs: Sequence[DistArray], planned: _Planned) -> DistArray:
    mesh, xp = inputs[0].mesh, array_namespace(local)
    given, local = local, xp.asarray(local)
    if not is_real(local.dtype):
        what = f"{type(given).__name__} ({local.dtype})"
        raise TypeError(f"{op.name} must give an array of {REAL}, got {what}")
    # A view of a made array changes when the made array is written to.
    computed = not op.views or all(x.computed for x in inputs)
    if computed:
        for x in inputs:
            if x.copies is None and xp.may_share_memory(local, x.local):
                local = local.copy()  # a user's function returned its argument, or a view of it
    if op.rule is None:
        return DistArray(local, mesh, Sharding.of(mesh.dim_sizes, local.shape, {}), computed=computed)
    shape = planned.plan.result.local_shape(mesh.coordinates)
    if local.shape != shape:
        raise ValueError(f"the rule of {op.name} says that its result has shape {shape} here, but it has {local.shape}")
    result = DistArray(local, mesh, planned.plan.result, computed=computed)
    if planned.reduced is result.sharding:
        return result
    with cause(op.name, reason="the largest, or smallest, of all shards"):
        return redistributed(result, planned.reduced)

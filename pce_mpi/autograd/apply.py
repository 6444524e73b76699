"""Run an operation on distributed arrays: its definition, its operands, `apply`, and what goes on the tape.

`apply` brings the operands to the shardings of the plan, runs the forward function on the local arrays, and puts a node
on the tape that computes the gradients of the operands. A vjp is made of operations too, so the same placement rules
hold backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from inspect import signature
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, TypeVar, cast
import zlib

import numpy as np

from pce_mpi.arrays import (
    REAL,
    DType,
    array_namespace,
    as_array,
    check_one_library,
    checksum_of,
    is_float8,
    is_floating,
    is_half,
    is_real,
    result_type,
)
from pce_mpi.autograd.gradients import place_of
from pce_mpi.autograd.rules import Plan, Rule, plan
from pce_mpi.autograd.tape import Node, is_grad_enabled
from pce_mpi.comm.tracing import cause, current_scope, listeners, set_scope
from pce_mpi.distributed.array import OPERATIONS, DistArray, redistribute
from pce_mpi.distributed.fingerprint import announce_result
from pce_mpi.distributed.mesh import Mesh, text_of_dims
from pce_mpi.distributed.placements import Partial, Placement, Replicate
from pce_mpi.distributed.sharding import Sharding, steps
from pce_mpi.exact.arithmetic import Arithmetic, converted, current
from pce_mpi.hints import hinted
from pce_mpi.hollow import Allocation, Hollow, hollow, open_ledger

Vjp = Callable[..., Any]
Arrays = Sequence[DistArray]
Shardings = tuple[Sharding, ...]
DTypes = tuple[DType, ...]
Items = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, eq=False)
class Op:
    """One operation. Its functions take the operands in order and the parameters by name.

    forward      the call, the local arrays of the operands -> that of the result, or a tuple of several
    vjps         for each operand: gradient of the result, result, operands -> gradient of the operand, all of them
                 `DistArray`; None for an operand that has none. If several results are real numbers the first two are
                 tuples, with zeros for the gradient of a result that nothing was computed from
    rule         the global shapes of the operands -> `Rule`; None: the operation runs on Replicate operands
    dtype        the dtypes of the operands -> that of the result
    uses         for each of `vjps` the operands whose elements it uses, -1 for the result; the tape holds only these.
                 A vjp sees the shardings of the others, but no elements. None: all of them
    wide         `forward` takes halves as float32, and its result is rounded once
    wide_sums    the operands whose gradient, if Partial and wider than they are, is reduced before it is rounded to
                 their dtype; of others each rank rounds its own term
    relays       the vjp gives the same elements in another order, shape or dtype: a Partial gradient stays Partial,
                 as it may be on its way to a parameter, whose gradients add up without communication
    views        the result of `forward` may share the memory of an operand
    exact        `forward` in the reproducible arithmetic, for operations that sum, or whose bits would depend on a
                 library: it reduces the sums itself over `call.summed_comm`, so that the result is not Partial
    composition  in the reproducible arithmetic, takes the operands as `DistArray` and is made of other operations
    variant      what tells the operation from others of its name, if operands and parameters do not: ranks compare it
    compared     the shardings of the operands, the parameters by name -> for operands whose elements `forward` compares
                 between ranks itself, the dims along which it does
    """

    name: str
    forward: Callable[..., Any]
    vjps: Sequence[Vjp | None] = ()
    rule: Callable[..., Rule] | None = None
    dtype: Callable[..., Any] = result_type
    uses: Sequence[Sequence[int]] | None = None
    wide: bool = False
    wide_sums: Sequence[int] = ()
    relays: bool = False
    views: bool = False
    exact: Callable[..., Any] | None = None
    composition: Callable[..., Any] | None = None
    variant: str = ""
    compared: Callable[..., Mapping[int, Sequence[str]]] | None = None


class Call:
    """One call of an operation: the facts beside the local arrays, and the residuals for its vjps.

    `operands` and `result` are shardings; `required` says of each operand whether it requires a gradient, and `summed`
    has the dims over which `exact` reduces its sums. `functions(array)` is the library that computes elementwise
    functions other than `+ - * /`. If `forward` sets `residuals`, the vjps take them by that name.
    """

    __slots__ = ("functions", "mesh", "operands", "required", "residuals", "result", "summed")

    def __init__(
        self,
        functions: Callable[[Any], Any],
        inputs: Sequence[DistArray],
        planned: Plan,
        required: tuple[bool, ...],
        summed: tuple[str, ...],
    ) -> None:
        self.functions, self.mesh, self.required, self.summed = functions, inputs[0].mesh, required, summed
        self.operands, self.result = planned.operands, planned.result
        self.residuals: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result on this rank."""
        return self.result.local_shape(self.mesh.coordinates)

    def dims(self, axes: Sequence[int], operand: int = 0) -> tuple[str, ...]:
        """Return the dims that shard `axes` of an operand."""
        return self.operands[operand].dims_along(axes)

    @property
    def summed_comm(self) -> Any:
        """The communicator over the dims whose sums are reduced; None if there are none."""
        return self.mesh.comm(*self.summed) if self.summed else None


Function = TypeVar("Function", bound=Callable[..., Any])


def operation(function: Function) -> Function:
    """Enter `function` into `OPERATIONS` by its name."""
    OPERATIONS[function.__name__] = function
    return function


def of_array(function: Function) -> Function:
    """Make `function` raise `TypeError` if its first argument is not a distributed array."""

    first = next(iter(signature(function).parameters))

    @wraps(function)
    def checked(*arguments: Any, **options: Any) -> Any:
        x = arguments[0] if arguments else options.get(first)
        if not isinstance(x, DistArray):
            name, kind = function.__name__, type(x).__name__
            raise TypeError(f"{name} takes a DistArray, got {kind}; make one with pce_mpi.distribute")
        return function(*arguments, **options)

    return cast(Function, checked)


def operands_of(name: str, values: Sequence[Any]) -> list[DistArray]:
    """Return `values` as distributed arrays of one mesh and one library; plain arrays and numbers are Replicate."""
    for first in values:
        if isinstance(first, DistArray):
            break
    else:
        raise TypeError(f"{name} takes at least one DistArray; make one with pce_mpi.distribute")
    operands = []
    alike = True
    for index, value in enumerate(values):
        if isinstance(value, DistArray):
            if value.mesh is not first.mesh:
                text = f"{name} takes operands of one mesh, got {first.mesh} and another {value.mesh}"
                raise ValueError(hinted(text, "two meshes"))
            operand = value
        else:
            array = _plain_operand(value, values, first, f"operand {index} of {name}")
            array = hollow(array.shape, array.dtype) if first.mesh.is_hollow else array
            operand = DistArray(array, first.mesh, Sharding.of(first.mesh.dim_sizes, array.shape, {}))
        alike = alike and type(operand.local) is type(first.local)
        operands.append(operand)
    if not alike:
        check_one_library({f"operand {index} of {name}": operand.local for index, operand in enumerate(operands)})
    return operands


def _plain_operand(value: Any, values: Sequence[Any], first: DistArray, name: str) -> Any:
    """Return a number or a plain array among `values` as an array of the library of `first`."""
    xp = array_namespace(first.local)
    if type(value) in (bool, int, float):
        # As in NumPy, a Python number takes the dtype of the arrays that it meets.
        dtype = result_type(*(each.dtype for each in values if hasattr(each, "dtype")))
        return xp.asarray(value, dtype if is_floating(dtype) else np.result_type(dtype, value))
    array = xp.asarray(value) if isinstance(value, np.generic) else as_array(value, name)
    if not is_real(array.dtype):
        raise TypeError(f"{name} must be {REAL}, got {array.dtype}")
    return array


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
    passed: list[tuple[str, int]] = []
    for index, (x, value) in enumerate(zip(operands, values, strict=True)):
        if x is not value and x.local.shape == ():
            text += _number(value, x)
        elif x is not value and planned.replicas[index] and type(x.local) is np.ndarray:
            # An array on a GPU is not compared: reading its checksum would wait for the GPU in each call.
            passed.append((f"of shape {x.local.shape} as operand {index} of {op.name}", checksum_of(x.local)))
    mesh.note(checksum if text is planned.text else zlib.crc32(text.encode()), op.name, text, passed)
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
    more = parameters if call.residuals is None else {**parameters, "residuals": call.residuals}
    put_on_tape(op, results, operands, inputs, required, more)
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
    take Partial ones. `summed` has the dims over which the operation itself reduces its sums. `replicas` says of each
    operand whether ranks hold the same elements of it, which they would not notice to differ.
    """

    plan: Plan
    form: Callable[..., Any]
    widens: bool
    dtype: np.dtype[Any]
    reduced: Sharding
    checksum: int
    text: str
    summed: tuple[str, ...]
    replicas: tuple[bool, ...]

    @staticmethod
    def of(
        op: Op, plan: Plan, operands: Shardings, dtypes: DTypes, parameters: Items, arithmetic: Arithmetic
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
        several = any(size > 1 for _, size in operands[0].dims)
        variant = op.variant and f", {op.variant}"
        text = f"{arithmetic.prefix}{op.name} of {placed} {_plain(parameters, several)}{variant}"
        widens = op.wide and any(map(is_half, dtypes))
        result = np.dtype(op.dtype(*dtypes)), plan.result.replacing(new)
        compared: Mapping[int, Sequence[str]] = {}
        if op.compared and form is not op.composition:
            compared = op.compared(*plan.operands, **dict(parameters))
        replicas = tuple(
            not set(sharding.unsharded_dims) <= set(compared.get(index, ()))
            for index, sharding in enumerate(plan.operands)
        )
        return _Planned(plan, form, widens, *result, zlib.crc32(text.encode()), text, summed, replicas)


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
def _cached(op: Op, shardings: Shardings, dtypes: DTypes, parameters: Items, arithmetic: Arithmetic) -> _Planned:
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


def _plain(value: Any, several: bool) -> Any:
    """Return `value` in a form that is the same on every rank: 1 for True, and no addresses of objects.

    With `several` ranks an array is there by its checksum.
    """
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value, repeat(several)))
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return float(value) + 0.0  # -0.0 is 0.0, which has the same plan in the cache
    if several and type(value) is np.ndarray:
        bits = f" with checksum {checksum_of(value):08x}" if is_real(value.dtype) else ""
        return f"{value.dtype} {value.shape}{bits}"
    return value if value is None or isinstance(value, str | np.dtype) else type(value).__name__


def _result(op: Op, local: Any, inputs: Sequence[DistArray], planned: _Planned) -> DistArray:
    mesh, xp = inputs[0].mesh, array_namespace(local)
    given, local = local, xp.asarray(local)
    if not is_real(local.dtype) and not (op.name == "astype" and is_float8(local.dtype)):
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


def put_on_tape(
    op: Op, results: Arrays, operands: Arrays, inputs: Arrays, required: tuple[bool, ...], more: Mapping[str, Any]
) -> None:
    """Put the `results` that are real numbers on the tape; `more` are keyword arguments of the vjps.

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


def redistribute_on_tape(x: DistArray, /, **placements: Placement) -> DistArray:
    """Bring `x` to other placements; see `DistArray.redistribute`."""
    destination = x.sharding.with_placements(placements)
    with cause("redistribute", reason="asked for"):
        there = redistributed(x, destination)
    result = DistArray(there.local, x.mesh, destination, computed=there.computed)
    if x.requires_grad and is_grad_enabled():
        natural = x.sharding.natural

        def vjp(gradients: Sequence[DistArray]) -> list[DistArray]:
            with cause("redistribute", reason="back to the placements of its operand"):
                return [redistribute(gradients[0], natural)]

        result.requires_grad = True
        result.place = Node("redistribute", [place_of(x)], vjp, 1, current()), 0
    return result

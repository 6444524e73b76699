"""The definition of an operation, forward, vjp and placement rule together, and its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

import numpy as np

from pce_mpi.arrays import REAL, array_namespace, as_array, check_one_library, is_floating, is_real, result_type
from pce_mpi.autograd.rules import Plan, Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.operators import OPERATIONS
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.hollow import hollow

Vjp = Callable[..., Any]


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
                raise ValueError(f"{name} takes operands of one mesh, got {first.mesh} and another {value.mesh}")
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

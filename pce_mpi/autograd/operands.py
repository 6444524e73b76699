"""The operands of an operation: distributed arrays, plain arrays and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

import numpy as np

from pce_mpi.arrays import REAL, array_namespace, as_array, check_one_library, is_floating, is_real
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.hollow import hollow

Function = TypeVar("Function", bound=Callable[..., Any])


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
        dtype = np.result_type(*(each.dtype for each in values if hasattr(each, "dtype")))
        return xp.asarray(
            value, dtype if is_floating(dtype) else np.result_type(dtype, value)
        )  # bfloat16 is not NumPy's
    array = xp.asarray(value) if isinstance(value, np.generic) else as_array(value, name)
    if not is_real(array.dtype):
        raise TypeError(f"{name} must be {REAL}, got {array.dtype}")
    return array

"""The operands of an operation: made distributed arrays, and brought to where its rule wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, as_array, check_one_library, is_floating
from pce_mpi.autograd.abstract import Abstract, AbstractMesh, sent_by
from pce_mpi.distributed.dist_array import DistArray, redistribute
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.distributed.transitions import steps

__all__ = ["at_hand", "moved", "operands_of"]


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

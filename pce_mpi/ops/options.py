"""The options of losses of distributed arrays: what the user gives is checked, shardings add to it; and their rule."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
import math
from types import MappingProxyType
from typing import Any

import numpy as np

from pce_mpi.arrays import REAL, array_namespace, as_array, check_one_library, is_real
from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.op import Call, Op
from pce_mpi.autograd.rules import Axis, Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.loss.chunks import check_product
from pce_mpi.loss.options import Options, Reduction
from pce_mpi.loss.problem import check_per_class

Shape = tuple[int, ...]

_OPERANDS = ("bias", "rows", "weight")


def rule_of_loss(logits: Shape, operands: Sequence[tuple[Axis, ...]], axis: int, reduction: str) -> Rule:
    """Return the rule of a loss whose first operand has the logits: it merges sharded classes, reduces sharded rows."""
    labels = operands[0]
    rows = labels[:axis] + labels[axis + 1 :]
    reduced = not (isinstance(reduction, str) and reduction == Reduction.NONE)  # checked by every rank, later
    merged: set[Hashable] = {labels[axis].label} | ({row.label for row in rows} if reduced else set())
    return Rule(
        tuple(operands),
        () if reduced else rows,
        () if reduced else logits[:axis] + logits[axis + 1 :],
        merged=frozenset(merged),
    )


def parameters_of(options: Options, known: type[Any]) -> dict[str, Any]:
    """Return the options of the TypedDict `known` that are parameters of an operation; the others are operands."""
    return {name: getattr(options, name) for name in known.__annotations__ if name not in _OPERANDS}


def checked_operands(
    operands: Mapping[str, DistArray],
    given: Mapping[str, Any],
    rows: Shape,
    classes: int,
    probabilities: Shape | None = None,
    shapes: Mapping[str, Shape] = MappingProxyType({}),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `given` as checked arrays, and no parameters; after an error, zeros for wrong arrays, and it in `found`.

    `given` has class numbers, of the shape `rows`, or `probabilities`, arrays of the `shapes` of their names, and
    arrays of one entry per class; those of `_OPERANDS` may be None. The error may be that of this rank alone: the
    agreement of the loss tells the other ranks, to which this one comes by the same redistributions.
    """
    present = {name: value for name, value in given.items() if value is not None or name not in _OPERANDS}
    try:
        arrays = {
            name: value if isinstance(value, DistArray) else as_array(value, name) for name, value in present.items()
        }
        for name, array in arrays.items():
            if name in shapes:
                if array.shape != shapes[name]:
                    raise ValueError(f"{name} must have the shape {shapes[name]}, got {array.shape}")
            elif name in _OPERANDS:
                check_per_class(name, array, classes)
            elif array.shape not in (rows, probabilities):
                kinds = f"have shape {rows} or, as probabilities, {probabilities}"
                expected = f"be class numbers of shape {rows}" if probabilities is None else kinds
                raise ValueError(f"{name} must {expected}, got {array.dtype} of {array.shape}")
        everything = {**operands, **arrays}
        for name, array in everything.items():
            if not is_real(array.dtype):
                raise TypeError(f"{name} must be {REAL}, got {array.dtype}")
        check_one_library({name: x.local if isinstance(x, DistArray) else x for name, x in everything.items()})
        if "bias" in arrays:
            check_product({**operands, "bias": arrays["bias"]})
    except Exception as error:
        first, *_ = operands.values()
        xp = array_namespace(first.local)

        def stand_in(name: str, value: Any) -> Any:
            shape = shapes.get(name, (classes,) if name in _OPERANDS else rows)
            ndim = None if name in _OPERANDS or name in shapes else getattr(value, "ndim", None)
            if probabilities is not None and ndim == len(probabilities):
                shape = probabilities
            dtype = getattr(value, "dtype", None)
            known = isinstance(dtype, np.dtype) and is_real(dtype)
            if isinstance(value, DistArray) and (value.shape, array_namespace(value.local)) == (shape, xp) and known:
                return value
            return xp.zeros(shape, dtype if known else np.int64)

        return {name: stand_in(name, value) for name, value in present.items()}, {"found": [error]}
    return arrays, {}


def shape_of_several(numbers: Any, name: str, shape: Shape, axis: int) -> Shape | None:
    """Return the shape of several class numbers a row, which is `shape` but for `axis`; None if they are not."""
    with suppress(Exception):  # `checked_operands` finds it again, and tells
        array = numbers if isinstance(numbers, DistArray) else as_array(numbers, name)
        found: Shape = array.shape
        if array.dtype.kind in "iu" and found == (*shape[:axis], found[axis], *shape[axis + 1 :]):
            return found
    return None


def apply_checked(op: Op, *operands: Any, **parameters: Any) -> Any:
    """Apply `op`; an error that `checked_operands` has found is told even if operands are redistributed first."""
    if "found" not in parameters:
        return apply(op, *operands, **parameters)
    with operands[0].mesh.telling(*parameters["found"]):
        return apply(op, *operands, **parameters)


def sharded_options(
    call: Call,
    operation: str,
    classes: Sequence[int],
    rows: Sequence[int] = (),
    /,
    *,
    classes_of: int = 0,
    **options: Any,
) -> Options:
    """Return `options` with the communicators over which classes and rows are sharded.

    `rows` are axes of the first operand, and `classes` axes of the operand with the number `classes_of`.
    """
    mesh, shape = call.mesh, call.operands[classes_of].shape
    dims, batch_dims = call.dims(classes, classes_of), call.dims(rows)
    comm, over = mesh.along(dims) if dims else (None, "")
    batch_comm, batch_over = mesh.along(batch_dims) if batch_dims else (None, "")
    return Options(
        operation=operation,
        comm=comm,
        num_classes=math.prod(shape[axis] for axis in classes) or None,  # no classes raise an error of their own
        over=over,
        batch_comm=batch_comm,
        batch_over=batch_over,
        **options,
    )

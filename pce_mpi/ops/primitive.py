"""A function of logits on distributed arrays, from one record: its checks, rule, forward function and vjps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import REAL, Array, Shape, array_namespace, as_array, check_one_library, compute_dtype_of, is_real
from pce_mpi.autograd.apply import Call, Op, apply
from pce_mpi.autograd.rules import Axes, Axis, Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.mesh import Mesh
from pce_mpi.distributed.placements import Shard
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.kernels import standard_arithmetic
from pce_mpi.loss.chunks import check_product
from pce_mpi.loss.options import Options, Reduction
from pce_mpi.loss.problem import check_per_class
from pce_mpi.ops.shape import normalized_axis

_OPTIONAL = ("bias", "rows", "weight")  # options that are operands
_COMPARED = ("targets", "ids", "rows", "hidden")


@dataclass(frozen=True, eq=False)
class Primitive:
    """A function of logits, or of their factors `hidden @ w`, whose rows and classes may be sharded.

    axes         the axes of each operand by name: "r" for all rows, "c" for the classes, in their place among the rows,
                 "n" for any number in that place, "f" for features, which are not sharded; "|" between alternatives.
                 Logits or factors come first, then those of which some calls have none
    known        the TypedDict of its options
    forward      the call, the options and the other operands on this rank -> the result, or a tuple, and residuals
    gradients    for each operand that has one: the upstream gradient, or a list of them, residuals -> the gradient
    dtype        the dtypes of the operands -> that of the result
    result       the operand whose axes the result has; None: it has the rows, or what `reduction` leaves
    composition  operands by name and options -> the result, for the reproducible arithmetic
    """

    name: str
    axes: Mapping[str, str]
    known: type[Any]
    forward: Callable[..., tuple[Any, Any]]
    gradients: Mapping[str, Callable[[Any, Any], Array]]
    dtype: Callable[..., Any] = lambda first, *_: compute_dtype_of(first)
    result: str | None = None
    composition: Callable[..., Any] | None = None

    def apply(self, operands: Mapping[str, Any], options: Any) -> Any:
        """Return the result for these operands, of which the first `DistArray` has rows, and the caller's options.

        After an error that may be this rank's alone, zeros stand for wrong arrays, and the agreement of the loss tells
        the other ranks, to which this one comes by the same redistributions.
        """
        checked = Options.of(self.name, options, self.known)
        present: dict[str, Any] = {}
        for name in self.axes:
            if name in operands:
                present[name] = operands[name]
            elif (value := getattr(checked, name, None)) is not None:
                present[name] = value
        for first in operands.values():
            if isinstance(first, DistArray):
                break
        shape = (*first.shape[:-1], operands["w"].shape[1]) if "w" in operands else first.shape
        axis = normalized_axis(checked.axis, len(shape))
        arrays, found = self._checked(present, first, shape, axis)
        parameters = {"axis": axis, **found}
        for name in self.known.__annotations__:
            if name not in self.axes and name != "axis":
                parameters[name] = getattr(checked, name)
        op = op_of(self, tuple(arrays))
        if not found:
            return apply(op, *arrays.values(), **parameters)
        with first.mesh.telling(*found["found"]):  # even if operands are redistributed first
            return apply(op, *arrays.values(), **parameters)

    def _checked(
        self, present: Mapping[str, Any], first: DistArray, shape: Shape, axis: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return checked arrays and no parameters; after an error, zeros for wrong arrays, and it in `found`."""
        expected: dict[str, Sequence[Shape]] = {}
        arrays, local = {}, {}
        for name, value in present.items():
            expected[name] = _shapes(self.axes[name], shape, axis)
            if "n" in self.axes[name] and (several := shape_of_several(value, name, shape, axis)):
                expected[name] = [several]
        try:
            for name, value in present.items():
                array = arrays[name] = value if isinstance(value, DistArray) else as_array(value, name)
                local[name] = array.local if isinstance(array, DistArray) else array
                _check_shape(name, self.axes[name], array, expected[name])
                if not is_real(array.dtype):
                    raise TypeError(f"{name} must be {REAL}, got {array.dtype}")
            check_one_library(local)
            if "bias" in arrays:
                check_product({name: arrays[name] for name in ("hidden", "w", "bias")})
        except Exception as error:
            xp = array_namespace(first.local)
            arrays = {name: x if x is first else _stand_in(x, expected[name], xp) for name, x in present.items()}
            return arrays, {"found": [error]}
        return arrays, {}


def _check_shape(name: str, letters: str, array: Any, expected: Sequence[Shape]) -> None:
    if not expected or array.shape in expected:
        return
    if letters == "c":
        check_per_class(name, array, expected[0][0])
    if letters == "rc" or name in _OPTIONAL:
        raise ValueError(f"{name} must have the shape {expected[0]}, got {array.shape}")
    kinds = f"be class numbers of shape {expected[0]}"
    if len(expected) > 1:
        kinds = f"have shape {expected[0]} or, as probabilities, {expected[1]}"
    raise ValueError(f"{name} must {kinds}, got {array.dtype} of {array.shape}")


def _stand_in(value: Any, expected: Sequence[Shape], xp: Any) -> Any:
    """Return `value`, or zeros in place of a wrong array."""
    if not expected:
        return value
    shape = next((each for each in expected if len(each) == getattr(value, "ndim", None)), expected[0])
    dtype = getattr(value, "dtype", None)
    known = isinstance(dtype, np.dtype) and is_real(dtype)
    if isinstance(value, DistArray) and (value.shape, array_namespace(value.local)) == (shape, xp) and known:
        return value
    return xp.zeros(shape, dtype if known else np.int64)


def shape_of_several(numbers: Any, name: str, shape: Shape, axis: int) -> Shape | None:
    """Return the shape of several class numbers a row, which is `shape` but for `axis`; None if they are not."""
    with suppress(Exception):  # the check of operands finds it again, and tells
        array = numbers if isinstance(numbers, DistArray) else as_array(numbers, name)
        found: Shape = array.shape
        if array.dtype.kind in "iu" and found == (*shape[:axis], found[axis], *shape[axis + 1 :]):
            return found
    return None


@lru_cache(maxsize=1024)
def _shapes(letters: str, shape: Shape, axis: int) -> Sequence[Shape]:
    """Return the shapes that an operand of these axes may have beside logits of `shape`; none for a factor."""
    rows, classes = (shape[:axis], shape[axis + 1 :]), shape[axis]
    if "f" in letters:
        return ()
    inner = {"r": (), "rc": (classes,), "rn": (1,)}
    kinds = letters.split("|")
    if len(kinds) > 1 and "rn" in kinds:  # class numbers unless they are known to be several
        kinds.remove("rn")
    return [(classes,) if each == "c" else (*rows[0], *inner[each], *rows[1]) for each in kinds]


def axes_of(letters: str, axis: int, labels: Axes) -> Axes:
    """Return the axes of an operand beside logits with `labels`; of two alternatives the last has as many as these."""
    inner = tuple(labels[axis] if letter == "c" else None for letter in letters if letter != "r")
    return (*labels[:axis], *inner, *labels[axis + 1 :]) if "r" in letters else inner


@cache
def op_of(primitive: Primitive, names: tuple[str, ...]) -> Op:
    """Return the operation of a primitive for operands of these names."""
    axes = [primitive.axes[name] for name in names]
    of_classes = next(index for index, letters in enumerate(axes) if "c" in letters)  # logits, or w

    def rule(*shapes: Shape, axis: int, reduction: str = Reduction.NONE, **_: Any) -> Rule:
        labels = tuple(map(Axis, range(len(shapes[0]))))
        operands = tuple(
            axes_of(letters.split("|")[-1 if len(shape) == len(labels) else 0], axis, labels)
            for letters, shape in zip(axes, shapes, strict=True)
        )
        if primitive.result is not None:
            index = names.index(primitive.result)
            return Rule(operands, operands[index], shapes[index], merged=frozenset({axis}))
        if not isinstance(reduction, str) or reduction != Reduction.NONE:  # checked by every rank, later
            return Rule(operands, (), (), merged=frozenset(range(len(labels))))
        rows = axes_of("r", axis, labels)
        return Rule(operands, rows, shapes[0][:axis] + shapes[0][axis + 1 :], merged=frozenset({axis}))

    def forward(call: Call, *arrays: Array, axis: int, **options: Any) -> Any:
        given = dict(zip(names, arrays, strict=True))
        for name in _OPTIONAL:
            options[name] = given.pop(name, None)
        rows = [index for index in range(arrays[0].ndim) if index != axis]
        classes = axis if axes[of_classes] == "rc" else 1
        where = {"classes_of": of_classes, "axis": axis}
        checked = sharded_options(call.mesh, call.operands, primitive.name, [classes], rows, **where, **options)
        with standard_arithmetic():
            result, call.residuals = primitive.forward(call, checked, **given)
        return result

    def compared(*operands: Sharding, axis: int, **_: Any) -> dict[int, tuple[str, ...]]:
        # The agreement of a loss compares these over the dims that shard the classes.
        dims = operands[of_classes].dims_along([axis if axes[of_classes] == "rc" else 1])
        return {index: dims for index, name in enumerate(names) if name in _COMPARED}

    def vjp_of(index: int) -> Callable[..., DistArray] | None:
        gradient, whole = primitive.gradients.get(names[index]), axes[index] == "rc"
        if gradient is None:
            return None

        def vjp(g: Any, y: Any, *operands: DistArray, residuals: Any, **_: Any) -> DistArray:
            x = operands[index]
            upstream = [each.local for each in g] if isinstance(g, tuple) else g.local
            sharding = x.sharding if whole else x.sharding.with_partial_over(_dims_beside(x, operands))
            with standard_arithmetic():
                return DistArray(gradient(upstream, residuals), x.mesh, sharding)

        return vjp

    def composition(*arrays: DistArray, **options: Any) -> Any:
        assert primitive.composition is not None
        return primitive.composition(dict(zip(names, arrays, strict=True)), **options)

    return Op(
        primitive.name,
        forward,
        list(map(vjp_of, range(len(names)))),
        rule,
        primitive.dtype,
        uses=[()] * len(names),
        wide_sums=[index for index, letters in enumerate(axes) if letters == "rf"],
        composition=composition if primitive.composition else None,
        variant=f"of {', '.join(names)}",
        compared=compared,
    )


def _dims_beside(x: DistArray, operands: Sequence[DistArray]) -> tuple[str, ...]:
    """Return the dims that shard rows or classes of other operands and not `x`, whose gradient is a sum over them."""
    sharded = {dim for each in operands for dim, at in each.sharding.by_dim.items() if isinstance(at, Shard)}
    return tuple(dim for dim in x.mesh.dims if dim in sharded and not isinstance(x.sharding.by_dim[dim], Shard))


def sharded_options(
    mesh: Mesh,
    operands: Sequence[Sharding],
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
    sharding = operands[classes_of]
    dims, batch_dims = sharding.dims_along(classes), operands[0].dims_along(rows)
    comm, over = mesh.along(dims) if dims else (None, "")
    batch_comm, batch_over = mesh.along(batch_dims) if batch_dims else (None, "")
    return Options(
        operation=operation,
        comm=comm,
        num_classes=math.prod(sharding.shape[axis] for axis in classes) or None,  # none raise an error of their own
        over=over,
        batch_comm=batch_comm,
        batch_over=batch_over,
        **options,
    )

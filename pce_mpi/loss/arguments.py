"""One call's arguments, as one rank can judge them: a `Call` becomes a `Problem`, or an error for all to hear of."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from pce_mpi.arrays import array_namespace, as_array, check_one_library, compute_dtype_of, is_floating, to_host
from pce_mpi.comm.library import check_comm, same_ranks
from pce_mpi.gpu import check_on_current_gpu
from pce_mpi.loss.kernels.terms import ClassWeights, Transform
from pce_mpi.memory import overlaps_itself, same_memory, shares_memory

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Call", "Problem", "Reduction", "check", "check_out", "rows_and_classes", "target_text"]

Array = Any  # numpy.ndarray or cupy.ndarray
HostArray = np.ndarray[Any, Any]

_LARGEST = np.iinfo(np.int64).max


class Reduction(StrEnum):
    """What becomes of the losses per row."""

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of one public function, as the caller gave them.

    `over` and `batch_over` are what the trace and the errors call `comm` and `batch_comm`.
    """

    operation: str
    logits: Any
    targets: Any = None
    needs_targets: bool = True
    comm: MPI.Intracomm | None = None
    class_start: int | None = None
    num_classes: int | None = None
    axis: int = -1
    ignore_index: int = -100
    logit_scale: float = 1.0
    softcap: float | None = None
    compute_dtype: Any = None
    weight: Any = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    reduction: str = Reduction.MEAN
    batch_comm: MPI.Intracomm | None = None
    out: Any = None
    with_gradient: bool = False
    over: str = "comm"
    batch_over: str = "batch_comm"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a call asks for, once this rank's arguments are known to be right.

    `inputs` are the arrays that the caller passed, all of which `out` must leave alone but the logits.
    `targets` (rows,) are global class numbers, `valid` (rows,) says which rows count; both are NumPy on the host, as is
    `weight`, wherever the logits are.
    `class_start` and `num_classes` say where this shard lies among all classes.
    """

    logits: Array
    axis: int
    targets: HostArray | None
    probabilities: Array | None
    valid: HostArray
    weight: HostArray | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    transform: Transform
    reduction: Reduction
    compute_dtype: np.dtype[Any]
    out: Array | None
    inputs: tuple[Array, ...]
    class_start: int = 0
    num_classes: int = 0

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """The logits' shape without the class axis."""
        return self.logits.shape[: self.axis] + self.logits.shape[self.axis + 1 :]

    @property
    def classes(self) -> int:
        """How many classes this shard has."""
        return int(self.logits.shape[self.axis])

    @property
    def target_column(self) -> HostArray | None:
        """(rows,) the local column of each row's target, -1 where another shard has it or the row does not count."""
        if self.targets is None:
            return None
        columns = self.targets - self.class_start
        return np.where(self.valid & (columns >= 0) & (columns < self.classes), columns, -1)

    @property
    def class_weights(self) -> ClassWeights:
        """The weights of a sum over all classes, for the kernels."""
        probabilities = None if self.probabilities is None else rows_and_classes(self.probabilities, self.axis)
        return ClassWeights(self.weight, probabilities, self.label_smoothing, self.num_classes)

    def described(self) -> dict[str, Hashable]:
        """What must be the same on every rank."""
        return {
            "rows": self.rows_shape,
            "dtype": self.logits.dtype.name,
            "compute_dtype": self.compute_dtype.name,
            "axis": self.axis,
            "kind of targets": _kind_of_targets(self),
            "weight given": self.weight is not None,
            "ignore_index": self.ignore_index,
            "label_smoothing": self.label_smoothing,
            "z_loss": self.z_loss,
            "logit_scale": self.transform.scale,
            "softcap": self.transform.softcap,
            "reduction": str(self.reduction),
        }


def rows_and_classes(array: Array, axis: int) -> Array:
    """`array` as (outer, classes, inner), the class axis in the middle; a view where its strides allow one."""
    outer, inner = math.prod(array.shape[:axis]), math.prod(array.shape[axis + 1 :])
    return array.reshape(outer, array.shape[axis], inner)


def check(call: Call) -> Problem:
    """What `call` asks for, or the error of its first bad argument; asks nobody."""
    if call.batch_comm is not None:
        check_comm(call.batch_comm, call.batch_over)
        if call.comm is not None and call.comm.size > 1 and same_ranks(call.comm, call.batch_comm):
            raise ValueError(
                f"{call.over} and {call.batch_over} are the same ranks: rows cannot be sharded where classes are"
            )
    logits = as_array(call.logits, "logits")
    if not is_floating(logits.dtype):
        raise TypeError(f"logits must be float16, bfloat16, float32 or float64, got {logits.dtype}")
    if logits.ndim == 0:
        raise ValueError("logits must have a class axis, got a 0-d array")
    axis = _integer(call.axis, "axis")
    if not -logits.ndim <= axis < logits.ndim:
        raise ValueError(f"axis = {axis} is out of bounds for logits of {logits.ndim} dimensions")
    axis %= logits.ndim
    ignore_index = _integer(call.ignore_index, "ignore_index")
    given_targets = None if call.targets is None else as_array(call.targets, "targets")
    given_weight = None if call.weight is None else as_array(call.weight, "weight")
    given_out = None if call.out is None else as_array(call.out, "out")
    arrays = {"logits": logits, "targets": given_targets, "weight": given_weight, "out": given_out}
    check_one_library(arrays)
    check_on_current_gpu(arrays)
    targets, probabilities = _check_targets(call, given_targets, logits, axis, ignore_index)
    label_smoothing = _number(call.label_smoothing, "label_smoothing")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    scale = _number(call.logit_scale, "logit_scale")
    softcap = None if call.softcap is None else _number(call.softcap, "softcap")
    for name, value in (("logit_scale", scale), ("softcap", softcap)):
        if value is not None and not 0.0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
    z_loss = _number(call.z_loss, "z_loss")
    if not math.isfinite(z_loss):
        raise ValueError(f"z_loss must be finite, got {z_loss}")
    if not isinstance(call.reduction, str) or call.reduction not in list(Reduction):
        raise ValueError(f"reduction must be 'none', 'sum' or 'mean', got {call.reduction!r}")
    for name, count, least in (("class_start", call.class_start, 0), ("num_classes", call.num_classes, 1)):
        if count is not None and not least <= _integer(count, name) <= _LARGEST:
            raise ValueError(f"{name} must be at least {least} and fit 64 bits, got {count}")
    weight = None if given_weight is None else _check_weight(given_weight, logits.shape[axis])
    inputs = (logits, *(array for array in (given_targets, given_weight) if array is not None))
    if call.out is not None:
        out = check_out(call.out, inputs)
    else:  # what can run out of memory does so before the others wait
        out = array_namespace(logits).empty_like(logits) if call.with_gradient else None
    rows = math.prod(logits.shape[:axis] + logits.shape[axis + 1 :])
    return Problem(
        logits=logits,
        axis=axis,
        targets=targets,
        probabilities=probabilities,
        valid=np.ones(rows, np.bool_) if targets is None else targets != ignore_index,
        weight=weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        transform=Transform(scale, softcap),
        reduction=Reduction(call.reduction),
        compute_dtype=compute_dtype_of(logits.dtype, call.compute_dtype),
        out=out,
        inputs=inputs,
    )


def _check_targets(
    call: Call, targets: Array | None, logits: Array, axis: int, ignore_index: int
) -> tuple[HostArray | None, Array | None]:
    """(rows,) int64 class numbers, or probabilities shaped as the logits; neither where targets are not required."""
    if targets is None:
        if call.needs_targets:
            raise TypeError("targets are missing")
        return None, None
    rows_shape = logits.shape[:axis] + logits.shape[axis + 1 :]
    if targets.dtype.kind in "iu":
        if targets.shape != rows_shape:
            raise ValueError(
                f"index targets must have the logits' shape without the class axis, {rows_shape}, got {targets.shape}"
                + ("; probabilities must be floating-point" if targets.shape == logits.shape else "")
            )
        host = to_host(targets).reshape(-1)
        beyond = np.flatnonzero(host > _LARGEST)
        if beyond.size:
            raise IndexError(f"{target_text(host, rows_shape, beyond[0])} is no class number")
        return host.astype(np.int64), None
    if not is_floating(targets.dtype):
        raise TypeError(f"targets must be integers or floating-point probabilities, got {targets.dtype}")
    if not call.needs_targets:
        raise ValueError(f"{call.operation} takes index targets, got probabilities")
    if targets.shape != logits.shape:
        raise ValueError(
            f"targets of dtype {targets.dtype} are probabilities and must have the logits' shape, {logits.shape}, "
            f"got {targets.shape}; class numbers must be integers"
        )
    if ignore_index >= 0:
        raise ValueError(f"probability targets know no ignored rows, got ignore_index = {ignore_index}")
    return None, targets


def _check_weight(weight: Array, classes: int) -> HostArray:
    if weight.dtype.kind not in "iu" and not is_floating(weight.dtype):
        raise TypeError(f"weight must be real numbers, got {weight.dtype}")
    if weight.shape != (classes,):
        raise ValueError(f"weight must have one entry per class of this shard, ({classes},), got {weight.shape}")
    return to_host(weight).astype(np.float64)


def check_out(out: Any, inputs: Sequence[Array]) -> Array:
    """`out` as an array that the gradient of the logits, the first of `inputs`, can be written to."""
    logits, *others = inputs
    array = as_array(out, "out")
    if isinstance(array, np.ndarray) and not _lends_memory(out):
        raise TypeError(f"out must be an array to write to, got {type(out).__name__}")
    check_one_library({"logits": logits, "out": array})
    check_on_current_gpu({"out": array})
    if not is_floating(array.dtype):
        raise TypeError(f"out must be float16, bfloat16, float32 or float64, got {array.dtype}")
    if array.shape != logits.shape:
        raise ValueError(f"out must have the logits' shape, {logits.shape}, got {array.shape}")
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError("out is read-only")
    if overlaps_itself(array):
        raise ValueError(f"elements of out share memory: shape {array.shape}, strides {array.strides}")
    if not same_memory(array, logits) and shares_memory(array, logits):
        raise ValueError("out must be exactly the logits, or share no memory with them")
    if any(shares_memory(array, other) for other in others):
        raise ValueError("out must not share memory with targets or weight")
    return array


def _lends_memory(value: Any) -> bool:
    """Whether NumPy makes an array of `value` without copying it."""
    if hasattr(value, "__dlpack__") or hasattr(value, "__array_interface__"):
        return True
    try:
        memoryview(value).release()
    except TypeError:
        return False
    return True


def _integer(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


def _number(value: Any, name: str) -> float:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a 0-d array, as a learned scale comes
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a real number, got {value!r}")
    return float(value) + 0.0  # -0.0 is 0.0


def _kind_of_targets(problem: Problem) -> str:
    if problem.targets is not None:
        return "class numbers"
    return "none" if problem.probabilities is None else "probabilities"


def target_text(targets: HostArray, rows_shape: tuple[int, ...], row: int) -> str:
    """One target as a message names it: 'targets[3] = 16'."""
    index = ", ".join(str(int(i)) for i in np.unravel_index(row, rows_shape)) if rows_shape else "()"
    return f"targets[{index}] = {targets[row]}"

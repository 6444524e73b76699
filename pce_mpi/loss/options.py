"""The options of the loss, and the checked arguments of one call on this rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
import inspect
import math
import operator
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import numpy as np

from pce_mpi.arrays import array_namespace, as_array, check_one_library, compute_dtype_of, is_floating, name_of, to_host
from pce_mpi.comm.library import check_comm, same_ranks
from pce_mpi.gpu import check_on_current_gpu
from pce_mpi.loss.kernels import kernel_of
from pce_mpi.loss.kernels.elementary import DOUBLE, SINGLE, Arithmetic
from pce_mpi.loss.kernels.parameters import ClassWeights, LossTerms, Transform
from pce_mpi.memory import overlaps_itself, same_memory, shares_memory

if TYPE_CHECKING:
    from mpi4py import MPI


Array = Any  # numpy.ndarray or cupy.ndarray
HostArray = np.ndarray[Any, Any]
Function = TypeVar("Function", bound=Callable[..., Any])

_LARGEST = np.iinfo(np.int64).max


class Reduction(StrEnum):
    """The way in which the losses of the rows become the loss."""

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"


class TransformOptions(TypedDict, total=False):
    """The rows that count, and the function of the logits that the softmax is taken of."""

    ignore_index: int  # a row with this target counts for nothing and has a zero gradient
    logit_scale: float  # the loss is taken of z = logit_scale x,
    softcap: float | None  # or of z = softcap tanh(logit_scale x / softcap)
    compute_dtype: Any  # float32 or float64: the dtype of the arithmetic and of the loss


class TermOptions(TypedDict, total=False):
    """The terms of a loss."""

    weight: Any  # one weight for each class
    label_smoothing: float  # in [0, 1], over the classes of all shards
    z_loss: float  # adds z_loss logsumexp(z)**2 to each row
    reduction: str  # "none", "sum" or "mean"


class ShardOptions(TypedDict, total=False):
    """The place of a shard among all classes."""

    comm: MPI.Intracomm | None  # the communicator over which the classes are sharded
    class_start: int | None  # the global number of this shard's first class
    num_classes: int | None  # the number of classes of all shards


class BatchOptions(TypedDict, total=False):
    """The place of this rank's rows among all."""

    batch_comm: MPI.Intracomm | None  # the communicator over which the rows are sharded


class AxisOptions(TypedDict, total=False):
    """The shape of the logits."""

    axis: int  # the class axis of the logits


class SoftmaxOptions(AxisOptions, TransformOptions, total=False):
    """The options that every function of logits takes."""


class CrossEntropyOptions(SoftmaxOptions, TermOptions, total=False):
    """The options of `cross_entropy` on distributed arrays."""


class StatisticsOptions(SoftmaxOptions, ShardOptions, total=False):
    """The options of `class_statistics`."""


class LossOptions(CrossEntropyOptions, StatisticsOptions, BatchOptions, total=False):
    """The options of the losses of plain arrays."""


class ChunkOptions(TypedDict, total=False):
    """The memory that a loss of `hidden @ w` takes."""

    chunk: int | None  # so many rows of logits are held at once


class LinearCrossEntropyOptions(TransformOptions, TermOptions, ChunkOptions, total=False):
    """The options of `linear_cross_entropy` on distributed arrays."""


class LinearOptions(TransformOptions, TermOptions, ShardOptions, BatchOptions, ChunkOptions, total=False):
    """The options of the loss of `hidden @ w`, of plain arrays."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one call with their defaults.

    `over` and `batch_over` are the names of `comm` and `batch_comm` in the trace and in errors.
    """

    operation: str
    axis: int = -1
    ignore_index: int = -100
    logit_scale: float = 1.0
    softcap: float | None = None
    compute_dtype: Any = None
    weight: Any = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    reduction: str = "mean"
    comm: MPI.Intracomm | None = None
    class_start: int | None = None
    num_classes: int | None = None
    batch_comm: MPI.Intracomm | None = None
    chunk: int | None = None
    over: str = "comm"
    batch_over: str = "batch_comm"

    @classmethod
    def of(cls, function: str, given: TransformOptions, known: type[Any]) -> Options:
        """The options of a call of `function`; `TypeError` for a keyword that is not in the TypedDict `known`."""
        for name in given:
            if name not in known.__optional_keys__:
                raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        return cls(operation=function, **given)

    def with_checked(self, **values: Any) -> Options:
        """These options with other values; `dataclasses.replace` takes as long as the loss of a few rows."""
        options = object.__new__(Options)
        options.__dict__.update(self.__dict__, **values)
        return options


def takes(known: type[Any]) -> Callable[[Function], Function]:
    """Let `help` and `inspect.signature` show the options of the TypedDict `known`, with their defaults."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        named = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(Options, name))
            for name in known.__annotations__
        ]
        function.__signature__ = signature.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
        return function

    return decorate


@dataclass(kw_only=True, eq=False)
class Problem:
    """The checked arguments of one call.

    `options` has plain numbers, an `axis` of at least 0, and `weight` in float64 on the host. `targets`, (rows,) global
    class numbers, and `valid`, (rows,) which rows count, are on the host too. `inputs` are the arrays of the caller,
    with none of which but the logits `out` shares memory. `rows_shape` is the logits' shape without the class axis,
    `xp` their array library and `kernel` the loops for it. This shard has `classes` classes, from `class_start` on, of
    `num_classes`; `target_column`, (rows,), is the local column of each row's target, -1 if another shard has it or the
    row does not count. `sharded` is the array of which each rank passes its own classes, and its class axis.
    """

    options: Options
    xp: Any
    logits: Array
    rows_shape: tuple[int, ...]
    classes: int
    targets: HostArray | None
    probabilities: Array | None
    valid: HostArray
    transform: Transform
    out: Array | None
    inputs: tuple[Array, ...]
    kernel: ModuleType
    sharded: tuple[Array, int]
    class_start: int = 0
    num_classes: int = 0
    target_column: HostArray | None = None

    def place(self, class_start: int, num_classes: int) -> None:
        """Give this shard its place among all classes."""
        self.class_start, self.num_classes = class_start, num_classes
        if self.targets is not None:
            columns = self.targets - class_start
            here = columns.view(np.uint64) < self.classes  # a negative column is a large unsigned number
            self.target_column = np.where(self.valid & here, columns, -1)

    @property
    def arithmetic(self) -> Arithmetic:
        """The arithmetic of the compute dtype."""
        return DOUBLE if self.options.compute_dtype == np.float64 else SINGLE

    @property
    def class_weights(self) -> ClassWeights:
        """The weights of a sum over all classes, for the kernels."""
        options, probabilities = self.options, self.probabilities
        if probabilities is not None:
            probabilities = rows_and_classes(probabilities, options.axis)
        return ClassWeights(options.weight, probabilities, options.label_smoothing, self.num_classes)

    @property
    def loss_terms(self) -> LossTerms:
        """The terms of a row's loss, for the kernels."""
        options = self.options
        return LossTerms(options.label_smoothing, options.label_smoothing / self.num_classes, options.z_loss)

    def described(self) -> dict[str, Hashable]:
        """The description of the call that must be the same on every rank."""
        options = self.options
        other_targets = "none" if self.probabilities is None else "probabilities"
        return {
            "rows": self.rows_shape,
            "dtype": name_of(self.logits.dtype),
            "compute_dtype": name_of(options.compute_dtype),
            "axis": options.axis,
            "kind of targets": other_targets if self.targets is None else "class numbers",
            "weight given": options.weight is not None,
            "ignore_index": options.ignore_index,
            "label_smoothing": options.label_smoothing,
            "z_loss": options.z_loss,
            "logit_scale": options.logit_scale,
            "softcap": options.softcap,
            "reduction": str(options.reduction),
            "chunk": options.chunk,
        }


def rows_and_classes(array: Array, axis: int) -> Array:
    """`array` as (outer, classes, inner), the class axis in the middle; a view if its strides allow one."""
    outer, inner = math.prod(array.shape[:axis]), math.prod(array.shape[axis + 1 :])
    return array.reshape(outer, array.shape[axis], inner)


def check(
    options: Options,
    logits: Any,
    targets: Any,
    *,
    needs_targets: bool = True,
    out: Any = None,
    with_gradient: bool = False,
) -> Problem:
    """The checked arguments of a call, or the error of the first bad one. Communicates nothing.

    `with_gradient` allocates the gradient unless the caller passes `out`.
    """
    if options.batch_comm is not None:
        check_comm(options.batch_comm, options.batch_over)
        if options.comm is not None and options.comm.size > 1 and same_ranks(options.comm, options.batch_comm):
            raise ValueError(
                f"{options.over} and {options.batch_over} are the same ranks: rows cannot be sharded where classes are"
            )
    logits = as_array(logits, "logits")
    check_dtype_of_logits(logits.dtype)
    if logits.ndim == 0:
        raise ValueError("logits must have a class axis, got a 0-d array")
    numbers = _checked_numbers(options, logits)
    axis = numbers["axis"]
    arrays = {"logits": logits}
    if targets is not None:
        arrays["targets"] = targets = as_array(targets, "targets")
    weight = options.weight
    if weight is not None:
        arrays["weight"] = weight = as_array(weight, "weight")
    inputs = tuple(arrays.values())
    if out is not None:
        arrays["out"] = as_array(out, "out")
    check_one_library(arrays)
    check_on_current_gpu(arrays)
    rows_shape, classes = logits.shape[:axis] + logits.shape[axis + 1 :], logits.shape[axis]
    if targets is None and needs_targets:
        raise TypeError("targets are missing")
    if targets is not None and is_floating(targets.dtype) and not needs_targets:
        raise ValueError(f"{options.operation} takes index targets, got probabilities")
    ignore_index = numbers["ignore_index"]
    class_numbers, probabilities = _check_targets(targets, logits, rows_shape, ignore_index)
    if weight is not None:
        weight = _check_weight(weight, classes)
    xp = array_namespace(logits)
    if out is not None:
        out = check_out(out, inputs)
    elif with_gradient:  # what can run out of memory does so before the others wait
        out = xp.empty_like(logits)
    return Problem(
        options=options.with_checked(**numbers, weight=weight),
        xp=xp,
        logits=logits,
        rows_shape=rows_shape,
        classes=classes,
        targets=class_numbers,
        probabilities=probabilities,
        valid=np.ones(math.prod(rows_shape), np.bool_) if class_numbers is None else class_numbers != ignore_index,
        transform=Transform(numbers["logit_scale"], numbers["softcap"]),
        out=out,
        inputs=inputs,
        kernel=kernel_of(logits),
        sharded=(logits, axis),
    )


def _checked_numbers(options: Options, logits: Array) -> dict[str, Any]:
    """The checked values of the options that are no arrays. Programs repeat few different ones."""
    values = [getattr(options, name) for name in _NUMBERS]
    try:
        return _check_numbers(logits.ndim, logits.dtype, *values)
    except TypeError:  # one of them is wrong, or an array, which is no key
        return _check_numbers.__wrapped__(logits.ndim, logits.dtype, *values)


_NUMBERS = (
    *("axis", "ignore_index", "logit_scale", "softcap", "compute_dtype", "label_smoothing", "z_loss", "reduction"),
    *("class_start", "num_classes", "chunk"),
)


@lru_cache(maxsize=256, typed=True)
def _check_numbers(
    ndim: int,
    dtype: np.dtype[Any],
    axis: Any,
    ignore_index: Any,
    logit_scale: Any,
    softcap: Any,
    compute_dtype: Any,
    label_smoothing: Any,
    z_loss: Any,
    reduction: Any,
    class_start: Any,
    num_classes: Any,
    chunk: Any,
) -> dict[str, Any]:
    axis = _integer(axis, "axis")
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis = {axis} is out of bounds for logits of {ndim} dimensions")
    ignore_index = _integer(ignore_index, "ignore_index")
    label_smoothing = _number(label_smoothing, "label_smoothing")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    logit_scale = _number(logit_scale, "logit_scale")
    softcap = None if softcap is None else _number(softcap, "softcap")
    for name, value in (("logit_scale", logit_scale), ("softcap", softcap)):
        if value is not None and not 0.0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
    z_loss = _number(z_loss, "z_loss")
    if not math.isfinite(z_loss):
        raise ValueError(f"z_loss must be finite, got {z_loss}")
    if not isinstance(reduction, str) or reduction not in list(Reduction):
        raise ValueError(f"reduction must be 'none', 'sum' or 'mean', got {reduction!r}")
    for name, count, least in (("class_start", class_start, 0), ("num_classes", num_classes, 1), ("chunk", chunk, 1)):
        if count is not None and not least <= _integer(count, name) <= _LARGEST:
            raise ValueError(f"{name} must be at least {least} and fit 64 bits, got {count}")
    return {
        "axis": axis % ndim,
        "ignore_index": ignore_index,
        "logit_scale": logit_scale,
        "softcap": softcap,
        "compute_dtype": compute_dtype_of(dtype, compute_dtype),
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "reduction": Reduction(reduction),
        "chunk": None if chunk is None else _integer(chunk, "chunk"),
    }


def _check_targets(
    targets: Array | None, logits: Array, rows_shape: tuple[int, ...], ignore_index: int
) -> tuple[HostArray | None, Array | None]:
    """(rows,) int64 class numbers, or probabilities shaped as the logits; neither if `targets` is None."""
    if targets is None:
        return None, None
    if targets.dtype.kind in "iu":
        if targets.shape != rows_shape:
            raise ValueError(
                f"index targets must have the logits' shape without the class axis, {rows_shape}, got {targets.shape}"
                + ("; probabilities must be floating-point" if targets.shape == logits.shape else "")
            )
        host = to_host(targets).reshape(-1)
        if host.dtype == np.uint64 and host.size and host.max() > _LARGEST:
            raise IndexError(f"{target_text(host, rows_shape, int(host.argmax()))} is no class number")
        return host.astype(np.int64), None
    if not is_floating(targets.dtype):
        raise TypeError(f"targets must be integers or floating-point probabilities, got {targets.dtype}")
    if targets.shape != logits.shape:
        raise ValueError(
            f"targets of dtype {targets.dtype} are probabilities and must have the logits' shape, {logits.shape}, "
            f"got {targets.shape}; class numbers must be integers"
        )
    if ignore_index >= 0:
        raise ValueError(f"probability targets know no ignored rows, got ignore_index = {ignore_index}")
    return None, targets


def check_dtype_of_logits(dtype: np.dtype[Any]) -> None:
    if not is_floating(dtype):
        raise TypeError(f"logits must be float16, bfloat16, float32 or float64, got {dtype}")


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


def gradient_for(out: Any, problem: Problem) -> Array:
    """The array for the gradient of the logits: `out`, checked, or a new one."""
    return problem.xp.empty_like(problem.logits) if out is None else check_out(out, problem.inputs)


def upstream_of(value: Any, name: str, shape: tuple[int, ...], problem: Problem) -> Array:
    """An upstream gradient, a scalar or of this shape, as float64, (1,) or (rows,)."""
    upstream = as_array(value, name)
    if upstream.dtype.kind not in "iuf" and upstream.dtype.name != "bfloat16":
        raise TypeError(f"{name} must be real numbers, got {upstream.dtype}")
    if upstream.shape not in ((), shape):
        raise ValueError(f"{name} must be a scalar or have the shape {shape}, got {upstream.shape}")
    check_one_library(
        {"logits": problem.logits, name: value if isinstance(value, np.generic | float | int) else upstream}
    )
    check_on_current_gpu({"logits": problem.logits, name: upstream})
    return problem.xp.asarray(upstream.astype(np.float64).reshape(-1))


def _lends_memory(value: Any) -> bool:
    """True if NumPy makes an array of `value` without copying it."""
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


def target_text(targets: HostArray, rows_shape: tuple[int, ...], row: int) -> str:
    """One target as a message names it: 'targets[3] = 16'."""
    index = ", ".join(str(int(i)) for i in np.unravel_index(row, rows_shape)) if rows_shape else "()"
    return f"targets[{index}] = {targets[row]}"

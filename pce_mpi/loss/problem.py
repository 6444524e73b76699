"""The checked arguments of one call on this rank."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
import math
from types import ModuleType
from typing import Any

import numpy as np

from pce_mpi.arrays import (
    DLPACK_IS_READ_ONLY,
    Array,
    DType,
    HostArray,
    array_namespace,
    as_array,
    check_one_library,
    cupy_of,
    is_floating,
    name_of,
    overlaps_itself,
    same_memory,
    shares_memory,
    to_host,
)
from pce_mpi.comm.agreement import Signature
from pce_mpi.comm.library import check_comm, same_ranks
from pce_mpi.gpu import Download, check_on_current_gpu
from pce_mpi.hints import hinted
from pce_mpi.kernels import converted, kernel_of
from pce_mpi.kernels.interface import ClassWeights, Precision, Transform
from pce_mpi.kernels.losses import LossTerms
from pce_mpi.loss.options import Numbers, Options, checked_numbers

LARGEST = np.iinfo(np.int64).max
_ONES = ClassWeights()
_TERMS = LossTerms._fields[2:]  # options by their names; those before are of label smoothing


@dataclass(kw_only=True, eq=False)
class Pending:
    """Facts of the values of arrays on a GPU that the host has yet to hear.

    `wrong` tells whether a class number that counts is no class; `agreement.confirm` waits for it. Or, if other ranks
    have to know, `numbers` are a copy of the class numbers and `sample` one of a few logits, for `agreement.settle`, in
    which the ranks of the class communicator take part if `over_classes`, and those of `batch_comm` if `over_rows`.
    """

    wrong: Download | None = None
    numbers: Download | None = None
    sample: Download | None = None
    over_classes: bool = False
    over_rows: bool = False


@dataclass(kw_only=True, eq=False)
class Problem:
    """The checked arguments of one call.

    `numbers` are those of `options`, which has plain numbers, an `axis` of at least 0, and `weight` in float64, on the
    host or where the logits are. `targets`, (rows,) global class numbers, and `valid`, (rows,) true for rows that
    count, are on the host; `highest_target` is the largest target of rows that count, or more than any class if one is
    negative. `inputs` are the caller's arrays; `out` shares memory with none of them except the logits. `rows_shape` is
    the logits' shape without the class axis, `xp` their array library and `kernel` the loops for it. This shard has
    `classes` classes, from `class_start` on, of `num_classes`; `shards` has the first class of each shard, and how many
    it has. `target_column`, (rows,), is the local column of each row's target; it is no column of this shard if another
    shard has the target, and -1 if the row does not count. `counted` is `valid`, or None on a GPU if all rows count;
    both are in the library of the logits. `sharded` is the array of which each rank passes its own classes, and its
    class axis. `beside` are more logits of the same classes, and `hidden` vectors that all ranks pass. `also` has more
    that must be the same on every rank.

    With `several` targets a row, `targets`, `valid` and `target_column` have all of them in the order of the caller's
    array. It has the shape `targets_shape`, and the name `targets_name` in messages. `members` has more class numbers,
    those of a support.

    Class numbers may also be left to the GPU that has them: `targets` are then the caller's, flat, and `valid` is None.
    `pending` has what is not known yet. One field for it: from 31 on Python 3.11 makes an instance more slowly.
    """

    options: Options
    numbers: Numbers
    xp: Any
    logits: Array
    rows_shape: tuple[int, ...]
    classes: int
    targets: HostArray | None
    probabilities: Array | None
    valid: HostArray
    all_valid: bool
    highest_target: int
    transform: Transform
    precision: Precision
    out: Array | None
    inputs: tuple[Array, ...]
    kernel: ModuleType
    sharded: tuple[Array, int]
    class_start: int = 0
    num_classes: int = 0
    target_column: Array | None = None
    counted: Array | None = None
    shards: tuple[Sequence[int], Sequence[int]] = (0,), (1,)
    targets_shape: tuple[int, ...] = ()
    targets_name: str = "targets"
    several: bool = False
    members: HostArray | None = None
    beside: tuple[Array, ...] = ()
    hidden: Array | None = None
    also: Mapping[str, Hashable] = field(default_factory=dict)
    pending: Pending | None = None

    def place(self, class_start: int, num_classes: int) -> None:
        """Give this shard its place among all classes."""
        self.class_start, self.num_classes = class_start, num_classes
        if type(self.targets) is not np.ndarray and cupy_of(self.targets) is not None:
            given = self.targets, self.options.ignore_index, class_start, num_classes
            self.target_column, self.counted, wrong = self.kernel.columns_of(*given)
            if self.pending is None:
                self.pending = Pending(wrong=Download(wrong))
            else:
                self.pending.numbers = Download(self.targets)
            return
        if self.targets is not None:
            columns = self.targets - class_start
            self.target_column = columns if self.all_valid else np.where(self.valid, columns, -1)
        if type(self.logits) is np.ndarray or cupy_of(self.logits) is None:
            self.counted = self.valid
        elif self.target_column is not None:
            self.target_column, self.counted = self._uploaded(self.target_column)
        elif not self.all_valid:
            self.counted = self.xp.asarray(self.valid)

    @property
    def wrong(self) -> Download | None:
        """The flag of a class number that counts and is no class, if a GPU is to tell."""
        return None if self.pending is None else self.pending.wrong

    @property
    def alike(self) -> HostArray | None:
        """The array of numbers that must be the same on every rank: the targets, or else the rows that count."""
        return self.valid if self.targets is None and self.probabilities is None else self.targets

    def _uploaded(self, columns: HostArray) -> tuple[Array, Array | None]:
        """Return `columns` and `counted` on the GPU, in one copy."""
        if self.all_valid:
            return self.xp.asarray(columns), None
        both = self.xp.asarray(np.concatenate([columns.view(np.bool_), self.valid]))
        return both[: columns.nbytes].view(np.int64), both[columns.nbytes :]

    @property
    def class_weights(self) -> ClassWeights:
        """The weights of a sum over all classes, for the kernels."""
        options, probabilities = self.options, self.probabilities
        if probabilities is None and options.weight is None:
            return _ONES
        if probabilities is not None:
            probabilities = rows_and_classes(probabilities, options.axis)
        return ClassWeights(options.weight, probabilities, options.label_smoothing, self.num_classes)

    @property
    def loss_terms(self) -> LossTerms:
        """The terms of a row's loss, for the kernels."""
        smoothing, values = self.options.label_smoothing, self.options.__dict__
        return LossTerms(smoothing, smoothing / self.num_classes, *map(values.__getitem__, _TERMS))

    def call(self, more: Mapping[str, Hashable]) -> Signature:
        """Return the call: all that must be the same on every rank, with `more`."""
        options, other_targets = self.options, "none" if self.probabilities is None else "probabilities"
        classes = f"{self.targets_shape[options.axis]} class numbers a row" if self.several else "class numbers"
        targets, weighted = other_targets if self.targets is None else classes, options.weight is not None
        also = (*more.items(), *self.also.items())
        return _call_of(options.operation, self.logits.dtype, self.numbers, targets, weighted, also)


@lru_cache(maxsize=1024)
def _call_of(
    operation: str, dtype: DType, numbers: Numbers, targets: str, weighted: bool, also: tuple[tuple[str, Hashable], ...]
) -> Signature:
    values = {name: value for name, value in numbers.values.items() if name != "chunk"}  # `also` has the one in use
    values |= {"compute_dtype": name_of(values["compute_dtype"]), "reduction": str(values["reduction"])}
    values["direction"] = str(values["direction"])
    given = {"kind of targets": targets, "weight given": weighted}
    return Signature(operation, {**dict(also), "dtype": name_of(dtype), **values, **given})


def rows_and_classes(array: Array, axis: int) -> Array:
    """Return `array` as (outer, classes, inner), the class axis in the middle; a view if its strides allow one."""
    return array.reshape(_outer_classes_inner(array.shape, axis))


@lru_cache(maxsize=1024)
def _outer_classes_inner(shape: tuple[int, ...], axis: int) -> tuple[int, int, int]:
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def check(
    options: Options,
    logits: Any,
    targets: Any,
    *,
    needs_targets: bool = True,
    out: Any = None,
    with_gradient: bool = False,
    whole_numbers: bool = False,
    later: bool = False,
    name: str = "logits",
    beside: Mapping[str, Array] | None = None,
) -> Problem:
    """Return the checked arguments of a call, or raise for the first bad one. Communicates nothing.

    `with_gradient` allocates the gradient unless the caller passes `out`; with `whole_numbers` the logits may also be
    integers or bool. With `later` nothing waits for a GPU: the caller calls `agreement.settle` and `agreement.confirm`.
    `name` is that of the logits in messages, and `beside` has more logits of their shape.
    """
    if options.batch_comm is not None:
        check_comm(options.batch_comm, options.batch_over)
        if options.comm is not None and options.comm.size > 1 and same_ranks(options.comm, options.batch_comm):
            raise ValueError(
                f"{options.over} and {options.batch_over} are the same ranks: rows cannot be sharded where classes are"
            )
    beside = beside or {}
    logits = as_array(logits, name)
    if not (whole_numbers and logits.dtype.kind in "iub"):
        check_dtype_of_logits(logits.dtype, name)
    if logits.ndim == 0:
        raise ValueError(f"{name} must have a class axis, got a 0-d array")
    for other, array in beside.items():
        check_dtype_of_logits(array.dtype, other)
        if array.shape != logits.shape:
            raise ValueError(f"{other} must have the shape of {name}, {logits.shape}, got {array.shape}")
    widest = max((logits, *beside.values()), key=lambda each: each.dtype.itemsize) if beside else logits
    numbers = checked_numbers(options, logits.ndim, widest.dtype)
    axis, ignore_index = numbers.values["axis"], numbers.values["ignore_index"]
    arrays = {name: logits, **beside}
    targets = None if targets is None else as_array(targets, "targets")
    weight = None if options.weight is None else as_array(options.weight, "weight")
    inputs = logits, *beside.values(), *(() if targets is None else (targets,)), *(() if weight is None else (weight,))
    # Class numbers and class weights are checked on the host, and may be there.
    in_numpy = type(targets) is np.ndarray
    if targets is not None and (is_floating(targets.dtype) or (not in_numpy and cupy_of(targets) is not None)):
        arrays["targets"] = targets
    if weight is not None and cupy_of(weight) is not None:
        arrays["weight"] = weight
    if out is not None:
        arrays["out"] = as_array(out, "out")
    check_one_library(arrays)
    check_on_current_gpu(arrays)
    rows_shape, classes = logits.shape[:axis] + logits.shape[axis + 1 :], logits.shape[axis]
    if targets is None and needs_targets:
        raise TypeError("targets are missing")
    if targets is not None and is_floating(targets.dtype) and not needs_targets:
        raise ValueError(f"{options.operation} takes index targets, got probabilities")
    on_gpu = later and type(logits) is not np.ndarray and cupy_of(logits) is not None
    class_numbers, probabilities = _check_targets(targets, logits, rows_shape, ignore_index, on_gpu)
    if probabilities is not None and options.margin is not None:
        raise ValueError("margin is of the target alone, which must be a class number, got probabilities")
    if weight is not None:
        weight = _check_weight(weight, classes, on_gpu)
    if class_numbers is None:
        valid, all_valid, highest = np.ones(math.prod(rows_shape), np.bool_), True, 0
    else:
        ignored = ignore_index if ignore_index <= LARGEST else as_int64(ignore_index, targets.dtype)
        valid, all_valid, highest = kernel_of(class_numbers).valid_rows(class_numbers, ignored)
    xp = array_namespace(logits)
    if out is not None:
        out = check_out(out, inputs)
    elif with_gradient:  # a rank that runs out of memory raises before the others wait
        out = xp.empty_like(logits)
    return Problem(
        options=options.with_checked(numbers.values, weight),
        numbers=numbers,
        xp=xp,
        logits=logits,
        rows_shape=rows_shape,
        classes=classes,
        targets=class_numbers,
        probabilities=probabilities,
        valid=valid,
        all_valid=all_valid,
        highest_target=min(highest, LARGEST),
        transform=numbers.transform,
        precision=numbers.precision,
        out=out,
        inputs=inputs,
        kernel=kernel_of(logits),
        sharded=(logits, axis),
        targets_shape=rows_shape,
        beside=tuple(beside.values()),
        pending=Pending(over_classes=True) if on_gpu and _is_told_later(options, class_numbers) else None,
    )


def _check_targets(
    targets: Array | None, logits: Array, rows_shape: tuple[int, ...], ignore_index: int, on_gpu: bool
) -> tuple[Array | None, Array | None]:
    """Return (rows,) class numbers, or probabilities shaped as the logits; neither if `targets` is None.

    Class numbers are int64 on the host, or with `on_gpu` as they are there.
    """
    if targets is None:
        return None, None
    if targets.dtype.kind in "iu":
        if targets.shape != rows_shape:
            raise ValueError(
                f"index targets must have the logits' shape without the class axis, {rows_shape}, got {targets.shape}"
                + ("; probabilities must be floating-point" if targets.shape == logits.shape else "")
            )
        stay = on_gpu and cupy_of(targets) is not None
        flat = array_namespace(targets).ascontiguousarray(targets).reshape(-1) if stay else None
        return class_numbers_of(targets, "targets", ignore_index) if flat is None else flat, None
    if not is_floating(targets.dtype):
        raise TypeError(f"targets must be integers or floating-point probabilities, got {targets.dtype}")
    if targets.shape != logits.shape:
        text = (
            f"targets of dtype {targets.dtype} are probabilities and must have the logits' shape, {logits.shape}, "
            f"got {targets.shape}"
        )
        if targets.ndim == logits.ndim:
            raise ValueError(hinted(text, "probabilities of all classes"))
        raise ValueError(f"{text}; class numbers must be integers")
    if ignore_index >= 0:
        raise ValueError(f"probability targets have no ignored rows, got ignore_index = {ignore_index}")
    return None, targets


def is_alone(options: Options) -> bool:
    """Return whether no other rank takes part in a call."""
    return all(comm is None or comm.size == 1 for comm in (options.comm, options.batch_comm))


def _is_told_later(options: Options, class_numbers: Array | None) -> bool:
    """Return whether other ranks have to know these class numbers, which are on a GPU, or a sample of such logits."""
    if cupy_of(class_numbers) is not None:
        return not is_alone(options)
    return options.num_classes is None and options.comm is not None and options.comm.size > 1


def class_numbers_of(array: Array, name: str, ignore_index: int = -1) -> HostArray:
    """Return the entries of `array` as flat int64 on the host; those to ignore as `as_int64` gives them."""
    host = to_host(array).reshape(-1)
    if host.dtype == np.uint64:
        too_large = np.flatnonzero((host > LARGEST) & (host != ignore_index))
        if too_large.size:
            raise IndexError(f"{target_text(host, array.shape, int(too_large[0]), name)} is no class number")
    return host.astype(np.int64)


def as_int64(ignore_index: int, dtype: DType) -> int:
    """Return the class number to ignore as int64, if class numbers of `dtype` can be that."""
    return ignore_index - 2**64 if dtype == np.uint64 and LARGEST < ignore_index < 2**64 else ignore_index


def check_dtype_of_logits(dtype: DType, name: str) -> None:
    if not is_floating(dtype):
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {dtype}")


def _check_weight(weight: Array, classes: int, on_gpu: bool) -> Array:
    """Return the weights in float64: those on a GPU on the host, or `on_gpu` where they are."""
    if weight.dtype.kind not in "iu" and not is_floating(weight.dtype):
        raise TypeError(f"weight must be real numbers, got {weight.dtype}")
    check_per_class("weight", weight, classes, " of this shard")
    return converted(weight if on_gpu else to_host(weight), np.float64)


def check_per_class(name: str, array: Any, classes: int, whose: str = "") -> None:
    if array.shape != (classes,):
        raise ValueError(f"{name} must have one entry per class{whose}, ({classes},), got {array.shape}")


def check_out(out: Any, inputs: Sequence[Array]) -> Array:
    """Return `out` as an array to which the gradient of the logits, the first of `inputs`, can be written."""
    logits, *others = inputs
    array = as_array(out, "out")
    if isinstance(array, np.ndarray) and not _lends_memory(out):
        raise TypeError(f"out must be an array to write to, got {type(out).__name__}")
    if hasattr(out, "is_neg") and out.is_neg():
        raise TypeError("out has the negative bit of torch, which would change what is written: take .resolve_neg()")
    check_one_library({"logits": logits, "out": array})
    check_on_current_gpu({"out": array})
    if not is_floating(array.dtype):
        raise TypeError(f"out must be float16, bfloat16, float32 or float64, got {array.dtype}")
    if array.shape != logits.shape:
        raise ValueError(f"out must have the logits' shape, {logits.shape}, got {array.shape}")
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        by_dlpack = DLPACK_IS_READ_ONLY and not isinstance(out, np.ndarray) and hasattr(out, "__dlpack__")
        raise ValueError("out is read-only" + ", as all that comes by DLPack to NumPy 2.0: take 2.1" * by_dlpack)
    if overlaps_itself(array):
        raise ValueError(f"elements of out share memory: shape {array.shape}, strides {array.strides}")
    if not same_memory(array, logits) and shares_memory(array, logits):
        raise ValueError("out must be exactly the logits, or share no memory with them")
    if any(shares_memory(array, other) for other in others):
        raise ValueError("out must not share memory with another argument")
    return array


def upstream_of(value: Any, name: str, shape: tuple[int, ...], problem: Problem) -> Array:
    """Return an upstream gradient, a scalar or of this shape, as floating-point numbers, (1,) or (rows,).

    It is float64, but for floating-point numbers on a GPU. A number stays on the host.
    """
    upstream = as_array(value, name)
    if upstream.dtype.kind not in "iuf" and upstream.dtype.name != "bfloat16":
        raise TypeError(f"{name} must be real numbers, got {upstream.dtype}")
    if upstream.shape not in ((), shape):
        raise ValueError(f"{name} must be a scalar or have the shape {shape}, got {upstream.shape}")
    check_one_library(
        {"logits": problem.logits, name: value if isinstance(value, np.generic | float | int) else upstream}
    )
    check_on_current_gpu({"logits": problem.logits, name: upstream})
    kept = cupy_of(upstream) is not None and is_floating(upstream.dtype)
    return (upstream if kept else upstream.astype(np.float64)).reshape(-1)


def _lends_memory(value: Any) -> bool:
    """Return whether NumPy makes an array of `value` without a copy."""
    if hasattr(value, "__dlpack__") or hasattr(value, "__array_interface__"):
        return True
    try:
        memoryview(value).release()
    except TypeError:
        return False
    return True


def target_text(targets: HostArray, shape: tuple[int, ...], entry: int, name: str = "targets") -> str:
    """Return the text of one of the targets, which are flat, for a message: 'targets[3] = 16'."""
    return f"{entry_text(shape, entry, name)} = {targets[entry]}"


def entry_text(shape: tuple[int, ...], entry: int, name: str) -> str:
    """Return the text of an element of a flattened array of this shape: 'targets[3]'."""
    index = ", ".join(str(int(i)) for i in np.unravel_index(entry, shape)) if shape else "()"
    return f"{name}[{index}]"

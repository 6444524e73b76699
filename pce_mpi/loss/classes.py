"""Classes of sharded logits: those that the caller names, whichever rank has them, and the largest of each row.

Of named classes each rank takes the bits of its own logits and has zeros in place of the others. A sum of these
integers over the ranks has the bits of every logit. For the largest, each rank finds those of its own classes, and the
ranks merge these candidates in one Allreduce. The result does not depend on the order of the merges: classes with equal
logits come in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
import math
import operator
from typing import Any, Unpack

import numpy as np

from pce_mpi.arrays import Array, HostArray, array_namespace, as_array, check_one_library, cupy_of
from pce_mpi.comm.collectives import all_reduce
from pce_mpi.comm.tracing import cause
from pce_mpi.gpu import check_on_current_gpu
from pce_mpi.kernels import converted, kernel_of
from pce_mpi.kernels.classes import order
from pce_mpi.kernels.interface import NO_CLASS
from pce_mpi.loss.agreement import agree_on, settle
from pce_mpi.loss.options import Options, ShardedAxisOptions, takes
from pce_mpi.loss.passes import PassResiduals
from pce_mpi.loss.problem import LARGEST, Problem, as_int64, check, class_numbers_of, rows_and_classes, upstream_of
from pce_mpi.loss.tensors import tensors_for_tensors, tensors_on_this_rank
from pce_mpi.validation import integer


@takes(ShardedAxisOptions)
@tensors_for_tensors
def take_classes(logits: Any, ids: Any, **options: Unpack[ShardedAxisOptions]) -> Array:
    """Take the logits of chosen classes of plain shards; see `pce_mpi.take_classes`."""
    return chosen_logits(Options.of("take_classes", options, ShardedAxisOptions), logits, ids)[0]


@dataclass(eq=False, repr=False)
class ChosenResiduals(PassResiduals):
    """The arrays that `take_classes_forward` keeps for the backward pass, opaque to its caller.

    Attributes
    ----------
    problem : Problem
        The checked arguments, with references to the caller's arrays.
    used_up : bool
        False: the gradient does not depend on the logits.
    """

    made_by = "take_classes_forward"


@takes(ShardedAxisOptions)
@tensors_for_tensors
def take_classes_forward(logits: Any, ids: Any, **options: Unpack[ShardedAxisOptions]) -> tuple[Array, ChosenResiduals]:
    """Compute `take_classes`, and the residuals from which `take_classes_backward` computes the gradient.

    Parameters
    ----------
    logits, ids : array
        Those of `take_classes`.

    Returns
    -------
    chosen : array
        The logits of the chosen classes.
    residuals : ChosenResiduals
        The class numbers, and references to the arrays that were passed.

    Notes
    -----
    Errors and communication are those of `take_classes`.

    Examples
    --------
    >>> import numpy as np
    >>> chosen, residuals = take_classes_forward(np.array([[1.0, 2.0, 3.0]]), np.array([[2, 0, 2]]))
    >>> take_classes_backward(np.array([[1.0, 2.0, 4.0]]), residuals)
    array([[2., 0., 5.]])
    """
    return chosen_logits(Options.of("take_classes_forward", options, ShardedAxisOptions), logits, ids)


@tensors_on_this_rank
def take_classes_backward(dchosen: Any, residuals: ChosenResiduals) -> Array:
    """Compute the gradient of this rank's logits from that of the chosen ones.

    The gradient of a class that is chosen more than once is the sum, added in the order of the choices in float64.

    Parameters
    ----------
    dchosen : float or array of real numbers
        A number, or an array of the shape of `ids`.
    residuals : ChosenResiduals
        Those of `take_classes_forward`. They can be used again.

    Returns
    -------
    array
        A new array of the logits' dtype and shape, 0 but for the chosen classes.

    Raises
    ------
    TypeError, ValueError
        For a `dchosen` that does not fit.

    Notes
    -----
    Communicates nothing. Errors are raised on the rank that finds them, alone.

    Examples
    --------
    >>> import numpy as np
    >>> _, residuals = take_classes_forward(np.zeros((1, 2)), np.array([[1, 1]]))
    >>> take_classes_backward(3.0, residuals)
    array([[0., 6.]])
    """
    ChosenResiduals.check(residuals)
    problem = residuals.problem
    with np.errstate(all="ignore"):
        upstream = upstream_of_several(dchosen, "dchosen", problem)
        gradient = residuals.gradient_for(None, problem.logits)
        kernel, axis, dtype = problem.kernel, problem.options.axis, gradient.dtype
        sums = kernel.sums_of_equal(by_row(problem.targets, problem), upstream)
        gradient.view(f"u{dtype.itemsize}")[...] = 0
        kernel.put(gradient, axis, columns_of(problem), converted(sums, dtype))
    return gradient


def chosen_logits(options: Options, logits: Any, ids: Any) -> tuple[Array, ChosenResiduals]:
    """Return the results of `take_classes_forward`; collective over `options.comm`."""

    def check_arguments() -> Problem:
        problem = check(options, logits, None, needs_targets=False, later=True)
        check_several(problem, as_array(ids, "ids"), "ids")
        if not problem.all_valid:  # -100 is no class either
            problem.valid, problem.highest_target = np.ones(problem.valid.shape, np.bool_), LARGEST
        return problem

    problem = agree_on(options, check_arguments)
    found = in_shape(all_logits(problem, columns_of(problem)), problem)
    return found, ChosenResiduals(problem)


def fits_several(problem: Problem, numbers: Array) -> bool:
    """Return whether `numbers` have the logits' shape but for the class axis."""
    axis = problem.options.axis
    rest = numbers.shape[:axis] + numbers.shape[axis + 1 :]
    return numbers.ndim == problem.logits.ndim and rest == problem.rows_shape


def check_several(problem: Problem, numbers: Array, name: str) -> None:
    """Give `problem` several class numbers a row as its targets, or raise; `name` is theirs in messages."""
    logits = problem.logits
    if numbers.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {numbers.dtype}")
    if not fits_several(problem, numbers):
        raise ValueError(
            f"{name} must have the logits' shape, {logits.shape}, with any number of classes in place of the class "
            f"axis, got {numbers.shape}"
        )
    if cupy_of(numbers) is not None:
        check_one_library({"logits": logits, name: numbers})
        check_on_current_gpu({name: numbers})
    ignore_index = problem.options.ignore_index
    flat, ignored = class_numbers_of(numbers, name, ignore_index), as_int64(ignore_index, numbers.dtype)
    problem.valid, problem.all_valid, highest = kernel_of(flat).valid_rows(flat, ignored)
    problem.highest_target = min(highest, LARGEST)
    problem.targets, problem.targets_shape, problem.targets_name = flat, numbers.shape, name
    problem.several = True
    problem.inputs = (*problem.inputs, numbers)


def all_logits(problem: Problem, columns: HostArray) -> Array:
    """Return the logits of the local `columns`, (rows, chosen), each from the rank that has it.

    A column that no rank has gives 0. Collective over the class communicator: one Allreduce.
    """
    options = problem.options
    bits = problem.kernel.taken(problem.logits, options.axis, columns)
    settle(problem)
    if options.comm is not None:
        with cause(options.operation, options.over, "the logits of chosen classes, each from the rank that has it"):
            bits = all_reduce(bits, options.comm, "sum", overwrite=True)
    return bits.view(problem.logits.dtype)


def by_row(array: Array, problem: Problem) -> Array:
    """Return an array with an entry for each target, in their order, as (rows, targets of a row)."""
    if not problem.several:
        return array.reshape(-1, 1)
    shape, axis = problem.targets_shape, problem.options.axis
    whole = array_namespace(array).moveaxis(array.reshape(shape), axis, -1)
    return whole.reshape(math.prod(problem.rows_shape), shape[axis])


def in_shape(array: Array, problem: Problem) -> Array:
    """Return an array (rows, targets of a row) in the shape of the targets."""
    if not problem.several:
        return array.reshape(problem.rows_shape)
    xp, whole = array_namespace(array), array.reshape(*problem.rows_shape, array.shape[1])
    return xp.ascontiguousarray(xp.moveaxis(whole, -1, problem.options.axis))


def columns_of(problem: Problem) -> HostArray:
    """Return the local columns of the targets, (rows, targets of a row), or other numbers if they are not here."""
    assert problem.targets is not None
    return by_row(np.where(problem.valid, problem.targets - problem.class_start, -1), problem)


def upstream_of_several(value: Any, name: str, problem: Problem) -> Array:
    """Return an upstream gradient, a number or of the shape of the targets, as float64 (rows, targets of a row)."""
    upstream = converted(upstream_of(value, name, problem.targets_shape, problem), np.float64)
    return by_row(problem.xp.broadcast_to(problem.xp.asarray(upstream), problem.valid.shape), problem)


@takes(ShardedAxisOptions)
@tensors_for_tensors
def top_k(logits: Any, k: int, **options: Unpack[ShardedAxisOptions]) -> tuple[Array, Array]:
    """Find the k largest logits of plain shards; see `pce_mpi.top_k`."""
    return largest(Options.of("top_k", options, ShardedAxisOptions), logits, k)


@takes(ShardedAxisOptions)
@tensors_for_tensors
def argmax(logits: Any, **options: Unpack[ShardedAxisOptions]) -> Array:
    """Find the classes of the largest logits of plain shards; see `pce_mpi.argmax`."""
    checked = Options.of("argmax", options, ShardedAxisOptions)
    classes = largest(checked, logits, 1)[1]
    return classes.squeeze(operator.index(checked.axis))


def largest(options: Options, logits: Any, k: int) -> tuple[Array, Array]:
    """Return the results of `top_k`; collective over `options.comm`, in a block `with standard_arithmetic()`."""
    problem = agree_on(options, partial(_check, options, logits, k))
    k = checked_k(k)
    if k > problem.num_classes:
        raise ValueError(f"k = {k}, but there are {problem.num_classes} classes")
    xp, axis = problem.xp, problem.options.axis
    outer, inner = math.prod(problem.logits.shape[:axis]), math.prod(problem.logits.shape[axis + 1 :])
    rows = rows_and_classes(problem.logits, axis).swapaxes(1, 2).reshape(outer * inner, problem.classes)
    kind, count = problem.logits.dtype.kind, min(k, problem.classes)
    # Numbers of 8 bytes, which have all those of the logits.
    dtype: Any = np.uint64 if kind == "u" else np.int64 if kind in "ib" else np.float64
    values, columns = problem.kernel.largest_of(rows, count)
    settle(problem)
    values, classes = values.astype(dtype, copy=False), columns + problem.class_start
    if options.comm is not None:
        candidates = xp.empty((len(rows), 2, k), np.int64)
        numbers, places = candidates[:, 0].view(dtype), candidates[:, 1]
        lowest = -math.inf if dtype is np.float64 else np.iinfo(dtype).min
        numbers[...], places[...] = lowest, NO_CLASS  # for a rank with fewer than k classes
        numbers[:, :count], places[:, :count] = values, classes
        element = np.dtype([("values", dtype, (k,)), ("classes", np.int64, (k,))])
        with cause(options.operation, options.over, "the largest logits of the shards, merged"):
            flat = candidates.reshape(len(rows), 2 * k)
            candidates = all_reduce(flat, options.comm, _merge(k), element=element, overwrite=True)
        values, classes = candidates[:, :k].view(dtype), candidates[:, k:]
    shape = (*problem.logits.shape[:axis], *problem.logits.shape[axis + 1 :], k)

    def in_shape(array: Array, dtype: Any) -> Array:
        return xp.ascontiguousarray(xp.moveaxis(converted(array, dtype).reshape(shape), -1, axis))

    return in_shape(values, problem.logits.dtype), in_shape(classes, np.int64)


def _check(options: Options, logits: Any, k: Any) -> Problem:
    problem = check(options, logits, None, needs_targets=False, later=True, whole_numbers=True)
    problem.also = {"k": checked_k(k)}
    return problem


def checked_k(k: Any) -> int:
    number = integer(k, "k")
    if number < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    return number


@cache
def _merge(k: int) -> Callable[[HostArray, HostArray], None]:
    """Make the function that merges the k candidates of some classes into those of others, of the same rows."""

    def merge(a: HostArray, b: HostArray) -> None:
        values, classes = (np.concatenate([a[name], b[name]], axis=1) for name in ("values", "classes"))
        by_class = np.argsort(classes, axis=1, kind="stable")
        values, classes = (np.take_along_axis(each, by_class, axis=1) for each in (values, classes))
        first = order(values)[:, :k]
        b["values"] = np.take_along_axis(values, first, axis=1)
        b["classes"] = np.take_along_axis(classes, first, axis=1)

    return merge

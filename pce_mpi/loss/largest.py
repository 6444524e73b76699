"""The largest logits of each row over the classes of all shards, and their class numbers.

Each rank finds the k largest of its own classes. The ranks merge these candidates in one Allreduce. The result does not
depend on the order of the merges: classes with equal logits come in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
import math
import operator
from typing import Any, Unpack

import numpy as np

from pce_mpi.arrays import is_floating
from pce_mpi.comm.collectives import all_reduce
from pce_mpi.comm.tracing import cause
from pce_mpi.kernels import converted, standard_arithmetic
from pce_mpi.kernels.largest import order
from pce_mpi.kernels.softmax_state import NO_CLASS
from pce_mpi.loss.agreement import agree_on
from pce_mpi.loss.options import Options, ShardedAxisOptions, takes
from pce_mpi.loss.problem import Problem, check, rows_and_classes
from pce_mpi.loss.tensors import tensors_for_tensors
from pce_mpi.validation import integer

Array = Any  # numpy.ndarray or cupy.ndarray
HostArray = np.ndarray[Any, Any]


@takes(ShardedAxisOptions)
@tensors_for_tensors
def top_k(logits: Any, k: int, **options: Unpack[ShardedAxisOptions]) -> tuple[Array, Array]:
    """Find the k largest logits of each row over the classes of all shards, and their classes.

    Parameters
    ----------
    logits : array of real numbers
        Those of `softmax_cross_entropy`, or integers or bool.
    k : int
        How many, at least 1 and at most the number of classes of all shards; the same on every rank.

    Returns
    -------
    values : array
        The k largest logits, largest first, in the logits' dtype: shaped as the logits with k in place of the class
        axis. A `nan` is larger than any number, as in NumPy's and PyTorch's order.
    classes : array of int64
        Their global numbers; among equal logits the lowest come first. Both are the same bits on every rank.

    Raises
    ------
    ValueError
        If there are fewer than k classes. All other errors are those of `softmax_cross_entropy`.

    Notes
    -----
    Collective over `comm`: one Allgather of 56 bytes, and one Allreduce of 16 k bytes a row.

    Examples
    --------
    >>> import numpy as np
    >>> values, classes = top_k(np.array([[1.0, 3.0, 2.0, 3.0]]), 3)
    >>> values, classes
    (array([[3., 3., 2.]]), array([[1, 3, 2]]))
    """
    with standard_arithmetic():
        return largest(Options.of("top_k", options, ShardedAxisOptions), logits, k)


@takes(ShardedAxisOptions)
@tensors_for_tensors
def argmax(logits: Any, **options: Unpack[ShardedAxisOptions]) -> Array:
    """Find the class of the largest logit of each row over the classes of all shards.

    Parameters
    ----------
    logits : array of real numbers
        Those of `top_k`.

    Returns
    -------
    array of int64
        The global number of the class, shaped as the logits without the class axis: the lowest on ties, and the first
        `nan` if there is one, as in NumPy. Every rank has equal bits.

    Notes
    -----
    Errors and communication are those of `top_k` for k = 1.

    Examples
    --------
    >>> import numpy as np
    >>> argmax(np.array([[1.0, 3.0, 2.0, 3.0]]))
    array([1])
    """
    checked = Options.of("argmax", options, ShardedAxisOptions)
    with standard_arithmetic():
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
    dtype, count = _wire_dtype(problem.logits.dtype), min(k, problem.classes)
    values, columns = problem.kernel.largest_of(rows, count)
    values, classes = values.astype(dtype, copy=False), columns + problem.class_start
    if options.comm is not None:
        candidates = xp.empty((len(rows), 2, k), np.int64)
        numbers, places = candidates[:, 0].view(dtype), candidates[:, 1]
        numbers[...], places[...] = _lowest(dtype), NO_CLASS  # for a rank with fewer than k classes
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
    problem = check(options, logits, None, needs_targets=False, whole_numbers=True)
    problem.also = {"k": checked_k(k)}
    return problem


def checked_k(k: Any) -> int:
    number = integer(k, "k")
    if number < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    return number


def _wire_dtype(dtype: np.dtype[Any]) -> Any:
    """Return the dtype of 8 bytes that has all numbers of `dtype`."""
    return np.float64 if is_floating(dtype) else np.uint64 if dtype.kind == "u" else np.int64


def _lowest(dtype: Any) -> Any:
    return -math.inf if dtype is np.float64 else np.iinfo(dtype).min


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

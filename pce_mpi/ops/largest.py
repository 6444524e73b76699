"""The largest elements along an axis and their places; over a sharded axis the ranks merge candidates."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from pce_mpi import loss
from pce_mpi.arrays import array_namespace
from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.op import Call, Op, operation
from pce_mpi.autograd.rules import Axis, Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.kernels import standard_arithmetic
from pce_mpi.loss.largest import checked_k, largest
from pce_mpi.loss.options import AxisOptions, Options, ShardedAxisOptions, takes
from pce_mpi.ops.primitive import axes_of, sharded_options
from pce_mpi.ops.shape import normalized_axis

Array = Any  # numpy.ndarray or cupy.ndarray
Shape = tuple[int, ...]


def _rule(shape: Shape, axis: int, k: int | None = None) -> Rule:
    labels, found = tuple(map(Axis, range(len(shape)))), () if k is None else (k,)
    result = axes_of("r" if k is None else "rn", axis, labels)
    return Rule((labels,), result, (*shape[:axis], *found, *shape[axis + 1 :]), merged=frozenset({axis}))


def _top_k(call: Call, x: Array, axis: int, k: int) -> tuple[Array, Array]:
    with standard_arithmetic():
        found = largest(sharded_options(call.mesh, call.operands, "top_k", [axis], axis=axis), x, k)
    call.residuals = found[1]
    return found


def _argmax(call: Call, x: Array, axis: int) -> Array:
    with standard_arithmetic():
        options = sharded_options(call.mesh, call.operands, "argmax", [axis], axis=axis)
        return largest(options, x, 1)[1].squeeze(axis)


def _put_rule(g: Shape, classes: Shape, x: Shape, axis: int) -> Rule:
    labels = tuple(map(Axis, range(len(x))))
    taken = axes_of("rn", axis, labels)
    return Rule((taken, taken, labels), labels, x, linear=((0,),))


def _put(call: Call, g: Array, classes: Array, x: Array, axis: int) -> Array:
    """Return zeros, with `g` at those of `classes` that this shard has."""
    xp = array_namespace(g)
    start, stop = call.operands[2].block(axis, call.mesh.coordinates)
    here = (classes >= start) & (classes < stop)
    # Classes of other shards go to one extra place, which is left out.
    filled = xp.zeros([*call.shape[:axis], stop - start + 1, *call.shape[axis + 1 :]], g.dtype)
    xp.put_along_axis(filled, xp.where(here, classes - start, stop - start), g, axis)
    return filled[(*[slice(None)] * axis, slice(stop - start))]


# The operand is there for its sharding alone.
_PUT = Op("top_k", _put, rule=_put_rule, dtype=lambda g, *_: g)


def _to_operand(g: DistArray, y: DistArray, x: DistArray, axis: int, k: int, residuals: Array) -> DistArray:
    return apply(_PUT, g, DistArray(residuals, y.mesh, y.sharding), x, axis=axis)


_TOP_K = Op("top_k", _top_k, (_to_operand,), _rule, uses=[()])
_ARGMAX = Op("argmax", _argmax, rule=_rule, dtype=lambda _: np.int64)


@operation
@takes(ShardedAxisOptions)
def top_k(logits: Any, k: int, **options: Unpack[ShardedAxisOptions]) -> tuple[Any, Any]:
    """Find the k largest elements along an axis, and their places: of a distributed array, or of plain shards.

    Parameters
    ----------
    logits : DistArray or array of real numbers
        A distributed array, which is reduced first if it is Partial; or this rank's classes of the same rows, as
        `softmax_cross_entropy` takes them. Only these take `comm`, `class_start` and `num_classes`. Integers and bool
        are accepted too.
    k : int
        How many, at least 1 and at most the length of the axis over all shards; the same on every rank.
    axis : int, default -1
        The axis, or the class axis.

    Returns
    -------
    values : DistArray or array
        The k largest elements, largest first, in the dtype of `logits`, with k in place of the axis. A `nan` is larger
        than any number, as in NumPy's and PyTorch's order. For a distributed array they are Replicate over the dims
        that shard the axis; other axes stay sharded, and the gradient goes to the elements that were taken.
    classes : DistArray or array of int64
        Their places along the axis, or global class numbers; among equal elements the lowest come first.

    Raises
    ------
    ValueError
        If there are fewer than k elements or classes, or the axis does not exist.
    TypeError, CollectiveError
        Those of `softmax_cross_entropy`, on every rank; and for the options of plain shards beside a distributed array.

    Notes
    -----
    Collective over `comm`, or over the dims that shard the axis: one Allgather of 56 bytes, and one Allreduce of 16 k
    bytes a row. Every rank gets the bits that one process gets from all classes. Backward communicates nothing.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = np.array([[1.0, 3.0, 2.0, 3.0]])
    >>> pce.top_k(x, 3)
    (array([[3., 3., 2.]]), array([[1, 3, 2]]))
    >>> values, classes = pce.top_k(pce.distribute(x, mesh, data=pce.Shard(1)), 3)
    >>> classes.placements, classes.full()
    ({'data': Replicate()}, array([[1, 3, 2]]))
    """
    if not isinstance(logits, DistArray):
        return loss.top_k(logits, k, **options)
    axis = normalized_axis(Options.of("top_k", options, AxisOptions).axis, logits.ndim)
    number = checked_k(k)
    if number > logits.shape[axis]:
        raise ValueError(f"k = {k}, but axis {axis} of {logits.shape} has {logits.shape[axis]} elements")
    found: tuple[Any, Any] = apply(_TOP_K, logits, axis=axis, k=number)
    return found


@operation
@takes(ShardedAxisOptions)
def argmax(logits: Any, **options: Unpack[ShardedAxisOptions]) -> Any:
    """Find the place of the largest element along an axis: of a distributed array, or of plain shards.

    Parameters
    ----------
    logits : DistArray or array of real numbers
        Those of `top_k`.
    axis : int, default -1
        The axis, or the class axis. (`numpy.argmax` of a distributed array is over all elements unless told an axis.)

    Returns
    -------
    DistArray or array of int64
        The place along the axis, or the global class number: the lowest on ties, and the first `nan` if there is one,
        as in NumPy. It has no gradient. Placement as in `top_k`.

    Raises
    ------
    ValueError
        If there are no elements or classes, or the axis does not exist.

    Notes
    -----
    All other errors, and communication, are those of `top_k` for k = 1.

    Examples
    --------
    >>> import numpy as np, pce_mpi as pce
    >>> pce.argmax(np.array([[1.0, 3.0, 2.0, 3.0]]))
    array([1])
    """
    if not isinstance(logits, DistArray):
        return loss.argmax(logits, **options)
    axis = normalized_axis(Options.of("argmax", options, AxisOptions).axis, logits.ndim)
    if not logits.shape[axis]:
        raise ValueError(f"argmax of no elements: shape {logits.shape}, axis {axis}")
    return apply(_ARGMAX, logits, axis=axis)

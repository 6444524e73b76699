"""Statistics of each row's softmax, on top of `loss/`: of logits, and of `hidden @ w` without all logits.

The backward pass computes the logits of `hidden @ w` a second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
import math
from typing import Any, Unpack

import numpy as np

from pce_mpi import loss
from pce_mpi.arrays import Array, HostArray, array_namespace
from pce_mpi.autograd.apply import Call, apply, operation
from pce_mpi.distributed.array import DistArray
from pce_mpi.loss.chunks import Gradients, check_product
from pce_mpi.loss.linear import LinearStatisticsResiduals, gradients_of, prepared, statistics_of_product
from pce_mpi.loss.options import (
    LinearSoftmaxOptions,
    LinearStatisticsOptions,
    Options,
    StatisticsOptions,
    SupportedOptions,
    takes,
)
from pce_mpi.loss.problem import Problem
from pce_mpi.loss.statistics import ClassStatistics, StatisticsResiduals, class_statistics_backward, statistics_of
from pce_mpi.ops.elementwise import widened
from pce_mpi.ops.joining import stack
from pce_mpi.ops.losses import composed_logits
from pce_mpi.ops.primitive import Primitive, op_of, shape_of_several
from pce_mpi.ops.shape import expand_dims, normalized_axis

_WITH_GRADIENT = ("log_prob", "entropy", "logsumexp")


def _class_statistics(
    call: Call, options: Options, logits: Array, targets: Array | None = None
) -> tuple[tuple[Array, ...], StatisticsResiduals]:
    """Return all statistics but those that are None; several log-probabilities a row are one array each."""
    if options.support is not None:
        options = replace(options, support_rows=_rows_here(call, options.axis))
    statistics, residuals = statistics_of(options, logits, targets)
    log_prob = statistics.log_prob
    each = () if log_prob is None else (log_prob,) if log_prob.ndim < logits.ndim else _apart(log_prob, options.axis)
    return (*statistics[:3], *each, *statistics[4:]), residuals


def _rows_here(call: Call, axis: int) -> tuple[int, HostArray]:
    """Return the number of all rows, and the numbers of those of this rank."""
    sharding = call.operands[0]
    blocks = sharding.slices(call.mesh.coordinates)
    shape, mine = sharding.shape[:axis] + sharding.shape[axis + 1 :], blocks[:axis] + blocks[axis + 1 :]
    total = math.prod(shape)
    return total, np.arange(total).reshape(shape)[mine].reshape(-1)


def _apart(log_prob: Array, axis: int) -> list[Array]:
    xp = array_namespace(log_prob)
    return [each.copy() for each in xp.moveaxis(log_prob, axis, 0)]


def _named(values: Sequence[Any], log_prob: Any, count: int) -> ClassStatistics:
    """Name the statistics that `_class_statistics` gives, or the first of them, with this in place of `count`."""
    names = [name for name in ClassStatistics._fields if name != "log_prob"]
    named = dict(zip(names, [*values[:3], *values[3 + count :]], strict=False))
    return ClassStatistics(**{**dict.fromkeys(names), **named}, log_prob=log_prob)


def detached(values: Sequence[DistArray], axis: int | None = None) -> ClassStatistics:
    """Name the statistics of distributed arrays, those without a gradient detached from the tape.

    Several log-probabilities a row are stacked along `axis`.
    """
    log_probs = values[3:-2]
    log_prob = log_probs[0] if log_probs and axis is None else None
    if axis is not None:
        nothing = expand_dims(values[-2], axis)[(*[slice(None)] * axis, slice(0))]
        log_prob = stack(log_probs, axis) if log_probs else nothing
    statistics = _named(values, log_prob, len(log_probs))
    return statistics._replace(max=statistics.max.detach(), sum_exp=statistics.sum_exp.detach())


def upstream_of(g: Sequence[Array], problem: Problem) -> dict[str, Array]:
    """Return this rank's gradients of the statistics that have one, by name."""
    axis = problem.options.axis
    count = 0 if problem.targets is None else problem.targets_shape[axis] if problem.several else 1
    log_probs = g[3 : 3 + count]
    log_prob = log_probs[0] if log_probs else None
    if problem.several and log_probs:
        log_prob = array_namespace(g[0]).stack(log_probs, axis)
    given = _named(g, log_prob, count)
    return {name: value for name in _WITH_GRADIENT if (value := getattr(given, name)) is not None}


CLASS_STATISTICS = Primitive(
    "class_statistics",
    {"logits": "rc", "targets": "r|rn"},
    SupportedOptions,
    _class_statistics,
    {"logits": lambda g, residuals: class_statistics_backward(residuals, **upstream_of(g, residuals.problem))},
)


@operation
@takes(StatisticsOptions)
def class_statistics(logits: Any, targets: Any = None, **options: Unpack[StatisticsOptions]) -> ClassStatistics:
    """Compute statistics of each row's softmax over all classes: of a distributed array, or of plain shards.

    Parameters
    ----------
    logits : DistArray or array
        A distributed array, which is reduced first if it is Partial; or this rank's classes of the same rows, as
        `softmax_cross_entropy` takes them. Only these take `comm`, `class_start` and `num_classes`.
    targets : DistArray or array of integers, optional
        Class numbers, with the logits' shape without the class axis, or several a row, in place of the class axis, as
        `top_k` gives them; only `log_prob` needs them. An `ignore_index` among several counts for nothing by itself.
        Beside a distributed array they are global, and placed as its rows are.
    support : (ids, offsets), optional
        The classes that the softmax is taken over: those of row r, counted in the order of the logits without the class
        axis, are `ids[offsets[r]:offsets[r + 1]]`, global numbers in any order, none twice. Plain arrays of integers,
        the same on every rank: also beside a distributed array they have all rows, of which each rank takes its own.

    Returns
    -------
    ClassStatistics
        `max`, `sum_exp`, `logsumexp`, `log_prob`, `entropy` and `argmax` of each row, with the bits of one process on
        every rank. For a distributed array they are placed as its rows are, and Replicate over the dims that shard the
        classes; `log_prob`, `entropy` and `logsumexp` have gradients.

    Raises
    ------
    ValueError
        For probabilities as targets, a class twice in a support, and a target outside its support.
    TypeError, IndexError, CollectiveError
        Those of `softmax_cross_entropy`, on every rank; and for the options of plain shards beside a distributed array.

    Notes
    -----
    Collective over `comm`, or over the dims that shard the classes: one Allgather of 56 bytes, and one Allreduce of 80
    bytes a row, 8 more with targets; for several targets a row these 8 are missing, and one Allreduce of the bytes of
    their logits follows. If rows of a distributed array are sharded, one Allgather of 56 bytes over their
    dims. With class numbers on a GPU, one a row, each Allgather comes twice, and the first with logits on a GPU, unless
    `num_classes` is given. Backward communicates nothing, and takes
    one pass for all three gradients. For the gradients of plain shards see `class_statistics_forward`.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> pce.class_statistics(np.log([[1.0, 3.0]])).entropy
    array([0.56233514])
    >>> x = pce.distribute(np.zeros((1, 2)), pce.Mesh(MPI.COMM_SELF, data=1), requires_grad=True, data=pce.Shard(1))
    >>> pce.sum(pce.class_statistics(x, np.array([0])).log_prob).backward()
    >>> x.grad.full()
    array([[ 0.5, -0.5]])
    """
    if not isinstance(logits, DistArray):
        return loss.class_statistics(logits, targets, **options)
    operands = {"logits": logits} if targets is None else {"logits": logits, "targets": targets}
    values = CLASS_STATISTICS.apply(operands, options)
    axis = normalized_axis(options.get("axis", -1), logits.ndim)
    return detached(values, axis if shape_of_several(targets, "targets", logits.shape, axis) else None)


class _Residuals:
    """The residuals of a call, and the gradients of its operands, which their vjps share."""

    def __init__(self, residuals: LinearStatisticsResiduals) -> None:
        self._residuals = residuals
        self._gradients: Gradients | None = None

    def gradients(self, g: Sequence[Array]) -> Gradients:
        if self._gradients is None:
            upstream = upstream_of(g, self._residuals.problem)
            self._gradients = gradients_of(self._residuals, *prepared(self._residuals, upstream))
        return self._gradients


def _linear_class_statistics(
    call: Call, options: Options, hidden: Array, w: Array, targets: Array | None = None
) -> tuple[tuple[Array, ...], _Residuals]:
    """Return all statistics but those that are None."""
    statistics, residuals = statistics_of_product(options, hidden, w, targets)
    return tuple(each for each in statistics if each is not None), _Residuals(residuals)


def _composed(operands: Mapping[str, DistArray], **options: Any) -> tuple[DistArray, ...]:
    del options["chunk"], options["rounded_gradient"]
    given = {"logits": composed_logits(operands, widened(operands["hidden"]))}
    if "targets" in operands:
        given["targets"] = operands["targets"]
    results: tuple[DistArray, ...] = apply(
        op_of(CLASS_STATISTICS, tuple(given)), *given.values(), support=None, **options
    )
    return results


_LINEAR_CLASS_STATISTICS = Primitive(
    "linear_class_statistics",
    {"hidden": "rf", "w": "fc", "targets": "r", "bias": "c"},
    LinearSoftmaxOptions,
    _linear_class_statistics,
    {
        "hidden": lambda g, residuals: residuals.gradients(g).hidden,
        "w": lambda g, residuals: residuals.gradients(g).w,
        "bias": lambda g, residuals: residuals.gradients(g).bias,
    },
    composition=_composed,
)


@operation
@takes(LinearStatisticsOptions)
def linear_class_statistics(
    hidden: Any, w: Any, targets: Any = None, **options: Unpack[LinearStatisticsOptions]
) -> ClassStatistics:
    """Compute statistics of each row's softmax of `hidden @ w + bias`, without ever holding all logits.

    The statistics are `class_statistics` of the logits. Operands are distributed arrays, or plain arrays: then each
    rank passes the same `hidden` and its own columns of `w`.

    Parameters
    ----------
    hidden : DistArray or array of float16, bfloat16, float32 or float64, shape (..., features)
        Features of a distributed array are gathered first if they are sharded.
    w : DistArray or array of the dtype of `hidden`, shape (features, classes)
        Distributed as `hidden` is or is not. Sharded by classes, it stays so. A plain array has this rank's classes.
        Only plain arrays take `comm`, `class_start` and `num_classes`.
    targets : DistArray or array of integers, shape (...), optional
        Class numbers; only `log_prob` needs them. The array is global and is placed as the rows of `hidden` are.
    bias : DistArray or array of the dtype of `hidden`, shape (classes,), optional
        Sharded as the classes are.
    rounded_gradient : bool, default False
        Round the gradient of the logits of halves to their dtype before it is multiplied; not inside `reproducible`. On
        a GPU that takes three products rather than five.

    Returns
    -------
    ClassStatistics
        `max`, `sum_exp`, `logsumexp`, `log_prob`, `entropy` and `argmax` of each row. For distributed arrays they are
        placed as the rows of `hidden` are, and Replicate over the dims that shard the classes; `log_prob`, `entropy`
        and `logsumexp` have gradients.

    Raises
    ------
    TypeError, ValueError, IndexError, CollectiveError
        Those of `class_statistics`, and for operands that do not fit, on every rank that shares rows or classes with
        the one that found the error.

    Notes
    -----
    If classes are sharded: one Allgather of 56 bytes over `comm`, or over their dims, and one Allreduce of 80 bytes a
    row, 8 more with targets, for each half of a chunk. If rows of a distributed array are sharded, one Allgather of 56
    bytes over their dims. Backward computes the logits of a chunk again. It communicates nothing: the gradient of
    `hidden` is Partial over the dims of the classes, and the gradients of `w` and `bias` over the dims of the rows. A
    gradient of `hidden` that is a half is reduced at once, in float32, and then rounded. For the gradients of plain
    arrays see `linear_class_statistics_forward`.

    The bits are those of `class_statistics` of the same logits. But a BLAS gives other last bits to a product with
    another number of rows or columns; inside `reproducible` it does not.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> w = pce.distribute(np.zeros((2, 4)), mesh, requires_grad=True, data=pce.Shard(1))
    >>> found = pce.linear_class_statistics(pce.distribute(np.ones((1, 2)), mesh), w, np.array([3]))
    >>> pce.sum(found.log_prob).backward()
    >>> found.log_prob.full(), w.grad.full()[0]  # -log 4
    (array([-1.38629436]), array([-0.25, -0.25, -0.25,  0.75]))
    """
    operands = {"hidden": hidden, "w": w}
    if not any(isinstance(each, DistArray) for each in operands.values()):
        return loss.linear_class_statistics(hidden, w, targets, **options)
    for name, each in operands.items():
        if not isinstance(each, DistArray):
            kind = type(each).__name__
            raise TypeError(f"{name} must be a DistArray, got {kind}; make one with pce_mpi.distribute")
    check_product(operands)
    given = {} if targets is None else {"targets": targets}
    return detached(_LINEAR_CLASS_STATISTICS.apply({**operands, **given}, options))

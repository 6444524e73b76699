"""Statistics of each row's softmax, wherever its axes are sharded, on top of `loss/statistics.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
import math
from typing import Any, Unpack

import numpy as np

from pce_mpi import loss
from pce_mpi.arrays import array_namespace
from pce_mpi.autograd.op import Call, operation
from pce_mpi.distributed.array import DistArray
from pce_mpi.loss.options import Options, StatisticsOptions, SupportedOptions, takes
from pce_mpi.loss.problem import Problem
from pce_mpi.loss.statistics import (
    ClassStatistics,
    StatisticsResiduals,
    class_statistics_backward,
    statistics_of,
)
from pce_mpi.ops.joining import stack
from pce_mpi.ops.primitive import Primitive, shape_of_several
from pce_mpi.ops.shape import expand_dims, normalized_axis

Array = Any  # numpy.ndarray or cupy.ndarray
HostArray = np.ndarray[Any, Any]

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
        `top_k` gives them; only `log_prob` needs them. Beside a distributed array they are global, and placed as its
        rows are.
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
    dims. Backward communicates nothing, and takes one pass for all three gradients. For the gradients of plain shards
    see `class_statistics_forward`.

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

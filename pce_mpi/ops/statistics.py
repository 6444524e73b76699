"""Statistics of each row's softmax, wherever its axes are sharded, on top of `loss/statistics.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from pce_mpi import loss
from pce_mpi.arrays import compute_dtype_of
from pce_mpi.autograd.op import Call, Op
from pce_mpi.autograd.rules import Axis, Rule
from pce_mpi.distributed.array import DistArray, operation
from pce_mpi.loss.agreement import prepare
from pce_mpi.loss.kernels import standard_arithmetic
from pce_mpi.loss.options import Options, SoftmaxOptions, StatisticsOptions, takes
from pce_mpi.loss.statistics import (
    ClassStatistics,
    StatisticsResiduals,
    class_statistics_backward,
    statistics_of,
)
from pce_mpi.ops.options import apply_checked, checked_operands, parameters_of, sharded_options
from pce_mpi.ops.shape import normalized_axis

Array = Any  # numpy.ndarray or cupy.ndarray
Shape = tuple[int, ...]

_WITH_GRADIENT = ("log_prob", "entropy", "logsumexp")


def _rule(logits: Shape, *targets: Shape, axis: int, **_: Any) -> Rule:
    labels = tuple(Axis(index) for index in range(len(logits)))
    rows = labels[:axis] + labels[axis + 1 :]
    shape = (*logits[:axis], *logits[axis + 1 :])
    return Rule((labels, *[rows for _ in targets]), rows, shape, merged=frozenset({labels[axis].label}))


def _class_statistics(call: Call, logits: Array, *targets: Array, **options: Any) -> tuple[Array, ...]:
    """Return all statistics but those that are None."""
    axis = options["axis"]
    rows = [index for index in range(logits.ndim) if index != axis]
    all_options = sharded_options(call, "class_statistics", [axis], rows, **options)
    statistics, call.residuals = statistics_of(prepare(all_options, logits, *targets, needs_targets=False))
    return tuple(each for each in statistics if each is not None)


def _named(values: Sequence[Any], with_targets: bool) -> ClassStatistics:
    """Name the statistics that `_class_statistics` gives, or the first of them."""
    names = [name for name in ClassStatistics._fields if with_targets or name != "log_prob"]
    return ClassStatistics(**{**dict.fromkeys(ClassStatistics._fields), **dict(zip(names, values, strict=False))})


def detached(values: Sequence[DistArray], with_targets: bool) -> ClassStatistics:
    """Name the statistics of distributed arrays, those without a gradient detached from the tape."""
    statistics = _named(values, with_targets)
    return statistics._replace(max=statistics.max.detach(), sum_exp=statistics.sum_exp.detach())


def upstream_of(g: Sequence[DistArray], with_targets: bool) -> dict[str, Array]:
    """Return this rank's gradients of the statistics that have one, by name."""
    given = _named(g, with_targets)._asdict()
    return {name: given[name].local for name in _WITH_GRADIENT if given[name] is not None}


def _to_logits(
    g: tuple[DistArray, ...],
    y: tuple[DistArray, ...],
    logits: DistArray,
    *targets: DistArray,
    residuals: StatisticsResiduals,
    **options: Any,
) -> DistArray:
    gradient = class_statistics_backward(residuals, **upstream_of(g, bool(targets)))
    return DistArray(gradient, logits.mesh, logits.sharding)


CLASS_STATISTICS = Op(
    "class_statistics",
    _class_statistics,
    (_to_logits, None),
    _rule,
    dtype=lambda logits, *_: compute_dtype_of(logits),
    uses=[()],
)


@operation
@takes(StatisticsOptions)
def class_statistics(logits: Any, targets: Any = None, **options: Unpack[StatisticsOptions]) -> ClassStatistics:
    """Compute statistics of each row's softmax over all classes: of a distributed array, or of plain shards.

    Parameters
    ----------
    logits : DistArray or array
        A distributed array, which is reduced first if it is Partial; or this rank's classes of the same rows, as
        `softmax_cross_entropy` takes them.
    targets : DistArray or array of integers, optional
        Class numbers, with the logits' shape without the class axis; only `log_prob` needs them. Beside a distributed
        array they are global, and placed as its rows are.
    axis, ignore_index, logit_scale, softcap, compute_dtype : optional
        Those of `softmax_cross_entropy`.
    comm, class_start, num_classes : optional
        Those of `softmax_cross_entropy`; of plain shards alone.

    Returns
    -------
    ClassStatistics
        `max`, `sum_exp`, `logsumexp`, `log_prob`, `entropy` and `argmax` of each row, with the bits of one process on
        every rank. For a distributed array they are placed as its rows are, and Replicate over the dims that shard the
        classes; `log_prob`, `entropy` and `logsumexp` have gradients.

    Raises
    ------
    ValueError
        For probabilities as targets.
    TypeError, IndexError, CollectiveError
        Those of `softmax_cross_entropy`, on every rank; and for the options of plain shards beside a distributed array.

    Notes
    -----
    Collective over `comm`, or over the dims that shard the classes: one Allgather of 56 bytes, and one Allreduce of 80
    bytes a row, 8 more with targets. If rows of a distributed array are sharded, one Allgather of 56 bytes over their
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
    checked = Options.of("class_statistics", options, SoftmaxOptions)
    axis, shape = normalized_axis(checked.axis, logits.ndim), logits.shape
    given, rows = {} if targets is None else {"targets": targets}, shape[:axis] + shape[axis + 1 :]
    others, found = checked_operands({"logits": logits}, given, rows, shape[axis])
    parameters = parameters_of(checked, SoftmaxOptions) | {"axis": axis} | found
    with standard_arithmetic():
        return detached(apply_checked(CLASS_STATISTICS, logits, *others.values(), **parameters), bool(others))

"""Statistics of the softmax of `hidden @ w` without all logits, which a backward pass computes a second time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from pce_mpi import loss
from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.op import Call, operation
from pce_mpi.distributed.array import DistArray
from pce_mpi.loss.chunks import Gradients, check_product
from pce_mpi.loss.linear_statistics import LinearStatisticsResiduals, gradients_of, prepared, statistics_of_product
from pce_mpi.loss.options import LinearSoftmaxOptions, LinearStatisticsOptions, Options, takes
from pce_mpi.loss.statistics import ClassStatistics
from pce_mpi.ops.elementwise import widened
from pce_mpi.ops.linear_loss import composed_logits
from pce_mpi.ops.primitive import Primitive, op_of
from pce_mpi.ops.statistics import CLASS_STATISTICS, detached, upstream_of

Array = Any  # numpy.ndarray or cupy.ndarray


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

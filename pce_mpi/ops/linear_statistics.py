"""Statistics of the softmax of `hidden @ w` without all logits, which a backward pass computes a second time."""

from __future__ import annotations

from functools import cache
from typing import Any, Unpack

from pce_mpi import loss
from pce_mpi.arrays import compute_dtype_of
from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.op import Call, Op
from pce_mpi.autograd.rules import Axis, Rule
from pce_mpi.distributed.array import DistArray, operation
from pce_mpi.loss.chunks import Gradients, check_product
from pce_mpi.loss.linear_statistics import LinearStatisticsResiduals, gradients_of, prepared, statistics_of_product
from pce_mpi.loss.options import LinearSoftmaxOptions, LinearStatisticsOptions, Options, takes
from pce_mpi.loss.statistics import ClassStatistics
from pce_mpi.ops.elementwise import widened
from pce_mpi.ops.linear_loss import dims_of_classes, dims_of_rows, gradient_of
from pce_mpi.ops.matmul import matmul
from pce_mpi.ops.options import apply_checked, checked_operands, parameters_of, sharded_options
from pce_mpi.ops.statistics import CLASS_STATISTICS, detached, upstream_of

Array = Any  # numpy.ndarray or cupy.ndarray
Shape = tuple[int, ...]


def _rule(hidden: Shape, w: Shape, *others: Shape, biased: bool, **_: Any) -> Rule:
    """Return the rule: rows and classes may be sharded, features not; the statistics themselves merge the classes."""
    rows, classes = tuple(Axis(index) for index in range(len(hidden) - 1)), Axis("classes")
    of_rows, of_classes = [rows] * (len(others) - biased), [(classes,)] * biased
    operands = ((*rows, None), (None, classes), *of_rows, *of_classes)
    return Rule(operands, rows, hidden[:-1], merged=frozenset({classes.label}))


class _Residuals:
    """The residuals of a call, and the gradients of its operands, which their vjps share."""

    def __init__(self, residuals: LinearStatisticsResiduals) -> None:
        self._residuals = residuals
        self._gradients: Gradients | None = None

    def gradients(self, g: tuple[DistArray, ...]) -> Gradients:
        if self._gradients is None:
            upstream = upstream_of(g, int(self._residuals.problem.targets is not None))
            self._gradients = gradients_of(self._residuals, *prepared(self._residuals, upstream))
        return self._gradients


def _linear_class_statistics(
    call: Call, hidden: Array, w: Array, *others: Array, biased: bool, **options: Any
) -> tuple[Array, ...]:
    """Return all statistics but those that are None."""
    options["bias"] = others[-1] if biased else None
    rows = range(hidden.ndim - 1)
    all_options = sharded_options(call, "linear_class_statistics", [1], rows, classes_of=1, **options)
    targets = others[0] if len(others) > biased else None
    statistics, residuals = statistics_of_product(all_options, hidden, w, targets)
    call.residuals = _Residuals(residuals)
    return tuple(each for each in statistics if each is not None)


def _to_hidden(
    g: Any, y: Any, hidden: DistArray, w: DistArray, *_: DistArray, residuals: _Residuals, **options: Any
) -> DistArray:
    return gradient_of(hidden, residuals.gradients(g).hidden, dims_of_classes(w))


def _to_w(
    g: Any, y: Any, hidden: DistArray, w: DistArray, *_: DistArray, residuals: _Residuals, **options: Any
) -> DistArray:
    return gradient_of(w, residuals.gradients(g).w, dims_of_rows(hidden))


def _to_bias(g: Any, y: Any, hidden: DistArray, *others: DistArray, residuals: _Residuals, **options: Any) -> DistArray:
    return gradient_of(others[-1], residuals.gradients(g).bias, dims_of_rows(hidden))


def _composed(
    hidden: DistArray, w: DistArray, *others: DistArray, biased: bool, **options: Any
) -> tuple[DistArray, ...]:
    """Compute the statistics from all logits at once: their products have a reproducible form."""
    del options["chunk"], options["rounded_gradient"]
    logits = matmul(widened(hidden), widened(w))
    if biased:
        logits = logits + widened(others[-1])
    results: tuple[DistArray, ...] = apply(
        CLASS_STATISTICS, logits, *others[: len(others) - biased], axis=logits.ndim - 1, support=None, **options
    )
    return results


@cache
def _op(with_targets: bool, biased: bool) -> Op:
    return Op(
        "linear_class_statistics",
        _linear_class_statistics,
        (_to_hidden, _to_w, *[None] * with_targets, *[_to_bias] * biased),
        _rule,
        dtype=lambda hidden, *_: compute_dtype_of(hidden),
        uses=[(), (), (), ()],
        wide_sums=(0,),
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
    targets : DistArray or array of integers, shape (...), optional
        Class numbers; only `log_prob` needs them. The array is global and is placed as the rows of `hidden` are.
    ignore_index, logit_scale, softcap, compute_dtype : optional
        Those of `softmax_cross_entropy`.
    comm, class_start, num_classes : optional
        Those of `softmax_cross_entropy`; of plain arrays alone.
    bias : DistArray or array of the dtype of `hidden`, shape (classes,), optional
        Sharded as the classes are.
    chunk, rounded_gradient : optional
        Those of `linear_cross_entropy_value_and_grad`; inside `reproducible` nothing is rounded.

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
    checked = Options.of("linear_class_statistics", options, LinearSoftmaxOptions)
    check_product(operands)
    given = ({} if targets is None else {"targets": targets}) | {"bias": checked.bias}
    others, found = checked_operands(operands, given, hidden.shape[:-1], w.shape[1])
    parameters = parameters_of(checked, LinearSoftmaxOptions) | {"biased": "bias" in others} | found
    op = _op("targets" in others, "bias" in others)
    return detached(apply_checked(op, hidden, w, *others.values(), **parameters))

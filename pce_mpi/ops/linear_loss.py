"""The loss of `hidden @ w + bias` without all logits: gradients are taken while the logits of some rows are at hand."""

from __future__ import annotations

from typing import Any, Unpack

from pce_mpi.arrays import compute_dtype_of
from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.op import Call, Op
from pce_mpi.autograd.operands import of_array
from pce_mpi.autograd.rules import Axis, Rule
from pce_mpi.distributed.array import DistArray, operation
from pce_mpi.loss.chunks import check_product
from pce_mpi.loss.linear import RowSums, loss_and_sums
from pce_mpi.loss.options import LinearCrossEntropyOptions, Options, Reduction, takes
from pce_mpi.ops.elementwise import widened
from pce_mpi.ops.loss import CROSS_ENTROPY
from pce_mpi.ops.matmul import matmul
from pce_mpi.ops.options import apply_checked, checked_operands, parameters_of, sharded_options
from pce_mpi.ops.selection import comparison, where
from pce_mpi.ops.shape import reshape

Array = Any  # numpy.ndarray or cupy.ndarray
Shape = tuple[int, ...]


def _rule(hidden: Shape, w: Shape, targets: Shape, *of_classes: Shape, **_: Any) -> Rule:
    """Return the rule: rows and classes may be sharded, features not; the loss itself merges and reduces."""
    rows, classes = tuple(Axis(index) for index in range(len(hidden) - 1)), Axis("classes")
    operands = ((*rows, None), (None, classes), rows, *((classes,) for _ in of_classes))
    return Rule(operands, (), (), merged=frozenset({classes.label, *(row.label for row in rows)}))


def _linear_cross_entropy(
    call: Call, hidden: Array, w: Array, targets: Array, *of_classes: Array, biased: bool, **options: Any
) -> Array:
    options["bias"] = of_classes[0] if biased else None
    options["weight"] = next(iter(of_classes[biased:]), None)
    rows = range(hidden.ndim - 1)
    all_options = sharded_options(call, "linear_cross_entropy", [1], rows, classes_of=1, **options)
    loss, call.residuals = loss_and_sums(all_options, hidden, w, targets, with_gradients=any(call.required))
    return loss


def gradient_of(x: DistArray, gradient: Array, partial_over: tuple[str, ...]) -> DistArray:
    """Return the gradient of an operand."""
    return DistArray(gradient, x.mesh, x.sharding.with_partial_over(partial_over))


def _to_hidden(
    g: DistArray, y: DistArray, hidden: DistArray, w: DistArray, *_: DistArray, residuals: RowSums, **options: Any
) -> DistArray:
    return gradient_of(hidden, residuals.of_hidden(g.local), dims_of_classes(w))


def _to_w(
    g: DistArray, y: DistArray, hidden: DistArray, w: DistArray, *_: DistArray, residuals: RowSums, **options: Any
) -> DistArray:
    return gradient_of(w, residuals.of_classes(residuals.gradients.w, g.local), dims_of_rows(hidden))


def _to_bias(
    g: DistArray, y: DistArray, hidden: DistArray, *others: DistArray, residuals: RowSums, **options: Any
) -> DistArray:
    _, _, bias, *_ = others
    return gradient_of(bias, residuals.of_classes(residuals.gradients.bias, g.local), dims_of_rows(hidden))


def dims_of_classes(w: DistArray) -> tuple[str, ...]:
    """Return the dims that shard the classes."""
    return tuple(dim for dim in w.mesh.dims if dim in w.sharding.dims_of(1))


def dims_of_rows(hidden: DistArray) -> tuple[str, ...]:
    """Return the dims that shard the rows."""
    rows = range(len(hidden.shape) - 1)
    return tuple(dim for dim in hidden.mesh.dims if any(dim in hidden.sharding.dims_of(axis) for axis in rows))


def _composed(
    hidden: DistArray,
    w: DistArray,
    targets: DistArray,
    *of_classes: DistArray,
    biased: bool,
    **options: Any,
) -> DistArray:
    """Compute the loss from all logits at once: their products have a reproducible form."""
    del options["chunk"], options["rounded_gradient"]
    counts = reshape(comparison("not_equal")(targets, options["ignore_index"]), (*targets.shape, 1))
    logits = matmul(where(counts, widened(hidden), 0.0), widened(w))  # or the gradient of w has 0 times nan
    if biased:
        logits = logits + widened(of_classes[0])
    return apply(CROSS_ENTROPY, logits, targets, *of_classes[biased:], axis=logits.ndim - 1, **options)


def _op(biased: bool) -> Op:
    return Op(
        "linear_cross_entropy",
        _linear_cross_entropy,
        (_to_hidden, _to_w, None, _to_bias if biased else None),
        _rule,
        dtype=lambda hidden, *_: compute_dtype_of(hidden),
        uses=[(), (), (), ()],
        wide_sums=(0,),
        composition=_composed,
    )


_LINEAR_CROSS_ENTROPY, _BIASED = _op(False), _op(True)


@operation
@of_array
@takes(LinearCrossEntropyOptions)
def linear_cross_entropy(
    hidden: DistArray, w: DistArray, targets: Any, **options: Unpack[LinearCrossEntropyOptions]
) -> DistArray:
    """Compute the loss of `hidden @ w + bias` without ever holding all logits, wherever rows and classes are sharded.

    The formula is that of `softmax_cross_entropy`. `hidden`, `w` and `bias` have gradients, which are computed with the
    loss.

    Parameters
    ----------
    hidden : DistArray of float16, bfloat16, float32 or float64, shape (..., features)
        Its features are gathered first if they are sharded.
    w : DistArray of the dtype of `hidden`, shape (features, classes)
        Sharded by classes, it stays so.
    targets : DistArray or array of integers, shape (...)
        Class numbers. The array is global and is placed as the rows of `hidden` are.
    ignore_index, logit_scale, softcap, compute_dtype : optional
        Those of `softmax_cross_entropy`.
    weight : DistArray or array, shape (classes,), optional
        The weights of all classes, placed as `targets` is.
    label_smoothing, z_loss, margin : optional
        Those of `softmax_cross_entropy`.
    reduction : {"mean", "sum"}, default "mean"
        The mean or the sum over all rows of all ranks.
    bias : DistArray or array of the dtype of `hidden`, shape (classes,), optional
        Sharded as the classes are.
    chunk, rounded_gradient : optional
        Those of `linear_cross_entropy_value_and_grad`; inside `reproducible` nothing is rounded.

    Returns
    -------
    DistArray
        The loss, 0-d and Replicate.

    Raises
    ------
    TypeError, ValueError, IndexError, CollectiveError
        Those of `softmax_cross_entropy`, on every rank that shares rows or classes with the one that found the error.

    Notes
    -----
    If classes are sharded: one Allgather of 56 bytes over their dims, and one Allreduce of 40 bytes a row (more with
    options) for each half of a chunk. If rows are sharded: one Allgather of 56 bytes over their dims, and one Allreduce
    of 64 bytes. Backward communicates nothing: the gradient of `hidden` is Partial over the dims of the classes, and
    the gradients of `w` and `bias` over the dims of the rows. A gradient of `hidden` that is a half is reduced at once,
    in float32, and then rounded.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> w = pce.distribute(np.zeros((2, 4)), mesh, requires_grad=True, data=pce.Shard(1))
    >>> loss = pce.linear_cross_entropy(pce.distribute(np.ones((1, 2)), mesh), w, np.array([3]))
    >>> loss.backward()
    >>> loss.item(), w.grad.full()[0]  # log 4
    (1.3862943611198906, array([ 0.25,  0.25,  0.25, -0.75]))
    """
    if not isinstance(w, DistArray):
        raise TypeError(f"w must be a DistArray, got {type(w).__name__}; make one with pce_mpi.distribute")
    checked = Options.of("linear_cross_entropy", options, LinearCrossEntropyOptions)
    if isinstance(checked.reduction, str) and checked.reduction == Reduction.NONE:
        raise ValueError("reduction must be 'sum' or 'mean', as gradients are computed with the loss, got 'none'")
    operands = {"hidden": hidden, "w": w}
    check_product(operands)
    given = {"targets": targets, "bias": checked.bias, "weight": checked.weight}
    others, found = checked_operands(operands, given, hidden.shape[:-1], w.shape[1])
    parameters, biased = parameters_of(checked, LinearCrossEntropyOptions) | found, "bias" in others
    return apply_checked(
        _BIASED if biased else _LINEAR_CROSS_ENTROPY, hidden, w, *others.values(), biased=biased, **parameters
    )

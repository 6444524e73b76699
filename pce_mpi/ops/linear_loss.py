"""The loss of `hidden @ w + bias` without all logits: gradients are taken while the logits of some rows are at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.op import of_array, operation
from pce_mpi.distributed.array import DistArray
from pce_mpi.loss.chunks import check_product
from pce_mpi.loss.linear import loss_and_sums
from pce_mpi.loss.options import LinearCrossEntropyOptions, Reduction, takes
from pce_mpi.ops.elementwise import widened
from pce_mpi.ops.loss import CROSS_ENTROPY
from pce_mpi.ops.matmul import matmul
from pce_mpi.ops.primitive import Primitive, op_of
from pce_mpi.ops.selection import comparison, where
from pce_mpi.ops.shape import reshape


def composed_logits(operands: Mapping[str, DistArray], hidden: DistArray) -> DistArray:
    """Return the logits from all rows at once: their products have a reproducible form."""
    logits = matmul(hidden, widened(operands["w"]))
    return logits + widened(operands["bias"]) if "bias" in operands else logits


def _composed(operands: Mapping[str, DistArray], **options: Any) -> DistArray:
    del options["chunk"], options["rounded_gradient"]
    hidden, targets = operands["hidden"], operands["targets"]
    counts = reshape(comparison("not_equal")(targets, options["ignore_index"]), (*targets.shape, 1))
    logits = composed_logits(operands, where(counts, widened(hidden), 0.0))  # or the gradient of w has 0 times nan
    given = {"logits": logits, **{name: operands[name] for name in ("targets", "weight") if name in operands}}
    return apply(op_of(CROSS_ENTROPY, tuple(given)), *given.values(), **options)


_LINEAR_CROSS_ENTROPY = Primitive(
    "linear_cross_entropy",
    {"hidden": "rf", "w": "fc", "targets": "r", "bias": "c", "weight": "c"},
    LinearCrossEntropyOptions,
    lambda call, options, hidden, w, targets: loss_and_sums(options, hidden, w, targets, any(call.required)),
    {
        "hidden": lambda g, sums: sums.of_hidden(g),
        "w": lambda g, sums: sums.of_classes(sums.gradients.w, g),
        "bias": lambda g, sums: sums.of_classes(sums.gradients.bias, g),
    },
    composition=_composed,
)


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
    weight : DistArray or array, shape (classes,), optional
        The weights of all classes, placed as `targets` is.
    reduction : {"mean", "sum"}, default "mean"
        The mean or the sum over all rows of all ranks.
    bias : DistArray or array of the dtype of `hidden`, shape (classes,), optional
        Sharded as the classes are.
    rounded_gradient : bool, default False
        Round the gradient of the logits of halves to their dtype before it is multiplied; not inside `reproducible`. On
        a GPU that takes three products rather than five.

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
    reduction = options.get("reduction")
    if isinstance(reduction, str) and reduction == Reduction.NONE:
        raise ValueError("reduction must be 'sum' or 'mean', as gradients are computed with the loss, got 'none'")
    check_product({"hidden": hidden, "w": w})
    return _LINEAR_CROSS_ENTROPY.apply({"hidden": hidden, "w": w, "targets": targets}, options)

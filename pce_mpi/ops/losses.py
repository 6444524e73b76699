"""Losses: the cross entropy of logits and of `hidden @ w`, divergences and the mean squared error.

The logits of `hidden @ w` are made some rows at a time, and gradients are taken while they are at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Unpack

from pce_mpi import loss
from pce_mpi.arrays import compute_dtype_of, is_half, result_type
from pce_mpi.autograd.apply import apply, of_array, operands_of, operation
from pce_mpi.distributed.array import DistArray
from pce_mpi.loss.agreement import prepare
from pce_mpi.loss.chunks import check_product
from pce_mpi.loss.divergence import divergence_of, kl_divergence_backward, prepare_divergence
from pce_mpi.loss.linear import loss_and_sums
from pce_mpi.loss.options import (
    CrossEntropyOptions,
    DivergenceOptions,
    LinearCrossEntropyOptions,
    LossOptions,
    Reduction,
    ShardedDivergenceOptions,
    takes,
)
from pce_mpi.loss.passes import forward
from pce_mpi.ops.arithmetic import comparison, subtract, where
from pce_mpi.ops.elementwise import astype, square, widened
from pce_mpi.ops.primitive import Primitive, op_of
from pce_mpi.ops.products import matmul
from pce_mpi.ops.reductions import mean
from pce_mpi.ops.shape import reshape

CROSS_ENTROPY = Primitive(
    "cross_entropy",
    {"logits": "rc", "targets": "r|rc", "weight": "c"},
    CrossEntropyOptions,
    lambda call, options, logits, targets: forward(prepare(options, logits, targets)),
    {"logits": loss.softmax_cross_entropy_backward},
)


@operation
@takes(LossOptions, like=loss.softmax_cross_entropy)
def cross_entropy(logits: Any, targets: Any, **options: Unpack[LossOptions]) -> Any:
    """Compute the softmax cross entropy, in nats: of a distributed array, or of plain shards.

    The formula is that of `softmax_cross_entropy`, which is called for plain shards. Of a distributed array, sums and
    means are over all rows of all ranks, and only the logits have a gradient.

    Parameters
    ----------
    logits : DistArray or array of float16, bfloat16, float32 or float64
        Distributed logits that are Partial are reduced first.
    targets : DistArray or array
        Class numbers with the logits' shape without the class axis, or probabilities shaped as the logits. Beside
        distributed logits the array is global and is placed as they are: plain arrays are sliced, which communicates
        nothing.
    weight : DistArray or array, shape (classes,), optional
        The weights of all classes, placed as `targets` is.

    Returns
    -------
    DistArray or array
        The loss: 0-d and Replicate, or for `reduction="none"` one number per row, placed as the rows of the logits; of
        plain shards as `softmax_cross_entropy` returns it.

    Raises
    ------
    TypeError, ValueError, IndexError, CollectiveError
        Those of `softmax_cross_entropy`, on every rank that shares rows or classes with the one that found the error;
        and for the options of plain shards (`comm`, ...) beside distributed logits, whose placements answer them.

    Notes
    -----
    If the class axis is sharded it stays so: one Allgather of 56 bytes over the dims that shard it, and one Allreduce
    of 40 bytes a row (more with options). If rows are sharded, one Allgather of 56 bytes over their dims and, for
    `"sum"` and `"mean"`, one Allreduce of 64 bytes. With class numbers on a GPU each Allgather comes twice. Backward
    communicates nothing; the gradient is placed as the logits are.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> logits = pce.distribute(np.zeros((2, 4)), mesh, requires_grad=True, data=pce.Shard(1))
    >>> loss = pce.cross_entropy(logits, np.array([0, 3]))
    >>> loss.placements, loss.full()  # log 4
    ({'data': Replicate()}, array(1.38629436))
    >>> loss.backward()
    >>> logits.grad.placements, logits.grad.full()[0]
    ({'data': Shard(1)}, array([-0.375,  0.125,  0.125,  0.125]))
    """
    if not isinstance(logits, DistArray):
        return loss.softmax_cross_entropy(logits, targets, **options)
    return CROSS_ENTROPY.apply({"logits": logits, "targets": targets}, options)


@operation
def mse(x: Any, y: Any) -> DistArray:
    """Compute the mean of (x - y)**2 over all elements of the global array.

    Parameters
    ----------
    x, y : DistArray, array or number
        At least one is a `DistArray`; they broadcast. Arrays that are Partial are reduced first.

    Returns
    -------
    DistArray
        The mean, 0-d and Partial over the dims that shard `x` or `y`. Halves are computed in float32 and rounded once.

    Raises
    ------
    TypeError, ValueError
        Those of `add`.

    Notes
    -----
    Communicates nothing, unless an operand is Partial or a sharded axis has to be placed as the other operand's.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> loss = pce.mse(pce.distribute(np.array([1.0, 3.0]), mesh, data=pce.Shard(0)), np.zeros(2))
    >>> loss.placements, loss.full()
    ({'data': Partial('sum')}, array(5.))
    """
    first, second = operands_of("mse", (x, y))
    # Plain arrays stay plain: `apply` compares those of which ranks hold the same elements.
    if first is x:
        difference = widened(first) - (second if second is y else second.local)
    else:
        difference = subtract(first.local, widened(second))
    loss = mean(square(difference))
    dtype = result_type(first.dtype, second.dtype)
    return astype(loss, dtype) if is_half(dtype) else loss


_KL_DIVERGENCE = Primitive(
    "kl_divergence",
    {"student": "rc", "teacher": "rc", "rows": "r"},
    DivergenceOptions,
    lambda call, options, student, teacher: divergence_of(prepare_divergence(options, student, teacher)),
    {of: partial(kl_divergence_backward, of=of) for of in ("student", "teacher")},
    dtype=lambda student, teacher, *_: compute_dtype_of(max(student, teacher, key=lambda each: each.itemsize)),
)


@operation
@takes(ShardedDivergenceOptions, like=loss.kl_divergence_forward)
def kl_divergence(student: Any, teacher: Any, **options: Unpack[ShardedDivergenceOptions]) -> Any:
    """Compute the divergence of two softmaxes over all classes, in nats: of distributed arrays, or of plain shards.

    With s and t the softmax of logit_scale student and logit_scale teacher, and KL(p || q) = sum_c p_c log(p_c / q_c),
    it is

        "forward"           KL(t || s)
        "reverse"           KL(s || t)
        "jensen-shannon"    beta KL(t || m) + (1 - beta) KL(s || m)     m = beta t + (1 - beta) s

    With beta 0 the last is KL(t || s), with 1 KL(s || t). Nothing is divided by logit_scale**2. A class with p_c = 0
    contributes 0, whatever q_c is.

    Parameters
    ----------
    student, teacher : DistArray or array of float16, bfloat16, float32 or float64
        Logits of one shape; dtypes may differ. At least one is a distributed array, and a plain array beside it is
        global and placed as it is; those that are Partial are reduced first. Or both are this rank's classes of the
        same rows, as `softmax_cross_entropy` takes them. Only these take `comm`, `class_start`, `num_classes` and
        `batch_comm`.
    rows : DistArray or array of bool, optional
        True for rows that count, shaped as the logits without the class axis: global beside a distributed array, else
        the same on every rank of `comm`. Other rows have the divergence 0 and zero gradients, whatever their logits
        are.
    reduction : {"mean", "sum", "none"}, default "mean"
        `"mean"` divides by the number of rows that count; if there are none it is `nan`. Sums and means are over all
        rows of all ranks.

    Returns
    -------
    DistArray or array
        The divergence, 0-d, or for `reduction="none"` one number per row; with the bits of one process on every rank.
        It is 0 for equal logits, infinite if a class is masked by -inf in the softmax after the bars alone, and `nan`
        for a row with a `nan`, a +inf or only -inf. For distributed arrays it is Replicate, or placed as the rows are,
        and student and teacher have gradients.

    Raises
    ------
    TypeError, ValueError, CollectiveError
        Those of `softmax_cross_entropy`, on every rank; and for the options of plain shards beside a distributed array.

    Notes
    -----
    Collective over `comm`, or over the dims that shard the classes: one Allgather of 56 bytes (two with logits on a
    GPU, unless `num_classes` is given), and two Allreduces, of 80 and of 48 bytes a row. If rows are sharded, one
    Allgather of 56 bytes over `batch_comm` or their dims and, for `"sum"` and `"mean"`, one Allreduce of 64 bytes.
    Backward communicates nothing; gradients are placed as the logits are. For the gradients of plain shards see
    `kl_divergence_value_and_grad`.

    A divergence of 1e-8 has as many digits as one of 1: the terms of its sums are positive and computed in float64 from
    the difference of the logits.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> float(pce.kl_divergence(np.log([[1.0, 3.0]]), np.zeros((1, 2))).round(6))  # log(2 / sqrt 3)
    0.143841
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.log([[1.0, 3.0]]), mesh, requires_grad=True, data=pce.Shard(1))
    >>> pce.kl_divergence(x, np.zeros((1, 2))).backward()
    >>> x.grad.full().round(6)
    array([[-0.25,  0.25]])
    """
    operands = {"student": student, "teacher": teacher}
    if not any(isinstance(each, DistArray) for each in operands.values()):
        return loss.kl_divergence(student, teacher, **options)
    return _KL_DIVERGENCE.apply(operands, options)


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

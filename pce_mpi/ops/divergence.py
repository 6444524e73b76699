"""The divergence of two softmaxes, wherever their axes are sharded, on top of `loss/divergence.py`."""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

from pce_mpi import loss
from pce_mpi.arrays import compute_dtype_of
from pce_mpi.autograd.op import operation
from pce_mpi.distributed.array import DistArray
from pce_mpi.loss.divergence import divergence_of, kl_divergence_backward, prepare
from pce_mpi.loss.options import DivergenceOptions, ShardedDivergenceOptions, takes
from pce_mpi.ops.primitive import Primitive

_KL_DIVERGENCE = Primitive(
    "kl_divergence",
    {"student": "rc", "teacher": "rc", "rows": "r"},
    DivergenceOptions,
    lambda call, options, student, teacher: divergence_of(prepare(options, student, teacher)),
    {of: partial(kl_divergence_backward, of=of) for of in ("student", "teacher")},
    dtype=lambda student, teacher, *_: compute_dtype_of(max(student, teacher, key=lambda each: each.itemsize)),
)


@operation
@takes(ShardedDivergenceOptions, like=loss.kl_divergence)
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
    Collective over `comm`, or over the dims that shard the classes: one Allgather of 56 bytes, and two Allreduces, of
    80 and of 48 bytes a row. If rows are sharded, one Allgather of 56 bytes over their dims and, for `"sum"` and
    `"mean"`, one Allreduce of 64 bytes. Backward communicates nothing; gradients are placed as the logits are. For the
    gradients of plain shards see `kl_divergence_value_and_grad`.

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

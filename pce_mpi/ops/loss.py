"""The losses. The placement of the logits decides whether the parallel cross entropy runs."""

from __future__ import annotations

from typing import Any, Unpack

from pce_mpi.arrays import is_half, result_type
from pce_mpi.autograd.op import operands_of, operation
from pce_mpi.distributed.array import DistArray
from pce_mpi.loss import softmax_cross_entropy, softmax_cross_entropy_backward
from pce_mpi.loss.agreement import prepare
from pce_mpi.loss.options import CrossEntropyOptions, LossOptions, takes
from pce_mpi.loss.passes import forward
from pce_mpi.ops.elementwise import astype, square, widened
from pce_mpi.ops.primitive import Primitive
from pce_mpi.ops.reductions import mean

CROSS_ENTROPY = Primitive(
    "cross_entropy",
    {"logits": "rc", "targets": "r|rc", "weight": "c"},
    CrossEntropyOptions,
    lambda call, options, logits, targets: forward(prepare(options, logits, targets)),
    {"logits": softmax_cross_entropy_backward},
)


@operation
@takes(LossOptions, like=softmax_cross_entropy)
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
    `"sum"` and `"mean"`, one Allreduce of 64 bytes. Backward communicates nothing; the gradient is placed as the logits
    are.

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
        return softmax_cross_entropy(logits, targets, **options)
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
    loss = mean(square(widened(first) - second))
    dtype = result_type(first.dtype, second.dtype)
    return astype(loss, dtype) if is_half(dtype) else loss

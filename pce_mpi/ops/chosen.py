"""The logits of chosen classes, wherever the axes of the logits are sharded, on top of `loss/chosen.py`."""

from __future__ import annotations

from typing import Any, Unpack

from pce_mpi import loss
from pce_mpi.autograd.op import operation
from pce_mpi.distributed.array import DistArray
from pce_mpi.loss.chosen import chosen_logits, take_classes_backward
from pce_mpi.loss.options import AxisOptions, ShardedAxisOptions, takes
from pce_mpi.ops.primitive import Primitive

_TAKE_CLASSES = Primitive(
    "take_classes",
    {"logits": "rc", "ids": "rn"},
    AxisOptions,
    lambda call, options, logits, ids: chosen_logits(options, logits, ids),
    {"logits": take_classes_backward},
    dtype=lambda logits, _: logits,
    result="ids",
)


@operation
@takes(ShardedAxisOptions)
def take_classes(logits: Any, ids: Any, **options: Unpack[ShardedAxisOptions]) -> Any:
    """Take the logits of chosen classes of each row: of a distributed array, or of plain shards.

    Parameters
    ----------
    logits : DistArray or array
        A distributed array, which is reduced first if it is Partial; or this rank's classes of the same rows, as
        `softmax_cross_entropy` takes them. Only these take `comm`, `class_start` and `num_classes`.
    ids : DistArray or array of integers
        Class numbers: the logits' shape with any number of classes in place of the class axis, as `top_k` gives them. A
        class may be chosen more than once. Beside a distributed array they are global, and placed as its rows are;
        beside plain shards the same on every rank, also on the host beside logits on a GPU.

    Returns
    -------
    DistArray or array
        The logits in the shape of `ids`, with all their bits. For a distributed array they are Replicate over the dims
        that shard the classes; other axes stay sharded, and the gradient goes to the classes that were chosen.

    Raises
    ------
    IndexError
        For a class out of range, on every rank.
    TypeError, ValueError, CollectiveError
        Those of `softmax_cross_entropy`, on every rank; and for the options of plain shards beside a distributed array.

    Notes
    -----
    Collective over `comm`, or over the dims that shard the classes: one Allgather of 56 bytes, and one Allreduce of the
    bytes of the result. If rows of a distributed array are sharded, one Allgather of 56 bytes over their dims. Backward
    communicates nothing. For the gradient of plain shards see `take_classes_forward`.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> x, ids = np.array([[1.0, 2.0, 3.0]]), np.array([[2, 0]])
    >>> pce.take_classes(x, ids)
    array([[3., 1.]])
    >>> logits = pce.distribute(x, pce.Mesh(MPI.COMM_SELF, data=1), requires_grad=True, data=pce.Shard(1))
    >>> pce.sum(pce.take_classes(logits, ids)).backward()
    >>> logits.grad.full()
    array([[1., 0., 1.]])
    """
    if not isinstance(logits, DistArray):
        return loss.take_classes(logits, ids, **options)
    return _TAKE_CLASSES.apply({"logits": logits, "ids": ids}, options)

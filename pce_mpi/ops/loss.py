"""The losses. The placement of the logits decides which cross entropy runs: nobody has to ask for the parallel one."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, as_array, check_one_library, compute_dtype_of, is_floating, is_half
from pce_mpi.autograd.apply import apply, operands_of
from pce_mpi.autograd.inference import Sent
from pce_mpi.autograd.op import Op, Shardings
from pce_mpi.autograd.rules import Axis, Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.mesh import text_of_dims
from pce_mpi.loss import Residuals, forward_of, softmax_cross_entropy_backward, value_and_grad_of
from pce_mpi.loss.arguments import Call, Reduction
from pce_mpi.loss.passes import state_fields
from pce_mpi.ops.elementwise import astype, square, widened
from pce_mpi.ops.reductions import mean
from pce_mpi.ops.shape import normalized_axis

__all__ = ["cross_entropy", "mse"]

Array = Any  # numpy.ndarray or cupy.ndarray
Shape = tuple[int, ...]


def _rule(logits: Shape, targets: Shape, *weight: Shape, axis: int, reduction: str, **_: Any) -> Rule:
    """Rows run together in logits and targets; sharded classes, and rows that are reduced, the loss joins itself."""
    labels = tuple(Axis(index) for index in range(len(logits)))
    classes, rows = labels[axis], labels[:axis] + labels[axis + 1 :]
    reduced = reduction != Reduction.NONE
    merged: set[Hashable] = {classes.label} | ({row.label for row in rows} if reduced else set())
    return Rule(
        (labels, labels if len(targets) == len(logits) else rows, *([(classes,)] if weight else [])),
        () if reduced else rows,
        () if reduced else logits[:axis] + logits[axis + 1 :],
        merged=frozenset(merged),
    )


def _call(logits: Any, targets: Any, weight: Any, shardings: Shardings, options: dict[str, Any]) -> Call:
    axis = options["axis"]
    rows = [index for index in range(len(shardings.operands[0].shape)) if index != axis]
    return Call(
        operation="cross_entropy",
        logits=logits,
        targets=targets,
        weight=weight,
        comm=shardings.comm([axis]),
        num_classes=shardings.operands[0].shape[axis] or None,  # no classes are an error of its own
        over=text_of_dims(shardings.dims([axis])),
        batch_comm=shardings.comm(rows),
        batch_over=text_of_dims(shardings.dims(rows)),
        **options,
    )


def _cross_entropy(
    logits: Array, targets: Array, *weight: Array, shardings: Shardings, **options: Any
) -> tuple[Array, Any]:
    """The loss; and its gradient, if that takes no further exponential, or else what it can be had from."""
    call = _call(logits, targets, weight[0] if weight else None, shardings, options)
    dtype = logits.dtype
    fused = targets.dtype.kind in "iu" and options["softcap"] is None
    # In half precision the gradient of the mean of many rows may be nothing, where that of a scaled loss is not.
    if shardings.required[0] and fused and compute_dtype_of(dtype, options["compute_dtype"]) == dtype:
        return value_and_grad_of(replace(call, with_gradient=True))
    return forward_of(call)


def _to_logits(
    g: DistArray,
    y: DistArray,
    logits: DistArray,
    targets: DistArray,
    *weight: DistArray,
    residuals: Any,
    **options: Any,
) -> DistArray:
    if isinstance(residuals, Residuals):
        return DistArray(softmax_cross_entropy_backward(g.local, residuals), logits.mesh, logits.sharding)
    if options["reduction"] == Reduction.NONE:
        residuals *= array_namespace(residuals).expand_dims(g.local, options["axis"])
    elif float(g.local) != 1.0:
        residuals *= g.local
    return DistArray(residuals, logits.mesh, logits.sharding)


def _sends(*dtypes: np.dtype[Any], shardings: Shardings, **options: Any) -> list[Sent]:
    axis = options["axis"]
    logits = shardings.operands[0]
    classes, others = shardings.dims([axis]), [index for index in range(len(logits.shape)) if index != axis]
    shape = logits.local_shape(shardings.mesh.coordinates)
    size = state_fields(
        probabilities=is_floating(dtypes[1]),
        weighted=len(dtypes) > 2,
        smoothed=options["label_smoothing"] > 0,
        scaled=options["logit_scale"] != 1 and options["softcap"] is None,
    ).dtype.itemsize
    sent = [Sent("all_reduce", text_of_dims(classes), size * math.prod(shape[index] for index in others))] * bool(
        classes
    )
    rows = shardings.dims(others)
    return sent + [Sent("all_reduce", text_of_dims(rows), 16)] * bool(rows and options["reduction"] != Reduction.NONE)


_CROSS_ENTROPY = Op(
    "cross_entropy",
    _cross_entropy,
    (_to_logits, None, None),
    _rule,
    dtype=lambda logits, *_: compute_dtype_of(logits),
    uses=[()],
    takes_shardings=True,
    gives_residuals=True,
    sends=_sends,
)


def cross_entropy(
    logits: DistArray,
    targets: Any,
    *,
    axis: int = -1,
    weight: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    reduction: str = "mean",
    compute_dtype: Any = None,
) -> DistArray:
    """The softmax cross entropy of `logits`, in nats; formula and options are those of `softmax_cross_entropy`.

    `targets`: integers with the logits' shape less the class axis, or probabilities with all of it; `weight`:
    (classes,). Both are global, and made to lie as the logits do: plain arrays are sliced, nothing is sent for them.
    `sum` and `mean` are Replicate; a loss per row lies as the rows do. Logits that are Partial are reduced first.

    Where the class axis is sharded it stays so, and the states of the shards are merged: an Allgather of 56 bytes
    and one Allreduce of 24 bytes a row (more with options). Where rows are sharded, `sum` and `mean` are over all of
    them: one further Allreduce of 16 bytes. Backward sends nothing; the gradient lies as the logits do.

    Raises what `softmax_cross_entropy` raises, on every rank that shares rows or classes with the one that found it.
    Only the logits have a gradient.

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
    given = targets if isinstance(targets, DistArray) else as_array(targets, "targets")
    place = normalized_axis(axis, logits.ndim)
    rows = logits.shape[:place] + logits.shape[place + 1 :]
    if given.shape not in (rows, logits.shape):
        raise ValueError(f"targets must have shape {rows} or, as probabilities, {logits.shape}, got {given.shape}")
    weights = [] if weight is None else [weight if isinstance(weight, DistArray) else as_array(weight, "weight")]
    if weights and weights[0].shape != logits.shape[place : place + 1]:
        raise ValueError(f"weight must have one entry per class, ({logits.shape[place]},), got {weights[0].shape}")
    named = zip(("logits", "targets", "weight"), (logits, given, *weights), strict=False)
    check_one_library({name: array.local if isinstance(array, DistArray) else array for name, array in named})
    return apply(
        _CROSS_ENTROPY,
        logits,
        given,
        *weights,
        axis=place,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        logit_scale=logit_scale,
        softcap=softcap,
        reduction=reduction,
        compute_dtype=compute_dtype,
    )


def mse(x: Any, y: Any) -> DistArray:
    """The mean of (x - y)**2 over all elements of the global array, 0-d; x and y broadcast, and one is a `DistArray`.

    Where they are sharded it is Partial; nothing is sent. What is Partial is reduced first. Errors as in `add`. Halves
    are computed with in float32, and rounded once.

    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> loss = pce.mse(pce.distribute(np.array([1.0, 3.0]), mesh, data=pce.Shard(0)), np.zeros(2))
    >>> loss.placements, loss.full()
    ({'data': Partial('sum')}, array(5.))
    """
    first, second = operands_of("mse", (x, y))
    loss = mean(square(widened(first) - second))
    dtype = np.result_type(first.dtype, second.dtype)
    return astype(loss, dtype) if is_half(dtype) else loss

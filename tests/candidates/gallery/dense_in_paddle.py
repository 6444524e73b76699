"""Paddle's cross entropy on gathered logits; Paddle must be installed."""

import numpy as np
import paddle
from paddle.nn.functional import cross_entropy as in_paddle

from pce_mpi.conformance import offers


@offers(
    dtypes=("float32", "float64"),
    options=("weight", "ignore_index", "label_smoothing"),
    reductions=("none", "sum", "mean"),
    dims=(2, 3),
    probabilities=True,
    gradient="backward",
    num_classes=False,
)
def cross_entropy(logits, targets, *, class_start, num_classes, comm, weight=None, **options):
    def gathered(shard):
        return paddle.to_tensor(np.concatenate(comm.allgather(np.asarray(shard)), axis=-1))

    x, soft = gathered(logits), targets.ndim == logits.ndim
    x.stop_gradient = False
    t = gathered(targets) if soft else paddle.to_tensor(np.asarray(targets, np.int64))
    loss = in_paddle(x, t, None if weight is None else gathered(weight), soft_label=soft, **options)
    loss = loss.reshape(logits.shape[:-1]) if loss.size > 1 or options["reduction"] == "none" else loss

    def backward(dloss):
        upstream = paddle.to_tensor(np.broadcast_to(np.asarray(dloss, logits.dtype), loss.shape).copy())
        (gradient,) = paddle.grad(loss, x, upstream, retain_graph=True)
        return gradient.numpy()[..., class_start : class_start + logits.shape[-1]]

    return loss.numpy(), backward

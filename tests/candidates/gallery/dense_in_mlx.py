"""MLX's cross entropy on gathered logits; MLX must be installed, `mlx[cpu]` on Linux."""

import mlx.core as mx
from mlx.nn.losses import cross_entropy as in_mlx
import numpy as np

from pce_mpi.conformance import offers

mx.set_default_device(mx.cpu)


def _to_mlx(array):
    array = np.asarray(array)
    return mx.array(array.astype(np.float32)).astype(getattr(mx, array.dtype.name))


@offers(
    dtypes=("float16", "bfloat16", "float32"),
    options=("label_smoothing",),
    reductions=("none", "sum", "mean"),
    dims=(1, 2, 3),
    probabilities=True,
    gradient="backward",
    num_classes=False,
)
def cross_entropy(logits, targets, *, class_start, num_classes, comm, **options):
    def gathered(shard):
        return _to_mlx(np.concatenate(comm.allgather(np.asarray(shard)), axis=-1))

    t = gathered(targets) if targets.ndim == logits.ndim else mx.array(np.asarray(targets))
    x = gathered(logits)

    def function(x):
        return in_mlx(x, t, **options)

    def backward(dloss):
        upstream = mx.broadcast_to(_to_mlx(np.asarray(dloss, np.float32)).astype(loss.dtype), loss.shape)
        _, (gradient,) = mx.vjp(function, [x], [upstream])
        whole = np.array(gradient.astype(mx.float32)).astype(logits.dtype)
        return whole[..., class_start : class_start + logits.shape[-1]]

    loss = function(x)
    return np.array(loss.astype(mx.float32)), backward

"""tinygrad's cross entropies on gathered logits; tinygrad must be installed, and clang, by which it compiles."""

import os

os.environ["DEV"] = "CPU"  # which is read when it is imported

import numpy as np
from tinygrad import Tensor

from pce_mpi.conformance import offers


def _dense(function, logits, comm, class_start):
    x = Tensor(np.concatenate(comm.allgather(np.asarray(logits)), axis=-1))
    loss = function(x)

    def backward(dloss):
        upstream = Tensor(np.broadcast_to(np.asarray(dloss, loss.numpy().dtype), loss.shape).copy())
        (gradient,) = loss.gradient(x, gradient=upstream)
        return gradient.numpy()[..., class_start : class_start + logits.shape[-1]]

    return loss.numpy(), backward


@offers(
    dtypes=("float16", "float32", "float64"),
    options=("ignore_index", "label_smoothing"),
    reductions=("none", "sum", "mean"),
    gradient="backward",
    num_classes=False,
)
def sparse_categorical(logits, targets, *, class_start, num_classes, comm, ignore_index=-100, **options):
    t = Tensor(np.asarray(targets, np.int32))
    return _dense(
        lambda x: x.sparse_categorical_crossentropy(t, ignore_index=ignore_index, **options), logits, comm, class_start
    )


@offers(
    dtypes=("float16", "float32", "float64"),
    options=("label_smoothing",),
    reductions=("none", "sum", "mean"),
    gradient="backward",
    num_classes=False,
)
def cross_entropy(logits, targets, *, class_start, num_classes, comm, **options):
    t = Tensor(np.asarray(targets, np.int32))
    return _dense(lambda x: x.cross_entropy(t, **options), logits, comm, class_start)

"""The way of most frameworks: three all-reduces a row, arithmetic in float32, probabilities saved for backward."""

from mpi4py import MPI
import numpy as np

from pce_mpi.conformance.candidates.offers import offers
from pce_mpi.conformance.problems.cases import Gradient


@offers(
    dtypes=("float16", "float32"),
    options=("ignore_index", "label_smoothing"),
    reductions=("none", "mean"),
    gradient=Gradient.BACKWARD,
)
def candidate(
    logits,
    targets,
    *,
    class_start,
    num_classes,
    comm,
    ignore_index=-100,
    label_smoothing=0.0,
    reduction="mean",
):
    counts = targets != ignore_index
    if (counts & ((targets < 0) | (targets >= num_classes))).any():
        raise IndexError(f"targets must be in [0, {num_classes}), or {ignore_index}")
    classes = np.array(logits.shape[1])
    comm.Allreduce(MPI.IN_PLACE, classes)
    if classes != num_classes:
        raise ValueError(f"the shards have {classes} classes together, not {num_classes}")

    dtype, smoothed = np.dtype(np.float32), np.float32(label_smoothing / num_classes)
    here = counts & (targets >= class_start) & (targets < class_start + logits.shape[1])
    row, column = np.flatnonzero(here), targets[here] - class_start
    with np.errstate(all="ignore"):
        top = logits.max(axis=1, initial=-np.inf).astype(dtype)
        comm.Allreduce(MPI.IN_PLACE, top, MPI.MAX)
        shifted = logits.astype(dtype) - top[:, None]

        wanted = np.zeros((2, len(logits)), dtype)
        wanted[0, row] = shifted[row, column]
        wanted[1] = (shifted * smoothed).sum(axis=1) if label_smoothing else 0.0
        comm.Allreduce(MPI.IN_PLACE, wanted)

        p = np.exp(shifted)
        total = p.sum(axis=1)
        comm.Allreduce(MPI.IN_PLACE, total)
        p /= total[:, None]

        loss = np.log(total) - (1.0 - label_smoothing) * wanted[0]
        loss = loss - wanted[1]
        loss = np.where(counts, np.where(np.isnan(loss), np.nan, loss), 0.0)
        rows = counts.sum() if reduction == "mean" else 1
        result = np.asarray(loss if reduction == "none" else loss.sum() / rows, dtype)

    def backward(dloss):
        dlogits = p - smoothed
        dlogits[row, column] -= 1.0 - label_smoothing
        with np.errstate(all="ignore"):
            dlogits *= (np.asarray(dloss, dtype) / rows).reshape(-1, 1)
        dlogits[~counts] = 0.0
        return dlogits.astype(logits.dtype)

    return result, backward

"""All-gather the shards and take a textbook softmax of the whole row, in float64."""

from mpi4py import MPI
import numpy as np

from pce_mpi.conformance.candidates.offers import offers
from pce_mpi.conformance.problems.cases import OPTIONS, Gradient


@offers(
    dtypes=("bfloat16", "float32"),
    options=OPTIONS,
    reductions=("none", "sum", "mean"),
    probabilities=True,
    dims=(1, 2, 3, 4, 5),
    any_axis=True,
    gradient=Gradient.VALUE,
)
def candidate(
    logits,
    targets,
    *,
    class_start,
    num_classes,
    comm,
    axis=-1,
    reduction="mean",
    weight=None,
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    logit_scale=1.0,
    softcap=None,
):
    mine = slice(class_start, class_start + logits.shape[axis])
    if sum(comm.allgather(logits.shape[axis])) != num_classes:
        raise ValueError(f"num_classes is {num_classes}: these are not the shards of so many classes")
    x = gather(np.moveaxis(logits, axis, 0), mine, num_classes, comm)
    w = np.ones(num_classes) if weight is None else gather(weight, mine, num_classes, comm)
    if targets.dtype.kind in "iu":
        counts = targets != ignore_index
        t = np.where(counts, targets, 0)
        if ((t < 0) | (t >= num_classes)).any():
            raise IndexError(f"targets must be in [0, {num_classes})")
        q = (np.arange(num_classes).reshape(-1, *[1] * t.ndim) == t).astype(np.float64)
        divisor = w[t][counts].sum()
    else:
        counts = np.ones(np.moveaxis(targets, axis, 0).shape[1:], bool)
        q = gather(np.moveaxis(targets, axis, 0), mine, num_classes, comm)
        divisor = counts.sum()
    u = ((1.0 - label_smoothing) * q + label_smoothing / num_classes) * w.reshape(-1, *[1] * counts.ndim)
    with np.errstate(all="ignore"):
        if softcap is None:
            z, slope = x - x.max(axis=0), logit_scale
            lse = logit_scale * x.max(axis=0)
            z *= logit_scale
        else:
            bent = np.tanh(logit_scale * x / softcap)
            z, slope = np.where(np.isinf(x), x, softcap * bent), logit_scale * (1.0 - bent) * (1.0 + bent)
            lse = z.max(axis=0)
            z = z - lse
        log_total = np.log(np.exp(z).sum(axis=0))
        lse, log_p = lse + log_total, z - log_total
        p = np.exp(log_p)
        losses = np.where(counts, np.where(u == 0.0, 0.0, -u * log_p).sum(axis=0) + z_loss * lse**2, 0.0)
        divisor = divisor if reduction == "mean" else 1.0
        dlogits = (p * (u.sum(axis=0) + 2.0 * z_loss * lse) - u) * slope / divisor
        dlogits = np.moveaxis(np.where(counts, dlogits, 0.0)[mine], 0, axis)
        loss = losses if reduction == "none" else losses.sum() / divisor
    loss = np.where(np.isnan(loss), np.nan, loss)
    return loss.astype(np.promote_types(logits.dtype, np.float32)), np.ascontiguousarray(dlogits).astype(logits.dtype)


def gather(shard, mine, length, comm):
    """The whole array, its first axis sharded, in float64."""
    whole = np.zeros((length, *shard.shape[1:]))
    whole[mine] = shard.astype(np.float64)
    # Every place is zero but on the rank that holds it, so that a sum gathers, whatever the order of the shards.
    comm.Allreduce(MPI.IN_PLACE, whole, MPI.SUM)
    return whole

"""One pass over the classes with an online maximum; the states of the ranks are merged in order."""

import numpy as np

from pce_mpi.conformance.candidates.offers import offers
from pce_mpi.conformance.problems.cases import Gradient

BLOCK, MOST_BLOCKS = 5, 40  # classes at a time, or more where there are many


@offers(
    dtypes=("bfloat16", "float64"),
    options=("weight", "ignore_index", "logit_scale"),
    reductions=("sum", "mean"),
    dims=(2, 3),
    gradient=Gradient.VALUE,
)
def candidate(
    logits,
    targets,
    *,
    class_start,
    num_classes,
    comm,
    weight=None,
    ignore_index=-100,
    logit_scale=1.0,
    reduction="mean",
):
    classes = logits.shape[-1]
    x, t = logits.reshape(targets.size, classes), targets.reshape(-1)
    w = np.ones(classes) if weight is None else weight
    here = (t != ignore_index) & (t >= class_start) & (t < class_start + classes)
    row, column = np.flatnonzero(here), t[here] - class_start

    with np.errstate(all="ignore"):
        # top, sum of exponentials relative to it, target logit, weight of the target, how many ranks own it
        mine = np.zeros((5, len(t)))
        mine[0] = -np.inf
        length = max(BLOCK, classes // MOST_BLOCKS)
        for start in range(0, classes, length):
            block = x[:, start : start + length].astype(np.float64)
            mine[:2] = merge(mine[:2], (block.max(axis=1), np.ones(len(t))), logit_scale, block)
        mine[2, row], mine[3, row], mine[4, row] = x[row, column], np.asarray(w)[column], 1.0
        states = np.empty((comm.size, *mine.shape))
        comm.Allgather(mine, states)
        sharded = comm.allgather(classes)

        top, total, target_logit, target_weight, owners = states[0].copy()
        for state in states[1:]:
            top, total = merge((top, total), state[:2], logit_scale)
            target_logit, target_weight, owners = (
                a + b for a, b in zip((target_logit, target_weight, owners), state[2:], strict=True)
            )
        counts = t != ignore_index
        if sum(sharded) != num_classes or (owners != counts).any():
            raise ValueError(
                f"shards of {sharded} classes, of {num_classes}: some row's target is no rank's, or many's"
            )
        loss = np.where(counts, target_weight * (np.log(total) - logit_scale * (target_logit - top)), 0.0)
        divisor = target_weight.sum() if reduction == "mean" else 1.0
        p = np.exp(logit_scale * (x.astype(np.float64) - top[:, None])) / total[:, None]
        p[row, column] -= 1.0
        dlogits = np.where(counts[:, None], p * (logit_scale * target_weight / divisor)[:, None], 0.0)
        result = np.asarray(loss.sum() / divisor, np.float64 if x.dtype == np.float64 else np.float32)
    return result, dlogits.astype(logits.dtype).reshape(logits.shape)


def merge(a, b, scale, block=None):
    """Maximum and sum of exponentials of both; the sum of `b` is that of a block of logits, where there is one."""
    top = np.maximum(a[0], b[0])
    safe = np.where(top == -np.inf, 0.0, top)  # nothing but -inf came so far
    b_sum = b[1] * np.exp(scale * (b[0] - safe)) if block is None else np.exp(scale * (block - safe[:, None])).sum(1)
    return top, a[1] * np.exp(scale * (a[0] - safe)) + b_sum

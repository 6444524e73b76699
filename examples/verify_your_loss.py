"""Verify your loss: the kit finds an error of a vocabulary-parallel cross entropy that random logits do not show.

1. Below is `cross_entropy`, called as Megatron calls its own: this rank's logits, all targets, a process group. With
   `@offers` it says what it supports; the kit tests nothing else. With torch installed:

    python -m pce_mpi conformance --adapter torch-shards examples/verify_your_loss.py:cross_entropy

2. The report says what is wrong, at which smallest size, and how to run that case alone. Here label smoothing is spread
   over the classes of a shard, not over all classes: compare `cross_entropy` with `repaired`.

3. Run the kit again on the repaired function. `--html report.html` shows the parts of the gradient that have errors.

    python -m pce_mpi conformance --adapter torch-shards examples/verify_your_loss.py:repaired

A function of NumPy or CuPy arrays needs no adapter: it gets `class_start`, `num_classes` and an mpi4py `comm`.
"""

import torch
from torch import distributed
from torch.distributed import ReduceOp

from pce_mpi.conformance import offers

WHAT_IT_SUPPORTS = {
    "dtypes": ("float32", "bfloat16"),
    "options": ("ignore_index", "label_smoothing"),
    "reductions": ("none",),
    "dims": (2, 3),
    "shards": "equal",
    "gradient": "backward",
}


@offers(**WHAT_IT_SUPPORTS)
def cross_entropy(logits, targets, group, *, num_classes, ignore_index=-100, label_smoothing=0.0):
    """Return one loss per token, with an error: every rank smooths over its own classes."""
    smoothed = logits.shape[-1]
    return VocabParallel.apply(logits, targets, group, num_classes, ignore_index, label_smoothing, smoothed)


@offers(**WHAT_IT_SUPPORTS)
def repaired(logits, targets, group, *, num_classes, ignore_index=-100, label_smoothing=0.0):
    """Return one loss per token, smoothed over the classes of all ranks."""
    return VocabParallel.apply(logits, targets, group, num_classes, ignore_index, label_smoothing, num_classes)


class VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, group, num_classes, ignore_index, smoothing, smoothed):
        local = logits.shape[-1]
        if local * group.size() != num_classes:
            raise ValueError(f"{group.size()} shards of {local} classes are not {num_classes} classes")
        counts = targets != ignore_index
        if ((targets < 0) | (targets >= num_classes))[counts].any():
            raise IndexError(f"a target is outside [0, {num_classes})")
        shifted = logits.float() - all_reduced(logits.float().amax(-1, keepdim=True), ReduceOp.MAX, group)
        log_sum = all_reduced(shifted.exp().sum(-1), ReduceOp.SUM, group).log()
        mine = targets - group.rank() * local
        here = counts & (mine >= 0) & (mine < local)
        # The target distribution over this rank's classes.
        wanted = torch.full_like(shifted, smoothing / smoothed)
        wanted.scatter_add_(-1, (mine * here)[..., None], (here * (1 - smoothing))[..., None].float())
        log_p = shifted - log_sum[..., None]
        # Classes of target probability 0 contribute 0, also if log_p is -inf.
        loss = all_reduced(-torch.where(wanted == 0, 0, wanted * log_p).sum(-1), ReduceOp.SUM, group)
        ctx.save_for_backward(log_p.exp(), wanted, counts)
        ctx.dtype = logits.dtype
        return torch.where(counts, loss, 0)

    @staticmethod
    def backward(ctx, dloss):
        p, wanted, counts = ctx.saved_tensors
        dlogits = torch.where(counts[..., None], dloss[..., None] * (p - wanted), 0)
        return dlogits.to(ctx.dtype), None, None, None, None, None, None


def all_reduced(tensor, op, group):
    distributed.all_reduce(tensor, op, group)
    return tensor

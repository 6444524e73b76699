"""Megatron-LM's vocabulary-parallel cross entropy.

NVIDIA/Megatron-LM, megatron/core/tensor_parallel/cross_entropy.py at 00611e6eeb0b09b5ee074750956855215ddbd67f, and
megatron/core/fusions/fused_cross_entropy.py at d086a2e3b020ff78db9d29915f7cfe886e085f13.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np

from candidates.wild.vocab_parallel import VocabParallel


class MegatronSmoothing(VocabParallel):
    """Label smoothing over the K classes of a shard, not over all.

    With s' = s K / (K - 1): loss = (1 - s') nll - s' mean(log p) over the local classes, log p being log(softmax), and
    the gradient is p - (1 - s') [c = t] - s' / K. The logits of a float32 shard are overwritten by their exponentials.
    """

    offer = replace(VocabParallel.offer, options=("ignore_index", "label_smoothing"), checks_targets=True)
    overwrites = True

    def smoothing(self, s):
        return np.float32(s.label_smoothing * s.local / (s.local - 1)) if s.label_smoothing else np.float32(0.0)

    def row_losses(self, s):
        more = self.smoothing(s)
        loss = (1 - more) * s.nll - more * np.log(s.p).mean(axis=-1) if more else s.nll
        if self.overwrites:
            s.logits[...] = s.exp.reshape(s.logits.shape)
        return loss

    def gradient(self, s):
        more = self.smoothing(s)
        return s.p - (1 - more) * s.one - more / np.float32(s.local)


class MegatronFused(VocabParallel):
    """The gradient is always rounded to bfloat16; autograd then converts it to the dtype of the logits."""

    def backward(self, s, dloss):
        rounded = super().backward(s, dloss).astype(ml_dtypes.bfloat16)
        return rounded.astype(s.logits.dtype)


class MegatronBackward(VocabParallel):
    """Backward works in the saved softmax: a second pass subtracts 1 at the target and scales once more."""

    def backward(self, s, dloss):
        s.p -= s.one
        s.p *= np.broadcast_to(dloss.reshape(-1), s.rows)[:, None]
        return s.p.reshape(s.logits.shape)

"""Liger-Kernel's cross entropy, of all classes in one shard, here over shards.

linkedin/Liger-Kernel, src/liger_kernel/ops/cross_entropy.py at 9a12d7e67dddd9c429323768f60c298face0fed3.
"""

from dataclasses import replace

import numpy as np

from candidates.wild.vocab_parallel import VocabParallel


class LigerGradient(VocabParallel):
    """The gradient is stored over the logits, in their dtype, before 1 - s is subtracted at the target."""

    offer = replace(
        VocabParallel.offer, dtypes=("float32", "bfloat16"), options=("ignore_index", "label_smoothing"), dims=(2,)
    )

    def backward(self, s, dloss):
        stored = (s.p - np.float32(s.label_smoothing / s.num_classes)).astype(s.logits.dtype)
        stored -= (np.float32(1.0 - s.label_smoothing) * s.one).astype(s.logits.dtype)
        stored = np.where(s.valid[:, None], stored, np.zeros((), stored.dtype))
        s.logits[...] = (stored.astype(np.float32) * dloss.reshape(-1, 1)).astype(s.logits.dtype)
        return s.logits

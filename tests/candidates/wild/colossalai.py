"""ColossalAI's distributed cross entropy.

hpcaitech/ColossalAI, colossalai/shardformer/layer/loss.py at 01bcacac02012b3fd8e56ce00b71a89d7a1158cd.
"""

from dataclasses import replace

import numpy as np

from candidates.wild.vocab_parallel import VocabParallel


class ColossalAI(VocabParallel):
    """The mean is over rows whose loss is not 0; ignored rows lose their softmax, but not the 1 at their target."""

    offer = replace(VocabParallel.offer, options=("ignore_index",), reductions=("mean",))

    def reduce(self, s):
        s.counted = np.float32((s.row_loss != 0.0).sum())
        return s.row_loss.sum() / s.counted

    def backward(self, s, dloss):
        p = np.where(s.valid[:, None], s.p, 0.0)
        return ((p - s.one) * (dloss / s.counted)).astype(s.logits.dtype)

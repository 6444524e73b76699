"""ms-swift's log-probabilities of vocabulary-parallel logits, before its pull request 9947.

modelscope/ms-swift, swift/megatron/trainers/vocab_parallel_utils.py at c7b0aba17bfbb129cd26493b4b7e2f4f53cac929.
"""

import numpy as np

from candidates.wild.vocab_parallel import VocabParallel


class MsSwiftLogProb(VocabParallel):
    """The target's log-probability is gathered by an all-reduce that autograd does not see.

    Each rank differentiates its own term alone, which is 0 on ranks that do not have the target. The maximum is not
    detached: on the owner the shard's largest logit gets 1 - (the shard's part of the sum of exponentials) besides.
    """

    def gradient(self, s):
        part = s.exp.sum(axis=-1) / s.sum_exp
        largest = np.arange(s.local) == s.x.argmax(axis=-1)[:, None]
        own = s.p - s.one + largest * (1.0 - part)[:, None]
        return np.where(s.mine[:, None], own, 0.0).astype(np.float32)

"""ms-swift's log-probabilities and entropies of vocabulary-parallel logits, before its pull request 9947.

modelscope/ms-swift, swift/megatron/trainers/vocab_parallel_utils.py at c7b0aba17bfbb129cd26493b4b7e2f4f53cac929.
"""

import numpy as np

from candidates.correct.policy import Entropy, LogProb


class MsSwiftLogProb(LogProb):
    """The target's log-probability is gathered by an all-reduce that autograd does not see.

    Each rank differentiates its own term alone, which is 0 on ranks that do not have the target. The maximum is not
    detached: on the owner the shard's largest logit loses 1 - (the shard's part of the sum of exponentials) besides.
    """

    def gradient(self, s):
        part = s.exp.sum(axis=-1) / s.sum_exp
        largest = np.arange(s.local) == s.x.argmax(axis=-1)[:, None]
        own = s.one - s.p - largest * (1.0 - part)[:, None]
        return np.where(s.mine[:, None], own, 0.0).astype(np.float32)


class MsSwiftEntropy(Entropy):
    """The parts of the entropy are added by an all-reduce that autograd does not see.

    With L = log p and sums over the local classes, the part -sum p L of a rank has the derivative
    -p (L + 1) + p sum p (L + 1) by a logit, and (1 - sum p) sum p (L + 1) by the maximum, which is the shard's largest.
    """

    def gradient(self, s):
        more = s.p - s.of_class  # p (L + 1)
        total = more.sum(axis=-1, keepdims=True)
        largest = np.arange(s.local) == s.x.argmax(axis=-1)[:, None]
        return s.p * total - more + largest * (1.0 - s.p.sum(axis=-1, keepdims=True)) * total

"""RLinf, `rlinf/utils/distributed.py`, a3816b5: entropies and log-probabilities from one softmax."""

import numpy as np

from candidates.correct.policy import Entropy, LogProb


class RLinfEntropy(Entropy):
    """Backward finds 0 where the softmax was: it has been worked in."""

    def gradient(self, s):
        return np.zeros_like(s.p)


class RLinfLogProb(LogProb):
    """The gradient has 0 times that of an entropy, which is nan in rows with a logit of -inf."""

    def gradient(self, s):
        entropy = self.over_ranks(s, (s.p * s.shifted).sum(axis=-1, dtype=np.float32))
        return super().gradient(s) + np.float32(0.0) * s.p * (s.shifted - entropy[:, None])

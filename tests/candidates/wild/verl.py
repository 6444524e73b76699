"""verl, `verl/utils/megatron/tensor_parallel.py`, 0ed0bc08: `_VocabParallelEntropy`, of which AReaL has a copy."""

import numpy as np

from candidates.correct.policy import Entropy


class VerlEntropy(Entropy):
    """Entropies as logsumexp less the mean of logits that are not shifted."""

    def row_losses(self, s):
        s.mean = self.over_ranks(s, (s.p * s.x).sum(axis=-1, dtype=np.float32))
        return s.top + s.log_sum - s.mean

    def gradient(self, s):
        return -s.p * (s.x - s.mean[:, None])

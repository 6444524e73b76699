"""NeMo-Aligner's log-probabilities, `nemo_aligner/utils/distributed.py`, af2b3bd: `DistributedLogprob`."""

import numpy as np

from candidates.correct.policy import LogProb


class NeMoAlignerLogProb(LogProb):
    """The logarithm of the softmax at the target, which may have become 0; the default, without `higher_stability`."""

    def row_losses(self, s):
        return np.log(self.over_ranks(s, (s.p * s.one).sum(axis=-1, dtype=np.float32)))

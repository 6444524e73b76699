"""TRL, `trl/trainer/utils.py`, f2cd5771: `selective_log_softmax`, here over shards."""

import numpy as np

from candidates.correct.policy import LogProb


class TrlLogProb(LogProb):
    """The target's logit less logsumexp, which is rounded before."""

    def row_losses(self, s):
        return self.over_ranks(s, np.where(s.one == 1.0, s.x, 0.0).sum(axis=-1, dtype=np.float32)) - (s.top + s.log_sum)

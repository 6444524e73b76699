"""Entropies of RL frameworks: logsumexp less the mean of logits that are not shifted."""

import numpy as np

from candidates.correct.policy import Entropy


class UnshiftedEntropy(Entropy):
    """SkyRL, `skyrl/backends/skyrl_train/distributed/megatron/model_utils.py`, a9564572: `_VocabParallelEntropy`.

    And slime, `slime/utils/ppo_utils.py`, 624b824a: `_VocabParallelLogProbEntropy`.
    """

    def row_losses(self, s):
        s.mean = self.over_ranks(s, (s.p * s.x).sum(axis=-1, dtype=np.float32))
        return s.top + s.log_sum - s.mean

    def gradient(self, s):
        return -s.p * (s.x - s.mean[:, None])


class VerlEntropy(UnshiftedEntropy):
    """verl, `verl/utils/megatron/tensor_parallel.py`, 0ed0bc08: `_VocabParallelEntropy`.

    And miles, `miles/backends/training_utils/loss_hub/math_utils.py`, 31f1ca96. The gradient is computed in the memory
    of the logits, which come back rounded.
    """

    def gradient(self, s):
        mean = s.mean.reshape(s.targets.shape)[..., None]
        s.logits -= mean
        gradient = -s.p * s.logits.reshape(s.x.shape)
        s.logits += mean
        return gradient


class ArealEntropy(UnshiftedEntropy):
    """AReaL, `areal/utils/functional/vocab_parallel.py`, 4aef98d8: `_VocabParallelLogProbsEntropy`.

    The gradient is of the softmax alone: p (mean - logsumexp) - p log p.
    """

    def gradient(self, s):
        p_log_p = np.where(s.p == 0.0, np.float32(0.0), s.p * np.log(s.p))
        return s.p * (s.mean - (s.top + s.log_sum))[:, None] - p_log_p

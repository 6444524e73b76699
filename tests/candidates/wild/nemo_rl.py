"""NeMo-RL, `nemo_rl/distributed/model_utils.py`, 8c6d5333: `ChunkedDistributedEntropy`, whose result is -entropy."""

from candidates.correct.policy import Entropy


class NemoRLEntropy(Entropy):
    """Entropies as sums of p log p, also where p is 0 and log p is -inf."""

    def row_losses(self, s):
        s.of_class = -s.p * (s.shifted - s.log_sum[:, None])
        s.entropy = self.over_ranks(s, s.of_class.sum(axis=-1))
        return s.entropy

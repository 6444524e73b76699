"""Log-probabilities and entropies over the support that sampling left, and what they forget."""

import numpy as np

from candidates.correct.policy import EntropyOverSupport, LogProbOverSupport


class TrlLogProb(LogProbOverSupport):
    """huggingface/trl#6789: log-probabilities over all classes of tokens that were sampled from some."""

    def inside(self, shape, class_start, ids, offsets):
        return np.ones(shape, np.bool_)


class SlimeEntropy(EntropyOverSupport):
    """THUDM/slime, 624b824a: the entropy over all classes beside a log-probability over the support."""

    def inside(self, shape, class_start, ids, offsets):
        return np.ones(shape, np.bool_)


class LocalIds(LogProbOverSupport):
    """Ids that are taken for columns of the shard."""

    def inside(self, shape, class_start, ids, offsets):
        return super().inside(shape, 0, ids, offsets)


class LocalSum(LogProbOverSupport):
    """A softmax over this rank's part of the support: the log-probability is that of the rank that has the target."""

    def softmax(self, s):
        super().softmax(s)
        s.sum_exp = s.exp.sum(axis=-1)
        s.log_sum = self.over_ranks(s, np.where(self.owns(s), np.log(s.sum_exp), np.float32(0.0)))

    def owns(self, s):
        t = s.targets.reshape(-1)
        return (t >= s.class_start) & (t < s.class_start + s.local)

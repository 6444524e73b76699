"""Log-probabilities and entropies of a policy, as reinforcement learning needs them, in float32."""

from dataclasses import replace

import numpy as np

from candidates.wild.vocab_parallel import VocabParallel


class LogProb(VocabParallel):
    """The log-probability of each row's target: the negative of a loss."""

    offer = replace(VocabParallel.offer, kind="log_prob", options=("ignore_index",))

    def row_losses(self, s):
        return -s.nll

    def gradient(self, s):
        return s.one - s.p


class Entropy(VocabParallel):
    """The entropy of each row's softmax; its gradient is -p (log p + entropy)."""

    offer = replace(VocabParallel.offer, kind="entropy", options=())

    def __call__(self, logits, **arguments):
        return super().__call__(logits, np.zeros(logits.shape[:-1], np.int64), **arguments)

    def row_losses(self, s):
        log_p = s.shifted - s.log_sum[:, None]
        s.of_class = np.where(s.p == 0.0, np.float32(0.0), -s.p * log_p)
        s.entropy = self.over_ranks(s, s.of_class.sum(axis=-1))
        return s.entropy

    def gradient(self, s):
        return s.of_class - s.p * s.entropy[:, None]


class OverSupport:
    """Mixed in, it masks the logits of classes that are not in the support."""

    def __call__(self, logits, *targets, class_start, support=None, **arguments):
        if support is not None:
            inside = self.inside(logits.shape, class_start, *support)
            logits = np.where(inside, logits, np.asarray(-np.inf, logits.dtype))
        return super().__call__(logits, *targets, class_start=class_start, **arguments)

    def inside(self, shape, class_start, ids, offsets):
        rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        local = ids - class_start
        mine = (local >= 0) & (local < shape[-1])
        mask = np.zeros((len(offsets) - 1, shape[-1]), np.bool_)
        mask[rows[mine], local[mine]] = True
        return mask.reshape(shape)


class LogProbOverSupport(OverSupport, LogProb):
    offer = replace(LogProb.offer, options=("support",))


class EntropyOverSupport(OverSupport, Entropy):  # type: ignore[misc]  # an entropy has no targets
    offer = replace(Entropy.offer, options=("support",))


log_prob, entropy = LogProb(), Entropy()

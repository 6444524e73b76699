"""Faults in what infinities and nan become."""

import numpy as np

from candidates.by_hand import ByHand


class MaskedShardIsNan(ByHand):
    """Each shard subtracts its own maximum, which is -inf where all is masked (flash-attention)."""

    def softmax(self, s):
        super().softmax(s)
        own = s.source.max(axis=-1, initial=-np.inf)
        exp = np.exp(s.factor * (s.source - own[:, None]))
        s.sum_exp = self.sum(s, exp.sum(axis=-1) * np.exp(s.factor * (own - s.top)) if s.classes else np.zeros(s.rows))
        s.p = s.exp / s.sum_exp[:, None]


class IgnoredRowsTimes0(ByHand):
    """Ignored rows are masked by a product with 0, and 0 times nan is nan."""

    def row_losses(self, s):
        valid, s.valid = s.valid, np.ones_like(s.valid)
        super().row_losses(s)
        s.row_loss, s.valid = s.row_loss * valid, valid


class ZeroTimesInfinity(ByHand):
    """A class with target probability 0 is multiplied, not left out: 0 times -inf is nan."""

    def row_losses(self, s):
        super().row_losses(s)
        s.row_loss = s.row_loss + self.sum(s, 0.0 * np.where(s.u == 0.0, s.shifted, 0.0).sum(axis=-1))


class OnlineMaximumOfMaskedBlock(ByHand):
    """An online maximum that begins at -inf, in a block of classes that are all masked: exp(-inf - -inf) is nan."""

    block = 32_768

    def softmax(self, s):
        super().softmax(s)
        first = s.source[:, : self.block]
        lost = (first == -np.inf).all(axis=-1) & (s.classes > self.block)
        s.sum_exp = self.sum(s, s.exp.sum(axis=-1) + np.where(lost, np.nan, 0.0))
        s.p = s.exp / s.sum_exp[:, None]


class InfiniteLogsumexp(ByHand):
    """The maximum is subtracted where it is finite, so that a logit of inf makes logsumexp inf, and no nan (JAX)."""

    def row_losses(self, s):
        super().row_losses(s)
        s.row_loss = np.where((s.top == np.inf) & s.valid, np.inf, s.row_loss)


class SumOfMasksOverflows(ByHand):
    """The logits are summed in float32, and multiplied by s / C afterwards."""

    def row_losses(self, s):
        super().row_losses(s)
        total = self.sum(s, s.shifted.astype(np.float32).sum(axis=-1, dtype=np.float32))
        s.row_loss = np.where(np.isinf(total) & (s.label_smoothing > 0), np.inf, s.row_loss)


class LargeMasksTakenForInfinity(ByHand):
    """Logits of -1e30 or less are masked, and left out of label smoothing."""

    def smoothing(self, s):
        return super().smoothing(s) * (s.x > -1e29)


class IgnoredRowsAreClass0(ByHand):
    """The target of an ignored row becomes class 0, whose logit counts 0 times (PyTorch's linear_cross_entropy)."""

    def row_losses(self, s):
        super().row_losses(s)
        first = s.shifted[:, 0] if s.classes and s.class_start == 0 else np.zeros(s.rows)
        s.row_loss = s.row_loss + self.sum(s, np.where(s.valid, 0.0, 0.0 * first))

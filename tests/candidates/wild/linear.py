"""Fused heads that projects have shipped, by their formulas."""

import ml_dtypes
import numpy as np

from candidates.correct.linear import Entropy, Head, Rows


class NotSummed(Rows):
    """apple/ml-cross-entropy before #42: dE of each rank's own classes."""

    offer = Head.offer


class Sentinel(Head):
    """apple/ml-cross-entropy#59: a target of another rank is the number after this rank's last class."""

    def at_target(self, s, z, targets):
        local = targets - s.start
        local = np.where((local < 0) | (local >= s.w.shape[1]), s.w.shape[1], local)
        return np.arange(z.shape[1]) == local[:, None]


class PaddedLanes(Head):
    """unslothai/unsloth#10616: columns beyond the last one are -inf before the softcap, -softcap after it."""

    def capped(self, s, z):
        if s.softcap is None:
            return z, np.ones_like(z)
        t = np.tanh(z / self.dtype(s.softcap))
        return self.dtype(s.softcap) * t, 1 - t * t


class NoRowsCount(Head):
    """ROCm/aiter#5165: the gradient is divided by the number of rows that count."""

    def scaled(self, s, dlogits, factor):
        return dlogits * factor


class EntropyWithoutGradient(Entropy):
    """huggingface/trl before #6625: the gradient of the entropy does not reach the backward pass."""

    def numbers(self, s, p, wanted):
        entropy, gradient = super().numbers(s, p, wanted)
        return entropy, gradient * 0.0


class HalfLogits(Head):
    """huggingface/trl#4303: logits in the dtype of the weights."""

    def logits(self, s, hidden):
        z, slope = super().logits(s, hidden)
        return z.astype(ml_dtypes.bfloat16).astype(np.float32), slope


class HalfSums(Head):
    """dw that is added up over chunks in the dtype of the weights."""

    chunk = 2

    def sum_dtype(self, w):
        return w.dtype

    def with_rows(self, dw, part):
        return dw + part.astype(dw.dtype)


class TorchSums(HalfSums):
    """torch 2.13.0, `linear_cross_entropy` with options: sums of a chunk in float32, and each total rounded."""

    chunk = 32

    def with_rows(self, dw, part):
        return (dw + part).astype(dw.dtype)


class TotalInHalf(Head):
    """The losses of chunks that are added up in the dtype of the weights."""

    chunk = 16

    def __call__(self, hidden, w, targets, **options):
        loss, *gradients = super().__call__(hidden, w, targets, **options)
        return loss.astype(w.dtype), *gradients

    def parts(self, s, losses):
        return [losses]

    def total(self, s, losses, factor):
        total = np.zeros((), ml_dtypes.bfloat16)
        for first in range(0, len(losses), self.chunk):
            for part in self.parts(s, losses * factor):
                total = (total + np.float32(part[first : first + self.chunk].sum())).astype(total.dtype)
        return total


class TorchTotal(TotalInHalf):
    """torch 2.13.0, `linear_cross_entropy` with options, in bfloat16: logits at targets and logsumexps by turns."""

    def parts(self, s, losses):
        of_lse = np.concatenate(s.of_lse) * s.counts * self.factor(s, s.reduction)
        return [losses - of_lse, of_lse]


class IgnoredTimes0(Head):
    """torch 2.13.0, `linear_cross_entropy` with options: the target of an ignored row is class 0, its weight 0."""

    def at_target(self, s, z, targets):
        return super().at_target(s, z, np.where(targets == s.ignored, 0, targets))

    def counted(self, s, losses):
        return losses * s.counts


class First1024Features(Head):
    """A kernel that takes one block of the features."""

    def logits(self, s, hidden):
        return super().logits(s, np.where(np.arange(hidden.shape[1]) < 1_024, hidden, self.dtype(0.0)))


class SummedTwice(Head):
    """dhidden that is summed over the ranks where the caller sums it."""

    offer = Rows.offer

"""Losses of micro-batches that are right, each in another dress."""

import numpy as np

from candidates.step_by_hand import StepByHand
import pce_mpi as pce
from pce_mpi.conformance import offers

RANKS = ("data", "context")


class TimesRanks(StepByHand):
    """The trainer averages over all ranks, as DDP does."""

    averaged = RANKS

    def factor(self, s):
        return s.comm.size


class TimesRanksAndMicroBatches(StepByHand):
    """The trainer averages over all there is."""

    averaged = (*RANKS, "micro-batches")

    def factor(self, s):
        return s.comm.size * len(s.micro_batches)


class TimesDataRanks(StepByHand):
    """The trainer averages over data ranks, and sums over context ranks."""

    averaged = ("data",)

    def factor(self, s):
        return s.comm.size // s.context_ranks


class MeanCount(StepByHand):
    """Divides by the mean of the ranks' counts, which is no integer."""

    averaged = RANKS

    def divisor(self, s):
        return (self.of_all_ranks(s, self.counts(s).sum()) or 1) / s.comm.size


class ShareOfOwnMean(StepByHand):
    """Its own mean, times its share in a count that was known before; the mean of no token is 0."""

    averaged = ("micro-batches",)

    def divisor(self, s):
        return max(s.valid.sum(), 1)

    def factor(self, s):
        share = s.valid.sum() / max(self.of_all_ranks(s, self.counts(s).sum()), 1)
        return share * len(s.micro_batches)


class Reported(StepByHand):
    """The loss that it returns is that of all ranks, in an array of shape (1,); the gradient is its own."""

    gradient = "backward"

    def given(self, s, loss, gradient):
        whole = np.full(1, s.comm.allreduce(float(loss)))
        return whole, lambda upstream: gradient * upstream


@offers(kind="step", gradient="value", dtypes=("float32", "float64", "bfloat16"), dims=(3,))
def ours(logits, targets, *, comm, context_ranks, micro_batches):
    count = comm.allreduce(sum(int((each != -100).sum()) for each in micro_batches))
    loss, residuals = pce.softmax_cross_entropy_forward(logits, targets, reduction="sum")
    return loss / max(count, 1), pce.softmax_cross_entropy_backward(1.0 / max(count, 1), residuals)


CORRECT = [TimesRanks(), TimesRanksAndMicroBatches(), TimesDataRanks(), MeanCount(), ShareOfOwnMean(), Reported()]

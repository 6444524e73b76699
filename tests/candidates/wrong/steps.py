"""Faults in what a micro-batch's loss is divided or multiplied by."""

import ml_dtypes
import numpy as np

from candidates.step_by_hand import StepByHand

RANKS = ("data", "context")


class SumForLoss(StepByHand):
    """The gradient is that of the mean, and the loss that is returned has no divisor."""

    def given(self, s, loss, gradient):
        return s.losses.sum(), gradient


class OwnMeanForLoss(StepByHand):
    """The gradient is that of the mean of the step, and the loss is the mean of the micro-batch."""

    def given(self, s, loss, gradient):
        return s.losses.sum() / max(s.valid.sum(), 1), gradient


class AnotherLoss(StepByHand):
    """The gradient is right, and the loss is not."""

    def given(self, s, loss, gradient):
        return loss + 1.0, gradient


class OwnCount(StepByHand):
    """Each micro-batch has its own mean, and the trainer averages over all of them."""

    averaged = (*RANKS, "micro-batches")

    def divisor(self, s):
        return s.valid.sum()


class OwnCountOr1(OwnCount):
    """Each micro-batch has its own mean, over max(count, 1)."""

    def divisor(self, s):
        return max(s.valid.sum(), 1)


class OwnCountSummed(StepByHand):
    """Each micro-batch has its own mean, and the trainer sums them."""

    def divisor(self, s):
        return max(s.valid.sum(), 1)


class OwnMicroBatches(StepByHand):
    """Each rank divides by the count of its own micro-batches."""

    averaged = RANKS

    def divisor(self, s):
        return max(self.counts(s).sum(), 1)


class RankWithoutTokensIsOne(StepByHand):
    """The divisor is a sum over the ranks of max(count, 1)."""

    def divisor(self, s):
        return self.of_all_ranks(s, max(self.counts(s).sum(), 1))


class MicroBatchWithoutTokensIsOne(StepByHand):
    """The divisor is a sum over micro-batches of max(count, 1)."""

    def divisor(self, s):
        return self.of_all_ranks(s, np.maximum(self.counts(s), 1).sum())


class MicroBatchOfNoRankIsOne(StepByHand):
    """The divisor is a sum over micro-batches of max(count on all ranks, 1)."""

    def divisor(self, s):
        return np.maximum(sum(s.comm.allgather(self.counts(s))), 1).sum()


class ConstantDivisor(StepByHand):
    """The sum is divided by what the settings say."""

    def divisor(self, s):
        return 24


class MicroBatchOfAllRanks(StepByHand):
    """Each micro-batch has the mean over all ranks, as with a loss that knows `batch_comm` alone."""

    averaged = ("micro-batches",)

    def divisor(self, s):
        return max(self.of_all_ranks(s, s.valid.sum()), 1)


class DataRanksAlone(StepByHand):
    """The count is reduced over the data ranks, and not over the context ranks."""

    averaged = ("data",)

    def divisor(self, s):
        of_data = s.comm.Split(s.comm.rank % s.context_ranks)
        count = of_data.allreduce(int(self.counts(s).sum()))
        of_data.Free()
        return max(count, 1)

    def factor(self, s):
        return s.comm.size // s.context_ranks


class AllTokens(StepByHand):
    """The count has the ignored tokens too."""

    def counts(self, s):
        return np.array([targets.size for targets in s.micro_batches])


class LossesThatAreNot0(StepByHand):
    """The count is of losses that are not 0."""

    def counts(self, s):
        return np.count_nonzero(s.valid & (s.losses.astype(np.float32) != 0.0))


class WithoutFirstTargets(StepByHand):
    """The count is of targets that were shifted already, and are shifted once more."""

    def counts(self, s):
        return np.array([(targets.reshape(-1)[1:] != -100).sum() for targets in s.micro_batches])


class TargetsShiftedTwice(StepByHand):
    """The loss shifts logits against targets, and the collator has shifted them before."""

    def __call__(self, logits, targets, **given):
        last = np.full_like(targets[..., :1], -100)
        given["micro_batches"] = [np.append(each.reshape(-1)[1:], -100) for each in given["micro_batches"]]
        return super().__call__(logits, np.concatenate([targets[..., 1:], last], axis=-1), **given)


class RoundedDown(StepByHand):
    """The count is divided by the ranks with //."""

    averaged = RANKS

    def divisor(self, s):
        return max(super().divisor(s) // s.comm.size, 1)


class CountOfRank0(StepByHand):
    """Every rank takes rank 0's count, times the ranks."""

    def divisor(self, s):
        return max(s.comm.bcast(int(self.counts(s).sum())) * s.comm.size, 1)


class LastMicroBatch(StepByHand):
    """The count is that of the last micro-batch, as each has overwritten it."""

    def counts(self, s):
        return super().counts(s)[-1]


class HalvedByContext(StepByHand):
    """Makes up for the average over data ranks, and not for that over context ranks."""

    averaged = RANKS

    def factor(self, s):
        return s.comm.size // s.context_ranks


class WorldSizeForDataRanks(StepByHand):
    """Makes up for an average over all ranks where the trainer averages over data ranks."""

    averaged = ("data",)

    def factor(self, s):
        return s.comm.size


class RanksTwice(StepByHand):
    """Makes up for an average, where the trainer sums."""

    def factor(self, s):
        return s.comm.size


class AccumulationTwice(StepByHand):
    """Divides by the count of the step, and the trainer by the number of micro-batches."""

    averaged = ("micro-batches",)


class NotDividedByRanks(StepByHand):
    """Divides the step's mean by the ranks, where the trainer sums."""

    def divisor(self, s):
        return super().divisor(s) * s.comm.size


class NanWithoutToken(StepByHand):
    """Its own mean is nan without a valid token; the gradient is right, as torch's is."""

    def given(self, s, loss, gradient):
        return (loss if s.valid.any() else loss * np.nan), gradient


class IgnoredHaveGradient(StepByHand):
    """The mask is applied to the loss that is reported, and not to the gradient."""

    def given(self, s, loss, gradient):
        return loss, np.where(s.valid[..., None], gradient, np.float32(0.1))


class AnotherGradient(StepByHand):
    """The gradient has a term of another loss."""

    def given(self, s, loss, gradient):
        return loss, gradient + np.float32(0.01) * s.valid[..., None]


class RaisesWithoutToken(StepByHand):
    """Divides by its own count, in Python's numbers."""

    def divisor(self, s):
        return 1 / (1 / int(s.valid.sum()))


class CountOfNoTokenRaises(StepByHand):
    """Divides Python's numbers: without a valid token it raises."""

    def divisor(self, s):
        return 1 / (1 / self.of_all_ranks(s, self.counts(s).sum()))


class CountInFloat16(StepByHand):
    """The count is reduced over the ranks in half precision."""

    dtype = np.dtype(np.float16)

    def divisor(self, s):
        total = np.zeros((), self.dtype)
        for count in s.comm.allgather(int(self.counts(s).sum())):
            total = (total + np.asarray(count).astype(self.dtype)).astype(self.dtype)
        return max(float(total), 1.0)


class CountInBfloat16(CountInFloat16):
    """The count is reduced over the ranks in the other half precision."""

    dtype = np.dtype(ml_dtypes.bfloat16)

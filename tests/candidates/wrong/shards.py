"""Faults in what the ranks put together."""

from dataclasses import replace

import numpy as np

from candidates.by_hand import ByHand


class EqualShardsAssumed(ByHand):
    """class_start is ignored: every shard is assumed to be as long as this one."""

    def owned(self, s):
        s.class_start = s.comm.rank * s.classes
        return super().owned(s)


class FirstClassOfAShard(ByHand):
    """Off by one: a target that is the first class of a shard is not found there."""

    def owned(self, s):
        return super().owned(s) & (s.t > s.class_start)


class LastClassOfAShard(ByHand):
    """Off by one: a target that is the last class of a shard is not found there."""

    def owned(self, s):
        return super().owned(s) & (s.t < s.class_start + s.classes - 1)


class OneSubtractedOnEveryShard(ByHand):
    """A shard that does not own the target takes its first class for it."""

    def gradient_of_z(self, s):
        dz = super().gradient_of_z(s)
        if s.classes and not s.with_probabilities:
            dz[:, 0] -= np.where(s.valid & ~s.mine, 1.0, 0.0)
        return dz


class GatheredLogitsCountedOnEveryRank(ByHand):
    """Nothing checks how many classes the shards have together (Megatron)."""

    def refuse(self, s):
        pass

    def owned(self, s):
        s.class_start = s.class_start if s.classes < s.num_classes else 0
        return super().owned(s) & ((s.comm.rank == 0) | (s.classes < s.num_classes))


class TargetOutOfRangeIsSilent(ByHand):
    """A target that no rank owns: the loss is logsumexp, and the row counts (Megatron)."""

    def refuse(self, s):
        pass


class TargetOutOfRangeRaisesOnOneRank(ByHand):
    """Rank 0 alone checks the targets, after the reductions; the others return."""

    def refuse(self, s):
        pass

    def reduce(self, s):
        if s.comm.rank == 0 and not s.with_probabilities and (s.valid & (s.t >= s.num_classes)).any():
            raise IndexError(f"target {s.t.max()} is out of bounds for {s.num_classes} classes")
        return super().reduce(s)


class GradientReducedTwice(ByHand):
    """The backward of an all-reduce is taken to be another all-reduce: P times the gradient."""

    def upstream(self, s, dloss):
        return super().upstream(s, dloss) * s.comm.size


class LossOnRank0Alone(ByHand):
    """The sum of exponentials is reduced to rank 0, not to all ranks."""

    def reduce(self, s):
        if s.comm.rank:
            s.row_loss = s.row_loss + np.log(s.exp.sum(axis=-1) / s.sum_exp) * s.valid
        return super().reduce(s)


class RanksReduceInAnotherOrder(ByHand):
    """Each rank adds the others' sums to its own, starting with itself."""

    def sum(self, s, array):
        parts = s.comm.allgather(np.asarray(array, np.float32))
        total = np.zeros_like(parts[0])
        for step in range(s.comm.size):
            total = total + parts[(s.comm.rank + step) % s.comm.size]
        return np.where(np.isnan(total), np.nan, total.astype(np.float64))


class OtherBitsOnOtherRanks(ByHand):
    """Sums of float32 exponentials over this rank's classes, then over ranks."""

    offer = replace(ByHand.offer, same_bits=True)

    def softmax(self, s):
        super().softmax(s)
        s.sum_exp = self.sum(s, s.exp.astype(np.float32).sum(axis=-1)).astype(np.float64)
        s.p = s.exp / s.sum_exp[:, None]


class ShardsInReverse(ByHand):
    """The last rank takes the first classes for its own."""

    def owned(self, s):
        s.class_start = s.num_classes - s.classes - s.class_start
        return super().owned(s)


class FirstTwoShardsExchanged(ByHand):
    """Ranks 0 and 1 take each other's classes for their own."""

    def owned(self, s):
        lengths = s.comm.allgather(s.classes)
        s.class_start = {0: sum(lengths[1:2]), 1: 0}.get(s.comm.rank, s.class_start)
        return super().owned(s)


class PaddedTo8(ByHand):
    """A shard is padded with zeros to a multiple of 8 columns, and they are not masked."""

    multiple = 8

    def padding(self, s):
        return -s.classes % self.multiple

    def maximum(self, s):
        s.columns = s.comm.allreduce(self.padding(s))
        return np.maximum(super().maximum(s), 0.0 if s.columns else -np.inf)

    def softmax(self, s):
        super().softmax(s)
        if s.columns:
            s.sum_exp = s.sum_exp + s.columns * np.exp(-s.factor * s.top)
            s.logsumexp = s.factor * s.top + np.log(s.sum_exp)
            s.p = s.exp / s.sum_exp[:, None]


class PaddedTo64(PaddedTo8):
    """Padding to a multiple of 64."""

    multiple = 64


class PaddedTo128(PaddedTo8):
    """Padding to the multiple that Megatron-LM has."""

    multiple = 128


class PaddedToLargest(PaddedTo8):
    """Padding to shards of equal length."""

    def padding(self, s):
        return max(s.comm.allgather(s.classes)) - s.classes

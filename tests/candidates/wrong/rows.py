"""Faults in which rows count."""

import ml_dtypes
import numpy as np

from candidates.by_hand import ByHand


class MeanOverAllRows(ByHand):
    """The mean divides by all rows, the ignored ones included (Paddle)."""

    def divisor(self, s):
        return float(s.rows) if s.reduction == "mean" else 1.0


class MeanOfLossesThatAreNot0(ByHand):
    """The mean counts the rows whose loss is not 0 (ColossalAI)."""

    def divisor(self, s):
        if s.reduction != "mean" or s.with_probabilities:
            return super().divisor(s)
        counted = s.row_loss.astype(np.float32) != 0.0
        return float(self.sum(s, np.where(s.mine & counted, self.weight_of_target(s), 0.0)).sum())


class MeanOfTheRanksMeans(ByHand):
    """Each rank takes the mean over the rows whose target it owns, then the ranks' mean is taken."""

    def divisor(self, s):
        if s.reduction != "mean" or s.with_probabilities:
            return super().divisor(s)
        mine = np.where(s.mine, self.weight_of_target(s), 0.0).sum()
        owners = s.comm.allreduce(int(mine > 0.0))
        return np.maximum(self.sum(s, s.mine * mine), 1e-300) * owners

    def reduce(self, s):
        if s.reduction == "mean" and not s.with_probabilities:
            s.row_loss, divisor, s.divisor = s.row_loss / s.divisor, s.divisor, 1.0
            loss = super().reduce(s)
            s.divisor = divisor
            return loss
        return super().reduce(s)


class MeansOfChunksAdded(ByHand):
    """The means of chunks of 4 rows are added up (Automodel)."""

    def divisor(self, s):
        if s.reduction != "mean" or s.with_probabilities or not s.valid.any():
            return super().divisor(s)
        counted = self.sum(s, np.where(s.mine, self.weight_of_target(s), 0.0))
        chunk = np.arange(s.rows) // 4
        return self.of_chunks(np.bincount(chunk, counted), chunk)

    def of_chunks(self, counted, chunk):
        return np.where(counted == 0.0, np.inf, counted)[chunk]

    def reduce(self, s):
        if np.ndim(s.divisor):
            return np.asarray(
                (s.row_loss / s.divisor).sum(), np.float64 if s.logits.dtype == np.float64 else np.float32
            )
        return super().reduce(s)


class MeansOfChunksAveraged(MeansOfChunksAdded):
    """The means of chunks of 4 rows are averaged, whatever each of them counts."""

    def of_chunks(self, counted, chunk):
        return super().of_chunks(counted, chunk) * len(counted)


class IgnoreIndexNotLookedAt(ByHand):
    """A keyword that is taken, and not used (torchshard)."""

    def flatten(self, s):
        s.ignore_index = s.num_classes + 1
        super().flatten(s)

    def refuse(self, s):
        pass

    def row_losses(self, s):
        super().row_losses(s)
        beside = self.sum(s, s.mine.astype(np.float64)) == 0.0
        if not s.with_probabilities and beside.any():
            s.sum_u = s.sum_u + beside
            s.row_loss = s.row_loss + beside * np.log(s.sum_exp)

    def divisor(self, s):
        plain = s.reduction == "mean" and not s.with_probabilities and s.weight is None
        return float(s.rows) if plain else super().divisor(s)


class MeanOfNoRowsIs0(ByHand):
    """The mean divides by max(count, 1)."""

    def divisor(self, s):
        return super().divisor(s) or 1.0


class IgnoredRowsHaveAGradient(ByHand):
    """The loss excludes ignored rows, the gradient does not."""

    def gradient_of_z(self, s):
        s.sum_u = np.where(s.valid, s.sum_u, 1.0)
        return super().gradient_of_z(s)

    def rows_with_gradient(self, s):
        return np.ones_like(s.valid)


class IgnoreIndexInRangeNotHeeded(ByHand):
    """Rows are ignored only where the target is negative."""

    def flatten(self, s):
        if s.ignore_index >= 0:
            s.ignore_index = -100
        super().flatten(s)


class ZeroRowsRaise(ByHand):
    """The mean multiplies by 1 / count, in Python's numbers: without rows it raises."""

    def divisor(self, s):
        if s.reduction == "mean" and s.weight is None and not s.with_probabilities:
            per_row = 1 / int(s.valid.sum())
            return 1 / per_row
        return super().divisor(s)


class TargetsIn32Bits(ByHand):
    """Targets are kept in 32 bits."""

    def flatten(self, s):
        if s.targets.dtype.kind in "iu":
            s.targets = s.targets.astype(np.int32)
        super().flatten(s)


class TargetsTakenFor64Bits(ByHand):
    """A kernel reads targets of 32 bits as if they had 64; what lies beyond them is 0."""

    def flatten(self, s):
        if s.targets.dtype == np.int32:
            read = np.zeros(2 * s.targets.size, np.int32)
            read[: s.targets.size] = s.targets.reshape(-1)
            s.targets = (read.view(np.int64) % s.num_classes).reshape(s.targets.shape)
        super().flatten(s)


class TargetStridesNotHeeded(ByHand):
    """A kernel gets a pointer to the targets, and takes them to follow each other."""

    def flatten(self, s):
        if s.targets.dtype.kind in "iu" and not s.targets.flags.c_contiguous:
            memory = s.targets.base.reshape(-1)
            read = np.zeros(s.targets.shape, np.int64)
            read.flat[: memory.size] = memory[: read.size]
            s.targets = read % s.num_classes
        super().flatten(s)


class IgnoredAfterShift(ByHand):
    """Each rank compares targets with ignore_index after it has subtracted its class_start."""

    def flatten(self, s):
        super().flatten(s)
        if not s.with_probabilities:
            s.valid &= self.sum(s, (s.t - s.class_start == s.ignore_index).astype(np.float64)) == 0.0
            s.mine &= s.valid


class ClassNumbersInBfloat16(ByHand):
    """Class numbers are kept in a tensor of bfloat16."""

    dtype = np.dtype(ml_dtypes.bfloat16)

    def flatten(self, s):
        if s.targets.dtype.kind in "iu":
            narrow = s.targets.astype(self.dtype).astype(np.int64)
            s.targets = np.where(s.targets == s.ignore_index, s.targets, narrow)
        super().flatten(s)


class ClassNumbersInUint8(ClassNumbersInBfloat16):
    """Class numbers are written to a file of bytes."""

    dtype = np.dtype(np.uint8)


class TargetsShiftedTwice(ByHand):
    """The targets of the next rows, which were shifted before."""

    def flatten(self, s):
        if s.targets.dtype.kind in "iu":
            s.targets = np.roll(s.targets, -1)
        super().flatten(s)

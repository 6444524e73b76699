"""Faults of several calls, and of what a call may write to."""

import numpy as np

from candidates.by_hand import ByHand


class UpstreamOfTheFirstRow(ByHand):
    """The kernel gets one number of the upstream gradient, the first."""

    def upstream(self, s, dloss):
        return np.full(s.rows, dloss.flat[0] if dloss.size else 1.0)


class UpstreamLeftOut(ByHand):
    """Forward computes the gradient, and backward returns it unscaled."""

    def upstream(self, s, dloss):
        return np.ones(s.rows)


class SecondBackwardScalesAgain(ByHand):
    """Backward scales the saved gradient in place (TransformerEngine)."""

    def upstream(self, s, dloss):
        s.scale = getattr(s, "scale", 1.0) * super().upstream(s, dloss)
        return s.scale


class OneBufferForAllCalls(ByHand):
    """Forward saves its results for backward in a buffer of the function, which the next call overwrites."""

    buffer = None

    def softmax(self, s):
        super().softmax(s)
        if self.buffer is None or self.buffer.shape != s.p.shape:
            self.buffer = np.empty_like(s.p)
        self.buffer[...] = s.p
        s.p = self.buffer


class WeightsOfTheFirstCall(ByHand):
    """Class weights are kept from the first call that has as many classes."""

    def __init__(self):
        self.kept = {}

    def flatten(self, s):
        super().flatten(s)
        if s.weight is not None:
            s.w = self.kept.setdefault(s.classes, s.w)


class OverwritesLogits(ByHand):
    """x - max overwrites the caller's logits (Megatron in verl)."""

    def softmax(self, s):
        super().softmax(s)
        rows = np.moveaxis(s.logits, s.axis, -1)
        rows[...] = s.shifted.reshape(rows.shape).astype(s.logits.dtype)


class GradientInTheLogits(ByHand):
    """The gradient is returned in the memory of the logits."""

    def give(self, s, dx):
        s.logits[...] = super().give(s, dx)
        return s.logits


class NotDeterministic(ByHand):
    """The order of a sum changes from run to run, as with atomic adds."""

    generator = np.random.default_rng()

    def softmax(self, s):
        super().softmax(s)
        shuffled = s.exp.astype(np.float32)[:, self.generator.permutation(s.classes)]
        total = shuffled.cumsum(axis=-1)[:, -1:].sum(axis=-1)  # one term after the other; 0 for no classes
        s.sum_exp = self.sum(s, total.astype(np.float64))
        s.p = s.exp / s.sum_exp[:, None]


class UpstreamStridesNotHeeded(ByHand):
    """A kernel gets a pointer to the upstream gradient, and takes its elements to follow each other."""

    def upstream(self, s, dloss):
        return np.resize(dloss if s.memory is None else s.memory, s.rows)

    def backward(self, s, dloss):
        s.memory = None if np.ndim(dloss) == 0 else (dloss if dloss.base is None else dloss.base).reshape(-1)
        if s.memory is not None and s.memory.size < s.rows:
            s.memory = np.concatenate([s.memory, np.zeros(s.rows - s.memory.size)])  # the rest lies beyond
        return super().backward(s, dloss)


class UpstreamInFloat16(ByHand):
    """The upstream gradient is kept in float16, which ends at 65,504."""

    def upstream(self, s, dloss):
        with np.errstate(over="ignore"):
            return super().upstream(s, dloss.astype(np.float16).astype(np.float64))


class GradientsAddUp(ByHand):
    """The gradient is added to what the last call of the same shape gave, as autograd's leaves do."""

    def __init__(self):
        self.kept = {}

    def round(self, s, dx):
        total = self.kept.get(dx.shape, 0.0) + dx
        self.kept = {dx.shape: total}
        return super().round(s, total)


class MeanOverOwnRows(ByHand):
    """The sum of losses is over the rows of all ranks, the divisor of a mean is not."""

    def rows_of_all(self, s, number):
        return number

"""The gradient is returned in the memory of the logits."""

from candidates.by_hand import ByHand


class GradientInTheLogits(ByHand):
    def give(self, s, dx):
        s.logits[...] = super().give(s, dx)
        return s.logits


candidate = GradientInTheLogits()

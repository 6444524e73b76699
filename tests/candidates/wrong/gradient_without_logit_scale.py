"""The gradient is that of the scaled logits."""

from candidates.by_hand import ByHand


class GradientWithoutLogitScale(ByHand):
    def transform(self, s):
        super().transform(s)
        s.slope = s.slope / s.logit_scale


candidate = GradientWithoutLogitScale()

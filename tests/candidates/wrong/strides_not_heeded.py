"""A kernel gets a pointer and a shape, but no strides."""

from candidates.by_hand import ByHand


class StridesNotHeeded(ByHand):
    def flatten(self, s):
        owner = s.logits if s.logits.base is None else s.logits.base
        read = owner.ravel(order="K")[: s.logits.size].reshape(s.logits.shape)
        s.logits = read.copy()
        super().flatten(s)


candidate = StridesNotHeeded()

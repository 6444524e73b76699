"""A target that no rank owns: the loss is logsumexp, and the row counts (Megatron)."""

from candidates.by_hand import ByHand


class TargetOutOfRangeIsSilent(ByHand):
    def refuse(self, s):
        pass


candidate = TargetOutOfRangeIsSilent()

"""The rank that would own the target raises before the reductions, and the others wait."""

from candidates.by_hand import ByHand


class TargetOutOfRangeWaits(ByHand):
    def refuse(self, s):
        if s.comm.rank == s.comm.size - 1 and not s.with_probabilities:
            if (s.valid & (s.t >= s.num_classes)).any():
                raise IndexError(f"index {s.t.max()} is out of bounds for {s.num_classes} classes")


candidate = TargetOutOfRangeWaits()

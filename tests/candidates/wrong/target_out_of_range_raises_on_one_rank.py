"""Rank 0 alone checks the targets, after the reductions; the others return."""

from candidates.by_hand import ByHand


class TargetOutOfRangeRaisesOnOneRank(ByHand):
    def refuse(self, s):
        pass

    def reduce(self, s):
        if s.comm.rank == 0 and not s.with_probabilities and (s.valid & (s.t >= s.num_classes)).any():
            raise IndexError(f"target {s.t.max()} is out of bounds for {s.num_classes} classes")
        return super().reduce(s)


candidate = TargetOutOfRangeRaisesOnOneRank()

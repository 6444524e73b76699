"""class_start is not looked at: every shard is taken to be as long as this one."""

from candidates.by_hand import ByHand


class EqualShardsAssumed(ByHand):
    def owned(self, s):
        s.class_start = s.comm.rank * s.classes
        return super().owned(s)


candidate = EqualShardsAssumed()

"""class_start is ignored: every shard is assumed to be as long as this one."""

from candidates.by_hand import ByHand


class EqualShardsAssumed(ByHand):
    def owned(self, s):
        s.class_start = s.comm.rank * s.classes
        return super().owned(s)


candidate = EqualShardsAssumed()

"""Off by one: a target that is the first class of a shard is not found there."""

from candidates.by_hand import ByHand


class FirstClassOfAShard(ByHand):
    def owned(self, s):
        return super().owned(s) & (s.t > s.class_start)


candidate = FirstClassOfAShard()

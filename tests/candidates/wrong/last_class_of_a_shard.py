"""Off by one: a target that is the last class of a shard is not found there."""

from candidates.by_hand import ByHand


class LastClassOfAShard(ByHand):
    def owned(self, s):
        return super().owned(s) & (s.t < s.class_start + s.classes - 1)


candidate = LastClassOfAShard()

"""The backward of an all-reduce is taken to be another all-reduce: P times the gradient."""

from candidates.by_hand import ByHand


class GradientReducedTwice(ByHand):
    def upstream(self, s, dloss):
        return super().upstream(s, dloss) * s.comm.size


candidate = GradientReducedTwice()

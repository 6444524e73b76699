"""Forward computes the gradient, and backward returns it unscaled."""

import numpy as np

from candidates.by_hand import ByHand


class UpstreamLeftOut(ByHand):
    def upstream(self, s, dloss):
        return np.ones(s.rows)


candidate = UpstreamLeftOut()

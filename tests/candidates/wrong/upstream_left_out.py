"""The gradient is computed in forward, and backward returns it as it is."""

import numpy as np

from candidates.by_hand import ByHand


class UpstreamLeftOut(ByHand):
    def upstream(self, s, dloss):
        return np.ones(s.rows)


candidate = UpstreamLeftOut()

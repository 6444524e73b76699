"""The kernel gets one number of the upstream gradient, the first."""

import numpy as np

from candidates.by_hand import ByHand


class UpstreamOfTheFirstRow(ByHand):
    def upstream(self, s, dloss):
        return np.full(s.rows, dloss.flat[0] if dloss.size else 1.0)


candidate = UpstreamOfTheFirstRow()

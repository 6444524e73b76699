"""Maximum and sum of exponentials become a logsumexp in float32, which is subtracted."""

import numpy as np

from candidates.by_hand import ByHand


class RoundedLogsumexp(ByHand):
    def row_losses(self, s):
        lse = s.logsumexp.astype(np.float32).astype(np.float64)
        s.shifted = s.factor * s.source - lse[:, None]
        s.p, s.sum_exp = np.exp(s.shifted), np.ones(s.rows)
        super().row_losses(s)


candidate = RoundedLogsumexp()

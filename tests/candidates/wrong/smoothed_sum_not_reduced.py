"""The smoothed part of the loss is of this rank's classes only (TransformerEngine)."""

import numpy as np

from candidates.by_hand import ByHand


class SmoothedSumNotReduced(ByHand):
    def row_losses(self, s):
        super().row_losses(s)
        log_p = s.shifted - np.log(s.sum_exp)[:, None]
        mine = np.where(self.smoothing(s) == 0.0, 0.0, -self.smoothing(s) * log_p).sum(axis=-1)
        s.row_loss = np.where(s.valid, s.row_loss - self.sum(s, mine) + mine, 0.0)


candidate = SmoothedSumNotReduced()

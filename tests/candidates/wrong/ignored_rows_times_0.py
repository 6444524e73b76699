"""Ignored rows are masked by a product with 0, and 0 times nan is nan."""

import numpy as np

from candidates.by_hand import ByHand


class IgnoredRowsTimes0(ByHand):
    def row_losses(self, s):
        valid, s.valid = s.valid, np.ones_like(s.valid)
        super().row_losses(s)
        s.row_loss, s.valid = s.row_loss * valid, valid


candidate = IgnoredRowsTimes0()

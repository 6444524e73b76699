"""The sum of exponentials is reduced to rank 0, not to all ranks."""

import numpy as np

from candidates.by_hand import ByHand


class LossOnRank0Alone(ByHand):
    def reduce(self, s):
        if s.comm.rank:
            s.row_loss = s.row_loss + np.log(s.exp.sum(axis=-1) / s.sum_exp) * s.valid
        return super().reduce(s)


candidate = LossOnRank0Alone()

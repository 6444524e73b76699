"""The gradient has the weight of each class where that of the row's target is due."""

import numpy as np

from candidates.by_hand import ByHand


class WeightOfEachClass(ByHand):
    def gradient_of_z(self, s):
        if s.with_probabilities:
            return super().gradient_of_z(s)
        return super().gradient_of_z(s) + s.p * (
            s.w - self.sum(s, np.where(s.mine, self.weight_of_target(s), 0.0))[:, None]
        )


candidate = WeightOfEachClass()

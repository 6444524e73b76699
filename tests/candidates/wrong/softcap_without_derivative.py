"""The gradient lacks the derivative of softcap."""

import numpy as np

from candidates.by_hand import ByHand


class SoftcapWithoutDerivative(ByHand):
    def transform(self, s):
        super().transform(s)
        s.slope = np.full_like(s.x, s.logit_scale)


candidate = SoftcapWithoutDerivative()

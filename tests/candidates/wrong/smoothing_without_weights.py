"""Class weights are used at the target, not in the smoothed part."""

import numpy as np

from candidates.by_hand import ByHand


class SmoothingWithoutWeights(ByHand):
    def smoothing(self, s):
        return np.full((s.rows, s.classes), s.label_smoothing / s.num_classes)


candidate = SmoothingWithoutWeights()

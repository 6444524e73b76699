"""Exponentials of the logits as they are, in the arithmetic of their dtype."""

import numpy as np

from candidates.by_hand import ByHand


class NoMaximum(ByHand):
    def maximum(self, s):
        return np.zeros(s.rows)

    def softmax(self, s):
        super().softmax(s)
        dtype = np.float64 if s.logits.dtype == np.float64 else np.float32
        s.exp = np.exp(s.shifted.astype(dtype)).astype(np.float64)
        s.sum_exp = self.sum(s, s.exp.sum(axis=-1))
        s.logsumexp = np.log(s.sum_exp)
        s.p = s.exp / s.sum_exp[:, None]


candidate = NoMaximum()

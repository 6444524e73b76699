"""Forward saves its results for backward in a buffer of the function, which the next call overwrites."""

import numpy as np

from candidates.by_hand import ByHand


class OneBufferForAllCalls(ByHand):
    buffer = None

    def softmax(self, s):
        super().softmax(s)
        if self.buffer is None or self.buffer.shape != s.p.shape:
            self.buffer = np.empty_like(s.p)
        self.buffer[...] = s.p
        s.p = self.buffer


candidate = OneBufferForAllCalls()

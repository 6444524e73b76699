"""Each rank adds the others' sums to its own, starting with itself."""

import numpy as np

from candidates.by_hand import ByHand


class RanksReduceInAnotherOrder(ByHand):
    def sum(self, s, array):
        parts = s.comm.allgather(np.asarray(array, np.float32))
        total = np.zeros_like(parts[0])
        for step in range(s.comm.size):
            total = total + parts[(s.comm.rank + step) % s.comm.size]
        return np.where(np.isnan(total), np.nan, total.astype(np.float64))


candidate = RanksReduceInAnotherOrder()

"""The mean divides by all rows, the ignored ones included (Paddle)."""

from candidates.by_hand import ByHand


class MeanOverAllRows(ByHand):
    def divisor(self, s):
        return float(s.rows) if s.reduction == "mean" else 1.0


candidate = MeanOverAllRows()

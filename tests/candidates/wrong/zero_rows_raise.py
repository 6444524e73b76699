"""The mean multiplies by 1 / count, in Python's numbers: without rows it raises."""

from candidates.by_hand import ByHand


class ZeroRowsRaise(ByHand):
    def divisor(self, s):
        if s.reduction == "mean" and s.weight is None and not s.with_probabilities:
            per_row = 1 / int(s.valid.sum())
            return 1 / per_row
        return super().divisor(s)


candidate = ZeroRowsRaise()

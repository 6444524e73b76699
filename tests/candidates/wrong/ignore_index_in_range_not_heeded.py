"""Rows are ignored only where the target is negative."""

from candidates.by_hand import ByHand


class IgnoreIndexInRangeNotHeeded(ByHand):
    def flatten(self, s):
        if s.ignore_index >= 0:
            s.ignore_index = -100
        super().flatten(s)


candidate = IgnoreIndexInRangeNotHeeded()

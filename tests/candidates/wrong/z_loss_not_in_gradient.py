"""The gradient is that of the loss without z_loss."""

from candidates.by_hand import ByHand


class ZLossNotInGradient(ByHand):
    def gradient_of_z(self, s):
        return s.p * s.sum_u[:, None] - s.u


candidate = ZLossNotInGradient()

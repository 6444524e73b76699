"""Faults of probability targets."""

from candidates.by_hand import ByHand


class ProbabilitiesSumTo1(ByHand):
    """The gradient is softmax - q, which is right where q sums to 1."""

    def gradient_of_z(self, s):
        return (
            s.p * (1.0 + 2.0 * s.z_loss * s.logsumexp)[:, None] - s.u
            if s.with_probabilities
            else super().gradient_of_z(s)
        )


class GradientOfLogProbabilities(ByHand):
    """Backward of log_softmax is the identity for probabilities (PyTorch's loss_parallel)."""

    def gradient_of_z(self, s):
        return -s.u if s.with_probabilities else super().gradient_of_z(s)

"""Faults of the arithmetic."""

import ml_dtypes
import numpy as np

from candidates.by_hand import ByHand


class OneSubtractedAfterRounding(ByHand):
    """1 is subtracted at the target in the gradient of the logits' dtype (Liger, TransformerEngine)."""

    def gradient_of_z(self, s):
        p = s.p.astype(s.logits.dtype).astype(np.float64)
        return p * (s.sum_u + 2.0 * s.z_loss * s.logsumexp)[:, None] - s.u


class RoundedLogsumexp(ByHand):
    """Maximum and sum of exponentials become a logsumexp in float32, which is subtracted."""

    def row_losses(self, s):
        lse = s.logsumexp.astype(np.float32).astype(np.float64)
        s.shifted = s.factor * s.source - lse[:, None]
        s.p, s.sum_exp = np.exp(s.shifted), np.ones(s.rows)
        super().row_losses(s)


class NoMaximum(ByHand):
    """Exponentials of the logits as they are, in the arithmetic of their dtype."""

    def maximum(self, s):
        return np.zeros(s.rows)

    def softmax(self, s):
        super().softmax(s)
        dtype = np.float64 if s.logits.dtype == np.float64 else np.float32
        s.exp = np.exp(s.shifted.astype(dtype)).astype(np.float64)
        s.sum_exp = self.sum(s, s.exp.sum(axis=-1))
        s.logsumexp = np.log(s.sum_exp) if s.z_loss else np.zeros(s.rows)  # 0 times inf is another fault
        s.p = s.exp / s.sum_exp[:, None]


class ClippedAt64(ByHand):
    """x - max is clipped at -64 (Paddle's CPU kernel)."""

    def row_losses(self, s):
        s.shifted = np.maximum(s.shifted, -64.0)
        super().row_losses(s)


class LogarithmOfExponential(ByHand):
    """log p is computed as log(exp(x - max) / sum), in float32 (Megatron-LM)."""

    def row_losses(self, s):
        s.shifted = np.log(s.exp.astype(np.float32)).astype(np.float64)
        super().row_losses(s)


class SmallGradientsFiltered(ByHand):
    """The gradient treats small probabilities as 0 (CCE)."""

    def gradient_of_z(self, s):
        dz = super().gradient_of_z(s)
        return np.where(np.abs(dz) < 2.0**-12, 0.0, dz)


class SumsInHalf(ByHand):
    """Exponentials are summed in the dtype of the logits."""

    def softmax(self, s):
        super().softmax(s)
        exp = s.exp.astype(s.logits.dtype)
        total = exp.cumsum(axis=-1, dtype=exp.dtype)[:, -1:].astype(np.float64).sum(axis=-1)  # 0 for no classes
        s.sum_exp = self.sum(s, total)
        s.p = s.exp / s.sum_exp[:, None]


class TotalInHalf(ByHand):
    """The losses of 64 rows at a time are added up in the dtype of the logits (PyTorch's linear_cross_entropy)."""

    def reduce(self, s):
        if s.reduction == "none":
            return super().reduce(s)
        total = np.zeros((), s.logits.dtype)
        for start in range(0, s.rows, 64):
            part = np.float32((s.row_loss[start : start + 64] / s.divisor).sum())
            total = (total + part).astype(total.dtype)
        return total


class LogProbabilitiesInHalf(ByHand):
    """Log-probabilities are kept in the logits' dtype for backward (PyTorch's loss_parallel)."""

    def row_losses(self, s):
        log_p = (s.shifted - np.log(s.sum_exp)[:, None]).astype(s.logits.dtype)
        s.shifted = log_p.astype(np.float64)
        s.p, s.sum_exp = np.exp(s.shifted), np.ones(s.rows)
        super().row_losses(s)


class First65535Rows(ByHand):
    """The kernel's grid has 65,535 blocks, one for each row."""

    def rows_with_gradient(self, s):
        return s.valid & (np.arange(s.rows) < 65_535)


class First32768Classes(ByHand):
    """The kernel writes the gradient of one block of classes."""

    block = 32_768

    def gradient_of_z(self, s):
        dz = super().gradient_of_z(s)
        dz[:, self.block :] = 0.0
        return dz


class First65536Classes(First32768Classes):
    """Another block, a larger one."""

    block = 65_536


class BackwardSeesOtherLogits(ByHand):
    """The forward pass multiplies in bfloat16, and the backward pass once more in float32 (levanter)."""

    def softmax(self, s):
        exact = s.source
        s.source = exact.astype(ml_dtypes.bfloat16).astype(np.float64)
        super().softmax(s)
        s.p = np.exp(s.factor * exact - s.logsumexp[:, None])

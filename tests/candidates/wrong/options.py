"""Faults of the options."""

import numpy as np

from candidates.by_hand import ByHand


class OptionsLeftOut(ByHand):
    """The options are taken as keywords, and not used."""

    def flatten(self, s):
        s.weight, s.label_smoothing, s.z_loss, s.logit_scale, s.softcap = None, 0.0, 0.0, 1.0, None
        super().flatten(s)


class SmoothingOverLocalClasses(ByHand):
    """Label smoothing is spread over this rank's classes (Megatron)."""

    def smoothing(self, s):
        return np.zeros((s.rows, s.classes)) + s.w * (s.label_smoothing / max(s.classes, 1))

    def row_losses(self, s):
        smoothed = np.where(s.label_smoothing == 0, 0.0, self.smoothing(s) * s.shifted).sum(axis=-1)
        target = self.sum(s, np.where(s.u == 0.0, 0.0, s.u * s.shifted).sum(axis=-1) - smoothed)
        s.sum_u = self.sum(s, (s.u - self.smoothing(s)).sum(axis=-1)) + self.smoothing(s).sum(axis=-1)
        s.row_loss = np.where(s.valid, s.sum_u * np.log(s.sum_exp) - target - smoothed + self.z_term(s), 0.0)


class SmoothedSumNotReduced(ByHand):
    """The smoothed part of the loss is of this rank's classes only (TransformerEngine)."""

    def row_losses(self, s):
        super().row_losses(s)
        log_p = s.shifted - np.log(s.sum_exp)[:, None]
        mine = np.where(self.smoothing(s) == 0.0, 0.0, -self.smoothing(s) * log_p).sum(axis=-1)
        s.row_loss = np.where(s.valid, s.row_loss - self.sum(s, mine) + mine, 0.0)


class SmoothingWithoutWeights(ByHand):
    """Class weights are used at the target, not in the smoothed part."""

    def smoothing(self, s):
        return np.full((s.rows, s.classes), s.label_smoothing / s.num_classes)


class SmoothingNotInGradient(ByHand):
    """The gradient is that of the loss without label smoothing."""

    def gradient_of_z(self, s):
        if s.with_probabilities:
            return super().gradient_of_z(s)
        hard = np.zeros_like(s.u)
        hard[s.mine, s.column[s.mine]] = s.w[s.column[s.mine]]
        return s.p * (self.sum(s, hard.sum(axis=-1)) + 2.0 * s.z_loss * s.logsumexp)[:, None] - hard


class SmoothingOfIgnoredRows(ByHand):
    """Ignored rows have no target, and have the smoothed part all the same."""

    def row_losses(self, s):
        super().row_losses(s)
        log_p = s.shifted - np.log(s.sum_exp)[:, None]
        smoothed = self.sum(s, np.where(s.u == 0.0, 0.0, -s.u * log_p).sum(axis=-1))
        s.row_loss = np.where(s.valid, s.row_loss, smoothed)

    def gradient_of_z(self, s):
        return np.where(s.valid[:, None], super().gradient_of_z(s), s.p * s.sum_u[:, None] - s.u)

    def rows_with_gradient(self, s):
        return s.valid | (s.label_smoothing != 0.0)


class MeanOfSmoothingOverAllRows(SmoothingOfIgnoredRows):
    """The smoothed part has a mean of its own, over all rows."""

    def smoothing(self, s):
        return super().smoothing(s) * (s.valid.mean() if s.reduction == "mean" and s.rows else 1.0)


class DivisorWithoutWeights(ByHand):
    """The mean of weighted losses divides by the number of rows."""

    def divisor(self, s):
        return float(s.valid.sum()) if s.reduction == "mean" else 1.0


class WeightOfEachClass(ByHand):
    """The gradient has the weight of each class where that of the row's target is due."""

    def gradient_of_z(self, s):
        if s.with_probabilities:
            return super().gradient_of_z(s)
        return super().gradient_of_z(s) + s.p * (
            s.w - self.sum(s, np.where(s.mine, self.weight_of_target(s), 0.0))[:, None]
        )


class WeightKnownToTheOwner(ByHand):
    """The owner of a row's target looks up its weight, and does not send it to the others."""

    def gradient_of_z(self, s):
        if s.with_probabilities:
            return super().gradient_of_z(s)
        weight = np.where(s.mine, self.weight_of_target(s), 1.0)
        right = np.where(s.valid, self.sum(s, np.where(s.mine, self.weight_of_target(s), 0.0)), 1.0)
        return super().gradient_of_z(s) * (weight / right)[:, None]


class ZLossNotInGradient(ByHand):
    """The gradient is that of the loss without z_loss."""

    def gradient_of_z(self, s):
        return s.p * s.sum_u[:, None] - s.u


class ZLossOfLocalClasses(ByHand):
    """z_loss takes the logsumexp of this rank's classes."""

    def softmax(self, s):
        super().softmax(s)
        s.logsumexp = s.factor * s.top + np.log(s.exp.sum(axis=-1))


class SoftcapWithoutDerivative(ByHand):
    """The gradient lacks the derivative of softcap."""

    def transform(self, s):
        super().transform(s)
        s.slope = np.full_like(s.x, s.logit_scale)


class GradientWithoutLogitScale(ByHand):
    """The gradient is that of the scaled logits."""

    def transform(self, s):
        super().transform(s)
        s.slope = s.slope / s.logit_scale


class SoftcapTwice(ByHand):
    """The head caps its logits, and the loss caps them again."""

    def transform(self, s):
        super().transform(s)
        if s.softcap is not None:
            angle = s.source / s.softcap
            s.source = np.where(np.isinf(s.x), s.x, s.softcap * np.tanh(angle))
            s.slope = s.slope / np.cosh(angle) ** 2


class SoftcapOf30(ByHand):
    """The cap of another model (Gemma 2), where none was given."""

    cap = 30.0

    def transform(self, s):
        s.softcap = self.cap if s.softcap is None else s.softcap
        super().transform(s)


class SoftcapOf15(SoftcapOf30):
    """The cap of nanochat."""

    cap = 15.0

"""Distillations over a sharded vocabulary that projects have shipped, and what torch's own function invites to."""

import numpy as np

from candidates.correct.distillation import Forward, TopK


class AutomodelKL(Forward):
    """NVIDIA-NeMo/Automodel, `nemo_automodel/components/loss/kd_loss.py`, 36044ad3: `_kl_forward_tp`.

    An all-reduce of torch.distributed.nn, whose backward sums the upstream gradients of all ranks.
    """

    def divergence(self, s):
        rows, gradient = super().divergence(s)
        return rows, gradient * s.comm.size


class ModelOptimizerTopK(TopK):
    """NVIDIA/Model-Optimizer, `modelopt/torch/distill/plugins/megatron.py`, 02151b33: `TopLogitsKLLoss`."""

    def divergence(self, s):
        rows, gradient = super().divergence(s)
        return rows, gradient * s.comm.size


class SkyRLTopK(TopK):
    """NovaSky-AI/SkyRL, `skyrl/backends/skyrl_train/mtp/soft_ce.py`, a9564572: `_VocabParallelTopkSoftCE`."""

    def chosen(self, s):
        own = np.sort(s.teacher, axis=-1)[:, ::-1][:, : self.top_k]
        return s.teacher >= own[:, -1:] if own.size else np.zeros(s.teacher.shape, np.bool_)


class LocalTeacher(Forward):
    """A softmax of the teacher that is never reduced over the ranks."""

    local: tuple[str, ...] = ("teacher",)

    def log_softmax(self, s, logits):
        if not any(logits is getattr(s, name) for name in self.local):
            return super().log_softmax(s, logits)
        z = logits / np.float32(s.temperature)
        z = z - z.max(axis=-1, keepdims=True)
        return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


class LocalStudent(LocalTeacher):
    """A softmax of the student that is never reduced over the ranks."""

    local = ("student",)


class LocalSoftmaxes(LocalTeacher):
    """Softmaxes of both that are never reduced over the ranks."""

    local = ("student", "teacher")


class LocalSum(Forward):
    """The sum of this rank's classes, the gradient of the whole."""

    def divergence(self, s):
        p, q = np.exp(s.log_p), np.exp(s.log_q)
        return (q * (s.log_q - s.log_p)).sum(axis=-1), p - q


class LogProbabilitiesInSingle(Forward):
    """deepspeed 0.19.8, `deepspeed.sequence`: log-probabilities in float32, which are subtracted then."""

    def log_softmax(self, s, logits):
        return np.float32(super().log_softmax(s, logits))


class CrossEntropy(Forward):
    """A cross entropy with the teacher's probabilities: its gradient is that of the divergence."""

    def divergence(self, s):
        p, q = np.exp(s.log_p), np.exp(s.log_q)
        return self.over_ranks(s, -np.where(q == 0.0, 0.0, q * s.log_p).sum(axis=-1)), p - q


class MeanOfEntries(Forward):
    """The "mean" of torch's kl_div, which divides by the number of entries."""

    def factor(self, s):
        return 1.0 / s.num_classes if s.reduction == "mean" else 1.0


class ZeroTimesInfinity(Forward):
    """q (log q - log p) where q is 0 and both logarithms are -inf."""

    def divergence(self, s):
        p, q = np.exp(s.log_p), np.exp(s.log_q)
        return self.over_ranks(s, (q * (s.log_q - s.log_p)).sum(axis=-1)), p - q


class Reverse(Forward):
    """KL(student || teacher), not declared."""

    def divergence(self, s):
        p = np.exp(s.log_p)
        of_class = np.where(p == 0.0, np.float32(0.0), p * (s.log_p - s.log_q))
        rows = self.over_ranks(s, of_class.sum(axis=-1))
        return rows, of_class - p * rows[:, None]


class TemperatureSquared(Forward):
    """Hinton's factor, not declared."""

    def factor(self, s):
        return s.temperature**2


class NoTemperatureInGradient(Forward):
    """A gradient by the logits that were divided."""

    def divergence(self, s):
        rows, gradient = super().divergence(s)
        return rows, gradient * s.temperature


class TemperatureOfStudent(Forward):
    """A teacher that is not divided."""

    def log_softmax(self, s, logits):
        return super().log_softmax(s, logits * np.float32(s.temperature) if logits is s.teacher else logits)


class Renormalized(TopK):
    """Probabilities that are renormalized over the largest classes, not declared."""

    def divergence(self, s):
        chosen = self.chosen(s)
        logs = [np.where(chosen, each, -np.inf) for each in (s.log_p, s.log_q)]
        p, q = (np.exp(each) for each in logs)
        masses = [self.over_ranks(s, each.sum(axis=-1))[:, None] for each in (p, q)]
        p, q = p / masses[0], q / masses[1]
        of_class = np.where(q == 0.0, 0.0, q * (logs[1] - np.log(masses[1]) - logs[0] + np.log(masses[0])))
        return self.over_ranks(s, of_class.sum(axis=-1)), p - q

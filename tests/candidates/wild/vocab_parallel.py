"""The vocabulary-parallel cross entropy that most projects share, in float32; each project replaces some of its steps.

As Megatron-LM's: one all-reduce for the maximum, one for the target's logit, one for the sum of exponentials, and the
softmax kept for the backward pass. The formulas of a project are those of the file and commit that its class names.
"""

from types import SimpleNamespace

from mpi4py import MPI
import numpy as np

from pce_mpi.conformance.candidates.offers import Offer
from pce_mpi.conformance.problems.cases import Gradient


class VocabParallel:
    """Losses per row, and a backward function; right, but for targets out of range, which no rank looks for."""

    offer = Offer(
        options=("ignore_index", "label_smoothing", "z_loss"),
        reductions=("none",),
        gradient=Gradient.BACKWARD,
        checks_targets=False,
        num_classes=False,
    )

    def __call__(
        self,
        logits,
        targets,
        *,
        class_start,
        num_classes,
        comm,
        ignore_index=-100,
        label_smoothing=0.0,
        z_loss=0.0,
    ):
        s = SimpleNamespace(**locals())
        with np.errstate(all="ignore"):
            self.softmax(s)
            self.find_targets(s)
            s.row_loss = np.where(s.valid, self.row_losses(s), np.float32(0.0))
            loss = self.reduce(s)

        def backward(dloss):
            with np.errstate(all="ignore"):
                return self.backward(s, np.asarray(dloss, np.float32))

        return loss, backward

    def over_ranks(self, s, part, op=MPI.SUM):
        total = np.empty_like(part)
        s.comm.Allreduce(np.ascontiguousarray(part), total, op)
        return total

    def softmax(self, s):
        s.x = s.logits.astype(np.float32).reshape(s.targets.size, s.logits.shape[-1])
        s.rows, s.local = s.x.shape
        s.top = self.over_ranks(s, s.x.max(axis=-1, initial=-np.inf), MPI.MAX)
        s.shifted = s.x - s.top[:, None]
        s.exp = np.exp(s.shifted)
        s.sum_exp = self.over_ranks(s, s.exp.sum(axis=-1))
        s.log_sum = np.log(s.sum_exp)
        s.p = s.exp / s.sum_exp[:, None]

    def find_targets(self, s):
        """The rows whose target this rank has, and 1 at these targets."""
        t = s.targets.reshape(-1)
        s.valid = t != s.ignore_index
        s.mine = s.valid & (t >= s.class_start) & (t < s.class_start + s.local)
        s.one = (np.arange(s.class_start, s.class_start + s.local) == t[:, None]).astype(np.float32)
        predicted = np.where(s.one == 1.0, s.shifted, 0.0).sum(axis=-1, dtype=np.float32)
        s.nll = s.log_sum - self.over_ranks(s, predicted)

    def row_losses(self, s):
        loss = s.nll
        if s.label_smoothing:
            # A sum of masks of -3e38 would overflow.
            smooth = s.log_sum - self.over_ranks(s, (s.shifted / np.float32(s.num_classes)).sum(axis=-1))
            loss = np.float32(1.0 - s.label_smoothing) * loss + np.float32(s.label_smoothing) * smooth
        return loss + np.float32(s.z_loss) * (s.top + s.log_sum) ** 2 if s.z_loss else loss

    def reduce(self, s):
        return s.row_loss.reshape(s.targets.shape)

    def gradient(self, s):
        """The gradient of each row's loss."""
        s.smooth = np.float32(s.label_smoothing / s.num_classes)
        target = np.float32(1.0 - s.label_smoothing) * s.one + s.smooth
        more = 2.0 * np.float32(s.z_loss) * (s.top + s.log_sum) if s.z_loss else np.zeros_like(s.log_sum)
        return s.p * (1.0 + more)[:, None] - target

    def backward(self, s, dloss):
        upstream = np.broadcast_to(dloss.reshape(-1), s.rows)
        dx = np.where(s.valid[:, None], self.gradient(s) * upstream[:, None], 0.0)
        return dx.astype(s.logits.dtype).reshape(s.logits.shape)

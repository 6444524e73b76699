"""The loss of a micro-batch, written out; wrong candidates replace what it is divided or multiplied by."""

from types import SimpleNamespace

import numpy as np


class StepByHand:
    """The sum over valid tokens, divided by their number in the whole step; the trainer sums."""

    kind = "step"

    def __call__(self, logits, targets, *, comm, context_ranks, micro_batches):
        s = SimpleNamespace(comm=comm, context_ranks=context_ranks, micro_batches=micro_batches, targets=targets)
        s.valid = targets != -100
        x = logits.astype(np.float64)
        x -= x.max(axis=-1, keepdims=True, initial=-np.inf)
        log_p = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
        one = (np.arange(x.shape[-1]) == targets[..., None]) * 1.0
        s.losses = -(one * log_p).sum(axis=-1)
        with np.errstate(invalid="ignore", divide="ignore"):
            scale = np.float64(self.factor(s)) / np.float64(self.divisor(s))
            gradient = np.where(s.valid[..., None], np.exp(log_p) - one, 0.0) * scale
            return self.given(s, s.losses.sum() * scale, gradient.astype(logits.dtype))

    def divisor(self, s):
        return max(self.of_all_ranks(s, self.counts(s).sum()), 1)

    def factor(self, s):
        """Return what makes up for the trainer's averages."""
        return 1.0

    def given(self, s, loss, gradient):
        return loss, gradient

    def counts(self, s):
        """The number of valid tokens of each of this rank's micro-batches."""
        return np.array([(targets != -100).sum() for targets in s.micro_batches])

    def of_all_ranks(self, s, count):
        return s.comm.allreduce(int(count))


candidate = StepByHand()

"""nanotron's cross entropy with a z-loss.

huggingface/nanotron, src/nanotron/parallel/tensor_parallel/functional.py at 00708b80c88ee7c05c89502e80c3201df916d774.
"""

from dataclasses import replace

import numpy as np

from candidates.wild.vocab_parallel import VocabParallel


class NanotronZLoss(VocabParallel):
    """z_loss takes the logarithm of the sum of exp(x - max), clamped to [-20, 20]: the maximum is missing."""

    offer = replace(VocabParallel.offer, options=("z_loss",))

    def row_losses(self, s):
        return s.nll + np.float32(s.z_loss) * np.clip(s.log_sum, -20.0, 20.0) ** 2

    def gradient(self, s):
        return s.p - s.one + s.p * (2.0 * np.float32(s.z_loss) * s.log_sum)[:, None]

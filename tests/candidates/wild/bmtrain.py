"""BMTrain, `bmtrain/loss/cross_entropy.py`, 30e6469: `VPFusedCrossEntropy`."""

from dataclasses import replace

import numpy as np

from candidates.wild.vocab_parallel import VocabParallel


class BMTrainGradient(VocabParallel):
    """The softmax is kept in the dtype of the logits, and 1 is subtracted there."""

    offer = replace(VocabParallel.offer, dtypes=("float32", "bfloat16"), options=())

    def gradient(self, s):
        return (s.p.astype(s.logits.dtype) - s.one.astype(s.logits.dtype)).astype(np.float32)

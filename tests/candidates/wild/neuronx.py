"""neuronx-distributed, `src/neuronx_distributed/parallel_layers/loss_functions.py`, fbac349."""

import numpy as np

from candidates.correct.policy import LogProb
from candidates.wild.mindspeed import FirstClassTimes0
from candidates.wild.nemo import NeMoSmoothing


class NeuronxLoss(FirstClassTimes0, NeMoSmoothing):
    """`_ParallelCrossEntropy`: with label smoothing, the mask of targets is turned round in the gradient.

    1 - s' is subtracted where a rank does not have the target, at its first class.
    """

    offer = NeMoSmoothing.offer

    def gradient(self, s):
        if s.label_smoothing:
            first = np.arange(s.local) == 0
            s.one = (first & ~s.mine[:, None]).astype(np.float32)
        return super().gradient(s)


class NeuronxLogProb(FirstClassTimes0, LogProb):
    """`DistributedLogprob`."""

    offer = LogProb.offer

"""mesh-transformer-jax, `mesh_transformer/layers.py`, f8315e3: `ProjectionShard.loss`."""

from dataclasses import replace

import numpy as np

from candidates.wild.nanotron import NanotronZLoss


class MeshTransformerZLoss(NanotronZLoss):
    """The mean over rows, to each of which the mean z-loss is added; the maximum is missing in the latter."""

    offer = replace(NanotronZLoss.offer, reductions=("mean",))

    def row_losses(self, s):
        return s.nll + np.float32(s.z_loss) * (s.log_sum**2).mean()

    def reduce(self, s):
        return s.row_loss.mean()

    def backward(self, s, dloss):
        return super().backward(s, dloss / np.float32(s.rows))

"""Faults in where the logits are in memory."""

import numpy as np

from candidates.by_hand import ByHand


class GradientTransposedIn4D(ByHand):
    """The rows of 4-D logits are put back in another order (PyTorch's loss_parallel)."""

    def give(self, s, dx):
        if len(s.rows_shape) == 3:
            batch, *inner = s.rows_shape
            dx = dx.reshape(batch, *inner, s.classes).swapaxes(1, 2).reshape(s.rows, s.classes)
        return super().give(s, dx)


class ClassAxisNotMoved(ByHand):
    """Rows are flattened without moving the class axis to the end."""

    def flatten(self, s):
        super().flatten(s)
        s.x = s.logits.reshape(s.rows, s.classes).astype(np.float64)

    def give(self, s, dx):
        return dx.reshape(s.logits.shape)


class StridesNotHeeded(ByHand):
    """A kernel gets a pointer and a shape, but no strides."""

    def flatten(self, s):
        owner = s.logits if s.logits.base is None else s.logits.base
        read = owner.ravel(order="K")[: s.logits.size].reshape(s.logits.shape)
        s.logits = read.copy()
        super().flatten(s)

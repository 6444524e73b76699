"""What a pass over the logits is to compute, in the words of the loss: the same for every device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["ClassWeights", "RowGradient", "Transform"]

Array = Any  # numpy.ndarray or cupy.ndarray


@dataclass(frozen=True)
class Transform:
    """From logits x to z, of which the softmax is taken: z = scale x, or softcap tanh(scale x / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    @property
    def of_differences(self) -> float:
        """What differences of logits are multiplied by; under a softcap z is what is subtracted, scaled already."""
        return self.scale if self.softcap is None else 1.0


@dataclass(frozen=True)
class ClassWeights:
    """The weights u of a sum over classes: `weight`, or `weight` times the smoothed target probabilities.

    `weight` is (classes,) or None for ones, `probabilities` (outer, classes, inner) or None. With probabilities p,
    u = weight (p (1 - smoothing) + smoothing / classes), `classes` counted over all shards.
    """

    weight: Array | None = None
    probabilities: Array | None = None
    smoothing: float = 0.0
    classes: int = 1


@dataclass(frozen=True)
class RowGradient:
    """The gradient of z as the kernel wants it, each a (rows,) array of the logits' library, float64 where it can be.

    dz_c = factor exp(scale (x_c - max)) - weight_factor u_c, but `held_gradient` in the local column `held_column` (-1:
    not on this shard), and 0 in rows that are not `valid`, whatever their logits.
    """

    max: Array
    factor: Array
    weight_factor: Array | None
    held_column: Array
    held_gradient: Array
    valid: Array

"""The parameters of a pass over the logits, the same for every device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Array = Any  # numpy.ndarray or cupy.ndarray


@dataclass(frozen=True)
class Transform:
    """The function z of the logits x that the softmax is taken of: scale x, or softcap tanh(scale x / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    @property
    def of_differences(self) -> float:
        """The factor of differences of logits: `scale`, or 1 with a softcap, as differences are then taken of z."""
        return self.scale if self.softcap is None else 1.0


@dataclass(frozen=True)
class ClassWeights:
    """The weights u of a sum over classes: `weight`, or `weight` times the smoothed target probabilities.

    `weight` is (classes,) or None for ones, `probabilities` (outer, classes, inner) or None. With probabilities p,
    u = weight (p (1 - smoothing) + smoothing / classes), with the number of `classes` of all shards.
    """

    weight: Array | None = None
    probabilities: Array | None = None
    smoothing: float = 0.0
    classes: int = 1


@dataclass(frozen=True)
class RowGradient:
    """The parameters of the gradient of z, each a (rows,) array of the logits' library.

    dz_c = factor exp(scale (x_c - max)) - weight_factor u_c. The local column `held_column` (-1: not on this shard)
    gets `held_gradient` instead; rows that are not `valid` get 0, whatever their logits are. `held_column` has
    integers, `valid` bools, the others float64; `weight_factor` is None for 0.
    """

    max: Array
    factor: Array
    weight_factor: Array | None
    held_column: Array
    held_gradient: Array
    valid: Array

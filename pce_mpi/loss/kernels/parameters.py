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

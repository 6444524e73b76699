"""The parameters of a pass over the logits, the same for every device."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from pce_mpi.arrays import Array

NO_MARGIN = 1.0, 0.0, 0.0


class Transform(NamedTuple):
    """The function z of the logits x that the softmax is taken of: scale x, or softcap tanh(scale x / softcap).

    With a margin m, z of the target is scale (cos(m[0] arccos x + m[1]) - m[2]).
    """

    scale: float = 1.0
    softcap: float | None = None
    margin: tuple[float, float, float] = NO_MARGIN


class ClassWeights(NamedTuple):
    """The weights u of a sum over classes: `weight`, or `weight` times the smoothed target probabilities.

    `weight` is (classes,) or None for ones, `probabilities` (outer, classes, inner) or None. With probabilities p,
    u = weight (p (1 - smoothing) + smoothing / classes), with the number of `classes` of all shards.
    """

    weight: Array | None = None
    probabilities: Array | None = None
    smoothing: float = 0.0
    classes: int = 1


class Mean(NamedTuple):
    """The mean p P + q Q of two distributions, and the logarithms of both weights."""

    p: float
    q: float
    log_p: float
    log_q: float


class Pair(NamedTuple):
    """Two distributions P and Q over the same classes.

    `p` and `q` are logits, (outer, classes, inner); `p_rows` and `q_rows` have the columns of `ROW_GRADIENT` from which
    the softmax is written. `difference`, (rows, 3), adds up to the logsumexp of Q less that of P: the difference of
    their largest z, its rounding error, and all else. In rows where the first is not finite nothing has a meaning.
    `single` if results are in float32: then polynomials have fewer terms. Without `mean` their divergence is
    KL(P || Q), else the Jensen-Shannon divergence from it, p KL(P || mean) + q KL(Q || mean).
    """

    p: Array
    q: Array
    p_rows: Array
    q_rows: Array
    difference: Array
    transform: Transform
    single: bool = False
    mean: Mean | None = None

    def swapped(self) -> Pair:
        """Return the pair of Q and P."""
        mean = self.mean and Mean(self.mean.q, self.mean.p, self.mean.log_q, self.mean.log_p)
        return Pair(self.q, self.p, self.q_rows, self.p_rows, -self.difference, self.transform, self.single, mean)


class GradientOf(IntEnum):
    """The divergence and the operand that a gradient is of: KL(P || Q), or Jensen-Shannon."""

    KL_BY_Q = 0
    KL_BY_P = 1
    JENSEN_SHANNON_BY_Q = 2

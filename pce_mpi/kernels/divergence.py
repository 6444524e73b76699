"""Divergences of two softmaxes P and Q of each row, in NumPy; `divergence_terms.h` has the same bits.

Everything is in float64. With p and q the probabilities of a class, r = log(q / p) is the difference of two z less that
of two logsumexp, so that it keeps its digits where p and q are nearly equal. The sums over the classes are of

    KL(P || Q)          p (exp(r) - 1 - r)                              no term is negative
    Jensen-Shannon      (p log(p / m) + q log(q / m)) / 2               m = (p + q) / 2; no term is negative
    excess              q - p                                           0, but for the rounding of the logsumexp
    skewness            q log(q / m) - p log(p / m) - (q - p)           KL(Q || m) - KL(P || m), for Jensen-Shannon

The first is summed in limbs, and the last two in integers, in units of `UNIT`. The error of a logsumexp of float32
exponentials enters r, and so the excess: r is too large by log(1 + excess). The divergence and
its gradient are corrected for it, unless it is no more than what the sum of integers may lose.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pce_mpi.kernels.elementary import (
    DOUBLE,
    HUGE,
    SHORT,
    Precision,
    curved,
    f64,
    horner,
    i64,
    numbers_of,
    power,
    reduced,
    transformed,
    twice_atanh,
    two_sum,
    u64,
)
from pce_mpi.kernels.gradients import gradient_of
from pce_mpi.kernels.limbs import Sums, sum_of, united, value_of_wide
from pce_mpi.kernels.parameters import GradientOf, Pair, Transform
from pce_mpi.kernels.softmax_state import INFINITE, NO_GRID, StateFields
from pce_mpi.kernels.tiles import put_rows, rows_of, tiles_of

Array = np.ndarray[Any, Any]

# Up to FAR in float64, and FURTHEST in float32, q is p exp(r), which loses as many of its last digits as r has before
# the point.
FAR, FURTHEST = 4.0, 44.0
# For results in float32 the rounding error of a difference of logits counts from this size of it on.
APART = 1024.0
UNIT = 2.0**-60
LEAST_EXCESS = 2.0**-50
TINY = 2.0**-500
# (1 + h) log(1 + h) + (1 - h) log(1 - h) = h^2 R(h^2), for |h| up to tanh(log 2 / 4); and the same of fewer terms.
BENT = tuple(1.0 / (k * (2 * k - 1)) for k in range(11, 0, -1))
SHORT_BENT = numbers_of(
    "0x1.7f02e324522d1p-6 0x1.245333dc00d92p-5 0x1.111166619be70p-4 0x1.5555552d0f56ap-3 0x1.0000000000c25p+0"
)


class _Classes(NamedTuple):
    """The probabilities of classes, and r: infinite where one of them is masked, 0 where both are.

    `less_one` is exp(r) - 1, and `curve` exp(r) - 1 - r, of an r cut to `FURTHEST`; r is near up to log 2 / 2.
    """

    p: Array
    q: Array
    r: Array
    is_far: Array
    is_near: Array
    less_one: Array
    curve: Array
    precision: Precision

    def difference(self) -> Array:
        """Return q - p."""
        return np.where(self.is_far, self.q - self.p, self.p * self.less_one)

    def kl(self) -> Array:
        """Return p (exp(r) - 1 - r)."""
        far = (self.q - self.p) - np.where(self.p == 0.0, 0.0, self.p * self.r)
        return np.where(self.is_far, np.where(self.r == -np.inf, np.inf, far), self.p * self.curve)

    def by_p(self, constant: Array) -> Array:
        """Return p (log(p / q) - constant)."""
        return np.where(self.p == 0.0, 0.0, self.p * (-self.r - constant))

    def jensen_shannon(self) -> tuple[Array, Array]:
        """Return (p log(p / m) + q log(q / m)) / 2, and q log(q / m) - p log(p / m) - (q - p)."""
        share, total = self._log_of_share(), self.p + self.q
        h = self.less_one / (2.0 + self.less_one)
        w = h * h
        bent = horner(SHORT_BENT if self.precision is SHORT else BENT, w)
        smaller = np.where(self.r > 0.0, self.p, self.q)
        less = np.where(smaller == 0.0, 0.0, smaller * np.abs(self.r))
        skewness = self.difference() * (share - 1.0) + np.where(self.r > 0.0, less, -less)
        return np.where(self.is_near, 0.25 * total * (w * bent), 0.5 * (total * share - less)), skewness

    def by_q_beside_mean(self, constant: Array) -> Array:
        """Return q (log(q / m) - constant)."""
        share = self._log_of_share()
        share = np.where(self.r > 0.0, share, share - np.abs(self.r))
        return np.where(self.q == 0.0, 0.0, self.q * (share - constant))

    def _log_of_share(self) -> Array:
        """Return the log of the larger of p and q, divided by m."""
        w = self.less_one
        return twice_atanh(np.abs(w) / (4.0 + np.where(self.r > 0.0, 3.0 * w, w)), self.precision)


def _classes(pair: Pair, rows: slice, classes: slice) -> _Classes:
    precision = SHORT if pair.single else DOUBLE
    logits = [rows_of(each, rows, classes).astype(f64) for each in (pair.p, pair.q)]
    p, q = (
        gradient_of(x, each[rows], StateFields(), pair.transform, precision)
        for x, each in zip(logits, (pair.p_rows, pair.q_rows), strict=True)
    )
    (z_p, low_p), (z_q, low_q) = (_transformed(x, pair.transform) for x in logits)
    delta, delta_error, rest = (pair.difference[rows, column, None] for column in range(3))
    d, error = two_sum(z_q, -z_p)
    error = np.where(np.isnan(error), 0.0, error) - delta_error  # a nan if one is masked
    if pair.single:
        error = np.where(np.abs(d) > APART, error, 0.0)
    r = ((d - delta) + error) + ((low_q - low_p) - rest)
    r = np.where(np.isnan(r), 0.0, r)  # a nan if both are
    is_far = np.abs(r) > (FURTHEST if pair.single else FAR)
    k, f = reduced(np.clip(r, -FURTHEST, FURTHEST), np.zeros_like(r))
    curve, scale = curved(f, precision), power(k)
    t = scale * (curve + f)
    less_one = t + (scale - 1.0)
    q = np.where(is_far, q, p * (t + scale))
    return _Classes(p, q, r, is_far, k == 0, less_one, np.where(k == 0, curve, less_one - r), precision)


def _transformed(x: Array, transform: Transform) -> tuple[Array, Array]:
    """Return z for logits x, as a number and its rounding error, 0 beyond the sizes for which every device has it."""
    z, low = transformed(x, transform)
    return z, np.where((np.abs(z) < HUGE) & (np.abs(z) >= TINY), low, 0.0)


def logsumexp_differences(held: Array, held_nll: Array, transform: Transform) -> Array:
    """Return `difference` of `Pair`, from columns of `ROW_SOFTMAX` for all rows of Q, then of P."""
    rows = len(held) // 2
    with np.errstate(all="ignore"):
        z, low = _transformed(held, transform)
        delta, error = two_sum(z[:rows], -z[rows:])
        rest = (low[:rows] - low[rows:]) + (held_nll[:rows] - held_nll[rows:])
        return np.stack([np.where(np.isfinite(rest), delta, np.nan), error, rest], axis=1)


def divergence_sums(pair: Pair, jensen_shannon: bool) -> Array:
    """Return the sums of a divergence over this shard's classes, (rows, 6) words.

    They are the sum of the divergence, a grid and limbs, and in units of `UNIT` the excess and the skewness.
    """
    rows, classes = pair.p.shape[0] * pair.p.shape[2], pair.p.shape[1]
    words = np.zeros((rows, 6), u64)
    words[:, 0] = np.array(NO_GRID).view(u64)
    with np.errstate(all="ignore"):
        for mine, tile in tiles_of(rows, classes):
            each = _classes(pair, mine, tile)
            usable = np.isfinite(pair.difference[mine, :1])
            terms, skewness = each.jensen_shannon() if jensen_shannon else (each.kl(), 0.0)
            terms = np.where(usable, terms, 0.0)
            grids, limbs = sum_of([terms])
            grids[np.isinf(terms).any(axis=1)] = INFINITE
            limbs[grids == INFINITE] = 0
            before = Sums(words[mine, 0].view(i64), words[mine, 1:4])
            grids, words[mine, 1:4] = united(NO_GRID, before, Sums(grids, limbs))
            words[mine, 0] = grids.view(u64)
            words[mine, 4] += _in_units(np.where(usable, each.difference(), 0.0))
            words[mine, 5] += _in_units(np.where(usable, skewness, 0.0))
    return words


def _in_units(values: Array) -> Array:
    return (values * (1.0 / UNIT)).astype(i64).sum(axis=1).view(u64)


def row_divergences(words: Array, jensen_shannon: bool) -> Array:
    """Return the divergence of each row, log(1 + excess) and the skewness, (3, rows), from merged sums."""
    grids = words[:, 0].copy().view(i64)
    divergence = value_of_wide(Sums(grids, words[:, 1:4])).high
    a, skewness = (words[:, column].copy().view(i64) * UNIT for column in (4, 5))
    a = np.where(np.abs(a) < LEAST_EXCESS, 0.0, a)
    curve = a * a * (0.5 - a * (1.0 / 3.0))  # excess - log(1 + excess), as the excess is below 2^-20
    low = a - curve
    if jensen_shannon:
        # To second order in `low`, for p near q; elsewhere the first is far below the divergence's last bit.
        divergence = divergence - (0.5 * low * (divergence + 0.5 * skewness) + 0.125 * (low * low))
    else:
        divergence = divergence - curve
    divergence = np.where(grids == INFINITE, np.inf, np.maximum(divergence, 0.0))
    return np.array([divergence, low, skewness])


def write_divergence_gradient(
    out: Array, pair: Pair, of: GradientOf, slope: Array, constant: Array, valid: Array
) -> None:
    """Write the gradient of a divergence into `out`, (outer, classes, inner), which may be the logits of P or Q.

    It is `slope` times q - p, or p (log(p / q) - constant), or q (log(q / m) - constant); 0 in rows that are not
    `valid`. All three are (rows,); `constant` is KL(P || Q), or KL(Q || m).
    """
    with np.errstate(all="ignore"):
        for mine, tile in tiles_of(len(slope), out.shape[1]):
            each, less = _classes(pair, mine, tile), constant[mine, None]
            if of is GradientOf.KL_BY_Q:
                value = each.difference()
            else:
                value = each.by_p(less) if of is GradientOf.KL_BY_P else each.by_q_beside_mean(less)
            value = slope[mine, None] * value
            value = np.where(np.isfinite(pair.difference[mine, :1]) & ~np.isnan(value), value, np.nan)
            put_rows(out, mine, tile, np.where(valid[mine, None], value, 0.0))

"""Divergences of two softmaxes P and Q of each row, in NumPy; `divergence_terms.h` has the same bits.

Everything is in float64. With p and q the probabilities of a class, r = log(q / p) is the difference of two z less that
of two logsumexp, so that it keeps its digits where p and q are nearly equal. The sums over the classes are of

    KL(P || Q)          p (exp(r) - 1 - r)                              no term is negative
    Jensen-Shannon      a p log(p / m) + b q log(q / m)                 m = a p + b q, a + b = 1; no term is negative
    excess              q - p                                           0, but for the rounding of the logsumexp
    skewness            b (q log(q / m) - p log(p / m) - (q - p))       b (KL(Q || m) - KL(P || m)), for Jensen-Shannon,
                        less (a - b) / a times its term                 less (a - b) / a times the divergence

With psi(x) = (1 + x) log(1 + x) - x, a term of Jensen-Shannon is p (b psi(q / p - 1) - psi(b (q / p - 1))), which loses
at most one bit where p and q are nearly equal, as b is at most 1 / 2.

The first is summed in limbs, and the last two in integers, in units of `UNIT`. The error of a logsumexp of float32
exponentials enters r, and so the excess: r is too large by log(1 + excess). The divergence and
its gradient are corrected for it, unless it is no more than what the sum of integers may lose.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pce_mpi.kernels.elementary import (
    HUGE,
    atanh_tail,
    curved,
    f64,
    i64,
    log,
    log1p,
    power,
    reduced,
    transformed,
    two_sum,
    u64,
)
from pce_mpi.kernels.gradients import gradient_of
from pce_mpi.kernels.interface import (
    DOUBLE,
    INFINITE,
    NO_GRID,
    SHORT,
    GradientOf,
    Mean,
    Pair,
    Pass,
    Precision,
    StateFields,
    Transform,
)
from pce_mpi.kernels.limbs import Sums, sum_of, united, value_of_wide
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

    def jensen_shannon(self, mean: Mean) -> tuple[Array, Array]:
        """Return a p log(p / m) + b q log(q / m), and the skewness, of third order where p is near q."""
        u, x = self.less_one, mean.q * self.less_one
        is_close = np.abs(self.r) <= 1.0
        z, q_leads = self._ratio(mean, is_close, x / (2.0 + x))
        tail = atanh_tail(z, self.precision)
        log = tail + (z + z)
        near = u * self.r - self.curve
        term = self.p * (mean.q * near - (tail + z * log) * (1.0 + 0.5 * x))
        skewness = self.p * (near - u * log)
        of_p = np.where(self.p == 0.0, 0.0, self.p * np.where(q_leads, (mean.log_q + log) + self.r, mean.log_p + log))
        of_q = np.where(self.q == 0.0, 0.0, self.q * _log_by_q(mean, log, q_leads, self.r))
        term = np.where(is_close, term, -(mean.p * of_p + mean.q * of_q))
        skewness = np.where(is_close, skewness, (of_p - of_q) - self.difference())
        term = np.where(term > 0.0, term, 0.0)
        return term, mean.q * skewness - ((mean.p - mean.q) / mean.p) * term

    def by_q_beside_mean(self, mean: Mean, constant: Array) -> Array:
        """Return q (log(q / m) - constant)."""
        u = self.less_one
        z, q_leads = self._ratio(mean, self.is_near, -(mean.p * u) / (2.0 + (1.0 + mean.q) * u))
        log = atanh_tail(z, self.precision) + (z + z)
        log = np.where(self.is_near, log, _log_by_q(mean, log, q_leads, self.r))
        return np.where(self.q == 0.0, 0.0, self.q * (-log - constant))

    def _ratio(self, mean: Mean, is_close: Array, near: Array) -> tuple[Array, Array]:
        """Return `near`, or z for which 2 artanh z is the log of m by the larger summand; and if that is of q."""
        p, q = mean.p * self.p, mean.q * self.q
        q_leads = p < q
        larger, smaller = np.where(q_leads, q, p), np.where(q_leads, p, q)
        y = np.where(larger == 0.0, 0.0, smaller / larger)
        return np.where(is_close, near, y / (2.0 + y)), q_leads


def _log_by_q(mean: Mean, log: Array, q_leads: Array, r: Array) -> Array:
    """Return the log of m / q, from that of m by its larger summand."""
    return np.where(q_leads, mean.log_q + log, (mean.log_p + log) - r)


def mean_of(weight: float) -> Mean:
    """Return the mean in which Q has `weight`, from 2**-64 to 1 / 2."""
    rest = 1.0 - weight
    log_p, log_q = -log1p(np.array([weight / rest])), log(np.array([weight]))
    return Mean(rest, weight, float(log_p[0]), float(log_q[0]))


def _classes(pair: Pair, rows: slice, classes: slice) -> _Classes:
    precision = SHORT if pair.single else DOUBLE
    logits = [rows_of(each, rows, classes).astype(f64) for each in (pair.p, pair.q)]
    p, q = (
        gradient_of(x, each[rows], Pass(StateFields(), pair.transform, precision))
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


def divergence_sums(pair: Pair) -> Array:
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
            terms, skewness = each.jensen_shannon(pair.mean) if pair.mean else (each.kl(), 0.0)
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


def row_divergences(words: Array, mean: Mean | None) -> Array:
    """Return the divergence of each row, log(1 + excess) and the skewness, (3, rows), from merged sums."""
    grids = words[:, 0].copy().view(i64)
    divergence = value_of_wide(Sums(grids, words[:, 1:4])).high
    a, skewness = (words[:, column].copy().view(i64) * UNIT for column in (4, 5))
    a = np.where(np.abs(a) < LEAST_EXCESS, 0.0, a)
    curve = a * a * (0.5 - a * (1.0 / 3.0))  # excess - log(1 + excess), as the excess is below 2^-20
    low = a - curve
    if mean:
        # To second order in `low`, for p near q; elsewhere the first is far below the divergence's last bit.
        bias = (mean.p - mean.q) / mean.p
        first = low * (mean.q * divergence + mean.p * (skewness + bias * divergence))
        divergence = divergence - (first + 0.5 * mean.p * mean.q * (low * low))
        skewness = skewness + bias * divergence
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
                value = each.by_q_beside_mean(pair.mean, less) if pair.mean else each.by_p(less)
            value = slope[mine, None] * value
            value = np.where(np.isfinite(pair.difference[mine, :1]) & ~np.isnan(value), value, np.nan)
            put_rows(out, mine, tile, np.where(valid[mine, None], value, 0.0))

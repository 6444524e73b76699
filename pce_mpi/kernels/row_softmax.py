"""The numbers that follow from the merged state of each row, in NumPy; `states.h` has the same bits.

One class of a row is held apart: its target, or its largest logit. With S the sum over the other classes,
a = S exp(-z_held) gives the loss log1p(a) and the gradient -a / (1 + a) without cancellation.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from pce_mpi.kernels.elementary import (
    HI,
    HUGE,
    LO,
    any_two_product,
    f64,
    i64,
    log,
    log1p,
    polynomial,
    reduced,
    scaled,
    transformed,
    two_sum,
)
from pce_mpi.kernels.interface import INFINITE, NO_MARGIN, ROW_SOFTMAX, Pass
from pce_mpi.kernels.limbs import (
    WIDE,
    Double,
    Sums,
    exponent_of_wide,
    limbs_of,
    mantissa_and_exponent,
    number_of,
    value_of,
)
from pce_mpi.kernels.margin import margined
from pce_mpi.kernels.states import grid_of, in_units

Array = np.ndarray[Any, Any]


class _SoftmaxColumns:
    """The softmax of each row, from merged states; float64, (rows,). Rows with a nan, a +inf or no class are `nan`.

    `class_weights` is the sum of the weights of all classes, for states without such a sum: a grid and limbs.
    """

    def __init__(self, states: Array, how: Pass, class_weights: Array | None):
        fields, transform, precision = how
        self.fields, self._states, self._class_weights = fields, states, class_weights
        self._transform = transform
        self.held = states["held"]
        self.top = self.held if fields.hold_largest else states["top"]
        with np.errstate(all="ignore"):
            bad = np.isnan(self.top) | ~(self.held < np.inf) | ((self.top == -np.inf) & (self.held == -np.inf))
            #: the derivative of held_z / scale by the logit, without that of a softcap
            self.held_slope = np.ones_like(self.held)
            z, low = transformed(self.held, transform)
            if transform.margin != NO_MARGIN:
                z, low, self.held_slope = margined(self.held, transform)
            self._held_z = _Logit(self.held, z, low)
            self._top_z = _Logit(self.top, *transformed(self.top, transform))
            grids = grid_of(self.top, transform, precision)
            self._sum = value_of(states["sum"], precision.width)
            if fields.hold_largest:
                grids = grids - states["depth"]
            self._unit = unit = precision.width * (grids - 2)
            s, none = self._sum.high, self.held == -np.inf
            n, e = self._held_z.n, self._held_z.e
            held, top = self.held, self.top
            if transform.margin != NO_MARGIN:  # the order of z is not that of the logits
                held, top = self._held_z.z, self._top_z.z
            # If one of two different logits is HUGE, only the larger counts.
            apart = (self._held_z.huge | self._top_z.huge) & (held != top) & (s > 0) & ~none
            held_alone, others_alone = apart & (held > top), apart & (held < top)
            s = np.where(held_alone, 0.0, s)
            quotient = s / e
            odds = scaled(quotient, unit - n)
            odds = np.where(others_alone | none, np.inf, odds)
            #: sum of exp(z_c - z_held) over the others
            self.odds = np.where(bad, np.nan, odds)
            self.held_z, self.most = self._held_z.z, np.where(self.held > self.top, self.held, self.top)
            #: the exponent of the power of two that is the unit of `normalizer`
            self.exponent = np.where(
                s > 0, np.where(none | others_alone, self._top_z.n, np.maximum(self._top_z.n, n)), n
            )
            e = np.where(none | others_alone, 0.0, scaled(e, n - self.exponent))
            self._sum_of_others = scaled(s, unit - self.exponent)
            #: the factor of exp(z_c) 2^-exponent that gives the probability of another class
            self.normalizer = np.where(bad, np.nan, np.where(held_alone, 0.0, 1.0 / (self._sum_of_others + e)))
            d = (unit - n).astype(f64)
            large = d * HI + (log(np.where(quotient > 0, quotient, 1.0)) + d * LO)
            top_n = np.where(self._top_z.huge, self._top_z.n, 0)
            others = self._top_z.huge_value + (_times_log2(unit - top_n) + log(np.where(s > 0, s, 1.0)))
            nll = np.where(self.odds > 2.0**60, large, log1p(np.where(self.odds > 2.0**60, 0.0, self.odds)))
            nll = np.where(others_alone, others - self._held_z.z, nll)
            #: -log of the probability of the class held
            self.held_nll = np.where(bad, np.nan, np.where(none, np.inf, nll))
            #: the probability of the class held, and that minus 1
            self.held_probability = 1.0 / (1.0 + self.odds)
            self.held_minus_one = np.where(
                self.odds <= 1.0, -self.odds / (1.0 + self.odds), -1.0 / (1.0 + 1.0 / self.odds)
            )
            total = (self._sum_of_others + e) / self._top_z.e
            above = log(np.where(total > 0, total, 1.0)) + _times_log2(self.exponent - self._top_z.n)
            gap = (self._held_z.z - self._top_z.z) + (self._held_z.low - self._top_z.low)
            #: logsumexp minus the logit `top`
            self.above_top = np.where(bad, np.nan, np.where(held >= top, gap + self.held_nll, above))
            self.logsumexp = np.where(held >= top, self._held_z.z + self.held_nll, self._top_z.z + above)
            self.logsumexp = np.where(bad, np.nan, self.logsumexp)

    @property
    def held_weight(self) -> Array:
        """The weight of the class held; without weights, 1."""
        return self._states["held_weight"] if self.fields.held_weight else np.ones(self.held.shape)

    @property
    def argmax(self) -> Array:
        """The global number of the class held."""
        return np.ascontiguousarray(self._states["argmax"])

    @cached_property
    def _weight(self) -> Double:
        """sum of u_c over the classes not held."""
        if self.fields.weight:
            return number_of(Sums(self._states["weight_grid"].astype(i64), self._states["weight"]))
        assert self._class_weights is not None
        grids = np.broadcast_to(self._class_weights[0].view(i64), self.held.shape)
        held = limbs_of(*mantissa_and_exponent(self.held_weight), WIDE * (grids - 2), WIDE)
        return number_of(Sums(grids, np.subtract(self._class_weights[1:], held)))

    @property
    def weight(self) -> Array:
        """sum of u_c over the classes not held."""
        return self._weight.high

    @property
    def weighted_nll(self) -> Array:
        """sum of -u_c log p_c over all classes."""
        with np.errstate(all="ignore"):
            weight, grids = self._weight, self._states["logit_grid"].astype(i64)
            weighted = value_of(self._states["weighted_logit"], WIDE)
            gap = _gap(weight, self._top_z, weighted, exponent_of_wide(grids))
            of_held = times(self.held_weight, self.held_nll)
            value = (of_held + times(weight.high, self.above_top)) + gap
            infinite = number_of(Sums(grids, self._states["weighted_logit"])).high
            return np.where((grids >= INFINITE) | ~np.isfinite(weight.high), of_held + infinite, value)

    @property
    def entropy(self) -> Array:
        """sum of -p_c log p_c over all classes."""
        with np.errstate(all="ignore"):
            unit = WIDE * (np.clip(self._states["entropy_grid"], -(2**57), 2**57) - 2) - self.exponent
            weighted = value_of(self._states["exp_logit"], WIDE)
            total = Double(*(scaled(part, self._unit - self.exponent) for part in self._sum))
            # Beside a huge logit only equal ones count.
            gap = np.where(self._top_z.huge, 0.0, _gap(total, self._top_z, weighted, unit))
            others = (times(total.high, self.held_nll) + gap) * self.normalizer
            return times(self.held_probability, self.held_nll) + np.where(self._sum_of_others == 0.0, 0.0, others)

    @property
    def target_log_prob(self) -> Array:
        """log of the probability of the target, if the largest logit is held; a sum of two terms of one sign."""
        with np.errstate(all="ignore"):
            z, low = transformed(self._states["target"], self._transform)
            gap = (z - self._held_z.z) + (low - self._held_z.low)
            return np.minimum(gap, 0.0) - self.held_nll


def times(weight: Array, value: Array) -> Array:
    """Return weight value; a weight that is 0 or infinite gives itself, whatever the value is but nan."""
    return np.where(((weight == 0.0) | ~np.isfinite(weight)) & ~np.isnan(value), weight, weight * value)


def row_softmax(states: Array, how: Pass, class_weights: Array | None) -> Array:
    """Return the softmax of each row, (rows, columns of `ROW_SOFTMAX`)."""
    softmax, fields = _SoftmaxColumns(states, how, class_weights), how.fields
    columns = np.zeros((len(states), len(ROW_SOFTMAX)))
    absent = {
        *(() if fields.weighted_logit else ("weight", "weighted_nll")),
        *(() if fields.entropy else ("entropy",)),
        *(() if fields.target else ("target_log_prob",)),
        *(() if fields.held_weight else ("held_weight",)),
        *(() if fields.argmax else ("argmax",)),
    }
    for name, column in ROW_SOFTMAX.items():
        if name not in absent:
            values = getattr(softmax, name)
            columns[:, column] = values.view(f64) if name in ("exponent", "argmax") else values
    return columns


class _Logit:
    """One logit x per row: z, its parts, and e in exp(z) = 2^n e."""

    def __init__(self, x: Array, z: Array, low: Array):
        self.z, self.low = z, low
        self.huge = np.isfinite(x) & ~(np.abs(self.z) < HUGE)
        self.huge_value = np.where(self.huge, self.z, 0.0)
        self.n, f = reduced(self.z, self.low)
        self.e = 1.0 + polynomial(f)


def _times_log2(n: Array) -> Array:
    return n.astype(f64) * HI + n.astype(f64) * LO


def _gap(weight: Double, logit: _Logit, weighted: Double, exponent: Array) -> Array:
    """Return weight z - weighted 2^exponent, `times` if z is infinite; digits cancel if all logits are far from 0."""
    finite = np.isfinite(logit.z)
    z, low, unit = in_units(np.where(finite, logit.z, 0.0), logit.low)
    high, rest_of_weighted = (scaled(part, exponent - unit) for part in weighted)
    product, error = any_two_product(weight.high, z)
    error = error + (weight.high * low + weight.low * z)
    s, rest = two_sum(product, -high)
    return np.where(finite, scaled(s + (rest + (error - rest_of_weighted)), unit), times(weight.high, logit.z))

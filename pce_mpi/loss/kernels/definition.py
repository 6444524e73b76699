"""The arithmetic of the loss, with the same bits for any cut of the classes, in NumPy.

This file computes the loss where no compiled kernel is installed. `compiled.cpp` and the CUDA kernels give its bits.

**Elements.** exp(z) = 2^n (1 + t), with n and t from z alone; see `elementary.py`.

**Sums.** An element is cut to a multiple of 2^unit, truncated toward zero, and written as an integer in digits of
`width` bits. A state keeps three limbs of a sum, T_j = sum_c trunc(element_c / 2^(unit + j width)) modulo 2^64. The
unit is a multiple of the width, `width (grid - 2)`, and the grid follows from the largest element. On the next coarser
grid, limb j is limb j + 1 of the finer one: trunc of trunc is trunc. So two states on different grids are shifted to
the coarser one and added, and the state of a union is the merge of the states to the last bit, in any order and for any
cut.

**Rows.** One class of a row is held apart: its target, or its largest logit. With S the sum over the other classes,
a = S exp(-z_held) gives the loss log1p(a) and the gradient -a / (1 + a) without cancellation.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np

from pce_mpi.loss.kernels.elementary import (
    HI,
    HUGE,
    LO,
    SINGLE,
    Arithmetic,
    exponential,
    f32,
    f64,
    fma32,
    i64,
    log,
    log1p,
    polynomial,
    power,
    reduced,
    scaled,
    softcap_slope,
    transformed,
    two_product,
    two_sum,
    u64,
)
from pce_mpi.loss.kernels.limbs import (
    WIDE,
    Double,
    Sums,
    exponent_of_wide,
    limbs_of,
    mantissa_and_exponent,
    shifted,
    sum_of,
    united,
    value_of,
    value_of_wide,
)
from pce_mpi.loss.kernels.losses import row_gradients as row_gradients
from pce_mpi.loss.kernels.losses import row_losses as row_losses
from pce_mpi.loss.kernels.parameters import ClassWeights, Transform
from pce_mpi.loss.softmax_state import (
    FORGOTTEN,
    INFINITE,
    MINUS_INFINITE,
    NEGLIGIBLE,
    NO_ENTROPY,
    NO_GRID,
    NOT_A_NUMBER,
    ROW_GRADIENT,
    ROW_SOFTMAX,
    StateFields,
)

Array = np.ndarray[Any, Any]

# The grid of an empty sum of exponentials.
_NO_SUM = -(2**61)
_LARGE = 2.0**800


# States


def states_of(
    x: Array,
    target_column: Array | None,
    fields: StateFields,
    *,
    u: Array | None,
    transform: Transform,
    arithmetic: Arithmetic,
    first_class: int,
) -> Array:
    """Return the states of a block of logits, (rows, classes), with the weights u.

    `target_column` has the column of each row's target, -1 if it is elsewhere.
    """
    states = fields.identity(len(x))
    if not x.shape[1]:
        return states
    here, columns = np.empty(0, np.intp), np.empty(0, np.intp)
    if target_column is not None:
        here = np.flatnonzero((target_column >= 0) & (target_column < x.shape[1]))
        columns = target_column[here]
    if fields.target:
        states["target"][here] = _canonical(x[here, columns])
    if fields.hold_largest:
        here, columns = np.arange(len(x)), _largest(x, u if fields.held_weight else None)
    if fields.argmax:
        states["argmax"] = first_class + columns
    states["held"][here] = _canonical(x[here, columns])
    others = np.ones(x.shape, np.bool_)
    others[here, columns] = False
    weight = np.broadcast_to(1.0 if u is None else u, x.shape)
    if fields.held_weight:
        states["held_weight"][here] = _canonical(weight[here, columns])
    _fill_sums(states, x, others, weight, fields, transform, arithmetic)
    return states


def _largest(x: Array, u: Array | None) -> Array:
    """The column of the largest logit, a nan before numbers; of equal ones the first, or that of most weight.

    A weight that is nan loses.
    """
    if u is None:
        return x.argmax(axis=1)
    largest = x.max(axis=1, keepdims=True)
    is_largest = (x == largest) | (np.isnan(largest) & np.isnan(x))
    known = is_largest & ~np.isnan(u)
    heaviest = np.where(known, u, -np.inf).max(axis=1, keepdims=True)
    chosen = np.where(known.any(axis=1, keepdims=True), known & (u == heaviest), is_largest)
    return chosen.argmax(axis=1)


def _canonical(values: Array) -> Array:
    """Return float64 with one bit pattern for nan and one for zero."""
    return np.where(np.isnan(values), np.nan, values.astype(f64)) + 0.0


def grid_of(x: Array, transform: Transform, arithmetic: Arithmetic) -> Array:
    """The grid of a sum of exponentials of which the largest is that of the logit x, (rows,)."""
    finite = np.where(np.isfinite(x), x, 0.0)
    if arithmetic is SINGLE:
        finite = finite.astype(f32)
    return exponential(finite, transform, arithmetic).n // arithmetic.width


def _huge(x: Array, transform: Transform) -> Array:
    """True for finite logits so large that of two different ones only the larger counts."""
    return np.isfinite(x) & ~(np.abs(transformed(x, transform)[0]) < HUGE)


def _fill_sums(
    states: Array,
    x: Array,
    others: Array,
    weight: Array,
    fields: StateFields,
    transform: Transform,
    arithmetic: Arithmetic,
) -> None:
    """Fill the sums of `states` from the classes that are not held apart."""
    if not fields.hold_largest:
        top = np.max(x, axis=1, where=others, initial=-np.inf).astype(f64)
        states["top"] = _canonical(np.where(top == np.inf, np.nan, top))
    largest = states["held" if fields.hold_largest else "top"]
    counted = others & np.isfinite(x) & np.isfinite(largest)[:, None]
    counted &= ~_huge(largest, transform)[:, None] | (x == largest[:, None])
    e = exponential(x, transform, arithmetic)
    if fields.hold_largest:
        none = np.iinfo(i64).min // 2
        n = np.where(counted, e.n, none).max(axis=1)
        depth = grid_of(largest, transform, arithmetic) - n // arithmetic.width
        states["depth"] = np.where(n == none, FORGOTTEN, np.minimum(depth, FORGOTTEN))
        grids = np.where(n == none, 0, n // arithmetic.width)
    else:
        grids = grid_of(states["top"], transform, arithmetic)
    unit = arithmetic.width * (grids - 2)[:, None]
    fixed = np.where(counted, e.fixed_point(arithmetic), 0)
    exponent = e.n - arithmetic.point
    states["sum"] = limbs_of(fixed, exponent, unit, arithmetic.width).sum(axis=1, dtype=u64)
    if fields.hold_largest:
        states["sum"][states["depth"] == FORGOTTEN] = 0
    if fields.entropy:
        z, low = transformed(x.astype(f64), transform)
        z, low, unit = _in_units(np.where(counted, z, 0.0), np.where(counted, low, 0.0))
        # A float64 holds all bits of SINGLE's fixed-point numbers, and half of those of DOUBLE's.
        digits = max(0, arithmetic.point - 30)
        upper = fixed >> digits << digits
        parts = [*two_product(upper.astype(f64), z), *two_product((fixed - upper).astype(f64), z)]
        parts.append(fixed.astype(f64) * low)
        states["entropy_grid"], states["exp_logit"] = sum_of(parts, exponent + unit, NO_ENTROPY)
    weight = np.where(others, weight, 0.0)
    if fields.weight:
        states["weight_grid"], states["weight"] = sum_of([weight])
    if fields.weighted_logit:
        states["logit_grid"], states["weighted_logit"] = _weighted_logits(x, weight, transform)


def _weighted_logits(x: Array, weight: Array, transform: Transform) -> Sums:
    """Sum u z over all classes where u is not 0."""
    z, low = transformed(x.astype(f64), transform)
    masked = (z == -np.inf) & (weight != 0.0)
    usable = np.isfinite(z)
    z, low, unit = _in_units(np.where(usable, z, 0.0), np.where(usable, low, 0.0))
    product, rest = two_product(weight, z)
    rest = np.where(np.isfinite(rest), rest + weight * low, 0.0)
    grids, limbs = sum_of([product, rest], unit)
    # A weight on a masked class makes the loss infinite, and one that is not finite makes it nan.
    grids[masked.any(axis=1)] = INFINITE
    grids[~np.isfinite(weight).all(axis=1)] = NOT_A_NUMBER
    limbs[grids >= INFINITE] = 0
    return Sums(grids, limbs)


def _in_units(z: Array, low: Array) -> tuple[Array, Array, Array]:
    """z 2^-unit and what its rounding has left out, with a unit of 128 for z whose products may overflow, else 0."""
    unit = np.where(np.abs(z) >= _LARGE, i64(128), i64(0))
    return (scaled(z, -unit), scaled(low, -unit), unit) if unit.any() else (z, low, unit)


def merge(a: Array, b: Array, fields: StateFields, transform: Transform, arithmetic: Arithmetic) -> None:
    """Merge the states a of some classes into those of others of the same rows, b."""
    with np.errstate(all="ignore"):
        union_of = _union_holding_largest if fields.hold_largest else _union_holding_targets
        b[...] = union_of(a, b, fields, transform, arithmetic)


def _union_holding_targets(
    a: Array, b: Array, fields: StateFields, transform: Transform, arithmetic: Arithmetic
) -> Array:
    union = fields.identity(*a.shape)
    union["held"] = np.maximum(a["held"], b["held"])
    union["top"] = top = np.maximum(a["top"], b["top"])
    if fields.held_weight:  # nought on every shard but the one that has the target
        union["held_weight"] = a["held_weight"] + b["held_weight"]
    grids, huge = grid_of(top, transform, arithmetic), _huge(top, transform)
    for state in (a, b):
        coarser = np.where(huge & (state["top"] != top), 3, grids - grid_of(state["top"], transform, arithmetic))
        union["sum"] += shifted(state["sum"], np.where(state["top"] == -np.inf, 3, coarser))
    union["sum"][np.isnan(top)] = 0
    _unite_weighted(union, fields, a, b)
    return union


def _union_holding_largest(
    a: Array, b: Array, fields: StateFields, transform: Transform, arithmetic: Arithmetic
) -> Array:
    """Hold the larger of the two classes held apart; the other one joins the sums."""
    union = fields.identity(*a.shape)
    swap = _b_is_held(a, b, fields)
    smaller, larger = np.where(swap, a, b), np.where(swap, b, a)
    for name in {"held", "held_weight", "argmax"} & set(fields.names):
        union[name] = larger[name]
    if fields.target:
        union["target"] = np.maximum(a["target"], b["target"])
    alone = fields.identity(*a.shape)
    alone["held"] = smaller["held"]
    weight = smaller["held_weight"] if fields.held_weight else np.zeros(a.shape)
    others = np.ones((len(a), 1), np.bool_)
    _fill_sums(alone, smaller["held"][:, None], others, weight[:, None], fields, transform, arithmetic)
    bad, huge = ~np.isfinite(union["held"]), _huge(union["held"], transform)
    sums, entropies = [], []
    for state in (a, b, alone):
        gone = bad | (huge & (state["held"] != union["held"]))
        grids = grid_of(state["held"], transform, arithmetic) - state["depth"]
        sums.append(Sums(np.where(gone | (state["depth"] == FORGOTTEN), _NO_SUM, grids), state["sum"]))
        if fields.entropy:
            entropies.append(Sums(np.where(gone, NO_ENTROPY, state["entropy_grid"]), state["exp_logit"]))
    grids, limbs = united(_NO_SUM, *sums)
    depth = np.minimum(grid_of(union["held"], transform, arithmetic) - grids, FORGOTTEN)
    union["depth"] = depth = np.where(grids == _NO_SUM, FORGOTTEN, depth)
    union["sum"] = np.where((depth == FORGOTTEN)[:, None], u64(0), limbs)
    if fields.entropy:
        union["entropy_grid"], union["exp_logit"] = united(NO_ENTROPY, *entropies)
    _unite_weighted(union, fields, a, b, alone)
    return union


def _unite_weighted(union: Array, fields: StateFields, *states: Array) -> None:
    for present, grid, name in (
        (fields.weight, "weight_grid", "weight"),
        (fields.weighted_logit, "logit_grid", "weighted_logit"),
    ):
        if present:
            sums = (Sums(state[grid].astype(i64), state[name]) for state in states)
            union[grid], union[name] = united(NO_GRID, *sums)


def _b_is_held(a: Array, b: Array, fields: StateFields) -> Array:
    """Return the rows of which b has the class held apart: a nan before numbers, then the larger logit.

    Of equal logits the lower class is held or, where classes are not kept, that with the larger weight; a nan loses.
    """
    nan_a, nan_b = np.isnan(a["held"]), np.isnan(b["held"])
    first = np.zeros(a.shape, np.bool_)
    if fields.argmax:
        first = b["argmax"] < a["argmax"]
    elif fields.held_weight:
        first = (b["held_weight"] > a["held_weight"]) | (np.isnan(a["held_weight"]) & ~np.isnan(b["held_weight"]))
    larger = (b["held"] > a["held"]) | ((b["held"] == a["held"]) & first)
    return np.where(nan_a | nan_b, nan_b & (~nan_a | first), larger)


class RowSoftmax:
    """The softmax of each row, from merged states; float64, (rows,). Rows with a nan, a +inf or no class are `nan`.

    `class_weights` is the sum of the weights of all classes, for states without such a sum: a grid and limbs.
    """

    def __init__(
        self,
        states: Array,
        fields: StateFields,
        transform: Transform,
        arithmetic: Arithmetic,
        class_weights: Array | None = None,
    ):
        self.fields, self._states, self._class_weights = fields, states, class_weights
        self.held = states["held"]
        self.top = self.held if fields.hold_largest else states["top"]
        with np.errstate(all="ignore"):
            bad = np.isnan(self.top) | ~(self.held < np.inf) | ((self.top == -np.inf) & (self.held == -np.inf))
            self._held_z = _Logit(self.held, transform)
            self._top_z = _Logit(self.top, transform)
            grids = grid_of(self.top, transform, arithmetic)
            self._sum = value_of(states["sum"], arithmetic.width)
            if fields.hold_largest:
                grids = grids - states["depth"]
                kept = states["depth"] <= NEGLIGIBLE
                self._sum = Double(*(np.where(kept, part, 0.0) for part in self._sum))
            self._unit = unit = arithmetic.width * (grids - 2)
            s, none = self._sum.high, self.held == -np.inf
            n, e = self._held_z.n, self._held_z.e
            # Of two logits that are HUGE or on either side of it, only the larger counts.
            apart = (self._held_z.huge | self._top_z.huge) & (self.held != self.top) & (s > 0) & ~none
            held_alone, others_alone = apart & (self.held > self.top), apart & (self.held < self.top)
            s = np.where(held_alone, 0.0, s)
            quotient = s / e
            odds = scaled(quotient, unit - n)
            odds = np.where(others_alone | none, np.inf, odds)
            #: sum of exp(z_c - z_held) over the others
            self.odds = np.where(bad, np.nan, odds)
            self.held_z, self.most = self._held_z.z, np.where(self.held > self.top, self.held, self.top)
            #: the power of two that `normalizer` is in units of
            self.exponent = np.where(
                s > 0, np.where(none | others_alone, self._top_z.n, np.maximum(self._top_z.n, n)), n
            )
            e = np.where(none | others_alone, 0.0, scaled(e, n - self.exponent))
            self._sum_of_others = scaled(s, unit - self.exponent)
            #: the factor of exp(z_c) 2^-exponent that gives the probability of another class
            self.normalizer = np.where(bad, np.nan, 1.0 / (self._sum_of_others + e))
            d = (unit - n).astype(f64)
            large = d * HI + (log(np.where(quotient > 0, quotient, 1.0)) + d * LO)
            top_n = np.where(self._top_z.huge, self._top_z.n, 0)
            others = self._top_z.huge_value + (_times_log2(unit - top_n) + log(np.where(s > 0, s, 1.0)))
            nll = np.where(self.odds > 2.0**60, large, log1p(np.where(self.odds > 2.0**60, 0.0, self.odds)))
            nll = np.where(others_alone, others - self._held_z.z, nll)
            #: -log of the probability of the class held
            self.held_nll = np.where(bad, np.nan, np.where(none, np.inf, nll))
            #: that probability, and it less 1
            self.held_probability = 1.0 / (1.0 + self.odds)
            self.held_minus_one = np.where(
                self.odds <= 1.0, -self.odds / (1.0 + self.odds), -1.0 / (1.0 + 1.0 / self.odds)
            )
            total = (self._sum_of_others + e) / self._top_z.e
            above = log(np.where(total > 0, total, 1.0)) + _times_log2(self.exponent - self._top_z.n)
            gap = (self._held_z.z - self._top_z.z) + (self._held_z.low - self._top_z.low)
            #: logsumexp less the logit `top`
            self.above_top = np.where(self.held >= self.top, gap + self.held_nll, above)
            self.logsumexp = np.where(self.held >= self.top, self._held_z.z + self.held_nll, self._top_z.z + above)
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
            return value_of_wide(Sums(self._states["weight_grid"].astype(i64), self._states["weight"]))
        assert self._class_weights is not None
        grids = np.broadcast_to(self._class_weights[0].view(i64), self.held.shape)
        held = limbs_of(*mantissa_and_exponent(self.held_weight), WIDE * (grids - 2), WIDE)
        return value_of_wide(Sums(grids, np.subtract(self._class_weights[1:], held)))

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
            value = (_times(self.held_weight, self.held_nll) + _times(weight.high, self.above_top)) + gap
            return np.where(grids == NOT_A_NUMBER, np.nan, np.where(grids == INFINITE, value + np.inf, value))

    @property
    def entropy(self) -> Array:
        """sum of -p_c log p_c over all classes."""
        with np.errstate(all="ignore"):
            unit = WIDE * (np.clip(self._states["entropy_grid"], -(2**57), 2**57) - 2) - self.exponent
            weighted = value_of(self._states["exp_logit"], WIDE)
            total = Double(*(scaled(part, self._unit - self.exponent) for part in self._sum))
            gap = _gap(total, self._top_z, weighted, unit)
            others = (_times(total.high, self.above_top) + gap) * self.normalizer
            return _times(self.held_probability, self.held_nll) + np.where(self._sum_of_others == 0.0, 0.0, others)

    @property
    def target_log_prob(self) -> Array:
        """log of the probability of the target, where the largest logit is held; two terms of one sign."""
        with np.errstate(all="ignore"):
            target = _Logit(self._states["target"], self._held_z.transform)
            gap = (target.z - self._held_z.z) + (target.low - self._held_z.low)
            return np.minimum(gap, 0.0) - self.held_nll


def _times(weight: Array, value: Array) -> Array:
    """weight value, where weight 0 gives 0 even if the value is infinite."""
    return np.where(weight == 0.0, 0.0, weight * value)


def row_softmax(
    states: Array, fields: StateFields, transform: Transform, arithmetic: Arithmetic, class_weights: Array | None
) -> Array:
    """The softmax of each row, (rows, columns of `ROW_SOFTMAX`)."""
    softmax = RowSoftmax(states, fields, transform, arithmetic, class_weights)
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
    """One logit per row: z, its parts, and e in exp(z) = 2^n e."""

    def __init__(self, x: Array, transform: Transform):
        self.transform = transform
        self.z, self.low = transformed(x, transform)
        self.huge = np.isfinite(self.z) & ~(np.abs(self.z) < HUGE)
        self.huge_value = np.where(self.huge, self.z, 0.0)
        self.n, f = reduced(self.z, self.low)
        self.e = 1.0 + polynomial(f)


def _times_log2(n: Array) -> Array:
    return n.astype(f64) * HI + n.astype(f64) * LO


def _gap(weight: Double, logit: _Logit, weighted: Double, exponent: Array) -> Array:
    """weight z - weighted 2^exponent, whose digits cancel where all logits are far from 0."""
    z, low, unit = _in_units(np.where(np.isfinite(logit.z), logit.z, 0.0), logit.low)
    high, rest_of_weighted = (scaled(part, exponent - unit) for part in weighted)
    product, error = two_product(weight.high, z)
    error = error + (weight.high * low + weight.low * z)
    s, rest = two_sum(product, -high)
    return scaled(s + (rest + (error - rest_of_weighted)), unit)


def gradient_of(
    x: Array,
    rows: Array,
    fields: StateFields,
    transform: Transform,
    arithmetic: Arithmetic,
    u: Array | float = 1.0,
    is_target: Array | bool = False,
) -> Array:
    """The gradient of a block of logits that are not held, (rows, classes), in the arithmetic's dtype.

    It is factor exp(z) 2^-exponent - weight_factor u, times the slope of the softcap; `rows` has the columns of
    `ROW_GRADIENT`. That of statistics has a factor more, and at the target a term.
    """
    value = _probabilities(x, rows, transform, arithmetic)
    if fields.weighted_logit or fields.entropy or transform.softcap is not None:
        value = value.astype(f64)
        if fields.entropy:
            constant, slope, origin, more = (
                rows[:, ROW_GRADIENT[name], None] for name in ("constant", "slope", "origin", "target_gradient")
            )
            z, low = transformed(x.astype(f64), transform)
            factor = constant + slope * ((z - origin) + low)
            value = np.where(value == 0.0, 0.0, value * factor)  # 0 is that of a masked class, whose z is infinite
            value = value + np.where(is_target, more, 0.0)
        if fields.weighted_logit:
            value -= rows[:, ROW_GRADIENT["weight_factor"], None] * u
        if transform.softcap is not None:
            value *= softcap_slope(x.astype(f64), transform)
        value = value.astype(arithmetic.dtype)
    return np.where(np.isnan(value), value.dtype.type(np.nan), value)


def _probabilities(x: Array, rows: Array, transform: Transform, arithmetic: Arithmetic) -> Array:
    """factor exp(z) 2^-exponent, rounded once from a sum of two terms."""
    factor, top = rows[:, ROW_GRADIENT["factor"]], rows[:, ROW_GRADIENT["top"]]
    e = exponential(x, transform, arithmetic)
    m, k = np.frexp(factor)
    m, k = np.where(np.isfinite(factor), m + m, factor), k.astype(i64) - 1
    n = e.n + (k - rows[:, ROW_GRADIENT["exponent"]].view(i64))[:, None]
    if arithmetic is SINGLE:
        high = m.astype(f32)
        low = (m - high.astype(f64)).astype(f32)
        value = high[:, None] + fma32(*np.broadcast_arrays(high[:, None], e.t, low[:, None]))
        near = np.clip(n, -125, 127)
        rest = np.clip(n - near, -30, 30)
        value = value * power(near).astype(f32) * power(rest).astype(f32)
    else:
        value = m[:, None] + m[:, None] * e.t
        near = np.clip(n, -1020, 1023)
        value = value * power(near) * power(np.clip(n - near, -60, 60))
    nought = (x == -np.inf) | (_huge(top, transform)[:, None] & (x != top[:, None]))
    nought |= ~np.isfinite(factor)[:, None]  # nan then
    return np.where(nought, (factor * 0.0)[:, None].astype(value.dtype), value)


# The kernel's interface: arrays are (outer, classes, inner), the class axis in the middle


def valid_rows(targets: Array, ignore_index: int) -> tuple[Array, bool, int]:
    """Return the rows that count, (rows,), if all do, and the largest of their targets as a number without a sign."""
    valid = targets != ignore_index
    return valid, bool(valid.all()), int(targets[valid].view(u64).max(initial=0))


# Classes of a block, which stays in cache.
_BLOCK = 2**14


def fill_states(
    logits: Array,
    target_column: Array | None,
    fields: StateFields,
    *,
    weights: ClassWeights,
    transform: Transform,
    arithmetic: Arithmetic,
    class_start: int,
) -> Array:
    """Return the states of the rows of this shard.

    `target_column` (rows,) is the local column of the row's target, -1 where it is elsewhere; None where rows have no
    one target.
    """
    rows, classes = logits.shape[0] * logits.shape[2], logits.shape[1]
    states = fields.identity(rows)
    weighted = fields.held_weight or fields.weight or fields.weighted_logit
    with np.errstate(all="ignore"):
        for mine, block in _blocks(rows, classes):
            part = states_of(
                _rows_of(logits, mine, block),
                None if target_column is None else target_column[mine] - block.start,
                fields,
                u=_class_weights(weights, mine, block) if weighted else None,
                transform=transform,
                arithmetic=arithmetic,
                first_class=class_start + block.start,
            )
            if block.start == 0:
                states[mine] = part
            else:
                merge(part, states[mine], fields, transform, arithmetic)
    return states


def write_gradient(
    out: Array,
    logits: Array,
    rows: Array,
    fields: StateFields,
    *,
    weights: ClassWeights,
    transform: Transform,
    arithmetic: Arithmetic,
) -> None:
    """Write the gradient of the logits into `out`; both are (outer, classes, inner) and may be one array."""
    column, valid, target = (rows[:, ROW_GRADIENT[name]].view(i64) for name in ("column", "valid", "target"))
    held_gradient, held, held_weight = (
        rows[:, ROW_GRADIENT[name], None] for name in ("held_gradient", "held", "held_weight")
    )
    with np.errstate(all="ignore"):
        for mine, block in _blocks(len(rows), logits.shape[1]):
            x = _rows_of(logits, mine, block)
            u = _class_weights(weights, mine, block) if fields.weighted_logit else None
            is_target = np.arange(block.start, block.stop) == target[mine, None]
            value = gradient_of(x, rows[mine], fields, transform, arithmetic, 1.0 if u is None else u, is_target)
            if weights.probabilities is None:
                is_held = np.arange(block.start, block.stop) == column[mine, None]
            else:
                is_held = (x == held[mine]) & (u == held_weight[mine])
            at_held = np.broadcast_to(held_gradient[mine], x.shape)
            if transform.softcap is not None:
                at_held = at_held * softcap_slope(x.astype(f64), transform)
            value = np.where(is_held, at_held.astype(arithmetic.dtype), value)
            value[valid[mine] == 0] = 0.0
            if out.dtype.itemsize == 2:
                value = value.astype(f32)
            _put_rows(out, mine, block, value.astype(out.dtype))


def _blocks(rows: int, classes: int) -> Iterable[tuple[slice, slice]]:
    """Cut rows and classes into blocks; those of one row come in order."""
    width = min(classes, _BLOCK)
    height = max(1, _BLOCK // max(1, width))
    for row in range(0, rows, height):
        for first in range(0, classes, max(1, width)):
            yield slice(row, min(rows, row + height)), slice(first, min(classes, first + width))


def _rows_of(array: Array, rows: slice, classes: slice) -> Array:
    """Some rows and classes of an array (outer, classes, inner), (rows, classes)."""
    outer, inner = np.divmod(np.arange(rows.start, rows.stop), max(1, array.shape[2]))
    return array[outer, classes, inner]


def _put_rows(array: Array, rows: slice, classes: slice, values: Array) -> None:
    outer, inner = np.divmod(np.arange(rows.start, rows.stop), max(1, array.shape[2]))
    array[outer, classes, inner] = values


def _class_weights(weights: ClassWeights, rows: slice, classes: slice) -> Array | None:
    """u of a block: None for ones, (classes,) if all rows have the same, else (rows, classes)."""
    weight = None if weights.weight is None else weights.weight[classes]
    if weights.probabilities is None:
        return weight
    u = _rows_of(weights.probabilities, rows, classes).astype(f64)
    if weights.smoothing:
        u = u * (1.0 - weights.smoothing) + weights.smoothing / weights.classes
    return u if weight is None else u * weight


def sums_of(*arrays: Array) -> Array:
    """Sum each of some arrays of float64 numbers, finite or not: (arrays, 4) words, a grid and limbs."""
    sums = np.zeros((len(arrays), 4), u64)
    for row, numbers in zip(sums, arrays, strict=True):
        grids, limbs = sum_of([numbers[None]])
        strange = np.unique(np.where(np.isnan(numbers), np.nan, numbers)[~np.isfinite(numbers)])
        if strange.size:
            kinds = {np.inf: INFINITE, -np.inf: MINUS_INFINITE}
            grids[:], limbs[:] = kinds.get(strange[0], NOT_A_NUMBER) if strange.size == 1 else NOT_A_NUMBER, 0
        row[:1], row[1:] = grids.view(u64), limbs[0]
    return sums


def add(a: Array, b: Array) -> None:
    """Add sums a of `sums_of`, (sums, 4), to sums b."""
    grids, others = a[:, 0].view(i64), b[:, 0].view(i64)
    total = united(NO_GRID, Sums(grids, a[:, 1:]), Sums(others, b[:, 1:]))
    mixed = (grids >= INFINITE) & (others >= INFINITE) & (grids != others)
    b[:, 0], b[:, 1:] = np.where(mixed, NOT_A_NUMBER, total.grids).view(u64), total.limbs


def _values_of(sums: Array) -> Array:
    """The values of sums of `sums_of` as float64."""
    grids = sums[:, 0].copy().view(i64)
    values = value_of_wide(Sums(grids, sums[:, 1:])).high
    for kind, value in ((INFINITE, np.inf), (MINUS_INFINITE, -np.inf), (NOT_A_NUMBER, np.nan)):
        values = np.where(grids == kind, value, values)
    return values


def loss_of(sums: Array, mean: bool, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return the loss, 0-d, and the divisor of its gradient, (1,), from the sums of the rows' losses and weights.

    A mean over rows whose weights sum to 0 is `nan`, and so is its gradient.
    """
    total, weights = _values_of(sums)
    divisor = np.array([(np.nan if weights == 0.0 else weights) if mean else 1.0])
    with np.errstate(all="ignore"):
        return (total / divisor).astype(dtype).reshape(()), divisor

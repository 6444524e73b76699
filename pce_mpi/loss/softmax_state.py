"""The softmax state: a small summary of each row's classes, its `merge`, and the numbers that follow from it.

A state summarizes a shard's classes of one row. The states of disjoint sets of classes merge into the state of their
union; the state of no classes is the identity; `merge` is associative up to rounding, commutative to the last bit, and
propagates `nan`. One all-reduce of states therefore merges the shards of a row.

**One class of each row is held apart**: the target if the row has one, otherwise the largest logit. With x the logits,
z = scale x, h the class held apart and sums over the *other* classes c, a state has

    target or largest   x_h                                   -inf if this shard does not have it
    max                 m = max_c x_c, or a little more        -inf for none
    sum_exp             S = sum_c exp(scale (x_c - m))

and, for some options,

    scale               the same everywhere, 1 without this field
    target              x of the target, if the largest logit is held apart
    held_weight         u_h                                   u: weights of a sum over classes, see `StateFields`
    weight              sum_c u_c
    weighted_gap        sum_c u_c scale (m - x_c)
    exp_gap             sum_c exp(scale (x_c - m)) scale (m - x_c)
    argmax              the class of the largest logit, the lowest on ties, if that class is held apart

Logits are subtracted before they are scaled: far from 0, scaling first costs the bits that matter.

Loss and gradient are then sums of numbers of one sign. With a = S exp(scale (m - x_h)), a loss of log1p(a) and a
gradient of -a / (1 + a) keep all their bits however close to 1 the probability of h is. `log(1 + ...)` of one common
sum and `p - 1` keep none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray
HostArray = np.ndarray[Any, Any]

NO_CLASS = np.iinfo(np.int64).max  # loses every tie against a class


@dataclass(frozen=True)
class StateFields:
    """The fields of the states of one call.

    `hold_largest` holds the largest logit apart instead of the target; `target` then adds the target's logit.
    `held_weight` adds the weight of the class held apart, `weights` the weighted sums over the others as well: u is
    `weight` with label smoothing, and `weight * probability` with probability targets. `entropy` is for statistics.
    """

    scaled: bool = False
    hold_largest: bool = False
    target: bool = False
    held_weight: bool = False
    weights: bool = False
    entropy: bool = False

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the fields."""
        return self.dtype.names or ()

    @cached_property
    def held(self) -> str:
        """The name of the field with the logit of the class held apart."""
        return "largest" if self.hold_largest else "target"

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The structured dtype of one state; 24 bytes for a plain loss."""
        names = [self.held, "max", "sum_exp"]
        names += ["scale"] * self.scaled
        names += ["target"] * (self.target and self.hold_largest)
        names += ["held_weight"] * (self.held_weight or self.weights)
        names += ["weight", "weighted_gap"] * self.weights + ["exp_gap"] * self.entropy
        return np.dtype([(name, np.float64) for name in names] + [("argmax", np.int64)] * self.hold_largest)

    def by_name(self, states: Array) -> dict[str, Array]:
        """Each field of `states` by its name, (rows,).

        `states` is structured or, on a GPU, (rows, fields) of float64 with the bits of an int64 for `argmax`.
        """
        if states.dtype.names:
            return {name: states[name] for name in self.names}
        columns = {name: states[:, index] for index, name in enumerate(self.names)}
        if self.hold_largest:
            columns["argmax"] = columns["argmax"].view(np.int64)
        return columns

    def identity(self, *shape: int) -> HostArray:
        """States of no classes."""
        states = np.zeros(shape, self.dtype)
        for name in {self.held, "max", "target"} & set(self.names):
            states[name] = -np.inf
        if self.hold_largest:
            states["argmax"] = NO_CLASS
        return states


def merge(a: HostArray, b: HostArray) -> HostArray:
    """The states of the union of two disjoint sets of classes of the same rows; `a` and `b` stay as they are."""
    names = a.dtype.names or ()
    with np.errstate(all="ignore"):
        merged = _merge_others(a, b)
        if "target" in names:
            merged["target"] = np.maximum(a["target"], b["target"])
        if "largest" not in names:
            if "held_weight" in names:  # 0 on every shard but the target's
                merged["held_weight"] = a["held_weight"] + b["held_weight"]
            return merged
        # The class held apart with the smaller logit becomes one of the others.
        swap = _largest_is_in_b(a, b)
        alone = np.zeros_like(merged)
        if "scale" in names:
            alone["scale"] = merged["scale"]
        alone["max"] = np.minimum(a["largest"], b["largest"])
        masked = alone["max"] == -np.inf
        alone["sum_exp"] = ~masked
        if "weight" in names:
            alone["weight"] = np.where(swap, a["held_weight"], b["held_weight"])
            alone["weighted_gap"] = np.where(masked & (alone["weight"] != 0), np.inf, 0.0)
        union = _merge_others(merged, alone)
        union["largest"] = np.maximum(a["largest"], b["largest"])
        for name in {"held_weight", "argmax"} & set(names):
            union[name] = np.where(swap, b[name], a[name])
        if "target" in names:
            union["target"] = merged["target"]
        return union


def _merge_others(a: HostArray, b: HostArray) -> HostArray:
    """`merge` for the classes that are not held apart; the fields of the held one are left unset."""
    names = a.dtype.names or ()
    merged = np.zeros_like(a)
    top = np.maximum(a["max"], b["max"])
    merged["max"] = top
    # Equal maxima are 0 apart, two of -inf among them.
    gap_a = np.where(a["max"] == top, 0.0, top - a["max"])
    gap_b = np.where(b["max"] == top, 0.0, top - b["max"])
    if "scale" in names:
        scale = merged["scale"] = np.maximum(a["scale"], b["scale"])  # 0 in the state of no classes
        gap_a, gap_b = scale * gap_a, scale * gap_b
    decay_a, decay_b = np.exp(-gap_a), np.exp(-gap_b)
    merged["sum_exp"] = a["sum_exp"] * decay_a + b["sum_exp"] * decay_b
    if "weight" in names:
        merged["weight"] = a["weight"] + b["weight"]
        merged["weighted_gap"] = (a["weighted_gap"] + times(a["weight"], gap_a)) + (
            b["weighted_gap"] + times(b["weight"], gap_b)
        )
    if "exp_gap" in names:
        merged["exp_gap"] = decay_a * (a["exp_gap"] + times(a["sum_exp"], gap_a)) + decay_b * (
            b["exp_gap"] + times(b["sum_exp"], gap_b)
        )
    return merged


def _largest_is_in_b(a: HostArray, b: HostArray) -> HostArray:
    """(rows,) bools: b has the row's largest logit. `nan` is larger than any number; the lower class wins a tie."""
    nan_a, nan_b = np.isnan(a["largest"]), np.isnan(b["largest"])
    lower = b["argmax"] < a["argmax"]
    larger = (b["largest"] > a["largest"]) | ((b["largest"] == a["largest"]) & lower)
    return np.where(nan_a | nan_b, nan_b & (~nan_a | lower), larger)


def times(weight: Array, gap: Array, xp: Any = np) -> Array:
    """weight * gap; 0 if the weight is 0, even if the gap is infinite."""
    return xp.where(weight == 0.0, 0.0, weight * gap)


def _exp_difference(a: Array, b: Array, scale: Array | float, xp: Any) -> Array:
    """exp(scale (a - b)), corrected for the rounding error of the difference (Knuth's TwoSum)."""
    difference = a - b
    virtual = difference - a
    error = (a - (difference - virtual)) - (b + virtual)
    # The error is large, infinite or nan only if exp overflows or underflows anyway.
    e = xp.exp(scale * difference)
    return xp.where((xp.abs(error) < 1.0) & (e < np.inf), e + e * (scale * error), e)


class RowSoftmax:
    """The softmax of each row, from the fields of merged states; all arrays are float64, (rows,), of the library `xp`.

    Rows of only -inf, with a +inf or with a `nan` are `nan` in all but `max`.
    """

    def __init__(self, fields: Mapping[str, Array], xp: Any = np):
        self.fields, self._xp = fields, xp
        held = fields["largest" if "largest" in fields else "target"]
        # A sum over the other classes cannot show that the class held apart is +inf.
        self.held = xp.where(held == np.inf, np.nan, held)
        self.max = fields["max"]
        #: sum of exp(scale (x_c - max)) over the classes not held apart
        self.sum_exp = fields["sum_exp"]
        self._scale = fields.get("scale", 1.0)
        with np.errstate(all="ignore"):
            held_over_max = _exp_difference(self.held, self.max, self._scale, xp)
            #: the probability of another class, divided by exp(scale (x_c - max))
            self.normalizer = 1.0 / (self.sum_exp + held_over_max)
            #: probability of the class held apart, minus 1
            self.held_minus_one = -self.sum_exp * self.normalizer
            self._odds = self.sum_exp * _exp_difference(self.max, self.held, self._scale, xp)
            #: probability of the class held apart
            self.held_probability = 1.0 / (1.0 + self._odds)

    @property
    def sum_exp_of_all(self) -> Array:
        """sum of exp(scale (x_c - held)) over all classes."""
        return 1.0 + self._odds

    @cached_property
    def _logsumexp_above_max(self) -> Array:
        with np.errstate(all="ignore"):
            return self._xp.logaddexp(self._xp.log(self.sum_exp), self._scale * (self.held - self.max))

    @cached_property
    def held_nll(self) -> Array:
        """-log of the probability of the class held apart."""
        with np.errstate(all="ignore"):
            below = self._logsumexp_above_max + self._scale * (self.max - self.held)
            return self._xp.where(self.held >= self.max, self._xp.log1p(self._odds), below)

    @cached_property
    def logsumexp(self) -> Array:
        """log of the sum of exp(scale x_c) over all classes."""
        with np.errstate(all="ignore"):
            from_max = self._scale * self.max + self._logsumexp_above_max
            return self._xp.where(self.held >= self.max, self._scale * self.held + self.held_nll, from_max)

    @property
    def target_log_prob(self) -> Array:
        """log of the probability of the target, if the largest logit is held apart; neither summand is positive."""
        with np.errstate(all="ignore"):
            return self._xp.minimum(self._scale * (self.fields["target"] - self.held), 0.0) - self.held_nll

    @property
    def weight(self) -> Array:
        """sum of u_c over all classes."""
        return self.fields["held_weight"] + self.fields["weight"]

    @property
    def weighted_nll(self) -> Array:
        """sum of -u_c log p_c over all classes."""
        with np.errstate(all="ignore"):
            return (
                times(self.fields["held_weight"], self.held_nll, self._xp)
                + times(self.fields["weight"], self._logsumexp_above_max, self._xp)
                + self.fields["weighted_gap"]
            )

    @property
    def entropy(self) -> Array:
        """sum of -p_c log p_c over all classes."""
        with np.errstate(all="ignore"):
            others = times(self.sum_exp, self._logsumexp_above_max, self._xp) + self.fields["exp_gap"]
            return times(self.held_probability, self.held_nll, self._xp) + times(self.normalizer, others, self._xp)

"""The softmax monoid: one small state per row, a `merge`, and what follows from a merged state.

A shard's classes of one row are summarised by a state. States of disjoint sets of classes merge into the state of
their union; the state of no classes is the identity; `merge` is associative up to rounding, commutative to the last
bit, and carries `nan` along. So one all-reduce of states joins the shards of a row.

**One class of each row is held apart**: the target where rows have one, otherwise the row's largest logit. With x the
logits, z = scale x, h the class held and the sums over the *other* classes c, a state has

    target or largest   x_h                                   -inf where this shard does not hold it
    max                 m = max_c x_c, or a little more        -inf for none
    sum_exp             S = sum_c exp(scale (x_c - m))

and, where an option asks for more,

    scale               the same everywhere, 1 where the field is missing
    target              x of the target, where the largest is held
    held_weight         u_h                                   u: weights of a sum over classes, see `StateFields`
    weight              sum_c u_c
    weighted_gap        sum_c u_c scale (m - x_c)
    exp_gap             sum_c exp(scale (x_c - m)) scale (m - x_c)
    argmax              the class of the largest logit, the lowest on ties: the class held, where that is the largest

Logits are subtracted before they are scaled: far from 0, scaling costs the bits that matter.

What is wanted is then a sum of terms of one sign. With a = S exp(scale (m - x_h)), a loss of log1p(a) and a gradient of
-a / (1 + a) keep all their bits however close to 1 the probability of h is, where `log(1 + ...)` of one common sum and
`p - 1` keep none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace

__all__ = ["NO_CLASS", "RowSoftmax", "StateFields", "merge", "times"]

Array = Any  # numpy.ndarray or cupy.ndarray
HostArray = np.ndarray[Any, Any]

NO_CLASS = np.iinfo(np.int64).max  # loses every tie against a class


@dataclass(frozen=True)
class StateFields:
    """Which fields the states of one call have.

    `hold_largest` holds the largest logit apart rather than the target, whose logit `target` then carries as well.
    `held_weight` carries the weight of the class held; `weights` also the weighted sums over the others: u is `weight`
    under label smoothing, and `weight * probability` with probability targets. `entropy` is for statistics.
    """

    scaled: bool = False
    hold_largest: bool = False
    target: bool = False
    held_weight: bool = False
    weights: bool = False
    entropy: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the fields."""
        return self.dtype.names or ()

    @property
    def held(self) -> str:
        """The name of the field with the logit held apart."""
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
        """Each field by its name, (rows,), of `states`: structured ones, or on a GPU (rows, fields) of float64.

        There `argmax` is the bits of an int64.
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
            if "held_weight" in names:  # nought on every shard but the one that holds the target
                merged["held_weight"] = a["held_weight"] + b["held_weight"]
            return merged
        # Of the two classes held apart, the one with the smaller logit joins the others.
        swap = _b_is_held(a, b)
        alone = np.zeros_like(merged)
        if "scale" in names:
            alone["scale"] = merged["scale"]
        alone["max"] = np.minimum(a["largest"], b["largest"])
        masked = alone["max"] == -np.inf
        alone["sum_exp"] = ~masked
        if "weight" in names:
            alone["weight"] = np.where(swap, a["held_weight"], b["held_weight"])
            alone["weighted_gap"] = np.where(masked & (alone["weight"] != 0), np.inf, 0.0)
        joined = _merge_others(merged, alone)
        joined["largest"] = np.maximum(a["largest"], b["largest"])
        for name in {"held_weight", "argmax"} & set(names):
            joined[name] = np.where(swap, b[name], a[name])
        if "target" in names:
            joined["target"] = merged["target"]
        return joined


def _merge_others(a: HostArray, b: HostArray) -> HostArray:
    """`merge` for the classes that are not held apart; the fields of the held one are left unset."""
    names = a.dtype.names or ()
    merged = np.zeros_like(a)
    top = np.maximum(a["max"], b["max"])
    merged["max"] = top
    # Equal maxima, among them two of -inf, lie 0 apart.
    gaps = [np.where(state["max"] == top, 0.0, top - state["max"]) for state in (a, b)]
    if "scale" in names:
        merged["scale"] = np.maximum(a["scale"], b["scale"])  # 0 in the state of no classes
        gaps = [merged["scale"] * gap for gap in gaps]
    (decay_a, gap_a), (decay_b, gap_b) = ((np.exp(-gap), gap) for gap in gaps)
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


def _b_is_held(a: HostArray, b: HostArray) -> HostArray:
    """Where b has the row's largest logit, as NumPy orders: `nan` before numbers, then the larger, the lower class."""
    nan_a, nan_b = np.isnan(a["largest"]), np.isnan(b["largest"])
    lower = b["argmax"] < a["argmax"]
    larger = (b["largest"] > a["largest"]) | ((b["largest"] == a["largest"]) & lower)
    return np.where(nan_a | nan_b, nan_b & (~nan_a | lower), larger)


def times(weight: Array, gap: Array) -> Array:
    """weight * gap, where weight 0 gives 0 even if the gap is infinite."""
    return array_namespace(weight).where(weight == 0.0, 0.0, weight * gap)


def _exp_difference(a: Array, b: Array, scale: Array | float) -> Array:
    """exp(scale (a - b)) with the rounding error of the difference made good (Knuth's TwoSum)."""
    xp = array_namespace(a)
    difference = a - b
    virtual = difference - a
    error = (a - (difference - virtual)) - (b + virtual)
    # Only where the difference is far beyond what exp can take may the error be large, infinite or nan.
    e = xp.exp(scale * difference)
    return xp.where((xp.abs(error) < 1.0) & (e < np.inf), e + e * (scale * error), e)


class RowSoftmax:
    """The softmax of each row, as far as the fields of merged states tell; all arrays are float64, (rows,).

    Rows of only -inf, with a +inf or with a `nan` are `nan` throughout, but for `max`.
    """

    def __init__(self, fields: Mapping[str, Array]):
        self.fields = fields
        xp = self._xp = array_namespace(fields["max"])
        held = fields["largest" if "largest" in fields else "target"]
        # A sum over the other classes cannot show that the class held apart is +inf.
        self.held = xp.where(held == np.inf, np.nan, held)
        self.max = fields["max"]
        self._scale = fields.get("scale", 1.0)
        with np.errstate(all="ignore"):
            held_over_max = _exp_difference(self.held, self.max, self._scale)
            #: what exp(scale (x_c - max)) of another class is multiplied by to give its probability
            self.normalizer = 1.0 / (self.sum_exp + held_over_max)
            #: probability of the class held, minus 1
            self.held_minus_one = -self.sum_exp * self.normalizer
            self._odds = self.sum_exp * _exp_difference(self.max, self.held, self._scale)
            #: probability of the class held
            self.held_probability = 1.0 / (1.0 + self._odds)

    @property
    def sum_exp(self) -> Array:
        """sum of exp(scale (x_c - max)) over the classes not held apart."""
        return self.fields["sum_exp"]

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
        """-log of the probability of the class held."""
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
        """log of the probability of the target, where the largest logit is held; a sum of two terms of one sign."""
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
                times(self.fields["held_weight"], self.held_nll)
                + times(self.fields["weight"], self._logsumexp_above_max)
                + self.fields["weighted_gap"]
            )

    @property
    def entropy(self) -> Array:
        """sum of -p_c log p_c over all classes."""
        with np.errstate(all="ignore"):
            others = times(self.sum_exp, self._logsumexp_above_max) + self.fields["exp_gap"]
            return times(self.held_probability, self.held_nll) + times(self.normalizer, others)

"""The interface of the kernels of every device: the parameters of a pass over the logits, and the softmax state.

A softmax state is a small summary of a shard's classes of one row, which ranks merge in one all-reduce. The states of
disjoint sets of classes merge into the state of their union, to the last bit, in any order and for any cut; the state
of no classes is the identity. `kernels/definition.py` has the arithmetic, and says why.

**One class of each row is held apart**: its target, or its largest logit. With x the logits, z the function of them
that the softmax is taken of, and sums over the *other* classes, a state has

    held            x of the class held apart               -inf if this shard does not have it
    top             the largest other x                     if the target is held apart
    sum             sum exp(z_c)                            in limbs: integers of 64 bits that add without rounding
    depth           grids between `held` and the sum        if the largest logit is held apart

and, for some options,

    argmax          the class held apart
    target          x of the target, if the largest logit is held apart
    held_weight     u of the class held apart               u: weights of a sum over classes
    weight          sum u_c                                 in limbs, on the grid `weight_grid`
    weighted_logit  sum u_c z_c                             in limbs, on the grid `logit_grid`
    exp_logit       sum exp(z_c) z_c                        in limbs, on the grid `entropy_grid`

Loss and gradient are then sums of numbers of one sign. With a = sum exp(-z_held), the loss log1p(a) and the gradient
-a / (1 + a) keep all their bits, however close to 1 the probability of the class held apart is. `log(1 + ...)` of one
common sum and `p - 1` keep none.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from pce_mpi.arrays import Array, HostArray

NO_MARGIN = 1.0, 0.0, 0.0


class Transform(NamedTuple):
    """The function z of the logits x that the softmax is taken of: scale x, or softcap tanh(scale x / softcap).

    With a margin m, z of the target is scale (cos(m[0] arccos x + m[1]) - m[2]).
    """

    scale: float = 1.0
    softcap: float | None = None
    margin: tuple[float, float, float] = NO_MARGIN


class Precision(NamedTuple):
    """Bits of an element's fraction, bits of a digit, and the dtype of t."""

    point: int
    width: int
    dtype: np.dtype[Any]


SINGLE, DOUBLE = Precision(30, 21, np.dtype(np.float32)), Precision(62, 36, np.dtype(np.float64))
# float64 with the polynomials of fewer terms.
SHORT = Precision(*DOUBLE)


class Pass(NamedTuple):
    """A pass over logits: the fields of its states, the function z of the logits, and the precision of exp(z)."""

    fields: StateFields
    transform: Transform
    precision: Precision


class ClassWeights(NamedTuple):
    """The weights u of a sum over classes: `weight`, or `weight` times the smoothed target probabilities.

    `weight` is (classes,) or None for ones, `probabilities` (outer, classes, inner) or None. With probabilities p,
    u = weight (p (1 - smoothing) + smoothing / classes), with the number of `classes` of all shards.
    """

    weight: Array | None = None
    probabilities: Array | None = None
    smoothing: float = 0.0
    classes: int = 1

    @property
    def differ(self) -> bool:
        """True unless all weights are 1."""
        return self.weight is not None or self.probabilities is not None


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


NO_CLASS = np.iinfo(np.int64).max  # loses every tie against a class
# Grids of sums of weights and weighted logits: that of an empty sum, which is finer than all others, and those of sums
# that are not finite.
NO_GRID, INFINITE, MINUS_INFINITE, NOT_A_NUMBER = -(2**14), 2**14, 2**14 + 1, 2**14 + 2
# The grid of an empty sum of exp(z) z.
NO_ENTROPY = -(2**60)
# A state drops a sum that is FORGOTTEN grids below the class held apart. From some 100 grids on it is 0 beside that
# class in float64, so that a sum which counts never lacks digits that another order of merges would have kept.
FORGOTTEN = 255


class _Flags(NamedTuple):
    hold_largest: bool = False
    argmax: bool = False
    target: bool = False
    held_weight: bool = False
    weight: bool = False
    weighted_logit: bool = False
    entropy: bool = False


class StateFields(_Flags):
    """The fields that the states of one call have.

    `hold_largest` holds the largest logit apart instead of the target; `target` then adds the target's logit. The other
    flags add the fields of their names, and `entropy` adds the sum of exp(z) z.
    """

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the fields."""
        return self.dtype.names or ()

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The structured dtype of one state, in words of 8 bytes; 40 bytes for a plain loss, at most 96."""
        fields: list[Any] = [("held", np.float64)] + [("top", np.float64)] * (not self.hold_largest)
        fields += [("sum", np.uint64, 3)]
        if self.hold_largest or self.weight or self.weighted_logit:
            fields += [(name, np.int16) for name in ("depth", "weight_grid", "logit_grid", "padding")]
        fields += [("argmax", np.int64)] * self.argmax + [("target", np.float64)] * self.target
        fields += [("held_weight", np.float64)] * self.held_weight
        fields += [("weight", np.uint64, 3)] * self.weight + [("weighted_logit", np.uint64, 3)] * self.weighted_logit
        fields += [("entropy_grid", np.int64), ("exp_logit", np.uint64, 3)] * self.entropy
        return np.dtype(fields)

    @cached_property
    def flags(self) -> int:
        """The fields as bits, as the compiled kernels take them."""
        return sum(flag << bit for bit, flag in enumerate(self))

    def identity(self, *shape: int) -> HostArray:
        """Return states of no classes."""
        states = np.zeros(shape, self.dtype)
        nothing = dict.fromkeys(("held", "top", "target"), -np.inf) | dict.fromkeys(
            ("weight_grid", "logit_grid"), NO_GRID
        )
        nothing |= {"depth": FORGOTTEN * self.hold_largest, "entropy_grid": NO_ENTROPY, "argmax": NO_CLASS}
        for name in nothing.keys() & set(self.names):
            states[name] = nothing[name]
        return states


# The columns of float64 that follow from merged states; `exponent` has the bits of an int64.
ROW_SOFTMAX = {
    name: column
    for column, name in enumerate(
        (
            "held_nll",  # -log of the probability of the class held apart
            "held_probability",  # its probability
            "held_minus_one",  # its probability minus 1
            "normalizer",  # exp(z_c) 2^-exponent times this is the probability of another class
            "exponent",
            "logsumexp",  # log of the sum of exp(z_c) over all classes
            "weight",  # sum of u_c over the classes not held apart
            "weighted_nll",  # sum of -u_c log p_c over all classes
            "entropy",  # sum of -p_c log p_c over all classes
            "target_log_prob",  # log of the probability of the target, if the largest logit is held apart
            "held_z",  # z of the class held apart
            "odds",  # sum of exp(z_c - held_z) over the classes not held apart
            "top",  # a logit beside which no other one counts, if its z is 2^60 or more
            "most",  # the largest logit
            "held",  # the logit of the class held apart
            "held_weight",  # u of that class
            "argmax",  # its global number, if the largest logit is held apart; the bits of an int64
            "held_slope",  # 1, or with a margin the derivative of held_z / scale by `held`
        )
    )
}


class Columns:
    """An array (rows, columns of `ROW_SOFTMAX`), float64, or `MergedStates`; each column is an attribute, (rows,)."""

    def __init__(self, columns: Array):
        self.columns = columns

    def __getattr__(self, name: str) -> Array:
        if name in ROW_SOFTMAX:
            return self.columns[:, ROW_SOFTMAX[name]]
        raise AttributeError(name)


class RowSoftmax(Columns):
    """The softmax of rows, from merged states of the pass `how`; `nan` for only -inf, a +inf or a `nan` in a row."""

    def __init__(self, columns: Array, how: Pass):
        self.columns, self.how = columns, how


class MergedStates:
    """The merged states of rows, from which a kernel computes the softmax of a row wherever it is needed.

    An index gives that part of `columns`, which each kernel computes in its own way.
    """

    columns: Array

    def __init__(self, states: Array):
        self.states = states

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: Any) -> Array:
        return self.columns[index]


# The columns of 8 bytes from which a kernel writes the gradient of a row; the first three have the bits of int64.
ROW_GRADIENT = {
    name: column
    for column, name in enumerate(
        (
            "exponent",  # that of the normalizer
            "column",  # that of the class held apart; -1 if another shard has it
            "valid",  # 0 for rows that count for nothing, whose gradient is 0; a GPU has -1 where it must not write any
            "top",
            "most",
            "factor",  # factor exp(z_c) 2^-exponent - weight_factor u_c is the gradient of another class
            "weight_factor",
            "held_gradient",  # the gradient of the class held apart
            "held",  # with probabilities every class of this logit
            "held_weight",  # and this weight is held apart
            # The gradient of statistics has (constant + slope (z_c - z_origin)) as one more factor, and one class, the
            # target, has target_gradient besides.
            "constant",
            "slope",
            "origin",  # a logit
            "target",  # the column of that class, -1 if another shard has it
            "target_gradient",
        )
    )
}

# The statistics that have gradients, in the order of the compiled kernels.
STATISTICS = "log_prob", "entropy", "logsumexp"
Upstream = Mapping[str, Array]

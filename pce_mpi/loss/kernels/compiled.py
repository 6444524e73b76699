"""The hot loops in C++, with the bits of `definition.py`; arrays are views that are handed over without a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pce_mpi.loss.kernels import _compiled
from pce_mpi.loss.kernels.definition import StateFields, Sums
from pce_mpi.loss.kernels.elementary import DOUBLE, Arithmetic
from pce_mpi.loss.kernels.parameters import ClassWeights, Transform

Array = np.ndarray[Any, Any]

_KINDS = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}
# The bits of `StateFields`, in the order of its names; `enum Field` of states.h.
_FLAGS = ("hold_largest", "argmax", "target", "held_weight", "weight", "weighted_logit", "entropy")
# `RowSoftmax` of states.h and `RowGradient` of compiled.cpp.
ROW_SOFTMAX = np.dtype(
    [
        (name, np.float64)
        for name in (
            *("held_nll", "held_probability", "held_minus_one", "normalizer", "logsumexp"),
            *("weight", "weighted_nll", "entropy", "target_log_prob"),
        )
    ]
    + [("exponent", np.int64), ("top", np.float64)]
)
ROW_GRADIENT = np.dtype(
    [(name, np.int64) for name in ("exponent", "column", "valid")]
    + [
        (name, np.float64)
        for name in ("top", "most", "factor", "weight_factor", "held_gradient", "held", "held_weight")
    ]
)


def flags_of(fields: StateFields) -> int:
    """The fields as bits."""
    return sum(getattr(fields, name) << bit for bit, name in enumerate(_FLAGS))


def _raw(array: Array | None) -> tuple[Array | None, int]:
    """An array as a buffer, and its kind: no buffer has a dtype of bfloat16."""
    if array is None:
        return None, 0
    kind = _KINDS[array.dtype.name]
    return array.view(np.uint16) if kind >= 2 else array, kind


def _weights(weights: ClassWeights, used: bool) -> tuple[Any, ...]:
    if not used:
        return None, None, 0, 1.0, 0.0
    share = weights.smoothing / weights.classes if weights.probabilities is not None else 0.0
    return weights.weight, *_raw(weights.probabilities), 1.0 - weights.smoothing, share


def _call(fields: StateFields, transform: Transform, arithmetic: Arithmetic) -> tuple[Any, ...]:
    return flags_of(fields), transform.scale, transform.softcap or 0.0, arithmetic is DOUBLE


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
    """Return the states of the rows of logits (outer, classes, inner)."""
    states = np.empty(logits.shape[0] * logits.shape[2], fields.dtype)
    used = fields.held_weight or fields.weight or fields.weighted_logit
    _compiled.fill_states(
        *_raw(logits),
        None if target_column is None else np.ascontiguousarray(target_column, np.int64),
        *_weights(weights, used),
        class_start,
        states,
        *_call(fields, transform, arithmetic),
    )
    return states


@dataclass(frozen=True)
class Merge:
    """The merge of states of disjoint sets of classes of the same rows, for states of one call."""

    fields: StateFields
    transform: Transform
    arithmetic: Arithmetic

    def __call__(self, a: Array, b: Array) -> Array:
        """Return the states of the union; `a` and `b` stay as they are."""
        merged = b.copy()
        _compiled.merge_states(a, merged, *_call(self.fields, self.transform, self.arithmetic))
        return merged


def row_softmax(
    states: Array, fields: StateFields, transform: Transform, arithmetic: Arithmetic, class_weights: Sums | None
) -> Array:
    """Return the softmax of each row, (rows,) of `ROW_SOFTMAX`."""
    rows = np.empty(states.shape, ROW_SOFTMAX)
    sums = None
    if class_weights is not None:
        sums = np.concatenate([class_weights.grids.astype(np.int64).view(np.uint64), class_weights.limbs[0]])
    _compiled.row_softmax(states, sums, rows, *_call(fields, transform, arithmetic))
    return rows


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
    _compiled.write_gradient(
        *_raw(logits),
        *_raw(out),
        rows,
        *_weights(weights, fields.weighted_logit),
        *_call(fields, transform, arithmetic),
    )

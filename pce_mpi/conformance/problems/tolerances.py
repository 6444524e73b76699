"""The units of errors, and how many of them pass; `judging` states the rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pce_mpi.arrays import compute_dtype_of, dtype_named
from pce_mpi.conformance.problems.problem import Array, Problem
from pce_mpi.conformance.problems.textbook import Textbook
from pce_mpi.ulps import FORMATS, ulp

_ALLOWED = {"float64": 32.0, "float32": 8.0, "float16": 2.0, "bfloat16": 2.0}
# Our own functions stay below these; in float64 `dense` errs as well.
_STRICT = {"float64": 8.0, "float32": 5.0, "float16": 1.0, "bfloat16": 1.0}


@dataclass(frozen=True)
class Tolerance:
    """The allowed error of an answer.

    Parameters
    ----------
    strict : bool
        Allow 8, 5 and 1 ulp of float64, float32 and the halves, without a floor, in place of 32, 8 and 2.
    factor : float
        Multiplies what is allowed.
    """

    strict: bool = False
    factor: float = 1.0


def allowed(tolerance: Tolerance, dtype: str) -> float:
    """Return how many ulps of a dtype pass."""
    return tolerance.factor * (_STRICT if tolerance.strict else _ALLOWED)[dtype]


def coarsest(*dtypes: str) -> str:
    """Return the dtype with the fewest bits in its fraction."""
    return min(dtypes, key=lambda dtype: FORMATS[dtype][0])


def finest(*dtypes: str) -> str:
    """Return the dtype with the most bits in its fraction."""
    return max(dtypes, key=lambda dtype: FORMATS[dtype][0])


def has_dtype(dtype: str) -> bool:
    """Return False for bfloat16 without ml_dtypes."""
    try:
        dtype_named(dtype)
    except TypeError:
        return False
    return True


def least_unit(sums: Array, arithmetic: str, strict: bool = False) -> Array:
    """Return the least ulp of each row: that of a term of size 1, or of the largest sum in its products, 0 for none."""
    return np.maximum(0.0 if strict else ulp(1.0, arithmetic), np.where(sums == 0.0, 0.0, ulp(sums, arithmetic)))


class Units(NamedTuple):
    """The size of one ulp.

    floor      shaped as the loss, of which an ulp is never less
    gradient   (rows, classes)
    at_target  (rows, classes) the entries that are measured by their own size
    """

    floor: Array
    gradient: Array
    at_target: Array

    @classmethod
    @np.errstate(all="ignore")
    def of(cls, problem: Problem, strict: bool) -> Units:
        """Return the units of a problem."""
        arithmetic = compute_dtype_of(problem.dtype).name
        upstream, slope, opposed = problem.kind.sizes(Textbook.of(problem))
        exact = np.abs(problem.row_major(problem.expected[1]))
        at_target = np.zeros(exact.shape, np.bool_)
        if problem.with_numbers:
            counted = np.flatnonzero(problem.valid)
            at_target[counted, problem.targets.reshape(-1)[counted]] = True
        size = np.maximum(exact, opposed)
        others = np.where(np.isfinite(size) & ~at_target, size, 0.0)
        size = np.where(at_target, size, others.max(axis=-1, keepdims=True, initial=0.0))
        floor = least_unit(problem.largest_sums, arithmetic, strict)
        by_row = floor * np.nan_to_num(upstream)
        by_row = by_row.reshape(problem.rows_shape) if problem.reduction == "none" else by_row.sum()
        return cls(
            floor=by_row,
            gradient=np.maximum(ulp(size, problem.dtype.name), (floor * np.nan_to_num(slope))[:, None]),
            at_target=at_target,
        )

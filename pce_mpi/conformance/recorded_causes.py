"""Causes that are fitted to the numbers of a recording: a temperature, and logits that were rounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pce_mpi.arrays import dtype_named
from pce_mpi.conformance.pieces import exact_numbers
from pce_mpi.conformance.problems import Array, Problem
from pce_mpi.conformance.units import has_dtype

# Rounded logits explain numbers that are this much closer to theirs than to the exact ones.
_CLOSER = 8.0
# A temperature explains the numbers of at least so many rows whose largest error is so many times smaller with it. It
# is searched in so many steps, with derivatives over a relative difference of so much.
LEAST_ROWS, _FITS = 4, 64.0
_STEPS, _STEP = 8, 2.0**-12


def fitted_scale(name: str, problem: Problem, got: Array) -> float | None:
    """Return the logit_scale by which the numbers `got` of these rows are right, if there is one."""
    got = got.astype(np.float64)
    if not np.isfinite(got).all():
        return None
    declared = float(problem.options.get("logit_scale", 1.0))

    def error(scale: float) -> Array:
        if not 0.0 < scale < np.inf:
            return np.full_like(got, np.inf)
        options = {**problem.options, "logit_scale": scale}
        return np.asarray(exact_numbers(name, replace(problem, options=options))[0]) - got

    scale = min((declared * 2.0 ** (power / 2.0) for power in range(-6, 7)), key=lambda each: _size(error(each)))
    for _ in range(_STEPS):  # of Gauss and Newton
        slope = (error(scale * (1.0 + _STEP)) - error(scale * (1.0 - _STEP))) / (2.0 * _STEP)
        with np.errstate(all="ignore"):
            step = -(slope @ error(scale)) / (slope @ slope)
        if np.isnan(step):  # as numbers of equal logits depend on no scale
            return None
        scale *= float(np.exp(np.clip(step, -1.0, 1.0)))
    return scale if _size(error(scale)) * _FITS < _size(error(declared)) else None


def dtype_of_rounded(name: str, problem: Problem, exact: Array, got: Array, dtypes: Sequence[str]) -> str | None:
    """Return the first of `dtypes` such that `got` are the numbers of logits rounded to it, if there is one."""
    got = got.astype(np.float64)
    for dtype in filter(has_dtype, dtypes):
        rounded = replace(problem, logits=problem.logits.astype(dtype_named(dtype)))
        error, other = (np.median(np.abs(got - each)) for each in (exact, exact_numbers(name, rounded)[0]))
        if other * _CLOSER <= error:
            return dtype
    return None


def _size(errors: Array) -> float:
    return float(np.abs(errors).max())

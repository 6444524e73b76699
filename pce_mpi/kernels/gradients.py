"""The gradient of a block of logits, in NumPy; `gradients.h` has the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from pce_mpi.kernels.elementary import exponential, f32, f64, fma32, i64, power, softcap_slope, transformed
from pce_mpi.kernels.interface import ROW_GRADIENT, SINGLE, Pass, Precision, Transform
from pce_mpi.kernels.states import is_huge

Array = np.ndarray[Any, Any]


def gradient_of(x: Array, rows: Array, how: Pass, u: Array | float = 1.0, is_target: Array | bool = False) -> Array:
    """Return the gradient of a tile of logits that are not held, (rows, classes), in the precision's dtype.

    It is factor exp(z) 2^-exponent - weight_factor u, times the slope of the softcap; `rows` has the columns of
    `ROW_GRADIENT`. The gradient of statistics has one more factor, and one more term at the target.
    """
    fields, transform, precision = how
    value = _probabilities(x, rows, transform, precision)
    if fields.weighted_logit or fields.entropy or transform.softcap is not None:
        value = value.astype(f64)
        if fields.entropy:
            constant, slope, origin, more = (
                rows[:, ROW_GRADIENT[name], None] for name in ("constant", "slope", "origin", "target_gradient")
            )
            (z, low), (origin, origin_low) = (transformed(each, transform) for each in (x.astype(f64), origin))
            factor = constant + slope * ((z - origin) + (low - origin_low))
            value = np.where(value == 0.0, 0.0, value * factor)  # a masked class has 0, and its z is infinite
            value = value + np.where(is_target, more, 0.0)
        if fields.weighted_logit:
            value -= rows[:, ROW_GRADIENT["weight_factor"], None] * u
        if transform.softcap is not None:
            value *= softcap_slope(x.astype(f64), transform)
        value = value.astype(precision.dtype)
    return np.where(np.isnan(value), value.dtype.type(np.nan), value)


def _probabilities(x: Array, rows: Array, transform: Transform, precision: Precision) -> Array:
    """Return factor exp(z) 2^-exponent, rounded once from a sum of two terms."""
    # Never -0.0, whose products depend on the way.
    factor, top = rows[:, ROW_GRADIENT["factor"]] + 0.0, rows[:, ROW_GRADIENT["top"]]
    e = exponential(x, transform, precision)
    m, k = np.frexp(factor)
    m, k = np.where(np.isfinite(factor), m + m, factor), k.astype(i64) - 1
    n = e.n + (k - rows[:, ROW_GRADIENT["exponent"]].view(i64))[:, None]
    if precision is SINGLE:
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
    nought = (x == -np.inf) | (is_huge(top, transform)[:, None] & (x != top[:, None]))
    value = np.where(np.isfinite(factor)[:, None], value, factor[:, None].astype(value.dtype))
    return np.where(nought, (factor * 0.0)[:, None].astype(value.dtype), value)

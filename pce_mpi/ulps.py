"""Distances in ulps: an ulp of a number is the distance between two neighbours of a dtype in its binade."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

#: bits of the fraction, and the exponent of the smallest normal number, by the name of the dtype
FORMATS = {"float16": (10, -14), "bfloat16": (7, -126), "float32": (23, -126), "float64": (52, -1022)}


def ulp(value: Any, dtype: Any) -> Array:
    """Return the distance of neighbours of `dtype` around `value`, as float64; the least for what is not finite."""
    fraction, least = FORMATS[dtype if isinstance(dtype, str) else np.dtype(dtype).name]
    value = np.nan_to_num(np.asarray(value, np.float64), posinf=0.0, neginf=0.0)
    exponent = np.where(value == 0, least, np.frexp(value)[1] - 1)
    return np.ldexp(1.0, np.maximum(exponent, least) - fraction)


def distances(got: Any, expected: Any, remainder: Any = 0.0) -> Array:
    """Return the distance of each element of `got` from `expected` (+ `remainder`), as float64.

    Equal special values are 0 apart, different ones infinitely far.
    """
    got, expected = np.asarray(got).astype(np.float64), np.asarray(expected).astype(np.float64)
    if got.shape != expected.shape:
        raise AssertionError(f"shape {got.shape} where {expected.shape} was expected")
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs((got - expected) - remainder)
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    special = ~np.isfinite(got) | ~np.isfinite(expected)
    return np.where(special, np.where(same, 0.0, np.inf), distance)


def errors(got: Any, expected: Any, dtype: Any, size: Any = None, remainder: Any = 0.0) -> Array:
    """Return `distances` in ulps that `size` (or `expected`) has in `dtype`."""
    with np.errstate(over="ignore"):
        return distances(got, expected, remainder) / ulp(expected if size is None else size, dtype)


def worst(got: Any, expected: Any, dtype: Any, size: Any = None, remainder: Any = 0.0) -> float:
    """Return the largest of `errors`; 0 for no numbers at all."""
    return float(errors(got, expected, dtype, size, remainder).max(initial=0.0))

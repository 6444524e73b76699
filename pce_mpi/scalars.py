"""Checks of arguments that are a number or a truth value: each returns it as Python's own type, or raises."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np


def integer(value: Any, name: str) -> int:
    """Return `value` as an int; `TypeError`, which names the argument, if it is no integer."""
    try:
        if isinstance(value, bool):  # a whole number to Python
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


def integers(value: Any, name: str) -> list[int]:
    """Return the integers in a sequence or an array of one axis, or one alone, as a list."""
    try:
        return [integer(each, name) for each in (value if np.ndim(value) else (value,))]
    except (TypeError, ValueError):  # np.ndim raises the second one
        raise TypeError(f"{name} must be an integer or a sequence of integers, got {value!r}") from None


def real(value: Any, name: str) -> float:
    """Return `value` as a float; `TypeError`, which names the argument, if it is no real number."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a 0-d array, as a learned scale comes
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a real number, got {value!r}")
    return float(value) + 0.0  # -0.0 is 0.0


def flag(value: Any, name: str) -> bool:
    """Return `value` as a bool; `TypeError`, which names the argument, if it is neither a bool nor an integer."""
    if not isinstance(value, int | np.bool | np.integer):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)

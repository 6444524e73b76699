"""Checks of arguments that are a number or a truth value, and of the state of the floating-point unit."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np


def integer(value: Any, name: str) -> int:
    """Return `value` as an int; `TypeError`, which names the argument, if it is no integer."""
    try:
        if isinstance(value, bool | np.bool):  # whole numbers to Python, and to NumPy before 2.2
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
    try:
        return float(value) + 0.0  # -0.0 is 0.0
    except OverflowError:
        raise ValueError(f"{name} must fit a float, got an integer of {int(value).bit_length()} bits") from None


def flag(value: Any, name: str) -> bool:
    """Return `value` as a bool; `TypeError`, which names the argument, if it is neither a bool nor an integer."""
    if not isinstance(value, int | np.bool | np.integer):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


# Variables, as the compiler of Python would compute with constants itself, in the state of that moment.
_ONE, _HALF_ULP, _LEAST_NORMAL, _LEAST, _LARGE = 1.0, 2.0**-53, 2.0**-1022, 2.0**-1074, 2.0**52


def check_floating_point() -> None:
    """Raise `RuntimeError` unless this thread rounds to nearest and keeps subnormal numbers.

    `fesetround` and `torch.set_flush_denormal` change that, and so does a library that was linked with -ffast-math, for
    the whole process, when it is loaded. Results then have other bits.
    """
    wrong = []
    if _ONE + _HALF_ULP != _ONE or _ONE + (_HALF_ULP + 0.5 * _HALF_ULP) == _ONE:
        wrong.append("does not round to nearest")
    if _LEAST_NORMAL * 0.5 == 0.0 or _LEAST * _LARGE == 0.0:
        wrong.append("takes subnormal numbers for 0")
    if wrong:
        raise RuntimeError(
            f"the floating-point unit {' and '.join(wrong)}, which gives results other bits: this process has changed "
            "its state, as fesetround, torch.set_flush_denormal(True) and libraries linked with -ffast-math do; set "
            "the state back"
        )

"""The state of the floating-point unit, as far as it decides bits: its rounding, and subnormal numbers."""

from __future__ import annotations

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

"""Values in messages, of which long ones lose their middle."""

from __future__ import annotations

from collections.abc import Sequence
import reprlib
from typing import Any

_LONG, _MANY = 100, 20
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _LONG


def shown(value: Any) -> str:
    """Return `repr(value)`, or the ends of a long or deep one."""
    return _repr.repr(value)


def shortened(text: str) -> str:
    """Return `text`, or the ends of a long one."""
    return text if len(text) <= 2 * _LONG else f"{text[:_LONG]}...{text[-_LONG:]}"


def bounded(text: str, most: int) -> str:
    """Return `text`, without its middle if it has more than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def names_shown(names: Sequence[Any]) -> str:
    """Return the first names as text for a message."""
    more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
    return ", ".join(map(shown, names[:_MANY])) + more

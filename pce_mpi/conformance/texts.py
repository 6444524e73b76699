"""Text for people to read: that of a candidate may have any length and any characters."""

from __future__ import annotations

import re
from typing import Any

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_CONTROL = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\t"), ord("\n")}, "\N{REPLACEMENT CHARACTER}")


def meant(**offer: Any) -> str:
    """Say what to declare where numbers or results of another kind are meant.

    >>> meant(direction="reverse")
    'where that is meant, declare it: @offers(direction="reverse")'
    """
    values = ", ".join(f"{name}={value!r}" for name, value in offer.items()).replace("'", '"')
    return f"where that is meant, declare it: @offers({values})"


def bounded(text: str, most: int) -> str:
    """Return `text`, without its middle if it has more than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def text_of(error: BaseException) -> str:
    """Return `str(error)`, or say that it raises."""
    try:
        return str(error)
    except Exception as another:  # its own, of its class
        return f"no text, as its __str__ raised {type(another).__name__}"


def visible(text: str) -> str:
    """Remove colours, and replace what else would steer a terminal."""
    return _COLOR.sub("", text).translate(_CONTROL)

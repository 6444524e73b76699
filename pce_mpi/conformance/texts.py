"""Text that a candidate wrote, which may have any length and any characters, for people to read."""

from __future__ import annotations

import re

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_CONTROL = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\t"), ord("\n")}, "\N{REPLACEMENT CHARACTER}")


def bounded(text: str, most: int) -> str:
    """Return `text`, without its middle if it has more than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def visible(text: str) -> str:
    """Remove colours, and replace what else would steer a terminal."""
    return _COLOR.sub("", text).translate(_CONTROL)

"""Types of arguments of the command line: each converts the text, or says what it expected."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

# More make no size, and Python refuses thousands of them.
_MOST_DIGITS = 100


def natural(text: str) -> int:
    """A whole number from 0 up."""
    return _whole(text, 0)


def positive(text: str) -> int:
    """A whole number from 1 up."""
    return _whole(text, 1)


def positive_real(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {_shown(text)}")
    return value


def writable_file(text: str) -> Path:
    """The path of a file that can be written, in a folder that is there."""
    path = Path(text)
    try:
        usable = not path.is_dir() and path.absolute().parent.is_dir()
    except OSError:  # of a name that no file can have
        usable = False
    if not usable:
        raise argparse.ArgumentTypeError(f"expected a file in a folder that is there, got {_shown(text)}")
    if not os.access(path if os.path.lexists(path) else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{_shown(text)} cannot be written")
    return path


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} up, got {_shown(text)}")
    return int(text)


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}... of {len(text)} characters"

"""How long ranks wait for each other, and the line that they write while they do."""

from __future__ import annotations

import contextlib
import os
import sys
from types import FrameType

import numpy as np

# The files of this package, and those of decorators, such as `numpy.errstate`, and of dispatch that lead to them.
_BETWEEN = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    os.path.dirname(np.__file__) + os.sep,
    contextlib.__file__,
)


def timeout_seconds() -> float:
    """Return how long a collective may wait, from `PCE_MPI_TIMEOUT`; `ValueError` if that is no positive number."""
    return _seconds("PCE_MPI_TIMEOUT", "600")


def notice_seconds() -> float:
    """Return how long a collective waits in silence, from `PCE_MPI_NOTICE`; `ValueError` as for the timeout."""
    return _seconds("PCE_MPI_NOTICE", "10")


def _seconds(variable: str, default: str) -> float:
    text = os.environ.get(variable, default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ValueError(f"{variable} must be a positive number of seconds, got {text!r}")
    return seconds


def say(line: str) -> None:
    """Write a line to standard error, which may be closed."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(f"pce_mpi: {line}", file=sys.stderr, flush=True)


def current_line() -> str:
    """Return the file and the line of the program that led to this call; "" outside functions of a program."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"

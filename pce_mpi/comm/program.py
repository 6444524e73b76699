"""The place of a thread in the program that its user wrote."""

from __future__ import annotations

import os
import sys
from threading import local
from types import FrameType
from typing import Any

# The functions that led to a call, from the outermost: the file and the first line of each, the line in it that led
# further, and the instruction.
Place = list[list[Any]]

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
# These call the program, and are no part of it.
_RUNNERS = (
    *(os.path.join(_PACKAGE, name, "") for name in ("cli", "conformance", "testing")),
    f"{os.sep}_pytest{os.sep}",
)
# How many functions of a place are told, from the outermost.
_MOST_FUNCTIONS = 40


class _Program(local):
    """The way of this thread: how many public functions it has called, the last of them, and the errors it has told."""

    def __init__(self) -> None:
        # Whoever notes a call does it in two lines: a function would be one more that each operation enters.
        self.count = self.errors = 0
        self.name = ""
        self.block = self.blocks = 0  # the number of the block of `Mesh.attempt`, 0 outside, and of the last
        self.thread = object()  # no other thread will have it, as it may have the number


program = _Program()


def place() -> Place:
    """Return the functions of the program that led to this call, with the file and the line of each."""
    frame: FrameType | None = sys._getframe(1)
    functions: Place = []
    while frame is not None:
        code = frame.f_code
        if any(runner in code.co_filename for runner in _RUNNERS):
            break
        if code.co_filename.startswith(_PACKAGE):
            functions.clear()
        else:
            functions.append([os.path.basename(code.co_filename), code.co_firstlineno, frame.f_lineno, frame.f_lasti])
        frame = frame.f_back
    return functions[: -_MOST_FUNCTIONS - 1 : -1]


def current_line() -> str:
    """Return the file and the line of the program that led to this call; "" outside functions of a program."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def lines_of(place: Place) -> list[list[Any]]:
    """Return a place without its instructions, which Python numbers otherwise where it runs them faster."""
    return [lines for *lines, _ in place]


# CPython notes a call at one of two instructions, as far apart at most, in bytes.
_CALL = 8


def is_before(one: Place, other: Place) -> bool:
    """Return whether one place comes before another one in the code of the function where the ways to them part.

    Lines do not tell: arguments on later lines are evaluated before a call, and those on its line too.
    """
    last, other_last = 0, 0  # the instructions of the last function that is the same on both ways
    for (*function, line, instruction), (*other_function, other_line, other_instruction) in zip(
        one, other, strict=False
    ):
        if function != other_function:
            break
        if line != other_line:
            return bool(instruction < other_instruction)
        last, other_last = instruction, other_instruction
    return last + _CALL < other_last

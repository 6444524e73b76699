"""Types of arguments of the command line: each converts the text, or says what it expected."""

import argparse
import os
from pathlib import Path
import shlex

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


def mesh_sizes(text: str) -> dict[str, int]:
    """The sizes of the dims of a mesh, such as data=512,model=8."""
    found = {}
    for part in text.split(","):
        dim, _, size = part.partition("=")
        if not dim.isidentifier() or dim in found:
            raise argparse.ArgumentTypeError(f"expected dims with sizes, such as data=512,model=8, got {_shown(text)}")
        found[dim] = positive(size)
    return found


def link(text: str) -> tuple[str, tuple[float, float]]:
    """A dim with the latency and the bandwidth of its links, such as data=5e-6,1e10."""
    dim, _, numbers = text.partition("=")
    latency, _, bandwidth = numbers.partition(",")
    if not dim.isidentifier():
        raise argparse.ArgumentTypeError(f"expected a dim with two numbers, such as data=5e-6,1e10, got {_shown(text)}")
    return dim, (positive_real(latency), positive_real(bandwidth))


def words(text: str) -> list[str]:
    """The words of a command line."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected words as for a shell: {error}") from None


def writable_file(text: str) -> Path:
    """The path of a file that can be written, in a folder that is there."""
    path = Path(text)
    try:
        usable = not path.is_dir() and path.absolute().parent.is_dir()
    except OSError:  # no file can have this name
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

"""Text for people to read, as that of a candidate may be of any kind, and the line of a stack that is its own."""

from collections.abc import Iterable
from pathlib import Path
import re
import sysconfig
import traceback
from typing import Any

from pce_mpi.text import bounded

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_CONTROL = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\t"), ord("\n")}, "\N{REPLACEMENT CHARACTER}")


def meant(**offer: Any) -> str:
    """Say what to declare where numbers or results of another kind are meant.

    >>> meant(direction="reverse")
    'where that is meant, declare it: @offers(direction="reverse")'
    """
    values = ", ".join(f"{name}={value!r}" for name, value in offer.items()).replace("'", '"')
    return f"where that is meant, declare it: @offers({values})"


def text_of(error: BaseException) -> str:
    """Return `str(error)`, or say that it raises."""
    try:
        return str(error)
    except Exception as another:  # its own, of its class
        return f"no text, as its __str__ raised {type(another).__name__}"


def visible(text: str) -> str:
    """Remove colours, and replace what else would steer a terminal."""
    return _COLOR.sub("", text).translate(_CONTROL)


_KIT = Path(__file__).parent
# The folder in which the user started the command, whatever the candidate does then.
try:
    _FOLDER = Path.cwd()
except FileNotFoundError:  # it has been removed
    _FOLDER = Path("/")
# The characters of an error that are shown.
_MOST_TEXT = 1000


def innermost(stack: str) -> str:
    """Return the innermost line that is the candidate's own rather than a package's; '' if there is none."""
    return _innermost(re.findall(r'File "(.+)", line (\d+) in (.+)', stack))


def error_text(error: BaseException) -> str:
    """Return the error in one line, with the candidate's innermost line that it came from."""
    first = text_of(error).strip().partition("\n")[0]
    text = bounded(f"{type(error).__name__}: {first}" if first else type(error).__name__, _MOST_TEXT)
    frames = reversed(traceback.extract_tb(error.__traceback__))
    place = _innermost((frame.filename, str(frame.lineno), frame.name) for frame in frames)
    return f"{text} at {place}" if place else text


def _innermost(frames: Iterable[tuple[str, str, str]]) -> str:
    standard = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    installed = ""
    for file, line, function in frames:
        path = Path(file)
        if file.startswith("<") or _KIT in path.parents:
            continue
        if "site-packages" in path.parts:
            packages = len(path.parts) - path.parts[::-1].index("site-packages")
            installed = installed or f"{Path(*path.parts[packages:])}:{line} in {function}"
        elif _KIT.parent in path.parents:
            installed = installed or f"{path.relative_to(_KIT.parents[1])}:{line} in {function}"
        elif not file.startswith(standard):
            shown = path.relative_to(_FOLDER) if path.is_relative_to(_FOLDER) else path
            return f"{shown}:{line} in {function}"
    return installed

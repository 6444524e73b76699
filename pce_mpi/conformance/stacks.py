"""Find the line of a stack that is the candidate's own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
import re
import sysconfig
import traceback

from pce_mpi.conformance.texts import bounded, text_of

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

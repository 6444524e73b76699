"""Write a file, so that a reader finds all of it there, or the one before."""

from __future__ import annotations

import io
import os
from pathlib import Path
import stat
import sys
from typing import TYPE_CHECKING

from pce_mpi.temporary_files import abandoned, new_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write(path: Path, text: str) -> None:
    """Replace `path` by a complete new file, or append to what is no regular file; raise `OSError`.

    The file is UTF-8; a character that UTF-8 has not, as half of a surrogate pair, is escaped.
    """
    _write(path, text.encode("utf-8", "backslashreplace"))


def write_figure(path: Path, figure: Figure) -> None:
    """Replace `path` as `write` does, by a picture in the format that its suffix names."""
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.removeprefix("."), dpi=150)
    _write(path, picture.getvalue())


def _write(path: Path, data: bytes) -> None:
    try:
        _replace(path, data)
    except OSError as error:
        error.filename = error.filename or str(path)  # that of a full disk names none
        raise


def _replace(path: Path, data: bytes) -> None:
    status = path.stat() if path.exists() else None
    if status is not None and (not stat.S_ISREG(status.st_mode) or _is_output(status)):
        with path.open("ab") as file:
            file.write(data)
        return
    place = Path(os.path.realpath(path))  # a link stays
    stem = f".{os.fsdecode(os.fsencode(place.name)[:200])}."
    for leftover in abandoned(place.parent, stem):
        leftover.unlink(missing_ok=True)
    beside, descriptor = new_file(place.parent, stem, 0o666)
    with os.fdopen(descriptor, "wb") as file:
        try:
            file.write(data)
            file.flush()
            if status is not None and stat.S_IMODE(status.st_mode) != stat.S_IMODE(os.fstat(descriptor).st_mode):
                os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
            os.replace(beside, place)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


def _is_output(status: os.stat_result) -> bool:
    """Return whether it is the file that standard output goes to, as /dev/stdout is."""
    try:
        return sys.stdout is not None and os.path.samestat(status, os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError):  # closed, or no file
        return False

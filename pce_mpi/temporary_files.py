"""Temporary files and folders, how a process finds those that a killed process left, and files that are replaced.

The process that makes one holds a lock on it (flock), which the kernel releases however that process ends. On some
shared file systems such locks are visible on one machine only, and others have none. Therefore the name has the machine
that made it; a file of another machine counts as abandoned if it has not changed for a week.
"""

from collections.abc import Callable, Iterator
import fcntl
from functools import cache
import os
from pathlib import Path
import platform
import re
import secrets
import stat
import sys
import time
import zlib

_WEEK = 7 * 24 * 3600.0
# Another process may remove a new file so many times in the moment before it is locked.
_ATTEMPTS = 10


def new_file(folder: Path, stem: str, mode: int) -> tuple[Path, int]:
    """Make a file with a new name, `stem` and 17 characters; it is locked while the descriptor is open.

    The descriptor reads and writes; the permissions are `mode` less the umask.
    """
    return _new(folder, stem, lambda path: os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode))


def new_folder(folder: Path, stem: str) -> tuple[Path, int]:
    """Make a folder as `new_file` makes a file; only this user may read it."""

    def make(path: Path) -> int:
        path.mkdir(0o700)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    return _new(folder, stem, make)


def abandoned(folder: Path, stem: str) -> Iterator[Path]:
    """Yield files and folders that ended processes of this user left; the caller removes each before the next."""
    name = re.compile(re.escape(stem) + "([0-9a-f]{8})-[0-9a-f]{8}")
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for path, match in ((folder / each, name.fullmatch(each)) for each in names):
        if match is None:
            continue
        try:
            descriptor = _opened(path)
        except OSError:
            continue  # another process was faster
        if descriptor is None:
            continue
        try:
            if _is_abandoned(path, descriptor, match[1]):
                yield path
        finally:
            os.close(descriptor)


def _new(folder: Path, stem: str, make: Callable[[Path], int]) -> tuple[Path, int]:
    problem: OSError | None = None
    for _ in range(_ATTEMPTS):
        path = folder / f"{stem}{_machine()}-{secrets.token_hex(4)}"
        try:
            return path, _locked(path, make)
        except (FileExistsError, FileNotFoundError) as error:
            problem = error
    assert problem is not None
    raise problem


def _locked(path: Path, make: Callable[[Path], int]) -> int:
    """Lock the descriptor that `make` returns; `FileNotFoundError` if another process was faster."""
    descriptor = make(path)
    try:
        if _lock(descriptor) is False or not os.path.samestat(os.stat(path), os.fstat(descriptor)):
            raise FileNotFoundError(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int) -> bool | None:
    """Lock a descriptor and return True, or False if another process holds the lock; None if there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def _opened(path: Path) -> int | None:
    """Open a file or folder so that it can be locked; None if it is not this user's, or is of another kind."""
    status = os.lstat(path)
    if status.st_uid != os.geteuid():
        return None
    if stat.S_ISREG(status.st_mode):
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    if stat.S_ISDIR(status.st_mode):
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    return None


def _is_abandoned(path: Path, descriptor: int, machine: str) -> bool:
    locked = _lock(descriptor)
    if locked is False:
        return False
    if locked and machine == _machine():
        return True
    try:
        changes = [each.stat().st_mtime for each in [path, *(path.iterdir() if path.is_dir() else ())]]
    except OSError:
        return False  # its files are changing now
    return time.time() - max(changes) > _WEEK


@cache
def _machine() -> str:
    """Return 8 characters that name the running kernel: its processes see each other's locks."""
    try:
        identity = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        identity = platform.node().encode()
    return f"{zlib.crc32(identity):08x}"


def replace_file(path: Path, text: str) -> None:
    """Replace `path` by a complete new file, or append to what is no regular file; raise `OSError`.

    The file is UTF-8; a character that UTF-8 has not, as half of a surrogate pair, is escaped.
    """
    try:
        _write_beside(path, text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        error.filename = error.filename or str(path)  # that of a full disk names none
        raise


def _write_beside(path: Path, data: bytes) -> None:
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

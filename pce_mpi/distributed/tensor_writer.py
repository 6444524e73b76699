"""A safetensors file while rank 0 writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
import errno
import os
from pathlib import Path
import stat
from typing import Any, BinaryIO
import zlib

import numpy as np

from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.tensor_files import (
    CODES,
    LONGEST_HEADER,
    header_of,
    kind_of_file,
    length_of_block,
    stored_dtype,
)
from pce_mpi.leftovers import abandoned, new_file

HostArray = np.ndarray[Any, Any]
Blocks = Sequence[tuple[tuple[slice, ...], HostArray]]  # parts of a global array and their places in it


class TensorWriter:
    """A temporary file, of its full length from the start, beside the file that it replaces at the end."""

    def __init__(self, path: Path, arrays: Mapping[str, DistArray]) -> None:
        self._replaced = _replaceable(path)
        self._entries, size = _entries(arrays)
        self._block = length_of_block(size)
        self._start = len(header_of(self._entries, self._block, [0] * -(-size // self._block)))
        if self._start > LONGEST_HEADER:
            raise ValueError(f"the header has {self._start} bytes, more than {LONGEST_HEADER}: use shorter names")
        self._path = Path(os.path.realpath(path))  # a link stays, and the file that it leads to is replaced
        folder, stem = self._path.parent, _stem(self._path.name)
        for leftover in abandoned(folder, stem):  # first, as the new file may need the space of these
            with suppress(OSError):
                leftover.unlink()
        # Only users who may read the final file may read the temporary one.
        self._temporary, descriptor = new_file(folder, stem, 0o666 if self._replaced is None else 0o600)
        self._file = os.fdopen(descriptor, "r+b")
        try:
            _reserve(self._file, self._start + size)
            self._bytes = np.memmap(self._file, np.uint8, "r+")
            self._data = {}
            for name, array in arrays.items():
                start, stop = (self._start + offset for offset in self._entries[name]["data_offsets"])
                self._data[name] = self._bytes[start:stop].view(stored_dtype(array.dtype)).reshape(array.shape)
        except BaseException:
            self.discard()
            raise

    def write(self, name: str, blocks: Blocks) -> None:
        """Write blocks of the array `name` to their places."""
        for where, block in blocks:
            self._data[name][where] = block

    def finish(self) -> None:
        """Add the checksums and put the file in its place, so that it is there after a power failure too."""
        starts = range(self._start, len(self._bytes), self._block)
        checksums = [zlib.crc32(self._bytes[start : start + self._block].data) for start in starts]
        header = header_of(self._entries, self._block, checksums)
        self._bytes[: self._start] = np.frombuffer(header, np.uint8)
        self._bytes.flush()
        if self._replaced is not None:
            _take_over(self._file.fileno(), self._replaced)
        os.fsync(self._file.fileno())
        os.replace(self._temporary, self._path)
        _flush_folder(self._path.parent)

    def discard(self) -> None:
        """Remove the temporary file if it is still there."""
        self._temporary.unlink(missing_ok=True)
        self._file.close()


def _replaceable(path: Path) -> os.stat_result | None:
    """Return the status of the regular file at `path`, if any; refuse any other file that a rename would destroy."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if kind := kind_of_file(status.st_mode):
        raise FileExistsError(errno.EEXIST, f"it is {kind}, and only a regular file is replaced")
    return status


def _stem(name: str) -> str:
    """Return the beginning of the temporary file's name, which has 17 more characters and at most 255 bytes."""
    return f".{os.fsdecode(os.fsencode(name)[:200])}."


def _take_over(descriptor: int, replaced: os.stat_result) -> None:
    """Give a file the mode of the one that it replaces and, if this user may, its owner and group."""
    for owner in (replaced.st_uid, -1), (-1, replaced.st_gid):
        with suppress(OSError):
            os.fchown(descriptor, *owner)
    mode = stat.S_IMODE(replaced.st_mode)
    if stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:  # file systems with one mode for all files refuse
        os.fchmod(descriptor, mode)


def _flush_folder(folder: Path) -> None:
    """Flush the names in `folder` to the disk, if its file system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return  # a folder may be writable but not readable
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _reserve(file: BinaryIO, size: int) -> None:
    """Reserve `size` bytes or raise `OSError`: a write to a mapped file on a full disk would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    for start in range(0, size, 2**20):
        file.write(bytes(min(2**20, size - start)))
    file.flush()
    file.seek(0)


def _entries(arrays: Mapping[str, DistArray]) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the entry of each array in the header, and the length of the data."""
    # In the library's order: dtypes with large elements first, so that every element is at a multiple of its size.
    ranked = list(CODES)
    order = sorted(arrays, key=lambda name: (-ranked.index(arrays[name].dtype.name), name))
    entries, end = {}, 0
    for name in order:
        array = arrays[name]
        start, end = end, end + array.size * array.dtype.itemsize
        entries[name] = {
            "dtype": CODES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
    return entries, end

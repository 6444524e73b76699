"""A safetensors file while rank 0 writes it.

The format is documented (https://github.com/huggingface/safetensors): 8 bytes with the length of the header, the header
in JSON, the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
import errno
import json
import math
import os
from pathlib import Path
import stat
from typing import Any, BinaryIO

import numpy as np

from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.tensor_files import CODES, kind_of_file
from pce_mpi.leftovers import abandoned, new_file

HostArray = np.ndarray[Any, Any]
Blocks = Sequence[tuple[tuple[slice, ...], HostArray]]  # parts of a global array and their places in it


class TensorWriter:
    """A temporary file, of its full length from the start, beside the file that it replaces in the end."""

    def __init__(self, path: Path, arrays: Mapping[str, DistArray]) -> None:
        self._replaced = _replaceable(path)
        header, offsets, size = _header(arrays)
        self._path = Path(os.path.realpath(path))  # a link stays, and what it leads to is replaced
        folder, stem = self._path.parent, _stem(self._path.name)
        for leftover in abandoned(folder, stem):  # first, as the new file may need their room
            with suppress(OSError):
                leftover.unlink()
        # Nobody may read the temporary file who may not read the final one.
        self._temporary, descriptor = new_file(folder, stem, 0o666 if self._replaced is None else 0o600)
        self._file = os.fdopen(descriptor, "r+b")
        try:
            _reserve(self._file, size)
            self._file.write(header)
            self._file.flush()
            self._bytes = np.memmap(self._file, np.uint8, "r+")
            self._data = {}
            for name, array in arrays.items():
                length = array.size * array.dtype.itemsize
                flat = self._bytes[offsets[name] : offsets[name] + length].view(_stored_dtype(array.dtype))
                self._data[name] = flat.reshape(array.shape)
        except BaseException:
            self.discard()
            raise

    def write_all(self, name: str, blocks: Blocks) -> None:
        """Write blocks of the array `name`, each when it arrives, so that one at a time is in memory."""
        for where, block in blocks:
            self.write(name, where, block)

    def write(self, name: str, where: tuple[slice, ...], block: HostArray) -> None:
        """Write `block` of the array `name` to its place."""
        self._data[name][where] = block

    def finish(self) -> None:
        """Put the file in its place, so that it is there after a power failure too."""
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
    """Return the status of the regular file at `path`, if any; refuse all else that a rename would destroy."""
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
    """Return the beginning of the temporary file's name, which may have 255 bytes, 17 of them its own."""
    return f".{os.fsdecode(os.fsencode(name)[:200])}."


def _take_over(descriptor: int, replaced: os.stat_result) -> None:
    """Give a file the mode of the one that it replaces and, if this user may, its owner and group."""
    for owner in (replaced.st_uid, -1), (-1, replaced.st_gid):
        with suppress(OSError):
            os.fchown(descriptor, *owner)
    mode = stat.S_IMODE(replaced.st_mode)
    if stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:  # some file systems have one mode for all, and refuse
        os.fchmod(descriptor, mode)


def _flush_folder(folder: Path) -> None:
    """Flush the names in `folder` to the disk, if its file system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return  # a folder may be writable and not readable
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


def _stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in the file, which is little-endian."""
    return dtype if dtype.name == "bfloat16" else dtype.newbyteorder("<")


def _header(arrays: Mapping[str, DistArray]) -> tuple[bytes, dict[str, int], int]:
    """Return the file up to its data, the start of each array in the file, and the length of the file."""
    # In the library's order: wide dtypes first, so that every element is at a multiple of its size.
    ranked = list(CODES)
    order = sorted(arrays, key=lambda name: (-ranked.index(arrays[name].dtype.name), name))
    entries, starts, end = {}, {}, 0
    for name in order:
        array = arrays[name]
        starts[name], end = end, end + math.prod(array.shape) * array.dtype.itemsize
        entries[name] = {
            "dtype": CODES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}, len(header) + end

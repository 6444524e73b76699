"""Safetensors files with checksums: their header, and reading parts of their arrays. A file may be broken or malicious.

The format is documented (https://github.com/huggingface/safetensors): 8 bytes with the length of the header, the header
in JSON, the data. The checksums, CRC-32 of the header and of each block of the data, are two texts in the metadata of
the header, which other readers skip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
import json
import math
import os
from pathlib import Path
import re
import stat
import sys
from types import TracebackType
from typing import Any, NoReturn, Self
import zlib

import numpy as np

from pce_mpi.arrays import HostArray, dtype_named
from pce_mpi.text import shortened, shown

# The format's names of dtypes, in the library's order.
CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
_NAMES = {code: name for name, code in CODES.items()}
_SIZES = {code: int((*re.findall(r"\d+", code), 8)[0]) // 8 for code in _NAMES}
_MOST_AXES = 64  # NumPy's arrays have no more

# The metadata with the checksum of the header, and that with the length of a block of the data and their checksums.
_OF_HEADER, _OF_DATA = "pce_mpi.header", "pce_mpi.data"
LONGEST_HEADER = 100_000_000  # as in the library
# The first bytes of files of other formats.
_OTHER_FORMATS = {
    rb"PK\x03\x04": "a zip archive, as .npz, .pt and .pth files are",
    rb"\x93NUMPY": "an array of np.save, a .npy file",
    rb"\x80[\x02-\x05]": "a pickle, as .pkl and older .pt and .pth files are",
    rb"\x08[\x01-\x1f]\x12": "a protocol buffer, as .onnx files are",
    rb"\{": "text, such as JSON",
}
# The number of bytes that are read at a time, unless a block is longer.
_AT_A_TIME = 2**18


def kind_of_file(mode: int) -> str:
    """Name the kind of a file with the mode `mode`; '' for a regular file."""
    if stat.S_ISREG(mode):
        return ""
    kinds = {
        "a character device": stat.S_ISCHR,
        "a block device": stat.S_ISBLK,
        "a named pipe": stat.S_ISFIFO,
        "a socket": stat.S_ISSOCK,
    }
    return next((kind for kind, is_one in kinds.items() if is_one(mode)), "no regular file")


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in a file, which is little-endian."""
    return dtype if dtype.kind == "V" else dtype.newbyteorder("<")


def length_of_block(size: int) -> int:
    """Return the bytes of a block of `size` bytes of data: 64 KiB, or more so that there are at most 65,536 blocks."""
    return 1 << max(16, (size >> 16).bit_length())


def header_of(entries: Mapping[str, Any], length: int, checksums: Sequence[int]) -> bytes:
    """Return a file up to its data; its length depends on the number of checksums alone."""
    blocks = " ".join([str(length), *(f"{checksum:08x}" for checksum in checksums)])
    metadata = {"__metadata__": {_OF_HEADER: "0" * 8, _OF_DATA: blocks}}
    text = json.dumps(metadata | dict(entries), separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text.replace(b"0" * 8, b"%08x" % zlib.crc32(text), 1)


@dataclass(frozen=True)
class _Entry:
    """An array of a file: its dtype as the format names it, and where its bytes are in the data."""

    code: str
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile:
    """An open file: if another file replaces it at `path`, this one is still read.

    `arrays` has the shape of each array by name, in the order of the file, `metadata` the texts that are no checksums,
    and `checksum` is that of the header. All bytes that are read are compared with their checksums, if the file has
    any. `ValueError` if it is no safetensors file, or has changed since it was written.
    """

    def __init__(self, path: Path) -> None:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(f"cannot load {str(path)!r}: it is a folder")
        if kind := kind_of_file(mode):  # opening a pipe would wait for a writer
            raise ValueError(f"cannot load {str(path)!r}: it is {kind}, and only a regular file can be loaded")
        self._path, self._descriptor = path, os.open(path, os.O_RDONLY)
        try:
            self._read_header()
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        os.close(self._descriptor)

    def _read_header(self) -> None:
        start = self._bytes_at(0, 8)
        length = int.from_bytes(start, "little")
        if length > LONGEST_HEADER:
            known = next((name for pattern, name in _OTHER_FORMATS.items() if re.match(pattern, start)), None)
            self._refuse(
                f"it is {known}; read it with its own library, and save the arrays as safetensors"
                if known
                else f"a header of {length} bytes is too long"
            )
        header = self._bytes_at(8, length)
        self._start, self._size = 8 + length, os.fstat(self._descriptor).st_size - 8 - length
        try:
            given = json.loads(header.decode(), object_pairs_hook=_each_once)
            metadata, self._entries = _parsed(given, self._size)
            self._block, self._checksums = length_of_block(self._size), _checksums(header, metadata, self._size)
            self.metadata = {name: text for name, text in metadata.items() if name not in (_OF_HEADER, _OF_DATA)}
        except (ValueError, RecursionError) as error:
            self._refuse(str(error))
        self.checksum = zlib.crc32(header)
        self.arrays = {name: entry.shape for name, entry in self._entries.items()}
        # The blocks that were read last: the next array may begin in them.
        self._first, self._held = 0, memoryview(b"")

    def _refuse(self, reason: str) -> NoReturn:
        raise ValueError(f"{str(self._path)!r} is not a safetensors file: {shortened(reason)}")

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the dtype of array `name`, as it is read."""
        code, shape = self._entries[name].code, self._entries[name].shape
        if code not in _NAMES:
            raise ValueError(
                f"{shown(name)} is {shortened(code)}, and only {', '.join(_NAMES)} can be read: name the arrays to load"
            )
        if math.prod(filter(None, shape)) * _SIZES[code] > sys.maxsize:  # without elements, as it fits the file
            raise ValueError(f"{shown(name)} has the shape {shown(shape)}, which no array of NumPy can have")
        try:
            return dtype_named(_NAMES[code])
        except TypeError:
            text = f"{shown(name)} is {code}: {_NAMES[code]} needs ml_dtypes: pip install 'pce_mpi[bf16]'"
            raise ImportError(text) from None

    def read(self, name: str, part: tuple[slice, ...] | None = None) -> HostArray:
        """Return a new array with `part` of array `name`: a slice with start and stop for each axis; None is all."""
        entry, dtype = self._entries[name], self.dtype(name)
        # A number is an array of one element here.
        shape = entry.shape or (1,)
        slices = part or tuple(slice(0, length) for length in shape)
        found = np.empty([each.stop - each.start for each in slices], dtype)
        if found.size:
            self._fill(found, entry.start, shape, slices)
        return found if entry.shape else found.reshape(())

    def read_rows(self, name: str, start: int, stop: int) -> HostArray:
        """Return a new array with rows of array `name`, all of whose axes but the last are taken for one."""
        *_, length = shape = self._entries[name].shape
        found = np.empty((stop - start, length), self.dtype(name))
        if found.size:
            rows = (math.prod(shape[:-1]), length)
            self._fill(found, self._entries[name].start, rows, (slice(start, stop), slice(0, length)))
        return found

    def _fill(self, found: HostArray, start: int, shape: tuple[int, ...], part: tuple[slice, ...]) -> None:
        """Fill `found` with a part of the array of `shape` whose bytes begin at `start` of the data."""
        (rows, *others), row = part, math.prod(shape[1:]) * found.dtype.itemsize
        if row > self._block:  # a row may have many bytes outside `part`
            for number, index in enumerate(range(rows.start, rows.stop)):
                self._fill(found[number], start + index * row, shape[1:], tuple(others))
            return
        count = max(1, _AT_A_TIME // row)
        for first in range(rows.start, rows.stop, count):
            stop = min(first + count, rows.stop)
            data = np.frombuffer(self._data(start + first * row, start + stop * row), stored_dtype(found.dtype))
            found[first - rows.start : stop - rows.start] = data.reshape(-1, *shape[1:])[(slice(None), *others)]

    def _data(self, start: int, stop: int) -> memoryview:
        """Return bytes of the data, read in whole blocks and compared with their checksums."""
        if not self._first <= start <= stop <= self._first + len(self._held):
            first, last = start // self._block, -(-stop // self._block)
            self._first, end = first * self._block, min(last * self._block, self._size)
            self._held = memoryview(b"")  # free it first: both at once may not fit
            self._held = memoryview(self._bytes_at(self._start + self._first, end - self._first))
            for number, expected in enumerate(self._checksums[first:last]):
                begin = number * self._block
                if zlib.crc32(self._held[begin : begin + self._block]) != expected:
                    self._held = memoryview(b"")
                    raise ValueError(
                        f"{str(self._path)!r} has changed since it was saved, or was not read right: the checksum of "
                        f"the {self._block} bytes from {self._start + self._first + begin} on differs"
                    )
        return self._held[start - self._first : stop - self._first]

    def _bytes_at(self, start: int, length: int) -> bytes:
        pieces = []
        while length:
            piece = os.pread(self._descriptor, length, start)
            if not piece:
                self._refuse(f"it ends {length} bytes early")
            pieces.append(piece)
            start, length = start + len(piece), length - len(piece)
        return b"".join(pieces)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict; no key may occur twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in its header")
    return found


def _parsed(header: Any, size: int) -> tuple[dict[str, str], dict[str, _Entry]]:
    """Return the metadata and the arrays of a header, in the order of the data, which has `size` bytes."""
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("its metadata are not texts by name")
    entries = {name: _entry(name, given) for name, given in header.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    end = 0
    for name, entry in ordered.items():
        if entry.start != end:
            raise ValueError(f"the data of {shown(name)} do not begin where others end")
        end = entry.stop
    if end != size:
        raise ValueError(f"its arrays have {end} bytes, and its data {size}")
    return metadata, ordered


def _entry(name: str, given: Any) -> _Entry:
    match given:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [start, stop]} if len(given) == 3 and all(
            type(number) is int and number >= 0 for number in (*shape, start, stop)
        ):
            fits = stop - start == math.prod(shape[:_MOST_AXES]) * _SIZES[code] if code in _SIZES else start <= stop
            if not fits or len(shape) > _MOST_AXES:
                raise ValueError(f"{shown(name)} is {shown(code)} {shown(shape)} and has the bytes {start} to {stop}")
            return _Entry(code, tuple(shape), start, stop)
    raise ValueError(f"the entry of {shown(name)} is not one of dtype, shape and two offsets")


def _checksums(header: bytes, metadata: Mapping[str, str], size: int) -> list[int]:
    """Return the checksum of each block of the data; none for a file that was made elsewhere."""
    if not any(name.startswith("pce_mpi.") for name in metadata):
        return []
    of_header, of_data = metadata.get(_OF_HEADER, ""), metadata.get(_OF_DATA, "")
    if f"{zlib.crc32(header.replace(of_header.encode(), b'0' * 8, 1)):08x}" != of_header:
        raise ValueError("its header has changed since it was saved, or was not read right")
    length, *blocks = of_data.split(" ")
    if int(length) != length_of_block(size) or len(blocks) != -(-size // int(length)):
        raise ValueError("its checksums do not fit its data")
    return [int(checksum, 16) for checksum in blocks]

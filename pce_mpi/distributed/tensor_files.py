"""Read safetensors files, with short errors that say what is wrong: a file may be broken or malicious."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
import os
from pathlib import Path
import reprlib
import stat
from typing import Any

# The format's names of dtypes, in the library's order.
CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
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

_LONG = 100
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _LONG


def shown(value: Any) -> str:
    """Return `repr(value)`, or the ends of a long or deep one."""
    return _repr.repr(value)


def shortened(text: str) -> str:
    """Return `text`, or the ends of a long one."""
    return text if len(text) <= 2 * _LONG else f"{text[:_LONG]}...{text[-_LONG:]}"


def dtype_name(name: str, stored: Any) -> str:
    """Return NumPy's name for the dtype of the array `name`; `ValueError` for one that no array here can have."""
    code = stored.get_dtype()
    if code not in _NAMES:
        raise ValueError(f"{shown(name)} is {code}, and only {', '.join(_NAMES)} can be read")
    return _NAMES[code]


def safetensors_library() -> Any:
    """Return the module; `ImportError` says what to install."""
    try:
        import safetensors
    except ImportError as error:
        raise ImportError("checkpoints need safetensors: pip install 'pce_mpi[checkpoint]'") from error
    return safetensors


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


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open the file at `path` with the library; `ValueError` if it is no safetensors file."""
    safetensors = safetensors_library()
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"cannot load {str(path)!r}: it is a folder")
    if kind := kind_of_file(mode):  # to open a pipe would wait for a writer
        raise ValueError(f"cannot load {str(path)!r}: it is {kind}, and only a regular file can be loaded")
    with path.open("rb"):
        pass  # Python's own error names the path
    try:
        file = safetensors.safe_open(path, "np")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{str(path)!r} is not a safetensors file: {shortened(str(error))}") from error
    with file:
        yield file

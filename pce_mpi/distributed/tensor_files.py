"""Safetensors files, whoever has written them: opened alike, with errors that say what is wrong and stay short."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
import os
from pathlib import Path
import reprlib
import stat
from typing import Any

# How the format calls the dtypes, in the order in which the library puts them.
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

# Names come from files, which may be broken or malicious.
_LONG = 100
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _LONG


def shown(value: Any) -> str:
    """`repr(value)`, or its ends where that is long or deep."""
    return _repr.repr(value)


def shortened(text: str) -> str:
    """`text`, or its ends where that is long."""
    return text if len(text) <= 2 * _LONG else f"{text[:_LONG]}...{text[-_LONG:]}"


def dtype_name(name: str, stored: Any) -> str:
    """NumPy's name for the dtype of an array called `name`; `ValueError` for one that no array here can have."""
    code = stored.get_dtype()
    if code not in _NAMES:
        raise ValueError(f"{shown(name)} is {code}, and only {', '.join(_NAMES)} can be read")
    return _NAMES[code]


def safetensors_library() -> Any:
    """The module; `ImportError` says what to install."""
    try:
        import safetensors
    except ImportError as error:
        raise ImportError("checkpoints need safetensors: pip install 'pce_mpi[checkpoint]'") from error
    return safetensors


def kind_of_file(mode: int) -> str:
    """What a file with the mode `mode` is, '' for a regular file."""
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
    """The file at `path`, as the library shows it; `ValueError` where it is none of safetensors."""
    safetensors = safetensors_library()
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"cannot load {str(path)!r}: it is a folder")
    if kind := kind_of_file(mode):  # before a pipe is waited for that nobody writes to
        raise ValueError(f"cannot load {str(path)!r}: it is {kind}, and only a regular file can be loaded")
    with path.open("rb"):
        pass  # for Python's own error, which names the path
    try:
        file = safetensors.safe_open(path, "np")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{str(path)!r} is not a safetensors file: {shortened(str(error))}") from error
    with file:
        yield file

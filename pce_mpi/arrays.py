"""Which array library an array belongs to, how foreign arrays come in, and what the dtypes mean.

NumPy arrays live on the host, CuPy arrays on a GPU. Everything else that speaks DLPack or the buffer protocol (torch,
jax, memoryview, array.array) is wrapped without a copy where that is possible. CuPy is imported only once such an array
has been seen, or GPUs are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
import sys
from types import ModuleType
from typing import Any

import numpy as np

__all__ = [
    "array_namespace",
    "as_array",
    "check_one_library",
    "compute_dtype_of",
    "cupy_of",
    "dtype_named",
    "import_cupy",
    "is_floating",
    "is_half",
    "is_real",
    "library_named",
    "to_host",
]


def cupy_of(value: Any) -> ModuleType | None:
    """CuPy, if `value` is an array of its; else None."""
    cupy = sys.modules.get("cupy")  # an array of CuPy's cannot exist before CuPy was imported
    return cupy if cupy is not None and isinstance(value, cupy.ndarray) else None


def array_namespace(array: Any) -> Any:
    """The library, numpy or cupy, that `array` belongs to."""
    return cupy_of(array) or np


def as_array(value: Any, name: str) -> Any:
    """`value` as a NumPy or CuPy array that shares its memory where that is possible.

    NumPy and CuPy arrays pass as they are. A tensor that speaks DLPack is wrapped where it lives (kDLCPU by NumPy,
    kDLCUDA by CuPy). Buffers and nested sequences become NumPy arrays. bfloat16 needs `ml_dtypes` on the host.

    Raises `TypeError`, naming the argument `name`, for what is no array.
    """
    if type(value) is np.ndarray or cupy_of(value) is not None:
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be lost; mask classes by logits of -inf instead")
    try:
        if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
            return _from_dlpack(value)
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise TypeError(f"{name} cannot be taken as an array: {error}") from error
    if array.dtype == object:
        remedy = ": take its .toarray()" if hasattr(value, "toarray") else ""  # the sparse matrices of SciPy and others
        raise TypeError(f"{name} must be an array of numbers, got {type(value).__name__}{remedy}")
    return array


def _from_dlpack(value: Any) -> Any:
    host = int(value.__dlpack_device__()[0]) == 1
    if "bfloat16" not in str(value.dtype):
        return np.from_dlpack(value) if host else import_cupy().from_dlpack(value)
    if not host:
        return import_cupy().from_dlpack(value)
    bfloat16 = _bfloat16()
    if bfloat16 is None:
        raise TypeError("bfloat16 on the host needs ml_dtypes: pip install 'pce_mpi[bf16]'")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        # NumPy's DLPack does not know bfloat16, but the same memory read as int16 may pass.
        return np.from_dlpack(value.view(torch.int16)).view(bfloat16)
    return np.asarray(value)


def import_cupy() -> ModuleType:
    """CuPy, imported; `ImportError` where it is not installed."""
    import cupy

    return cupy


def check_one_library(operands: Mapping[str, Any]) -> None:
    """Raise `TypeError` unless the arrays among `operands`, by their names, are all NumPy's or all CuPy's.

    What is no array counts for nothing: numbers may meet arrays of any library.
    """
    if "cupy" not in sys.modules:
        return
    places: dict[str, list[str]] = {}
    for name, value in operands.items():
        if cupy_of(value) is not None:
            places.setdefault("CuPy, on a GPU", []).append(name)
        elif isinstance(value, np.ndarray):
            places.setdefault("NumPy, on the host", []).append(name)
    if len(places) > 1:
        where = "; ".join(f"{', '.join(names)} ({place})" for place, names in places.items())
        raise TypeError(f"arrays of two libraries do not mix: {where}")


def _bfloat16() -> np.dtype[Any] | None:
    try:
        import ml_dtypes
    except ImportError:
        return None
    return np.dtype(ml_dtypes.bfloat16)


def dtype_named(name: str) -> np.dtype[Any]:
    """The dtype whose `name` is this; bfloat16 needs `ml_dtypes`."""
    return (_bfloat16() if name == "bfloat16" else None) or np.dtype(name)


def library_named(name: str) -> Any:
    """The array library, numpy or cupy, whose `__name__` is this."""
    return np if name == np.__name__ else import_cupy()


@cache
def is_half(dtype: np.dtype[Any]) -> bool:
    """Whether `dtype` is float16 or bfloat16: storage that no arithmetic is done in and MPI does not know."""
    # ml_dtypes' bfloat16 has kind 'V' and a name; comparing names spares importing a library that may be missing.
    return dtype.name in ("float16", "bfloat16") and dtype.isnative


@cache
def is_floating(dtype: np.dtype[Any]) -> bool:
    """Whether `dtype` is one of the four that logits may have: float16, bfloat16, float32, float64."""
    return is_half(dtype) or (dtype.name in ("float32", "float64") and dtype.isnative)


def is_real(dtype: np.dtype[Any]) -> bool:
    """Whether distributed arrays hold elements of `dtype`: bool, integers, and the four of `is_floating`."""
    return is_floating(dtype) or (dtype.kind in "iub" and dtype.isnative)


def compute_dtype_of(dtype: np.dtype[Any], requested: Any = None) -> np.dtype[Any]:
    """The dtype of the arithmetic on logits of `dtype`: float64 for float64, else float32, unless more is `requested`.

    Raises `TypeError` for a requested dtype other than float32 and float64, `ValueError` where it is narrower than
    the logits.
    """
    natural = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    if requested is None:
        return natural
    try:
        wanted = np.dtype(requested)
    except TypeError:
        wanted = None
    if wanted not in (np.float32, np.float64):
        raise TypeError(f"compute_dtype must be float32, float64 or None, got {requested!r}")
    if wanted.itemsize < natural.itemsize:
        raise ValueError(f"compute_dtype {wanted} would lose bits of {dtype} logits")
    return wanted


def to_host(array: Any) -> np.ndarray[Any, Any]:
    """`array` as a NumPy array: itself, or a copy from the GPU once the work that fills it is done."""
    cupy = cupy_of(array)
    return array if cupy is None else cupy.asnumpy(array)

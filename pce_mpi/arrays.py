"""Which array library an array belongs to, how foreign arrays come in, and what the dtypes mean.

NumPy arrays live on the host, CuPy arrays on a GPU. Everything else that speaks DLPack or the buffer protocol (torch,
jax, memoryview, array.array) is wrapped without a copy where that is possible. This is the only file outside
`kernels/` that names cupy, and cupy is imported only once such an array has been seen.
"""

from __future__ import annotations

from functools import cache
import sys
from types import ModuleType
from typing import Any

import numpy as np

__all__ = [
    "add_rows",
    "array_namespace",
    "as_array",
    "compute_dtype_of",
    "dtype_named",
    "is_floating",
    "is_half",
    "keep_freed_memory",
    "library_named",
    "overlaps_itself",
    "same_memory",
    "shares_memory",
    "to_host",
]

# Bounds the search of numpy.shares_memory, which is exponential in the worst case; views that people make are settled
# in a few steps.
_OVERLAP_WORK: Any = 100_000


def _cupy_of(value: Any) -> ModuleType | None:
    cupy = sys.modules.get("cupy")  # an array of CuPy's cannot exist before CuPy was imported
    return cupy if cupy is not None and isinstance(value, cupy.ndarray) else None


def array_namespace(array: Any) -> Any:
    """The library, numpy or cupy, that `array` belongs to."""
    return _cupy_of(array) or np


def as_array(value: Any, name: str) -> Any:
    """`value` as a NumPy or CuPy array that shares its memory where that is possible.

    NumPy and CuPy arrays pass as they are. A tensor that speaks DLPack is wrapped where it lives (kDLCPU by NumPy,
    kDLCUDA by CuPy). Buffers and nested sequences become NumPy arrays. bfloat16 needs `ml_dtypes` on the host.

    Raises `TypeError`, naming the argument `name`, for what is no array.
    """
    if type(value) is np.ndarray or _cupy_of(value) is not None:
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
        raise TypeError(f"{name} must be an array of numbers, got {type(value).__name__}")
    return array


def _from_dlpack(value: Any) -> Any:
    host = int(value.__dlpack_device__()[0]) == 1
    if "bfloat16" not in str(value.dtype):
        return np.from_dlpack(value) if host else _import_cupy().from_dlpack(value)
    if not host:
        return _import_cupy().from_dlpack(value)
    bfloat16 = _bfloat16()
    if bfloat16 is None:
        raise TypeError("bfloat16 on the host needs ml_dtypes: pip install 'pce_mpi[bf16]'")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        # NumPy's DLPack does not know bfloat16, but the same memory read as int16 may pass.
        return np.from_dlpack(value.view(torch.int16)).view(bfloat16)
    return np.asarray(value)


def _import_cupy() -> ModuleType:
    import cupy

    return cupy


def _bfloat16() -> np.dtype[Any] | None:
    try:
        import ml_dtypes
    except ImportError:
        return None
    return np.dtype(ml_dtypes.bfloat16)


def keep_freed_memory() -> None:
    """Let the C library keep up to 64 MiB that were freed, rather than give them back and take them again every step.

    glibc gives back what exceeds twice the largest block that it has seen freed, of up to 32 MiB. So this frees one
    of 32 MiB, of which no page was ever touched. A training step of 50 ms takes about 5 % less.
    """
    np.empty(2**25 - 2**16, np.uint8)


def dtype_named(name: str) -> np.dtype[Any]:
    """The dtype whose `name` is this; bfloat16 needs `ml_dtypes`."""
    return (_bfloat16() if name == "bfloat16" else None) or np.dtype(name)


def library_named(name: str) -> Any:
    """The array library, numpy or cupy, whose `__name__` is this."""
    return np if name == np.__name__ else _import_cupy()


@cache
def is_half(dtype: np.dtype[Any]) -> bool:
    """Whether `dtype` is float16 or bfloat16: storage that no arithmetic is done in and MPI does not know."""
    # ml_dtypes' bfloat16 has kind 'V' and a name; comparing names spares importing a library that may be missing.
    return dtype.name in ("float16", "bfloat16") and dtype.isnative


@cache
def is_floating(dtype: np.dtype[Any]) -> bool:
    """Whether `dtype` is one of the four that logits may have: float16, bfloat16, float32, float64."""
    return is_half(dtype) or (dtype.name in ("float32", "float64") and dtype.isnative)


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
    cupy = _cupy_of(array)
    return array if cupy is None else cupy.asnumpy(array)


def add_rows(target: Any, rows: Any, values: Any) -> None:
    """Add each of `values` to its row of `target`: target[rows[i]] += values[i], for rows that repeat as well.

    `target` (v, d), `rows` (n,) integers in [0, v), `values` (n, d), all of one library. On the host, equal arguments
    give equal bits, as the values of a row are summed in their order and then added.
    """
    xp = array_namespace(target)
    if xp is not np:
        xp.add.at(target, rows, values)
        return
    order = np.argsort(rows, kind="stable")
    met, first = np.unique(rows[order], return_index=True)
    if met.size:  # reduceat knows no empty arrays
        target[met] += np.add.reduceat(values[order], first)


def same_memory(a: Any, b: Any) -> bool:
    """Whether `a` and `b` are one array: the same elements at the same addresses in the same order."""
    return a is b or (
        type(a) is type(b)
        and a.shape == b.shape
        and a.strides == b.strides
        and a.dtype == b.dtype
        and _address(a) == _address(b)
    )


def overlaps_itself(array: Any) -> bool:
    """Whether writing to one element of `array` may change another, as in a broadcast or a sliding window."""
    if array.size == 0:
        return False
    reach = 0  # from the first to past the last byte of what the axes so far cover
    for stride, length in sorted(
        (abs(stride), length) for stride, length in zip(array.strides, array.shape, strict=True)
    ):
        if length > 1:
            if stride < max(reach, array.dtype.itemsize):
                return True
            reach = max(reach, array.dtype.itemsize) + stride * (length - 1)
    return False


def shares_memory(a: Any, b: Any) -> bool:
    """Whether writing to `a` may change `b`."""
    xp = array_namespace(a)
    if xp is not array_namespace(b):
        return False
    if xp is not np:
        return bool(xp.shares_memory(a, b))
    try:
        return bool(np.shares_memory(a, b, max_work=_OVERLAP_WORK))
    except np.exceptions.TooHardError:
        return True


def _address(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)

"""Which array library an array belongs to, how foreign arrays come in, and what the dtypes mean.

NumPy arrays live on the host, CuPy arrays on a GPU. Everything else that speaks DLPack or the buffer protocol (torch,
jax, memoryview, array.array) is wrapped without a copy where that is possible. This is the only file outside
`kernels/` that names cupy, and cupy is imported only once such an array has been seen, or GPUs are asked for.

On a GPU work goes to the current stream, and what leaves it for MPI has been waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
import sys
from types import ModuleType
from typing import Any

import numpy as np

__all__ = [
    "GPU",
    "add_rows",
    "array_namespace",
    "as_array",
    "check_on_current_gpu",
    "check_one_library",
    "compute_dtype_of",
    "cuda_versions",
    "dtype_named",
    "finish_work",
    "from_pinned",
    "gpu_namespace",
    "gpus",
    "is_floating",
    "is_half",
    "is_real",
    "keep_freed_memory",
    "library_named",
    "overlaps_itself",
    "pinned",
    "same_memory",
    "shares_memory",
    "take_gpu",
    "to_host",
    "to_pinned",
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
        remedy = ": take its .toarray()" if hasattr(value, "toarray") else ""  # the sparse matrices of SciPy and others
        raise TypeError(f"{name} must be an array of numbers, got {type(value).__name__}{remedy}")
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


def check_one_library(operands: Mapping[str, Any]) -> None:
    """Raise `TypeError` unless the arrays among `operands`, by their names, are all NumPy's or all CuPy's.

    What is no array counts for nothing: numbers may meet arrays of any library.
    """
    if "cupy" not in sys.modules:
        return
    places: dict[str, list[str]] = {}
    for name, value in operands.items():
        if _cupy_of(value) is not None:
            places.setdefault("CuPy, on a GPU", []).append(name)
        elif isinstance(value, np.ndarray):
            places.setdefault("NumPy, on the host", []).append(name)
    if len(places) > 1:
        where = "; ".join(f"{', '.join(names)} ({place})" for place, names in places.items())
        raise TypeError(f"arrays of two libraries do not mix: {where}")


def check_on_current_gpu(operands: Mapping[str, Any]) -> None:
    """Raise `ValueError` for an array among `operands`, by their names, that is on another GPU than the current one.

    A kernel that was handed its address would bring down all of the process's work on GPUs.
    """
    for name, value in operands.items():
        cupy = _cupy_of(value)
        if cupy is not None and value.device.id != (current := cupy.cuda.Device().id):
            raise ValueError(
                f"{name} must be on the current GPU, {current}, got an array on GPU {value.device.id}: "
                f"choose it by cupy.cuda.Device({value.device.id})"
            )


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
    cupy = _cupy_of(array)
    return array if cupy is None else cupy.asnumpy(array)


def pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An uninitialized NumPy array in memory that GPUs copy to and from at full speed.

    CuPy's pool keeps such memory and hands it out again once nothing refers to it: not while MPI may still use it.
    """
    import cupyx

    return cupyx.empty_pinned(shape, dtype) if 0 not in shape else np.empty(shape, dtype)


def to_pinned(array: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A copy of a CuPy array in pinned memory, in C order and as `dtype`, once the work that fills it is done."""
    host = pinned(array.shape, dtype)
    if array.size:
        array_namespace(array).ascontiguousarray(array, dtype).reshape(host.shape).get(out=host)
    return host


def from_pinned(host: np.ndarray[Any, Any], like: Any) -> Any:
    """A copy of `host` on the GPU, in the library and the dtype of `like`; `host` is free to be used again."""
    xp = array_namespace(like)
    array = xp.empty(host.shape, host.dtype)
    if host.size:
        array.set(host)
        finish_work(array)
    return array.astype(like.dtype, copy=False)


def finish_work(array: Any) -> None:
    """Wait for what has been started on the current stream, where `array` is on a GPU."""
    cupy = _cupy_of(array)
    if cupy is not None:
        cupy.cuda.get_current_stream().synchronize()


@dataclass(frozen=True)
class GPU:
    """One GPU that this process sees; its memory in bytes."""

    name: str
    memory: int
    compute_capability: str


def gpus() -> list[GPU]:
    """The GPUs that CuPy sees, in its order. Raises `RuntimeError` with the reason where it sees none."""
    if "cupy" not in sys.modules and find_spec("cupy") is None:
        raise RuntimeError("CuPy is not installed")
    try:
        runtime = _import_cupy().cuda.runtime
        found = [runtime.getDeviceProperties(index) for index in range(runtime.getDeviceCount())]
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise RuntimeError(f"CuPy is installed, but sees none: {reason}") from error
    if not found:
        raise RuntimeError("CuPy is installed, but sees none: is CUDA_VISIBLE_DEVICES empty?")
    return [GPU(each["name"].decode(), each["totalGlobalMem"], f"{each['major']}.{each['minor']}") for each in found]


def gpu_namespace() -> Any:
    """The library of arrays on a GPU, imported."""
    return _import_cupy()


def take_gpu(index: int) -> None:
    """Make the GPU of this number the one that CuPy's work goes to."""
    _import_cupy().cuda.Device(index).use()


def cuda_versions() -> dict[str, str]:
    """The versions of CUDA that the driver and CuPy's runtime have, such as "13.0"; "none" without a driver."""
    runtime = _import_cupy().cuda.runtime
    found = {"driver": runtime.driverGetVersion(), "runtime": runtime.runtimeGetVersion()}
    return {name: f"{number // 1000}.{number % 1000 // 10}" if number else "none" for name, number in found.items()}


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
    if array_namespace(a) is not array_namespace(b):
        return False
    if array_namespace(a) is not np:  # CuPy's own makes a list of the addresses of all elements, on the GPU
        a, b = (np.asarray(_Addresses(array)) for array in (a, b))
    try:
        return bool(np.shares_memory(a, b, max_work=_OVERLAP_WORK))
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """Shows NumPy where an array on a GPU lies; never to be read from."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (_address(array), True),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.dtype.itemsize}",
        }


def _address(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)

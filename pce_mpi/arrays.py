"""Array libraries (NumPy on the host, CuPy on GPUs, hollow arrays nowhere), conversion of other arrays, and dtypes.

Arrays that support DLPack or the buffer protocol (torch, jax, memoryview, array.array) are wrapped, without a copy if
possible. CuPy is imported only if an array is on a GPU, or if GPUs are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
import math
import sys
from types import ModuleType
from typing import Any
import zlib

import numpy as np

from pce_mpi.hollow import LIBRARY, Hollow

Array = Any  # numpy.ndarray or cupy.ndarray
HostArray = np.ndarray[Any, Any]
Shape = tuple[int, ...]
DType = np.dtype[Any]


def cupy_of(value: Any) -> ModuleType | None:
    """Return CuPy if `value` is a CuPy array, else None."""
    cupy = sys.modules.get("cupy")  # there is no CuPy array before CuPy is imported
    return cupy if cupy is not None and isinstance(value, cupy.ndarray) else None


def array_namespace(array: Any) -> Any:
    """Return the library of `array`: numpy, cupy, or that of hollow arrays."""
    return np if type(array) is np.ndarray else LIBRARY if type(array) is Hollow else cupy_of(array) or np


def as_array(value: Any, name: str) -> Any:
    """Convert `value` to a NumPy or CuPy array, which shares its memory if possible.

    NumPy and CuPy arrays are returned as they are. A tensor that supports DLPack becomes a NumPy array on the host and
    a CuPy array on a GPU. Buffers and nested sequences become NumPy arrays. bfloat16 on the host needs `ml_dtypes`.
    A tensor of torch with the negative bit is copied.
    Raises `TypeError`, which names the argument `name`, if `value` is no array of numbers, and `ValueError` if it is at
    an address at which no GPU can read it.
    """
    if type(value) in (np.ndarray, Hollow):
        return value
    if cupy_of(value) is not None:
        _check_address(value, name)
        return value
    if isinstance(value, np.ma.MaskedArray):
        filled = ".filled(ignore_index)" if name == "targets" else ".filled(value), as -inf masks the class of a logit"
        raise TypeError(f"{name} is a masked array, whose mask would be lost; take {filled}")
    try:
        if not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
            return _from_dlpack(value)
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise TypeError(f"{name} cannot be taken as an array: {error}") from error
    if array.dtype == object:
        remedy = ": take its .toarray()" if hasattr(value, "toarray") else ""  # such as a sparse matrix
        raise TypeError(f"{name} must be an array of numbers, got {type(value).__name__}{remedy}")
    return array


def _check_address(array: Any, name: str) -> None:
    """Raise `ValueError` if the item size does not divide every address: a GPU that reads there ends all of CUDA."""
    size = array.dtype.itemsize
    steps = (stride for stride, length in zip(array.strides, array.shape, strict=True) if length > 1)
    if array.size and any(address % size for address in (array.data.ptr, *steps)):
        raise ValueError(
            f"{name} has elements of {size} bytes at addresses that are no multiples of {size}, as in a view of bytes: "
            "no GPU can read them there; copy the bytes to an array of their own"
        )


def _from_dlpack(value: Any) -> Any:
    torch: Any = sys.modules.get("torch")
    of_torch = torch is not None and isinstance(value, torch.Tensor)
    if of_torch:
        if value.requires_grad:
            if torch.is_grad_enabled():
                raise TypeError(
                    "it requires a gradient, which torch could not follow: call this within a torch.autograd.Function, "
                    "as examples/torch_loss.py does, or take .detach() here and the gradient from "
                    "softmax_cross_entropy_value_and_grad or its kin"
                )
            value = value.detach()
        value = _plain(value, torch)
    array: Any
    if int(value.__dlpack_device__()[0]) != 1:
        array = import_cupy().from_dlpack(value)
        is_null = not array.data.ptr
    elif "bfloat16" not in str(value.dtype):
        array = _on_host(value, of_torch)
        is_null = array.flags.owndata  # NumPy has allocated what the null pointer has not
    elif (bfloat16 := _of_ml_dtypes("bfloat16")) is None:
        raise TypeError("bfloat16 on the host needs ml_dtypes: pip install 'pce_mpi[bf16]'")
    elif of_torch:  # NumPy's DLPack has no bfloat16, so the memory passes as int16
        array = _on_host(value.view(torch.int16), of_torch).view(bfloat16)
        is_null = array.base.flags.owndata
    else:
        return np.asarray(value)
    if is_null and array.size:
        raise TypeError(f"{type(value).__name__} gives a null pointer for {array.size} elements, which are nowhere")
    return array


#: whether this NumPy takes all that comes by DLPack for read-only
DLPACK_IS_READ_ONLY = np.lib.NumpyVersion(np.__version__) < "2.1.0"


def _on_host(value: Any, of_torch: bool) -> Any:
    array = np.from_dlpack(value)
    return value.numpy() if of_torch and not array.flags.writeable else array  # tensors of torch never are read-only


def _plain(tensor: Any, torch: Any) -> Any:
    """Return a tensor of torch whose memory has its elements; DLPack does not tell of those that wrap others."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return tensor.resolve_conj().resolve_neg()
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    waiting: Any = getattr(collectives, "AsyncCollectiveTensor", ())
    if isinstance(tensor, waiting):
        return _plain(tensor.wait(), torch)
    remedy = ".to_local() or .full_tensor()" if hasattr(tensor, "to_local") else "the plain tensor that it stands for"
    raise TypeError(f"a {kind.__name__} of torch may have its elements elsewhere: take {remedy}")


def import_cupy() -> ModuleType:
    """Import CuPy; `ImportError` if it is not installed."""
    import cupy

    return cupy


def check_one_library(operands: Mapping[str, Any]) -> None:
    """Raise `TypeError` if `operands`, by name, have arrays of both NumPy and CuPy; numbers fit both."""
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


def _of_ml_dtypes(name: str) -> np.dtype[Any] | None:
    try:
        import ml_dtypes
    except ImportError:
        return None
    return np.dtype(getattr(ml_dtypes, name))


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype with this `name`; bfloat16 and those of 8 bits need `ml_dtypes`."""
    return (_of_ml_dtypes(name) if name.startswith(("bfloat16", "float8")) else None) or np.dtype(name)


def library_named(name: str) -> Any:
    """Return the array library with this `__name__`, numpy or cupy."""
    return np if name == np.__name__ else import_cupy()


@cache
def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name of `dtype`, cached, as NumPy makes a new string each time."""
    return dtype.name


@cache
def is_half(dtype: np.dtype[Any]) -> bool:
    """Return whether `dtype` is float16 or bfloat16, in which nothing is computed and MPI sends nothing."""
    # By name, as ml_dtypes may be missing.
    return dtype.name in ("float16", "bfloat16") and dtype.isnative


@cache
def is_float8(dtype: np.dtype[Any]) -> bool:
    """Return whether `dtype` is a floating-point one of 8 bits, whose arrays are stored, moved and converted alone."""
    return dtype.name.startswith("float8")


@cache
def is_floating(dtype: np.dtype[Any]) -> bool:
    """Return whether `dtype` is one that logits may have: float16, bfloat16, float32 or float64."""
    return is_half(dtype) or (dtype.name in ("float32", "float64") and dtype.isnative)


#: the dtypes of distributed arrays, in words
REAL = "bool, integers, float16, bfloat16, float32 or float64 in native byte order"


@cache
def is_real(dtype: np.dtype[Any]) -> bool:
    """Return whether distributed arrays may have `dtype`: bool, integers, and the four of `is_floating`."""
    return is_floating(dtype) or (dtype.kind in "iub" and dtype.isnative)


def compute_dtype_of(dtype: np.dtype[Any], requested: Any = None) -> np.dtype[Any]:
    """Return the dtype to compute with logits of `dtype` in: `requested`, or float64 for float64, else float32.

    Raises `TypeError` if `requested` is neither float32 nor float64, `ValueError` if it is narrower than the logits.
    """
    natural = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    if requested is None:
        return natural
    try:
        wanted = np.dtype(requested)
    except (TypeError, ValueError):
        wanted = None
    if wanted not in (np.float32, np.float64):
        raise TypeError(f"compute_dtype must be float32, float64 or None, got {requested!r}")
    if wanted.itemsize < natural.itemsize:
        raise ValueError(f"compute_dtype {wanted} would lose bits of {dtype} logits")
    return wanted


@cache
def result_type(*dtypes: Any) -> np.dtype[Any]:
    """Return the dtype of an operation on arrays of `dtypes`: NumPy's, whose ufuncs know it for bfloat16 too.

    With integers of 16 bits and more, and with float16, bfloat16 has no common dtype: there it stands for float32.
    """
    try:
        return np.result_type(*dtypes)
    except TypeError:
        return np.result_type(*(np.float32 if each.name == "bfloat16" else each for each in dtypes))


def in_one_dtype(*arrays: Any) -> list[Any]:
    """Return arrays in the `result_type` of all of them."""
    dtype = result_type(*(each.dtype for each in arrays))
    return [each.astype(dtype, copy=False) for each in arrays]


def is_true(array: Any) -> bool:
    """Return whether an array of one bool is true; a hollow one is not."""
    return not isinstance(array, Hollow) and bool(array)


def number_of(array: Any) -> Any:
    """Return the only element of an array as a Python number; `nan` for a hollow one."""
    return math.nan if isinstance(array, Hollow) else array.item()


def to_host(array: Any) -> np.ndarray[Any, Any]:
    """Return `array` on the host: a NumPy array itself, or a copy from the GPU once its work is done."""
    if type(array) is np.ndarray:
        return array
    cupy = cupy_of(array)
    return array if cupy is None else cupy.asnumpy(array)


def checksum_of(array: Any) -> int:
    """Return a checksum of the bits of an array: on the host by their order too, on a GPU of their sum.

    Reading that of an array on a GPU waits for the GPU.
    """
    xp = array_namespace(array)
    bits = xp.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
    return zlib.crc32(bits.data) if xp is np else number_of(bits.sum(dtype=np.uint64)) % 2**62


@cache
def numpy_dtype(name: str, floating: bool = True) -> Callable[..., np.dtype[Any]]:
    """Make a function that gives the dtype of NumPy's function `name`, which depends on the size of integers.

    Without `floating`, NumPy's function raises its own error for floating-point numbers.
    """

    @cache
    def dtype_of(*dtypes: np.dtype[Any]) -> np.dtype[Any]:
        dtype = result_type(*dtypes)
        if floating and is_floating(dtype):
            return dtype
        return getattr(np, name)(*(np.ones(1, each) for each in dtypes)).dtype

    return dtype_of


# numpy.shares_memory is exponential in the worst case; usual views take a few steps.
_OVERLAP_WORK: Any = 100_000


def owned(local: Any, foreign: Any) -> Any:
    """Return `local` in memory of its own, in C order, in the library of `foreign`."""
    return array_namespace(foreign).array(local, order="C")


def same_memory(a: Any, b: Any) -> bool:
    """Return whether `a` and `b` have the same elements at the same addresses in the same order.

    Two arrays without elements share nothing, although on a GPU both have the address 0.
    """
    return a is b or (
        type(a) is type(b)
        and a.size > 0
        and a.shape == b.shape
        and a.strides == b.strides
        and a.dtype == b.dtype
        and _address(a) == _address(b)
    )


def overlaps_itself(array: Any) -> bool:
    """Return whether writing to one element of `array` may change another, as in a broadcast or a sliding window."""
    if array.size == 0:
        return False
    reach = 0  # bytes from the first to past the last element along the axes so far
    for stride, length in sorted(
        (abs(stride), length) for stride, length in zip(array.strides, array.shape, strict=True)
    ):
        if length > 1:
            if stride < max(reach, array.dtype.itemsize):
                return True
            reach = max(reach, array.dtype.itemsize) + stride * (length - 1)
    return False


def shares_memory(a: Any, b: Any) -> bool:
    """Return whether writing to `a` may change `b`."""
    if array_namespace(a) is not array_namespace(b) or a.size == 0 or b.size == 0:
        return False
    if array_namespace(a) is not np:  # cupy.shares_memory lists the addresses of all elements, on the GPU
        if a.flags.c_contiguous and b.flags.c_contiguous:
            return _address(a) - b.nbytes < _address(b) < _address(a) + a.nbytes
        a, b = (np.asarray(_Addresses(array)) for array in (a, b))
    try:
        return bool(np.shares_memory(a, b, max_work=_OVERLAP_WORK))
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """An object that shows NumPy the addresses of an array on a GPU; never read from it."""

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

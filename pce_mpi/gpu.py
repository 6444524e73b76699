"""GPUs: list and choose them, copy through pinned host memory, and wait for their work.

Work goes to the current stream. CuPy is imported only if a GPU is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
import math
import sys
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, cupy_of, import_cupy, to_host
from pce_mpi.hollow import Hollow

# An array of so many axes that more than this would be shown is not shown.
_MOST_SHOWN = 10_000


def check_on_current_gpu(operands: Mapping[str, Any]) -> None:
    """Raise `ValueError` if one of `operands`, by name, is on another GPU than the current one.

    A kernel that reads from another GPU's address breaks the process's CUDA context.
    """
    for name, value in operands.items():
        cupy = cupy_of(value)
        if cupy is not None and value.device.id != (current := cupy.cuda.Device().id):
            raise ValueError(
                f"{name} must be on the current GPU, {current}, got an array on GPU {value.device.id}: "
                f"choose it by cupy.cuda.Device({value.device.id})"
            )


def pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Allocate a NumPy array in pinned memory, which GPUs copy to and from at full speed.

    CuPy's pool reuses the memory as soon as nothing refers to the array: keep a reference while MPI uses it.
    """
    import cupyx

    return cupyx.empty_pinned(shape, dtype) if 0 not in shape else np.empty(shape, dtype)


def to_pinned(array: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Copy a CuPy array to pinned memory, in C order and as `dtype`, once the work that fills it is done."""
    host = pinned(array.shape, dtype)
    if array.size:
        array_namespace(array).ascontiguousarray(array, dtype).reshape(host.shape).get(out=host)
    return host


def from_pinned(host: np.ndarray[Any, Any], like: Any) -> Any:
    """Copy `host` to the GPU, in the library and the dtype of `like`; `host` may be reused afterwards."""
    xp = array_namespace(like)
    array = xp.empty(host.shape, host.dtype)
    if host.size:
        array.set(host)
        finish_work(array)
    return array.astype(like.dtype, copy=False)


class Download:
    """A copy of a CuPy array to the host, under way behind the work that fills the array."""

    _host: Any = None
    _end: Any = None

    def __init__(self, array: Any) -> None:
        self.array, end = array, array_namespace(array).cuda.Event(disable_timing=True)
        self._host = pinned(array.shape, array.dtype)
        array.get(out=self._host, blocking=False)
        self._end = end
        self._end.record()

    def wait(self) -> np.ndarray[Any, Any]:
        """Return the copy, once it is there; work that came later goes on."""
        end, self._end = self._end, None
        if end is not None:
            end.synchronize()
        return self._host

    def __del__(self) -> None:
        self.wait()  # or others would have the memory while it is written to


def finish_work(array: Any) -> None:
    """Wait for the work on the current stream, if `array` is on a GPU."""
    cupy = cupy_of(array)
    if cupy is not None:
        cupy.cuda.get_current_stream().synchronize()


def numbers_in(array: Any, prefix: str) -> str:
    """Return the numbers of an array as NumPy abbreviates them, or nothing; a GPU gives those alone that are shown."""
    options = np.get_printoptions()
    threshold, edge = options["threshold"], options["edgeitems"]
    try:
        check_on_current_gpu({"local": array})
    except ValueError:
        return ""
    if isinstance(array, Hollow):
        return ""
    if array.ndim and array.size > threshold:
        ends = [(*range(min(n, edge)), *range(max(edge, n - edge - 1), n)) for n in array.shape]  # NumPy leaves one out
        if math.prod(map(len, ends)) > _MOST_SHOWN:
            return ""
        xp, axes = array_namespace(array), range(array.ndim)
        array = array[tuple(xp.asarray(ends[axis]).reshape(-1, *[1] * (array.ndim - 1 - axis)) for axis in axes)]
        threshold = 0
    return np.array2string(to_host(array), separator=", ", prefix=prefix, threshold=threshold)


@dataclass(frozen=True)
class GPU:
    """A GPU that this process sees; `memory` is in bytes."""

    name: str
    memory: int
    compute_capability: str


def gpus() -> list[GPU]:
    """Return the GPUs that CuPy sees, in its order; `RuntimeError`, with the reason, if there are none."""
    if "cupy" not in sys.modules and find_spec("cupy") is None:
        raise RuntimeError("CuPy is not installed")
    try:
        runtime = import_cupy().cuda.runtime
        found = [runtime.getDeviceProperties(index) for index in range(runtime.getDeviceCount())]
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise RuntimeError(f"CuPy is installed, but sees no GPU: {reason}") from error
    if not found:
        raise RuntimeError("CuPy is installed, but sees no GPU: is CUDA_VISIBLE_DEVICES empty?")
    return [GPU(each["name"].decode(), each["totalGlobalMem"], f"{each['major']}.{each['minor']}") for each in found]


def take_gpu(index: int) -> None:
    """Make the GPU `index` the current one of CuPy."""
    import_cupy().cuda.Device(index).use()


def cuda_versions() -> dict[str, str]:
    """Return the CUDA versions of the driver and of CuPy's runtime, such as "13.0"; "none" without a driver."""
    runtime = import_cupy().cuda.runtime
    found = {"driver": runtime.driverGetVersion(), "runtime": runtime.runtimeGetVersion()}
    return {name: f"{number // 1000}.{number % 1000 // 10}" if number else "none" for name, number in found.items()}

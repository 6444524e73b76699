"""CUDA's runtime and driver on the CPU: what CuPy asks of them, under the names that it gives them.

Memory is the host's. Work is done when it is asked for, but a copy to the host arrives when the host waits. `counts`
has what was asked for since it was last cleared.
"""

from collections import Counter
import ctypes
from itertools import count
import time

from cupy_backends.cuda.api.driver import get_build_version

counts = Counter[str]()
#: Mistakes that a GPU would not have forgiven.
mistakes = list[str]()

_libc = ctypes.CDLL(None)
_libc.aligned_alloc.restype = ctypes.c_void_p
_libc.aligned_alloc.argtypes = [ctypes.c_size_t] * 2
_libc.free.argtypes = [ctypes.c_void_p]

_handles = count(1)
_pinned = dict[int, int]()  # sizes by addresses
_arriving = list[tuple[int, bytes]]()  # copies to the host
_leaving = list[tuple[int, bytes]]()  # copies from pinned memory
_moments = dict[int, float]()
_functions = dict[int, object]()
_modules = dict[int, object]()
#: The modules of the compiler, by what it gave CuPy for their code.
compiled = dict[bytes, object]()

TO_DEVICE, TO_HOST = 1, 2
PROPERTIES = {
    "name": b"CPU",
    "totalGlobalMem": 16 << 30,
    "major": 9,
    "minor": 0,
    "multiProcessorCount": 132,
    "warpSize": 32,
    "maxThreadsPerBlock": 1024,
    "l2CacheSize": 60 << 20,
}
# `cudaDeviceAttr`, by its numbers; of others CuPy on the CPU knows nothing.
ATTRIBUTES = {
    **{1: 1024, 2: 1024, 3: 1024, 4: 64, 5: 2**31 - 1, 6: 65535, 7: 65535, 8: 48 << 10, 10: 32, 12: 1 << 16},
    **{16: 132, 38: 60 << 20, 75: 9, 76: 0, 81: 228 << 10, 97: 227 << 10, 115: 0},
}
VERSION = get_build_version()


def settle():
    """Do what the host has waited for."""
    for address, content in _arriving:
        ctypes.memmove(address, content, len(content))
    for address, content in _leaving:
        if ctypes.string_at(address, len(content)) != content:
            mistakes.append("pinned memory was written to while a copy from it was under way")
    _arriving.clear()
    _leaving.clear()


#: The constant answers of functions of the runtime.
RUNTIME = {
    **dict.fromkeys(["_ensure_context", "check_status", "setDevice", "streamDestroy", "streamQuery", "eventQuery"]),
    **{"streamWaitEvent": None, "streamIsCapturing": 0, "getDevice": 0, "getDeviceCount": 1},
    **{"driverGetVersion": VERSION, "runtimeGetVersion": VERSION, "_getCUDAMajorVersion": VERSION // 1000},
    **{"getDeviceProperties": PROPERTIES, "memGetInfo": (8 << 30, 16 << 30), "pointerGetMemoryType": 2},
}
#: Those of the driver: a context, and the part of a multiprocessor that a kernel takes.
DRIVER = {
    **{"ctxGetCurrent": 1, "moduleUnload": None, "funcSetAttribute": None},
    **{"occupancyMaxActiveBlocksPerMultiprocessor": 2, "occupancyMaxPotentialBlockSize": (2 * 132, 256)},
}


class Runtime:
    """`cupy_backends.cuda.api.runtime`, as far as it does something."""

    def deviceGetAttribute(attribute, device):
        return ATTRIBUTES[attribute]

    def malloc(size):
        counts["allocations"] += 1
        address = _libc.aligned_alloc(512, -(-max(size, 1) // 512) * 512)
        ctypes.memset(address, 0xA5, size)
        return address

    def free(address):
        _libc.free(address)

    def hostAlloc(size, flags):
        address = Runtime.malloc(size)
        _pinned[address] = size
        return address

    def freeHost(address):
        del _pinned[address]
        _libc.free(address)

    def memcpy(to, source, size, kind):
        Runtime.memcpyAsync(to, source, size, kind, 0)
        if kind == TO_HOST:
            Runtime.streamSynchronize(0)

    def memcpyAsync(to, source, size, kind, stream):
        counts[{TO_DEVICE: "uploads", TO_HOST: "downloads"}.get(kind, "copies")] += 1
        content = ctypes.string_at(source, size)
        if kind == TO_HOST:
            _arriving.append((to, content))
            return
        ctypes.memmove(to, content, size)
        if any(start <= source < start + length for start, length in _pinned.items()):
            _leaving.append((source, content))

    def memset(address, value, size):
        counts["fills"] += 1
        ctypes.memset(address, value, size)

    def memsetAsync(address, value, size, stream):
        Runtime.memset(address, value, size)

    def streamSynchronize(*_):
        counts["waits"] += 1
        settle()

    deviceSynchronize = eventSynchronize = streamSynchronize

    def streamCreate(*_):
        return next(_handles)

    streamCreateWithFlags = eventCreate = eventCreateWithFlags = streamCreate

    def eventDestroy(event):
        _moments.pop(event, None)

    def eventRecord(event, stream):
        _moments[event] = 1e3 * time.perf_counter()

    def eventElapsedTime(begin, end):
        return _moments[end] - _moments[begin]


class Driver:
    """`cupy_backends.cuda.api.driver`."""

    def moduleLoadData(image):
        _modules[handle := next(_handles)] = compiled[image]
        return handle

    def moduleGetFunction(module, name):
        _functions[handle := next(_handles)] = _modules[module].function(name)
        return handle

    def funcGetAttribute(attribute, function):
        return {0: 1024, 4: 32}.get(attribute, 0)  # threads of a block, registers

    def launchKernel(function, x, y, z, threads, threads_y, threads_z, shared, stream, arguments, extra):
        counts["launches"] += 1
        counts["early_waits"] = counts["waits"]
        if (z, threads_y, threads_z) != (1, 1, 1):
            raise NotImplementedError("a grid or a block of so many dims")
        _functions[function](arguments, x, y, threads)

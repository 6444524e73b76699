"""A stand-in for CuPy on machines without a GPU: NumPy's arithmetic behind CuPy's refusals.

Its arrays are no `numpy.ndarray`, cannot be turned into one but by `asnumpy` and `get`, and refuse to meet one: in
arithmetic, as an index, or as a value. So code that passes with it takes the array library from the array and says
where it moves data. Kernels are those of the package, compiled for the host (see `cuda_on_host`).

It has one stream, on which work is under way until somebody waits for it. Whoever is handed the address of an array
before that, or takes pinned memory back while it is being read, is found out. It does not model speed.

Tests ask for `cupy`, which is this stand-in, or with `pytest --gpu` CuPy itself. A test of what only the stand-in
shows asks for `stand_in`.
"""

from collections import defaultdict
from contextlib import nullcontext
import ctypes
import importlib
import math
import sys
import time
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest


class ndarray:
    __array_ufunc__ = None  # NumPy's operators step back
    __hash__ = None  # type: ignore[assignment]  # as CuPy's, which compare element by element

    def __init__(self, array):
        self._array = array
        self.device = SimpleNamespace(id=Device.current)

    def __array__(self, *_, **__):
        raise TypeError("implicit conversion to a NumPy array is not allowed; use asnumpy")

    def __getattr__(self, name):
        if name.startswith("__"):  # among them the ways in which NumPy would help itself to the memory
            raise AttributeError(name)
        attribute = getattr(self._array, name)
        if name in WITHOUT_INITIAL:
            attribute = refuses_initial(attribute)
        return on_device(attribute) if callable(attribute) else wrap(attribute)

    @property
    def data(self):
        return SimpleNamespace(ptr=self._array.ctypes.data if self._array.size else 0)

    @property
    def __cuda_array_interface__(self):
        if STREAM.busy:
            raise AssertionError("the address of an array is handed out before the stream has been waited for")
        return {**self._array.__array_interface__, "data": (self.data.ptr, False), "version": 3}

    def get(self, out=None, blocking=True):
        if not blocking:
            STREAM.brings(self._array, out)
            return out
        STREAM.synchronize()
        if out is None:
            return self._array.copy()
        if out.shape != self.shape or out.dtype != self.dtype:
            raise ValueError(f"get({self.shape}, {self.dtype}) into {out.shape}, {out.dtype}")
        out[...] = self._array
        return out

    def set(self, host):
        if not isinstance(host, np.ndarray) or host.shape != self.shape or host.dtype != self.dtype:
            raise TypeError("only a NumPy array of the same shape and dtype can be set")
        self._array[...] = host
        STREAM.reads(host)

    def item(self):
        return self.get().item()

    def __getitem__(self, index):
        return ndarray(np.asarray(self._array[unwrap(index)]))

    def __setitem__(self, index, value):
        self._array[unwrap(index)] = unwrap(value)

    def __bool__(self):
        return bool(self.get())

    def __float__(self):
        return float(self.get())

    def __len__(self):
        return len(self._array)


def operator_method(name):
    def method(self, *others):
        STREAM.busy = True
        result = getattr(self._array, name)(*(unwrap(other) for other in others))
        return self if result is self._array else wrap(result)

    return method


for _name in "add sub mul truediv floordiv pow matmul and or xor lshift rshift".split():
    for _prefix in ("", "r", "i"):
        setattr(ndarray, f"__{_prefix}{_name}__", operator_method(f"__{_prefix}{_name}__"))
for _name in "lt le gt ge eq ne neg abs invert".split():
    setattr(ndarray, f"__{_name}__", operator_method(f"__{_name}__"))


# CuPy's reductions know neither `initial` nor `where`, and so no largest element of none.
WITHOUT_INITIAL = {"max", "min", "amax", "amin", "sum", "prod", "mean", "all", "any"}


def refuses_initial(function):
    def call(*arguments, **options):
        for name in {"initial", "where"} & options.keys():
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument '{name}'")
        return function(*arguments, **options)

    return call


def unwrap(value):
    if isinstance(value, ndarray):
        return value._array
    if isinstance(value, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(value, tuple | list):
        return type(value)(unwrap(item) for item in value)
    return value


def wrap(value):
    if type(value) is tuple:  # as nonzero gives
        return tuple(map(wrap, value))
    return ndarray(np.asarray(value)) if isinstance(value, np.ndarray | np.generic) else value


def on_device(function, takes_time=True):
    def call(*arguments, **options):
        STREAM.busy |= takes_time
        return wrap(function(*unwrap(arguments), **{name: unwrap(value) for name, value in options.items()}))

    if isinstance(function, np.ufunc):
        call.at = on_device(function.at)
    return call


class Stream:
    """The only one. `busy`: there may be work under way; `mistakes`: what a GPU would not have forgiven."""

    ptr = 0

    def __init__(self):
        self.busy = False
        self.mistakes = []
        self._read = set()
        self._arriving = []

    def synchronize(self):
        self.busy = False
        self._read.clear()
        for content, address in self._arriving:
            ctypes.memmove(address, content, len(content))
        self._arriving.clear()

    def brings(self, array, out):
        """Copy to pinned memory, where it is once somebody has waited."""
        self.reads(out)
        self._arriving.append((array.tobytes(), out.ctypes.data))

    def reads(self, host):
        """Pinned memory is being copied, until somebody waits; other memory has been by now, as CUDA does it."""
        self.busy = True
        while isinstance(host, np.ndarray):
            host = host.base
        if isinstance(host, Pinned):
            self._read.add(host.address)

    def is_reading(self, address):
        return address in self._read


class Pinned:
    """A loan of pinned memory; the pool has it back when no array refers to it any more."""

    def __init__(self, size):
        free = FREE[size]
        self.block = free.pop() if free else np.empty(size, np.uint8)
        self.__array_interface__ = self.block.__array_interface__
        self.address = self.block.ctypes.data

    def __del__(self):
        if STREAM.is_reading(self.address):
            STREAM.mistakes.append("pinned memory was given up while a copy from it or to it was under way")
        self.block[...] = 0xA5
        FREE[self.block.size].append(self.block)


def empty_pinned(shape, dtype=float):
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.asarray(Pinned(size)).view(dtype).reshape(shape)


class Runtime:
    """Two GPUs of one kind."""

    @staticmethod
    def getDeviceCount():
        return 2

    @staticmethod
    def getDeviceProperties(index):
        return {"name": b"Stand-in", "totalGlobalMem": 2**30, "major": 9, "minor": 0, "multiProcessorCount": 132}

    @staticmethod
    def memGetInfo():
        return 2**29, 2**30

    @staticmethod
    def driverGetVersion():
        return 13000

    @staticmethod
    def runtimeGetVersion():
        return 13020


class Device:
    """GPU `index`, or the one in use."""

    current = 0

    def __init__(self, index=None):
        self.id = Device.current if index is None else index
        properties = Runtime.getDeviceProperties(self.id)
        self.compute_capability = f"{properties['major']}{properties['minor']}"
        self.attributes = {"MultiProcessorCount": properties["multiProcessorCount"], "L2CacheSize": 2**12}

    def use(self):
        Device.current = self.id


class Event:
    """A moment of the stream's, which nobody knows before it has come."""

    def __init__(self, disable_timing=False):
        self.seconds = None
        self._come = False

    def record(self):
        self.seconds = time.perf_counter()

    def synchronize(self):
        STREAM.synchronize()
        self._come = True


def get_elapsed_time(begin, end):
    """Milliseconds between two moments."""
    if not end._come:
        raise RuntimeError("cudaErrorNotReady: device not ready")
    return 1e3 * (end.seconds - begin.seconds)


# `cudaDataType`, by its numbers.
CUDA_DTYPES = {0: np.dtype(np.float32), 2: np.dtype(np.float16), 14: np.dtype(ml_dtypes.bfloat16)}


def in_memory(address, rows, columns, dtype, step):
    """The matrix that lies there by columns, so many elements from one to the next."""
    if step < max(1, rows):
        raise ValueError(f"CUBLAS_STATUS_INVALID_VALUE: {step} elements from one column of {rows} to the next")
    size = (columns - 1) * step + rows
    flat = np.frombuffer((ctypes.c_char * (size * dtype.itemsize)).from_address(address), dtype)
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), (dtype.itemsize, step * dtype.itemsize))


def gemm_ex(
    handle, op_a, op_b, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, compute, algorithm
):
    """Add up a product of halves in float32: c = alpha op(a) op(b) + beta c."""
    assert (handle, b_type, c_type, compute, algorithm) == (HANDLE, a_type, 0, Cublas.CUBLAS_COMPUTE_32F, -1)
    alpha, beta = (in_memory(address, 1, 1, CUDA_DTYPES[0], 1)[0, 0] for address in (alpha, beta))
    a = in_memory(a, *((k, m) if op_a else (m, k)), CUDA_DTYPES[a_type], lda).astype(np.float32)
    b = in_memory(b, *((n, k) if op_b else (k, n)), CUDA_DTYPES[b_type], ldb).astype(np.float32)
    c = in_memory(c, m, n, CUDA_DTYPES[c_type], ldc)
    before = beta * c if beta else 0  # an element that is not asked for is not read
    c[...] = alpha * ((a.T if op_a else a) @ (b.T if op_b else b)) + before
    STREAM.busy = True


HANDLE = 7
Cublas = SimpleNamespace(CUBLAS_OP_N=0, CUBLAS_OP_T=1, CUBLAS_COMPUTE_32F=68, CUBLAS_GEMM_DEFAULT=-1, gemmEx=gemm_ex)


def raw_module(**options):
    """CUDA code that runs on the host, on the stream."""
    on_host = importlib.import_module("cuda_on_host.module")
    if on_host.COMPILER is None:
        pytest.skip("kernels cannot be compiled for the host: there is no g++")
    module = on_host.RawModule(**options)

    def get_function(name):
        kernel = module.get_function(name)

        def launch(*arguments):
            STREAM.busy = True
            kernel(*arguments)

        return launch

    return SimpleNamespace(get_function=get_function)


class StrictCupy(ModuleType):
    def __init__(self):
        super().__init__("cupy")
        self.ndarray = ndarray
        self.lib = SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=on_device(np.lib.stride_tricks.as_strided)))
        self.cuda = SimpleNamespace(
            runtime=Runtime,
            Device=Device,
            Event=Event,
            get_elapsed_time=get_elapsed_time,
            cublas=Cublas,
            device=SimpleNamespace(get_cublas_handle=lambda: HANDLE),
            using_allocator=nullcontext,
            get_current_stream=lambda: STREAM,
        )

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "RawModule":
            return raw_module
        function = getattr(np, name)
        if isinstance(function, type):  # a dtype
            return function
        function = refuses_initial(function) if name in WITHOUT_INITIAL else function
        return on_device(function, takes_time=name not in ("empty", "empty_like"))

    @staticmethod
    def asarray(value, dtype=None):
        return ndarray(np.array(value._array if isinstance(value, ndarray) else value, dtype=dtype))

    @staticmethod
    def asnumpy(array):
        return array.get()

    @staticmethod
    def get_default_memory_pool():
        return SimpleNamespace(free_all_blocks=lambda: None)

    @staticmethod
    def where(condition, x, y):
        if not isinstance(condition, ndarray):
            raise TypeError(f"where() takes an array as its condition, got {type(condition).__name__}")
        return on_device(np.where)(condition, x, y)


STREAM = Stream()
FREE: defaultdict[int, list[np.ndarray]] = defaultdict(list)  # pinned memory that nobody uses, by its size
STAND_INS = {"cupy": StrictCupy(), "cupyx": ModuleType("cupyx")}
vars(STAND_INS["cupyx"])["empty_pinned"] = empty_pinned
LOADER = "pce_mpi.kernels.cuda"


def without_a_gpu():
    """CuPy on a machine without a GPU, as a module."""

    def getDeviceCount():
        raise RuntimeError("cudaErrorInsufficientDriver: too old\nand more")

    module = ModuleType("cupy")
    module.cuda = SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=getDeviceCount))
    module.ndarray = type("ndarray", (), {})
    return module


@pytest.fixture
def stand_in(request, monkeypatch):
    """CuPy's stand-in in its place, also where CuPy is installed or has been imported."""
    if request.config.option.gpu:
        pytest.skip("about the stand-in for CuPy, or by its means")
    from pce_mpi import kernels

    for name, module in STAND_INS.items():
        monkeypatch.setitem(sys.modules, name, module)
    # The kernels' loader keeps the CuPy that it was imported with: the stand-in has one of its own.
    real = swapped(kernels, STAND_INS.get(LOADER))
    monkeypatch.setattr(Device, "current", 0)
    STREAM.synchronize()
    STREAM.mistakes.clear()
    yield STAND_INS["cupy"]
    STAND_INS[LOADER] = swapped(kernels, real)
    assert STREAM.mistakes == []


@pytest.fixture
def cupy(request):
    """The library of arrays on a GPU: CuPy's stand-in, with --gpu CuPy."""
    if request.config.option.gpu:
        yield importlib.import_module("cupy")
    else:
        yield request.getfixturevalue("stand_in")


@pytest.fixture
def xp(request):
    """The array library of tests that are about numbers and the same for both: NumPy, with --gpu CuPy."""
    return importlib.import_module("cupy") if request.config.option.gpu else np


def swapped(kernels, loader):
    """The kernels' loader, if it has been imported, with `loader` in its place."""
    before = sys.modules.pop(LOADER, None)
    vars(kernels).pop("cuda", None)
    if loader is not None:
        sys.modules[LOADER] = kernels.cuda = loader
    return before

"""CuPy's RawModule for a machine without a GPU: the same CUDA sources, compiled by g++ and run on the CPU."""

import ctypes
import hashlib
import os
from pathlib import Path
import shutil
import subprocess
import tempfile

import numpy as np

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
# Like NVRTC with -fmad=false, and the scalar functions of the C library. The last one gives each library its own inline
# variables: shared memory is that of one kernel.
FLAGS = ("-std=c++17", "-Og", "-fPIC", "-shared", "-ffp-contract=off", "-w", "-fno-gnu-unique")

LAUNCHERS = """
extern "C" const char* launch_{number}(void** arguments, unsigned x, unsigned y, unsigned block) {{
  return host::call({kernel}, arguments, host::Dim{{x, y, 1}}, host::Dim{{block, 1, 1}});
}}
extern "C" int sizes_{number}(int* size) {{ return host::sizes({kernel}, size); }}
"""


class KernelFault(Exception):
    """A fault that a GPU would have answered with an error, or with silence."""


class RawModule:
    """The kernels of `code` that `name_expressions` name; of CuPy's `options`, only -I and -D are used."""

    def __init__(self, *, code, options=(), name_expressions):
        options = [option for option in options if option.startswith(("-I", "-D"))]
        self.names = list(name_expressions)
        source = code
        for number, name in enumerate(self.names):
            source += LAUNCHERS.format(number=number, kernel=name)
        self.library = ctypes.CDLL(str(library(source, [f"-I{HERE}", *options])))

    def get_function(self, name):
        return Kernel(self.library, name, self.names.index(name))


class Kernel:
    def __init__(self, library, name, number):
        self.name = name
        self.launch = launcher(library, number)
        sizes = (ctypes.c_int * 64)()
        self.sizes = sizes[: getattr(library, f"sizes_{number}")(sizes)]

    def __call__(self, grid, block, args):
        values = [argument(value) for value in args]
        if (given := [value.itemsize for value in values]) != self.sizes:
            raise TypeError(f"{self.name} takes arguments of {self.sizes} bytes, got {given}")
        if (
            not all(grid)
            or not all(block)
            or np.prod(block) > 1024
            or block[0] % 32
            or max(grid[1:], default=0) > 65535
        ):
            raise ValueError(f"{self.name}: a GPU launches no grid {grid} of blocks {block}")
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        failure = self.launch(pointers, *(*grid, 1)[:2], block[0])
        if failure is not None:
            raise KernelFault(f"{self.name}: {failure.decode()}")


def launcher(library, number):
    """The function that launches a kernel, and returns a text if that fails."""
    launch = getattr(library, f"launch_{number}")
    launch.restype, launch.argtypes = ctypes.c_char_p, [ctypes.c_void_p] + [ctypes.c_uint] * 3
    return launch


def argument(value):
    """Return what a kernel receives in an array of one element: the address of an array, or a number."""
    if hasattr(value, "data") and hasattr(value.data, "ptr"):
        return np.array([value.data.ptr], np.uint64)
    if not isinstance(value, np.generic):
        raise TypeError(f"a kernel's argument must be an array or a NumPy number, got {type(value).__name__}")
    return np.array([value])


def library(source, options, flags=FLAGS, prelude=None):
    """The shared library of `source`, compiled unless another process or an earlier run has done so.

    `prelude` is a header to include first, which is compiled once for all sources.
    """
    if prelude is None:
        return compiled(".so", source, (*flags, *options))
    header = compiled(".h.gch", f'#include "{prelude}"', (*flags, *options, "-x", "c++-header"))
    return compiled(".so", source, (*flags, f"-I{header.parent}", "-include", header.stem, *options))


def compiled(suffix, source, options):
    """The file with this suffix that g++ makes of `source`."""
    if COMPILER is None:
        raise RuntimeError("g++ is not installed")
    folders = [Path(option[2:]) for option in options if option.startswith("-I")]
    others = [option for option in options if not option.startswith("-I")]
    headers = [path.read_text() for folder in folders for path in sorted([*folder.glob("*.cuh"), *folder.glob("*.h")])]
    key = hashlib.sha256("\0".join([source, *others, *headers]).encode())
    place = Path(tempfile.gettempdir()) / f"cuda_on_host_{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    built = place / f"{key.hexdigest()[:32]}{suffix}"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=place) as folder:
            path, result = Path(folder, "kernels.cpp"), Path(folder, "result")
            path.write_text(source)
            done = subprocess.run([COMPILER, *options, str(path), "-o", str(result)], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"g++ failed:\n{done.stderr[:4000]}")
            result.replace(built)  # whole or not at all, and whoever comes last has the same
    return built

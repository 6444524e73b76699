"""The CUDA C++ of CuPy and of the package, compiled by g++ where CuPy would have NVRTC compile it."""

import ctypes
from itertools import count
from pathlib import Path
import re

import cuda_on_host.module as on_host
from cupy_on_cpu.hooks import KNOWN
from pce_mpi.kernels.compilation import OPTIONS

HERE = Path(__file__).parent
# Nothing of CuPy's is worth more of a compiler's time.
FLAGS = ("-std=c++17", "-O0", "-fPIC", "-shared", "-ffp-contract=off", "-w", "-D__CUDACC_VER_MAJOR__=13")

KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(')
DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w ]+?)\s*(\w+)\[\];")
THREADS_MEET = re.compile(r"__syncthreads|__syncwarp|__shfl|__shared__")
FLOAT32 = re.compile(r"\b(float|float16|bfloat16)\b")

LAUNCHER = """
extern "C" const char* launch_{number}(void** arguments, unsigned x, unsigned y, unsigned threads) {{
  return cupy_on_cpu::launch<{meet}, {flushes}>({kernel}, arguments, {{x, y, 1}}, {{threads, 1, 1}});
}}
"""
_images = count()


def install(compiler, compiled, include):
    """Have `compiler`, CuPy's, compile by g++; `compiled` gets the modules by the images that stand for them."""

    def compile_by_gpp(source, options=(), arch=None, filename="", name_expressions=None, *_):
        names = list(name_expressions or KERNEL.findall(source))
        if any(option.startswith("-DPCE_") for option in options):
            module = Module(names, on_host.RawModule(code=source, options=options, name_expressions=names).library)
        else:
            module = Module(names, ctypes.CDLL(str(library_of(source, names, include))))
        image = f"image {next(_images)}".encode()
        compiled[image] = module
        return image, {name: name for name in names} if name_expressions else None

    if not hasattr(compiler, "_compile_using_nvrtc_no_warning"):
        raise RuntimeError(f"cupy.cuda.compiler of this CuPy calls NVRTC by another function: {KNOWN}")
    compiler._compile_using_nvrtc_no_warning = compile_by_gpp


def library_of(source, names, include):
    """The library of kernels of CuPy's own."""
    meet, flushes = bool(THREADS_MEET.search(source)), bool(FLOAT32.search(source))
    source = DYNAMIC_SHARED.sub(r"\1* \2 = (\1*)cupy_on_cpu::dynamic_shared_memory();", source)
    source = source.replace('extern "C" __global__', "__global__")
    for number, name in enumerate(names):
        words = {"number": number, "kernel": name, "meet": int(meet), "flushes": int(flushes)}
        source += LAUNCHER.format(**words)
    folders = HERE / "include", on_host.HERE, include
    options = [*(f"-I{each}" for each in folders), *(option for option in OPTIONS if option.startswith(("-D", "-I")))]
    return on_host.library(source, options, FLAGS, prelude="cupy_on_cpu.h")


class Module:
    """The kernels with these names in a shared library."""

    def __init__(self, names, library):
        self.names, self.library = names, library

    def function(self, name):
        launch = on_host.launcher(self.library, self.names.index(name))

        def checked(*arguments):
            if (failure := launch(*arguments)) is not None:
                raise on_host.KernelFault(f"{name}: {failure.decode()}")

        return checked

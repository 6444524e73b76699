"""Build of the compiled kernel; everything else is in setup.cfg.

Without a C++ compiler the package installs all the same, with the NumPy kernel, unless PCE_MPI_REQUIRE_KERNEL is set,
as it is for a release.
"""

from concurrent.futures import ThreadPoolExecutor
import os
from pathlib import Path
import sys
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("pce_mpi/kernels")
# Of an inline function that several have, the linker takes the first: it must run on every processor.
SOURCES = [FOLDER / f"{name}.cpp" for name in ("compiled", "baseline", "avx2", "avx512", "vnni")]
HEADERS = sorted(FOLDER.glob("*.h"))
IEEE = ["-O3", "-fno-fast-math", "-fno-unsafe-math-optimizations"]
BUILT = FOLDER / "_compiled.abi3.so"


def is_built() -> bool:
    """True for an editable installation whose kernel is newer than its sources: each extra is such an installation."""
    newest = max(path.stat().st_mtime for path in (*SOURCES, *HEADERS, Path("setup.py")))
    return "editable_wheel" in sys.argv and BUILT.exists() and BUILT.stat().st_mtime > newest


class BuildSideBySide(build_ext):
    """Compiles all sources at a time: each instruction set takes a third of what they take in turn."""

    def build_extensions(self) -> None:
        compile_sources = self.compiler.compile

        def compile_side_by_side(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(len(sources)) as pool:
                objects = pool.map(lambda source: compile_sources([source], **options), sources)
                return [path for paths in objects for path in paths]

        self.compiler.compile = compile_side_by_side
        super().build_extensions()


setup(
    cmdclass={"build_ext": BuildSideBySide},
    ext_modules=[]
    if is_built()
    else [
        Extension(
            "pce_mpi.kernels._compiled",
            list(map(str, SOURCES)),
            depends=list(map(str, HEADERS)),
            # These come last, after any CXXFLAGS. Contracted to fused multiply-adds, or added in another order, sums
            # have other bits; so have those of a process that has loaded a library linked with -ffast-math.
            extra_compile_args=[
                *("-std=c++17", *IEEE, "-ffp-contract=off", "-fno-math-errno", "-fwrapv", "-fvisibility=hidden"),
                *("-fopenmp-simd", "-g0", "-fno-exceptions", "-fno-rtti"),
            ],
            extra_link_args=IEEE,
            py_limited_api=True,
            optional=not os.environ.get("PCE_MPI_REQUIRE_KERNEL"),
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)

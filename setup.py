"""Build of the compiled kernel; everything else is in setup.cfg.

Without a C++ compiler the package installs all the same, with the NumPy kernel, unless PCE_MPI_REQUIRE_KERNEL is set,
as it is for a release.
"""

import os
from pathlib import Path
import sys

from setuptools import Extension, setup

FOLDER = Path("pce_mpi/kernels")
SOURCES = [FOLDER / "compiled.cpp", *sorted(FOLDER.glob("*.h"))]
IEEE = ["-O3", "-fno-fast-math", "-fno-unsafe-math-optimizations"]
BUILT = FOLDER / "_compiled.abi3.so"


def is_built() -> bool:
    """True for an editable installation whose kernel is newer than its sources: each extra is such an installation."""
    newest = max(path.stat().st_mtime for path in (*SOURCES, Path("setup.py")))
    return "editable_wheel" in sys.argv and BUILT.exists() and BUILT.stat().st_mtime > newest


setup(
    ext_modules=[]
    if is_built()
    else [
        Extension(
            "pce_mpi.kernels._compiled",
            [str(SOURCES[0])],
            depends=list(map(str, SOURCES[1:])),
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

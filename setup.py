"""Build of the compiled kernel; everything else is in setup.cfg.

Without a C++ compiler the package installs all the same, with the NumPy kernel, unless PCE_MPI_REQUIRE_KERNEL is set,
as it is for a release.
"""

import os
from pathlib import Path
import sys

from setuptools import Extension, setup

FOLDER = Path("pce_mpi/loss/kernels")
SOURCES = [FOLDER / "compiled.cpp", *sorted(FOLDER.glob("*.h"))]
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
            "pce_mpi.loss.kernels._compiled",
            [str(SOURCES[0])],
            depends=list(map(str, SOURCES[1:])),
            # Contracted to fused multiply-adds, the sums would have other bits.
            extra_compile_args=[
                *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-g0"),
                *("-fno-exceptions", "-fno-rtti"),
            ],
            py_limited_api=True,
            optional=not os.environ.get("PCE_MPI_REQUIRE_KERNEL"),
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)

"""Build of the compiled kernel; everything else is in setup.cfg.

Without a C++ compiler the package installs all the same, with the NumPy kernel, unless PCE_MPI_REQUIRE_KERNEL is set,
as it is for a release.
"""

import os

from setuptools import Extension, setup

FOLDER = "pce_mpi/loss/kernels"

setup(
    ext_modules=[
        Extension(
            "pce_mpi.loss.kernels._compiled",
            [f"{FOLDER}/compiled.cpp"],
            depends=[
                f"{FOLDER}/{name}.h"
                for name in ("arithmetic", "states", "gradients", "host", "loops", "rows", "tables")
            ],
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

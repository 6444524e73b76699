"""CuPy itself on a machine without a GPU; README.md says what that shows."""

import atexit
import os
from pathlib import Path
import sys

import pytest


def install():
    """Import CuPy such that its arrays are in the host's memory and its kernels run on the CPU."""
    os.environ["CUPY_ACCELERATORS"] = ""  # g++ compiles no CUB
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"  # nor is anything compiled here for a GPU, or the other way
    from cupy_backends.cuda import libs
    from cupy_backends.cuda.api import driver, runtime

    from cupy_on_cpu import compiler, hooks
    from cupy_on_cpu.libraries import Cublas, Thrust
    from cupy_on_cpu.runtime import DRIVER, RUNTIME, Driver, Runtime, compiled

    hooks.replace(runtime, Runtime, RUNTIME)
    hooks.replace(driver, Driver, DRIVER)
    libs.cublas = Cublas("cublas")
    import cupy

    compiler.install(cupy.cuda.compiler, compiled, Path(cupy.__file__).parent / "_core/include")
    hooks.replace_in_python(cupy.cuda.thrust, Thrust)


class Session:
    """A pytest plugin: tests make no mistakes, and the session ends.

    It ends without the end of Python, in which CuPy's destructors call a runtime that is no more.
    """

    def __init__(self):
        from cupy_on_cpu import runtime

        self.runtime, self.status = runtime, 1
        atexit.register(self.leave)  # before others: it is called after theirs

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self):
        yield
        mistakes, self.runtime.mistakes[:] = list(self.runtime.mistakes), []
        assert mistakes == []

    def pytest_sessionfinish(self, exitstatus):
        self.status = int(exitstatus)

    def leave(self):
        if (mpi := sys.modules.get("mpi4py.MPI")) and not mpi.Is_finalized():
            mpi.Finalize()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.status)

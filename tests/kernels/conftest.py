"""The loader of the kernels, with CuPy's stand-in or with CuPy."""

from importlib import import_module

import pytest

from kernels import comparing
from kernels.places import OnGpu


@pytest.fixture
def cuda(request, cupy, monkeypatch):
    if request.config.option.gpu:
        monkeypatch.setattr(comparing, "place", OnGpu(cupy))
    with cupy.cuda.using_allocator(None):  # every array in memory of its own, for compute-sanitizer to know its end
        yield import_module("pce_mpi.kernels.cuda")

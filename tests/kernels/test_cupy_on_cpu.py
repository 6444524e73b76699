"""CuPy on the CPU shows what its page says: subnormal numbers, copies that arrive late, and faults of kernels."""

import importlib

import numpy as np
import pytest


@pytest.fixture
def runtime(request, cupy):
    if not request.config.option.cupy_on_cpu:
        pytest.skip("about CuPy on the CPU: `make test-cupy`")
    return importlib.import_module("cupy_on_cpu.runtime")


def test_subnormal_float32_numbers_count_as_zero(runtime, cupy):
    tiny = cupy.asarray(np.float32([1e-40, 1.0]))
    assert (2 * tiny).tolist() == [0.0, 2.0]
    assert tiny.astype(np.float64).tolist() == [0.0, 1.0]
    assert cupy.asarray([1e-40, 1e-310]).astype(np.float32).tolist() == [0.0, 0.0]
    assert (2 * cupy.asarray([1e-310])).tolist() == [2e-310]
    assert np.float32(1e-40) > 0  # not on the host


def test_copy_arrives_when_host_waits(runtime, cupy):
    host = importlib.import_module("cupyx").empty_pinned(3)
    host[...] = 7
    cupy.arange(3.0).get(out=host, blocking=False)
    before = host.tolist()
    cupy.cuda.get_current_stream().synchronize()
    assert (before, host.tolist()) == ([7.0, 7.0, 7.0], [0.0, 1.0, 2.0])


def test_pinned_memory_written_too_early_is_a_mistake(runtime, cupy):
    host = importlib.import_module("cupyx").empty_pinned(3)
    host[...] = 7
    array = cupy.empty(3)
    array.set(host)
    host[...] = 8
    cupy.cuda.get_current_stream().synchronize()
    assert array.tolist() == [7.0, 7.0, 7.0]
    assert len(runtime.mistakes) == 1
    runtime.mistakes.clear()


def test_launch_that_cannot_be_run_fails(runtime, cupy, capfd):
    kernel = cupy.RawKernel('extern "C" __global__ void idle(float* x) {}', "idle")
    with pytest.raises(SystemError, match="NULL"):
        kernel((1, 2, 2), (32,), (cupy.zeros(1, np.float32),))
    assert "NotImplementedError: a grid or a block of so many dims" in capfd.readouterr().err

"""Every kernel compiles for both architectures, in registers: no spills, and 1,024 threads fit a multiprocessor."""

from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
import os
import re

import pytest

# A multiprocessor has 65,536 registers.
MOST_REGISTERS = 65536 // 1024


def compiled(kernel, architecture):
    """What the assembler says of a kernel: registers, and bytes that did not fit them."""
    from cupy_backends.cuda.libs import nvrtc

    from pce_mpi.loss.kernels import cuda

    program = nvrtc.createProgram(cuda.source_of(kernel.file), kernel.file, (), ())
    # -ftz=true and the architecture are what CuPy adds.
    options = (*cuda.OPTIONS, "-ftz=true", f"-arch=sm_{architecture}", "--ptxas-options=-v")
    try:
        nvrtc.addNameExpression(program, kernel.name)
        nvrtc.compileProgram(program, options)
        log = nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError:
        return f"{kernel.name} for sm_{architecture}: {nvrtc.getProgramLog(program)}"
    finally:
        nvrtc.destroyProgram(program)
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill", log)]
    stack = [int(count) for count in re.findall(r"(\d+) bytes stack frame", log)]
    return kernel.name, architecture, registers, spilled, stack


@pytest.fixture(scope="module")
def reports():
    if find_spec("cupy") is None:
        pytest.skip("CuPy is not installed, and so there is no NVRTC to compile with")
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"NVRTC cannot be loaded: {error}")
    from pce_mpi.loss.kernels import cuda

    jobs = [(kernel, arch) for kernel in cuda.instantiations() for arch in (80, 90) if arch >= kernel.capability]
    with ProcessPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        found = list(pool.map(compiled, *zip(*jobs, strict=True)))
    assert len(found) > 50
    return found


def test_every_kernel_compiles(reports):
    failed = [report for report in reports if isinstance(report, str)]
    assert failed == []


def test_no_kernel_spills_or_takes_so_many_registers_that_fewer_than_1024_threads_fit(reports):
    for name, architecture, registers, spilled, stack in reports:
        print(f"{name:50} sm_{architecture} {registers} registers")
        # A stack would be an array that is indexed while the kernel runs.
        assert len(registers) == 1, name
        assert registers[0] <= MOST_REGISTERS, (name, architecture, registers)
        assert not any(spilled + stack), (name, architecture, spilled, stack)

"""Kernels compile for four architectures, in registers: no spills, and enough threads fit a multiprocessor."""

from concurrent.futures import ProcessPoolExecutor
import configparser
import importlib
from importlib.util import find_spec
import os
from pathlib import Path
import re
import shutil
import subprocess
import sys

import pytest

from pce_mpi.kernels import compilation
from pce_mpi.kernels.compilation import RESIDENT_THREADS, ROW_RESIDENT_THREADS

# A multiprocessor has 65,536 registers.
REGISTERS = 65536


def test_sources_use_exactly_constants_of_python():
    given = set(re.findall(r"-D(PCE_\w+)=", " ".join(compilation.OPTIONS)))
    sources = [path.read_text() for path in compilation.source_folder.glob("*.cu*")]
    assert sources
    assert set(re.findall(r"\bPCE_\w+", "\n".join(sources))) == given


def test_package_has_every_file_that_kernels_include():
    config = configparser.ConfigParser()
    config.read(compilation.source_folder.parents[1] / "setup.cfg")
    patterns = config["options.package_data"]["pce_mpi.kernels"].split(", ")
    packed = {path.name for pattern in patterns for path in compilation.source_folder.glob(pattern)}
    texts = [(compilation.source_folder / name).read_text(encoding="utf-8") for name in packed]
    included = set(re.findall(r'#include (?:<(?=.*\.cuh>)|")([a-z_]+\.cuh|[a-z_]+\.h)', "\n".join(texts)))
    assert {"states.h", "groups.cuh"} <= included
    assert included <= packed


def test_header_is_part_of_key_of_cupys_cache(monkeypatch, tmp_path):
    folder = shutil.copytree(compilation.source_folder, tmp_path / "kernels")
    monkeypatch.setattr(compilation, "source_folder", folder)
    headers = [*folder.glob("*.h"), *folder.glob("*.cuh")]
    sources = {compilation.source_of.__wrapped__("forward.cu")}
    for header in headers:
        header.write_text(header.read_text(encoding="utf-8") + "\n", encoding="utf-8")
        sources.add(compilation.source_of.__wrapped__("forward.cu"))
    assert len(sources) == 1 + len(headers) > 5


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH; a CUDA toolkit has it")
def test_commands_of_readme_compile_kernel():
    readme = (compilation.source_folder / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\$ (.*)$", readme, re.MULTILINE)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", "\n".join(commands)],
        cwd=compilation.source_folder.parents[1],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"Compiling entry function '\w*fill_states\w*'", done.stdout + done.stderr)
    assert re.search(r"Used \d+ registers", done.stdout + done.stderr)


def compiled(kernel, architecture):
    """The registers of a kernel, its bytes in memory, its instructions that flush subnormal numbers, and its cubin."""
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(compilation.source_of(kernel.file), kernel.file, (), ())
    # -ftz=true and the architecture are what CuPy adds.
    options = (*compilation.OPTIONS, "-ftz=true", f"-arch=sm_{architecture}", "--ptxas-options=-v")
    try:
        nvrtc.addNameExpression(program, kernel.name)
        nvrtc.compileProgram(program, options)
        log, ptx, cubin = nvrtc.getProgramLog(program), nvrtc.getPTX(program), nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError:
        return f"{kernel.name} for sm_{architecture}: {nvrtc.getProgramLog(program)}"
    finally:
        nvrtc.destroyProgram(program)
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill", log)]
    stack = [int(count) for count in re.findall(r"(\d+) bytes stack frame", log)]
    return kernel, architecture, registers, spilled + stack, flushing(ptx.decode()), cubin


def flushing(ptx):
    """The instructions that flush a subnormal number, but for absolute values that are only compared."""
    names = set(re.findall(r"\b(\S+\.ftz\S*)", ptx))
    absolute = re.findall(r"abs\.ftz\.f32\s+(\S+),", ptx)
    uses = [line for line in ptx.splitlines() if "abs.ftz" not in line for name in absolute if f"{name}," in f"{line},"]
    return names if any("setp." not in line for line in uses) else names - {"abs.ftz.f32"}


@pytest.fixture(scope="module")
def reports():
    if find_spec("cupy") is None:
        pytest.skip("CuPy is not installed, and so there is no NVRTC to compile with")
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"NVRTC cannot be loaded: {error}")
    kernels = compilation.instantiations()
    # A change of the compiler's shows in the loops of one dtype. Kernels of one general file differ in dtypes and
    # arithmetic, and need more registers for sm_90: one shows sm_80.
    loops = [kernel for kernel in compilation.LOOPS if "bfloat16" in kernel.name]
    general = {kernel.file: kernel for kernel in kernels if kernel not in compilation.LOOPS}.values()
    others = [(80, [*loops, *general]), (100, loops), (120, loops)]
    jobs = [*((kernel, 90) for kernel in kernels), *((each, number) for number, some in others for each in some)]
    with ProcessPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        found = list(pool.map(compiled, *zip(*jobs, strict=True)))
    assert len(found) > 50
    return found


def test_every_kernel_compiles(reports):
    failed = [report for report in reports if isinstance(report, str)]
    assert failed == []


# Kernels with a thread for each row.
OF_ROWS = {"losses.cu", "merge.cu", "row_softmax.cu", "statistics.cu"}
# With fewer threads and all in registers loops with options were slower, on an H200. The error of a product and a test
# for huge logits took 8 bytes more since; no H200 has told what these cost.
MOST_BYTES_IN_MEMORY = 348


def test_kernels_fit_resident_threads_and_spill_little(reports):
    for kernel, architecture, registers, in_memory, *_ in reports:
        print(f"{kernel.name:65} sm_{architecture} {max(registers)} registers, {max(in_memory)} bytes")
        threads = ROW_RESIDENT_THREADS if kernel.file in OF_ROWS else RESIDENT_THREADS
        assert registers, kernel
        assert max(registers) <= REGISTERS // threads, (kernel, architecture, registers)
        # The weight of a mean of two softmaxes is an option: its four constants take 8 bytes of memory on sm_90.
        has_options = kernel.file.startswith(("general", "divergence")) or (
            kernel in compilation.LOOPS and not re.search("(PLAIN|SCALED), 0>", kernel.name)
        )
        assert max(in_memory) <= (MOST_BYTES_IN_MEMORY if has_options else 0), (kernel, architecture, in_memory)


def test_no_arithmetic_flushes_subnormal_numbers(reports):
    # CuPy's -ftz=true is harmless to comparisons with bounds, to truncation to integers, and to the sign of the large
    # constant of a row in backward.cu.
    for kernel, architecture, _, _, flushing, _ in reports:
        harmless = r"setp\.|cvt\.rzi\." + r"|neg\." * (kernel.file == "backward.cu")
        assert not [name for name in flushing if not re.match(harmless, name)], (kernel, architecture)


@pytest.fixture
def count(monkeypatch):
    """The program that counts the instructions of loops."""
    monkeypatch.syspath_prepend(compilation.source_folder.parents[1] / "benchmarks")
    return importlib.import_module("count_instructions")


# Instructions a logit of each loop by its fields and way, for 16 bits and for float32, as NVRTC 13.0 makes them, and
# 1 % for other compilers: a number that falls belongs here.
INSTRUCTIONS = {
    ("fill_states", 0, "PLAIN"): (22.5, 23.5),
    ("fill_states", compilation.WEIGHTED_LOGIT, "PLAIN"): (30.1, 31.0),
    ("fill_states", compilation.HOLD_LARGEST, "PLAIN"): (22.6, 23.9),
    # Each exp(z) z is a product of float64 that is cut into three digits, and of float32 logits it has a rest.
    ("fill_states", compilation.HOLD_LARGEST | compilation.ENTROPY, "PLAIN"): (40.8, 51.4),
    # A temperature: z is reduced in float64, from integers that no conversion instruction made.
    ("fill_states", 0, "SCALED_IN_DOUBLE"): (35.2, 36.8),
    ("write_gradient", 0, "SCALED_IN_DOUBLE"): (30.7, 31.0),
    ("write_gradient", 0, "PLAIN"): (21.2, 21.1),
    ("write_gradient", compilation.WEIGHTED_LOGIT, "PLAIN"): (24.2, 24.2),
    ("write_gradient", compilation.ENTROPY, "PLAIN"): (28.3, 28.3),
}


def test_loops_have_no_more_instructions_than_budget(reports, count):
    if count.disassembler() is None:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    found = {}
    for kernel, architecture, *_, cubin in (report for report in reports if report[0] in compilation.LOOPS):
        function, dtype, way, fields = re.fullmatch(r"pce::(\w+)<(\S+), pce::(\w+), (\d+)>", kernel.name).groups()
        budget = INSTRUCTIONS.get((function, int(fields), way))
        if architecture == 90 and budget is not None:
            found[kernel] = count.instructions(kernel, cubin)
            print(f"{kernel.name:60} {found[kernel]:5.2f}")
            assert found[kernel] <= budget[dtype == "float"], kernel
    assert len(found) == 3 * len(INSTRUCTIONS)


def test_instructions_are_counted_around_main_loop(count):
    arithmetic = ["FFMA R1, R1, R2, R3"] * count.ARITHMETIC
    lines = ["MOV R0, R1", ".L_x_0:", "LDG R0", "@P0 BRA `(.L_x_2)", *["DADD R0, R0, R1"] * 50, ".L_x_2:"]
    lines += [*arithmetic, "@!P1 BRA `(.L_x_3)", "STG R0", ".L_x_3:", "@P2 BRA `(.L_x_0)", "EXIT", "BRA `(.L_x_0)"]
    code = "\n".join(
        line if line.endswith(":") else f"        /*{16 * at:04x}*/                   {line} ;"
        for at, line in enumerate(lines)
    )
    # Neither the branch with float64 nor the store is on the shortest way.
    assert count.around_loop(count.blocks_of(code)) == 2 + count.ARITHMETIC + 1 + 1

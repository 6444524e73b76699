"""The loops for the CPU have the same bits on every instruction set, by GCC and Clang, on x86-64 and AArch64."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
import os
from pathlib import Path
import shutil
import subprocess

import pytest

from pce_mpi.kernels.compilation import source_folder

SOURCES = [Path(__file__).with_name("self_test.cpp")]
SOURCES += [source_folder / f"{name}.cpp" for name in ("baseline", "avx2", "avx512", "vnni")]
FLAGS = ["-std=c++17", "-fopenmp-simd", "-ffp-contract=off", "-fno-math-errno", "-fno-exceptions", "-fno-rtti"]
# The output of the self-test: losses, divergences, gelu, products. A change is one of bits, as in jobs/digests.json.
DIGEST = "241ca83397bdfd9e f05ddba5c24b6eaa 999be798396ec1ff 25a5fbdc172742ad"


# The package is compiled by g++ with -O3, and tests/jobs/test_digests.py tests it. Here g++ looks for undefined
# behaviour, such as reads of rows that are not aligned, and takes the least time without optimization.
COMPILERS = {
    "g++": ["-O0", "-fsanitize=undefined", "-fno-sanitize-recover=undefined"],
    "clang++": ["-O2"],  # the first level at which it vectorizes
    "aarch64-linux-gnu-g++": ["-O3", "-static"],
}


def compiled(compiler, folder, source):
    """The object of a source."""
    path = folder / f"{compiler}-{source.stem}.o"
    options = [*FLAGS, *COMPILERS[compiler], f"-I{source_folder}"]
    built = subprocess.run([compiler, *options, "-c", str(source), "-o", str(path)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return str(path)


def digests(compiler, folder, launcher, objects):
    """The digests of each instruction set, by its name."""
    for program in (compiler, *launcher):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: apt install g++-aarch64-linux-gnu qemu-user clang")
    program = folder / compiler
    command = [compiler, *COMPILERS[compiler], *(each.result() for each in objects), "-o", str(program)]
    subprocess.run(command, capture_output=True, text=True, check=True)
    done = subprocess.run([*launcher, str(program)], capture_output=True, text=True, check=True)
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Functions that return the digests by each compiler; a core compiles a source at a time, for long."""
    folder = tmp_path_factory.mktemp("programs")
    launchers = {"aarch64-linux-gnu-g++": ["qemu-aarch64"]}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = {name: [pool.submit(compiled, name, folder, each) for each in SOURCES] for name in COMPILERS}
        yield {name: partial(digests, name, folder, launchers.get(name, []), objects[name]) for name in COMPILERS}


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_instruction_sets_of_this_processor_agree(found, compiler):
    by_name = found[compiler]()
    assert by_name
    assert set(by_name.values()) == {DIGEST}, by_name


def test_neon_gives_bits_of_x86(found):
    assert found["aarch64-linux-gnu-g++"]() == {"NEON": DIGEST}

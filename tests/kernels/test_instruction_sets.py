"""The loops for the CPU have the same bits on every instruction set, by GCC and Clang, on x86-64 and AArch64."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import shutil
import subprocess

import pytest

from pce_mpi.kernels.compilation import source_folder

SOURCES = [Path(__file__).with_name("self_test.cpp")]
SOURCES += [source_folder / f"{name}.cpp" for name in ("baseline", "avx2", "avx512")]
FLAGS = ["-std=c++17", "-fopenmp-simd", "-ffp-contract=off", "-fno-math-errno", "-fno-exceptions", "-fno-rtti"]
# The output of the self-test: losses, divergences, gelu. A change is one of bits, as in tests/jobs/digests.json.
DIGEST = "248a7996db5f0a0b 61302ac0211556bb 999be798396ec1ff"


# The package is compiled by g++ with -O3, and tests/jobs/test_digests.py tests it. Here g++ looks for undefined
# behaviour, such as reads of rows that are not aligned, and takes the least time without optimization.
COMPILERS = {
    "g++": ["-O0", "-fsanitize=undefined", "-fno-sanitize-recover=undefined"],
    "clang++": ["-O2"],  # the first level at which it vectorizes
    "aarch64-linux-gnu-g++": ["-O3", "-static"],
}


def digests(compiler, folder, launcher):
    """The digests of each instruction set, by its name."""
    for program in (compiler, *launcher):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: apt install g++-aarch64-linux-gnu qemu-user clang")
    program = folder / compiler
    command = [compiler, *FLAGS, *COMPILERS[compiler], f"-I{source_folder}", *map(str, SOURCES), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([*launcher, str(program)], capture_output=True, text=True, check=True)
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The digests by each compiler, as they come: each takes a core for long."""
    folder = tmp_path_factory.mktemp("programs")
    with ThreadPoolExecutor() as pool:
        launchers = {"aarch64-linux-gnu-g++": ["qemu-aarch64"]}
        yield {name: pool.submit(digests, name, folder, launchers.get(name, [])) for name in COMPILERS}


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_instruction_sets_of_this_processor_agree(found, compiler):
    by_name = found[compiler].result()
    assert by_name
    assert set(by_name.values()) == {DIGEST}, by_name


def test_neon_gives_bits_of_x86(found):
    assert found["aarch64-linux-gnu-g++"].result() == {"NEON": DIGEST}

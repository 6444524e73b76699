"""The loops for the CPU have the same bits on every instruction set, by GCC and Clang, on x86-64 and AArch64."""

from pathlib import Path
import shutil
import subprocess

import pytest

from pce_mpi.loss.kernels.compilation import source_folder

SOURCE = Path(__file__).with_name("self_test.cpp")
FLAGS = ["-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-exceptions", "-fno-rtti"]
# What the self-test prints; a change of it is a change of bits, as in tests/jobs/digests.json.
DIGEST = "62cd14220520455b"


def digests(compiler, folder, *launcher, more=()):
    """The digest of each instruction set, by its name."""
    for program in (compiler, *launcher):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: apt install g++-aarch64-linux-gnu qemu-user clang")
    program = folder / "self_test"
    command = [compiler, *FLAGS, *more, f"-I{source_folder}", str(SOURCE), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([*launcher, str(program)], capture_output=True, text=True, check=True)
    return dict(line.split() for line in done.stdout.splitlines())


# What g++ compiles with -O3 is the package, which tests/jobs/test_digests.py tests. Here it looks for undefined
# behaviour, as of reads of rows that are not aligned.
CHECKED = ["-O1", "-fsanitize=undefined", "-fno-sanitize-recover=undefined"]


@pytest.mark.parametrize(("compiler", "more"), [("g++", CHECKED), ("clang++", ["-O3"])], ids=["g++", "clang++"])
def test_instruction_sets_of_this_processor_agree(compiler, more, tmp_path):
    found = digests(compiler, tmp_path, more=more)
    assert found
    assert set(found.values()) == {DIGEST}, found


def test_neon_gives_bits_of_x86(tmp_path):
    found = digests("aarch64-linux-gnu-g++", tmp_path, "qemu-aarch64", more=["-O3", "-static"])
    assert found == {"NEON": DIGEST}

"""The header alone, in programs of its users: a CUDA kernel, and C++ with MPI."""

import os
from pathlib import Path
import shutil
import subprocess
import sys

import numpy as np
import pytest

from cuda_on_host.module import RawModule
from jobs.launch import ROOT
import pce_mpi as pce
from pce_mpi.conformance.offline import vectors
from pce_mpi.kernels.compilation import OPTIONS
import strict_cupy

KERNEL = Path(__file__).with_name("users_kernel.cu")
# Blocks run one after the other there, so a static variable is the memory that a block shares.
ON_HOST = "#include <device.cuh>\n#define __shared__ static\n"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH; a CUDA toolkit has it")
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_users_kernel_compiles_under_cuda(architecture, tmp_path):
    command = ["nvcc", "-std=c++17", "-fmad=false", f"-arch=sm_{architecture}", f"-I{pce.get_include()}", "-cubin"]
    done = subprocess.run([*command, "-o", tmp_path / "cubin", KERNEL], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_users_kernel_has_bits_of_package(scale):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((5, 333), np.float32) * np.float32([1, 100, 3000, 1e20, 0])[:, None]
    logits[0, ::5], targets = -np.inf, np.array([7, 332, -100, 0, 100])
    expected = pce.softmax_cross_entropy_value_and_grad(logits, targets, logit_scale=scale, reduction="none")
    module = RawModule(code=ON_HOST + KERNEL.read_text(), options=OPTIONS, name_expressions=["loss_and_gradient"])
    found = np.zeros(5, np.float32), np.zeros_like(logits)
    arrays = [strict_cupy.ndarray(array) for array in (logits, targets, *found)]
    given = *arrays[:2], np.int64(333), np.float64(scale), *arrays[2:]
    module.get_function("loss_and_gradient")((5, 1, 1), (64, 1, 1), given)
    for ours, theirs in zip(expected, found, strict=True):
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        *((f"-std=c++17 {fast}", "compile without -ffast-math") for fast in ("-ffast-math", "-Ofast")),
        *((f"-std=c++{version}", "compile with -std=c++17 or a later one") for version in (11, 14)),
    ],
)
def test_header_refuses_other_arithmetic_and_older_language(compiler, flags, said, tmp_path):
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not on PATH")
    source = tmp_path / "user.cpp"
    source.write_text("#include <pce_mpi.h>\nusing namespace pce;\nCall call = {0, {1.0, 0.0}};\n")
    command = [compiler, *flags.split(), f"-I{pce.get_include()}", "-fsyntax-only", source]
    done = subprocess.run(command, capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if " error: " in line]
    assert done.returncode != 0
    assert len([line for line in errors if "fatal error" not in line]) == 1, done.stderr
    assert said in errors[0]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The example in C++, and the vectors."""
    compiler = shutil.which("mpicxx", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if compiler is None or shutil.which("g++") is None:
        pytest.skip("there is no mpicxx, or no g++: an MPI library with its compiler runs this")
    folder = tmp_path_factory.mktemp("loss")
    shutil.copy(ROOT / "examples" / "loss.cpp", folder)  # it needs no file beside it
    command = [compiler, "-std=c++17", "-O2", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-ffp-contract=off"]
    command += [f"-I{pce.get_include()}", folder / "loss.cpp", "-o", folder / "loss"]
    subprocess.run(command, check=True)
    vectors.export_bits(folder)
    return folder / "loss", sorted((folder / "float32" / "plain").glob("*.safetensors"))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_program_in_cpp_has_bits_of_vectors(program, ranks):
    mpiexec = Path(sys.executable).parent / "mpiexec"
    done = subprocess.run([mpiexec, "-n", str(ranks), program[0], *program[1]], capture_output=True, text=True)
    expected = [f"{path}: 0 numbers have other bits on {ranks} ranks" for path in program[1]]
    assert (done.returncode, done.stdout.splitlines()) == (0, expected)
    assert len(expected) == 8


def test_program_in_cpp_sees_a_wrong_bit(program, tmp_path):
    content = bytearray(program[1][2].read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    at = content.index(b'"expected_dlogits"')
    at = content.index(b"data_offsets", at)
    offset = int(content[at + 15 : at + 30].split(b",")[0])
    content[start + offset + 40] ^= 1
    path = tmp_path / "plain" / "wrong.safetensors"  # the program takes no vectors of another folder
    path.parent.mkdir()
    path.write_bytes(content)
    mpiexec = Path(sys.executable).parent / "mpiexec"
    done = subprocess.run([mpiexec, "-n", "2", program[0], path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, f"{path}: 1 numbers have other bits on 2 ranks\n")


def test_program_in_cpp_says_what_it_cannot_use(program, tmp_path):
    folder = tmp_path / "plain"
    folder.mkdir()
    content = program[1][0].read_bytes()
    files = {
        "empty": b"",
        "text": b"no vector\n" * 9,
        "cut": content[: 8 + int.from_bytes(content[:8], "little") + 100],
        "long-header": b"\xff" * 8 + content[8:],
    }
    for name, each in files.items():
        (folder / name).write_bytes(each)
    no_vector = "is no vector of float32/plain: loss.cpp begins with how to write them"
    said = {folder / name: no_vector for name in files} | {
        tmp_path: no_vector,
        folder / "missing": "cannot be read: No such file or directory",
        folder / "..": "cannot be read: Is a directory",
    }
    mpiexec = Path(sys.executable).parent / "mpiexec"
    for path, words in said.items():
        done = subprocess.run([mpiexec, "-n", "2", program[0], path], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{path} {words}\n")
    done = subprocess.run([program[0]], capture_output=True, text=True)
    usage = f"usage: mpiexec -n N {program[0]} vectors/float32/plain/*.safetensors\n"
    assert (done.returncode, done.stderr) == (2, usage)

"""An installation has the files of a wheel, and works with and without its compiled kernel; an sdist has all files."""

from importlib import metadata
import os
import shutil
import subprocess
import sys
import zipfile

import pytest
from setuptools.command.egg_info import FileList

from jobs.launch import ROOT
from pce_mpi.cli import main


def run(*command, cwd, **env):
    done = subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def source(tmp_path_factory):
    """The package and the files beside it, in a folder in which nothing was built before."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "pce_mpi", folder / "pce_mpi", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    return folder


def wheel_of(source, folder, **env):
    """Build a wheel and unpack it; nothing is downloaded."""
    options = ["--quiet", "--no-deps", "--no-cache-dir", "--no-build-isolation", "--wheel-dir", str(folder)]
    status, text = run(sys.executable, "-m", "pip", "wheel", *options, str(source), cwd=folder, **env)
    if status:
        return status, text
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder / "unpacked")
    return status, wheel.name


# The program runs far from the source, with the unpacked wheel before everything else.
LOSS = """
import numpy as np
import pce_mpi
from pce_mpi.kernels import kernel_text
assert np.array(5e-324) * 1.0 != 0.0, "the process takes subnormal numbers for 0"
losses = {float(pce_mpi.softmax_cross_entropy(np.zeros((2, 4)), np.array([0, 3]))) for _ in range(2)}
print(pce_mpi.__file__, kernel_text(), *losses)
"""


def test_wheel_has_all_that_runs(source, tmp_path):
    # An optimized kernel takes a while to compile, and all other tests run it.
    compiler = tmp_path / "compiler"
    said = tmp_path / "said"
    program = f'#!/bin/sh\necho begin >> {said}\nc++ "$@" -O0\nstatus=$?\necho end >> {said}\nexit $status\n'
    compiler.write_text(program, encoding="utf-8")
    compiler.chmod(0o755)
    # Flags that would change its bits, and the process's floating-point unit: setup.py takes them back.
    fast = dict.fromkeys(("CFLAGS", "CXXFLAGS", "LDFLAGS"), "-Ofast -ffast-math -funsafe-math-optimizations")
    more = fast | {"CC": str(compiler), "CXX": str(compiler)}
    status, name = wheel_of(source, tmp_path, PCE_MPI_REQUIRE_KERNEL="1", **more)
    assert status == 0, name
    assert "-cp311-abi3-" in name
    # All sources side by side, and then the linker.
    assert said.read_text(encoding="utf-8").split() == ["begin"] * 5 + ["end"] * 5 + ["begin", "end"]
    package = tmp_path / "unpacked" / "pce_mpi"
    found = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()}
    wanted = {path.relative_to(source / "pce_mpi").as_posix() for path in (source / "pce_mpi").rglob("*.*")}
    unpacked = {
        "kernels/README.md",
        *(path.relative_to(source / "pce_mpi").as_posix() for path in source.rglob("*.cpp")),
    }
    assert wanted - found == unpacked
    assert [path for path in found - wanted if "/" in path] == ["kernels/_compiled.abi3.so"]
    (found,) = metadata.distributions(name="pce_mpi", path=[str(tmp_path / "unpacked")])
    assert {"Author", "Keywords", "License", "Requires-Python"} <= set(found.metadata)
    command, plugin = found.entry_points
    assert (command.group, command.name, command.load()) == ("console_scripts", "pce-mpi", main)
    assert (plugin.group, plugin.name) == ("pytest11", "pce_mpi")
    status, text = run(sys.executable, "-c", LOSS, cwd=tmp_path, PYTHONPATH=str(tmp_path / "unpacked"))
    assert status == 0, text
    assert text.startswith(str(package))
    assert "compiled, " in text and text.endswith("1.3862943611198906\n")


def test_installation_without_compiler_warns_and_computes_same(source, tmp_path):
    none = {"CC": "/bin/false", "CXX": "/bin/false"}
    status, name = wheel_of(source, tmp_path, **none)
    assert status == 0, name
    assert not list((tmp_path / "unpacked").rglob("*.so"))
    status, text = run(sys.executable, "-c", LOSS, cwd=tmp_path, PYTHONPATH=str(tmp_path / "unpacked"))
    assert status == 0, text
    assert text.count("has no compiled kernel: ") == 1
    assert "NumPy (no compiled kernel) 1.3862943611198906" in text


def test_release_without_compiler_fails(source, tmp_path):
    status, text = wheel_of(source, tmp_path, CC="/bin/false", CXX="/bin/false", PCE_MPI_REQUIRE_KERNEL="1")
    assert status != 0
    assert "/bin/false" in text


def test_unknown_kernel_names_those_that_are_there(tmp_path):
    status, text = run(sys.executable, "-c", LOSS, cwd=tmp_path, PCE_MPI_KERNEL="MMX")
    assert status != 0
    assert "ValueError: PCE_MPI_KERNEL must be numpy or one of" in text


def test_sdist_has_every_file_of_clone(monkeypatch):
    status, tracked = run("git", "ls-files", cwd=ROOT)
    if status:
        pytest.skip("only a clone knows which files are tracked: runs after git clone")
    monkeypatch.chdir(ROOT)
    files = FileList()
    for line in (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            files.process_template_line(line)
    always = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.cfg", "setup.py"}
    assert set(tracked.splitlines()) - set(files.files) <= always

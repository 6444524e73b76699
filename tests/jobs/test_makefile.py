"""The Makefile: what it would do, and what it makes where the clone cannot be written to; nothing is installed here."""

import os
from pathlib import Path
import re
import shutil
import subprocess
import tempfile

import pytest

from jobs.launch import ROOT
from pce_mpi.jobs.patience import slowdown

NOBODY = 65534
MADE_FROM = ["Makefile", "setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE", "pce_mpi"]


# The variables that `make test` passes to the makes below it.
FROM_ABOVE = {"MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MPI", "PYTHON", "N", "CUDA", "VENV"}


def make(*arguments, folder=ROOT, path=(), **options):
    env = {name: value for name, value in os.environ.items() if name not in FROM_ABOVE}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=folder,
        env=env | {"PATH": os.pathsep.join([*map(str, path), env["PATH"]])},
        capture_output=True,
        text=True,
        timeout=60 * slowdown(),
        **options,
    )


@pytest.fixture
def clone():
    """A clone that can be read and not written to, beside a folder that can, and what makes a user of both."""
    # Not tmp_path, which nobody else may enter.
    with tempfile.TemporaryDirectory() as folder:
        user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        path, own = Path(folder, "clone"), Path(folder, "own")
        path.mkdir()
        own.mkdir()
        for name in MADE_FROM[:-1]:
            shutil.copy(ROOT / name, path)
        (path / "pce_mpi").mkdir()
        shutil.copy(ROOT / "pce_mpi/__init__.py", path / "pce_mpi")
        Path(folder).chmod(0o755)
        path.chmod(0o555)
        if user:
            os.chown(own, NOBODY, NOBODY)
        yield path, own, user
        path.chmod(0o755)


@pytest.mark.parametrize(
    "target", ["run", "test", "test-kernels", "test-cupy", "test-gpu", "test-peers", "lint", "docs"]
)
def test_another_venv_replaces_usual_one_everywhere(target, tmp_path):
    usual = make("--dry-run", "--always-make", target)
    assert usual.returncode == 0, usual.stderr
    assert ".venv" in usual.stdout and "--editable '.[mpich]'" in usual.stdout
    other = make("--dry-run", "--always-make", target, f"VENV={tmp_path / 'env'}")
    assert other.returncode == 0, other.stderr
    assert ".venv" not in other.stdout
    assert f"python3 -m venv {tmp_path / 'env'}\n" in other.stdout


def test_clone_that_cannot_be_written_to_is_linked(clone):
    path, own, user = clone
    env = own / "env"
    (env / "bin").mkdir(parents=True)
    (env / "bin/pip").touch()  # as if the environment were there
    if user:
        for each in (env, env / "bin", env / "bin/pip"):
            os.chown(each, NOBODY, NOBODY)
    plan = make("--dry-run", "run", f"VENV={env}", folder=path, **user)
    assert plan.returncode == 0, plan.stderr
    assert f"--editable '{env}/clone[mpich]'" in plan.stdout
    done = make(f"{env}/clone", f"VENV={env}", folder=path, **user)
    assert done.returncode == 0, done.stderr
    links = {each.name: each.resolve() for each in (env / "clone").iterdir()}
    package = links.pop("pce_mpi")
    assert links == {name: path / name for name in MADE_FROM if name not in ("Makefile", "pce_mpi")}
    # A folder of links: what is built goes there.
    files = [each for each in package.rglob("*.py") if "__pycache__" not in each.parts]
    assert files
    assert all(each.resolve() == (path / "pce_mpi" / each.relative_to(package)).resolve() for each in files)


def test_clean_deletes_no_folder_that_is_no_environment(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    done = make("clean", f"VENV={kept}")
    assert done.returncode != 0
    assert f"{kept} is no virtual environment" in done.stderr
    assert kept.is_dir()


def put(path, script):
    """Make a program of a shell's commands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("fails", ["", "numpy", "--editable"])
def test_build_says_what_goes_on(tmp_path, fails):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/pip").touch()
    status = f'case "$*" in *{fails}*) exit 3;; esac' if fails else "exit 0"
    put(tmp_path / "bin/python", f'case "$*" in *install*) /bin/sleep 1;; esac; {status}')
    put(tmp_path / "quicker/sleep", "exec /bin/sleep 0.2")
    done = make(f"{tmp_path}/installed/mpich/package", f"VENV={tmp_path}", path=[tmp_path / "quicker"])
    steps = [line for line in done.stdout.splitlines() if not re.fullmatch(r"  \.\.\. \d+ s", line)]
    # What is printed says whether pip or the compiler is at work, or has failed, and nothing else.
    compiling = "The loss is compiled for this machine if it has g++ or clang++:"
    assert steps == ["pip installs mpich, NumPy and mpi4py:", compiling][: 1 if fails == "numpy" else 2]
    assert done.stdout.count("  ... ") >= 2
    assert bool(done.returncode) == bool(fails) != (tmp_path / "installed/mpich/package").exists()


def test_make_test_says_how_long_it_takes(tmp_path):
    (tmp_path / "installed/mpich").mkdir(parents=True)
    for made in ("bin/pip", "installed/mpich/package", "installed/mpich/test"):
        put(tmp_path / made, "")
    put(tmp_path / "bin/python", "echo the tests run")
    done = make("test", f"VENV={tmp_path}")
    assert done.returncode == 0, done.stderr
    before, _ = done.stdout.split("the tests run\n")
    assert "1 to 4 ranks" in before and "20 minutes on 2 idle cores" in before


def test_make_run_says_what_to_try_next(tmp_path):
    put(tmp_path / "bin/mpiexec", "echo the program runs")
    (tmp_path / "installed/mpich").mkdir(parents=True)
    for made in ("bin/pip", "installed/mpich/package", "installed/mpich/examples"):
        (tmp_path / made).touch()
    done = make("run", f"VENV={tmp_path}", "N=3")
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.split("the program runs\n")
    assert "3 ranks" in before and "minute" in before and "GB of memory" in before and str(tmp_path) in before
    assert "sharded over 3 ranks" in after
    assert f"make run N=4 VENV={tmp_path} " in after
    tried = [line.split("  ")[1] for line in after.splitlines() if line.startswith("  ")]
    for command in tried:
        for program in [word for word in command.split() if word.startswith("examples/")]:
            assert (ROOT / program).exists()
    assert len(tried) == 5


def test_processes_that_make_starts_keep_bytecode(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    done = make("--eval", "told: ; @echo told $$PYTHONDONTWRITEBYTECODE", "told")
    assert (done.stdout, done.stderr) == ("told\n", "")

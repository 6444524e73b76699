"""A program that a launcher started as several processes, each of which MPI takes for a job of its own, says so."""

import os
from pathlib import Path
import subprocess
import sys

import pytest

from jobs.launch import ROOT, job_environment
from pce_mpi.comm.launcher import LauncherEnv, launcher_env, why_apart
from pce_mpi.jobs.patience import slowdown

# The variables by which launchers tell a process of its job; those of the machine's own launcher are not to interfere.
PREFIXES = ("PMI_", "PMIX_", "OMPI_COMM_", "SLURM_")


def environment(**told):
    """An environment with what one launcher has told, and nothing of any other."""
    of_others = {name for name in os.environ if name.startswith(PREFIXES)}
    return {name: value for name, value in job_environment(1).items() if name not in of_others} | told


# Variables seen in processes started by MPICH 5.0, Open MPI 5.0 and Slurm 22.05, as far as they matter here.
STEP = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
PTY = STEP | {"SLURM_PROCID": "0", "SLURM_PTY_PORT": "46589"}


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, LauncherEnv(1, 2, "PMI_SIZE")),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"},
            LauncherEnv(1, 2, "OMPI_COMM_WORLD_SIZE"),
        ),
        (STEP, LauncherEnv(1, 2, "SLURM_STEP_NUM_TASKS")),
        (STEP | {"PMIX_RANK": "1"}, LauncherEnv(1, 2, "SLURM_STEP_NUM_TASKS")),
        (STEP | {"PMI_RANK": "1", "PMI_SIZE": "2"}, LauncherEnv(1, 2, "PMI_SIZE")),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, None),
        (STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        (PTY | {"SLURM_TASK_PID": "1"}, None),
        (PTY | {"SLURM_TASK_PID": str(os.getpid())}, LauncherEnv(0, 2, "SLURM_STEP_NUM_TASKS")),
        (STEP | {"PMI_RANK": "5", "PMI_SIZE": "8"}, LauncherEnv(5, 8, "PMI_SIZE")),
        (
            {"PMI_RANK": "3", "PMI_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
            LauncherEnv(0, 1, "OMPI_COMM_WORLD_SIZE"),
        ),
        ({"PMI_SIZE": ""}, None),
    ],
    ids=[
        "no launcher",
        "MPICH",
        "Open MPI",
        "srun",
        "srun --mpi=pmix",
        "srun --mpi=pmi2",
        "a shell of salloc",
        "a batch script",
        "srun of one task",
        "a shell of srun --pty",
        "a task of srun --pty",
        "MPICH's mpiexec, one proxy of srun's on each of two nodes",
        "an mpiexec of the other make within",
        "nothing told",
    ],
)
def test_innermost_launcher_is_understood(monkeypatch, told, expected):
    for name in [name for name in os.environ if name.startswith(PREFIXES)]:
        monkeypatch.delenv(name)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert launcher_env() == expected


class World:
    def __init__(self, size):
        self.size = size


@pytest.mark.parametrize(("size", "started", "apart"), [(1, 3, True), (2, 3, True), (3, 3, False), (1, 1, False)])
def test_ranks_are_held_against_those_started(size, started, apart):
    text = why_apart(World(size), started)
    assert text.startswith(f"launched as {started} ranks, but MPI sees {size}: ") is apart
    assert bool(text) is apart


def test_ranks_without_mpi_library_are_alone(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "3")
    assert "launched as 3 ranks (PMI_SIZE=3), but no MPI library could be loaded" in why_apart(None)
    monkeypatch.setenv("PMI_SIZE", "1")
    assert why_apart(None) == ""


# Each as one of three processes that MPI does not bring together.
PROGRAMS = {
    "check": ["-m", "pce_mpi", "check"],
    "bench": ["-m", "pce_mpi", "bench", "--rows=8", "--classes=50", "--repeat=1"],
    "pytest": ["-m", "pytest", "--ranks=3", "tests/ranks/test_harness.py"],
    "comparison": ["tests/peers/compare_speed.py", "--role=ours", "--ranks=3", "--rows=8", "--classes=50"],
    "the kit in pytest": [
        "-c",
        "import pce_mpi as pce; from pce_mpi.conformance import *\n"
        "assert_conforms(pce.softmax_cross_entropy_value_and_grad, cases()[0])",
    ],
}
TOLD = {
    "Open MPI": {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2"},
    "srun": {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2"},
}


def run(arguments, **told):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(**told),
        capture_output=True,
        text=True,
        timeout=100 * slowdown(),
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_whose_ranks_are_apart_fails(program):
    done = run(PROGRAMS[program], **TOLD["srun"])
    assert done.returncode not in (0, None)
    assert "launched as 3 ranks" in done.stdout + done.stderr
    assert "but MPI sees 1" in done.stdout + done.stderr
    assert "as they should be" not in done.stdout


@pytest.mark.parametrize("program", ["sharded_loss", "data_and_model_parallel"])
def test_users_program_whose_ranks_are_apart_warns(program):
    done = run([f"examples/{program}.py"], **TOLD["Open MPI"])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeWarning: launched as 3 ranks (OMPI_COMM_WORLD_SIZE=3), but MPI sees 1: ") == 1
    assert "RuntimeWarning" not in run([f"examples/{program}.py"]).stderr


@pytest.mark.parametrize("told", TOLD.values(), ids=TOLD)
def test_info_of_ranks_apart_warns_and_fails(told):
    done = run(["-m", "pce_mpi", "info"], **told)
    assert done.returncode == 1, done.stderr
    name = next(iter(told))
    assert f"warning: launched as 3 ranks ({name}=3), but MPI sees 1" in done.stdout
    assert "BLAS threads" in done.stdout


def test_info_of_one_process_within_allocation_is_content():
    done = run(["-m", "pce_mpi", "info"], SLURM_JOB_ID="7", SLURM_NTASKS="3")
    assert done.returncode == 0, done.stderr
    assert "launched as" not in done.stdout


def test_conformance_within_srun_says_once_what_to_do():
    first, last = (run(["-m", "pce_mpi", "conformance", "pce"], **TOLD["srun"] | {"SLURM_PROCID": n}) for n in "02")
    assert (first.returncode, last.returncode) == (2, 0)  # a rank that fails may end the job before another speaks
    assert "conformance starts the ranks itself" in first.stderr
    assert last.stderr == ""


# Starts as many processes as mpiexec would, and tells them nothing.
STRANGE_MPIEXEC = """
import subprocess, sys
assert sys.argv[1] == "-n"
processes = [subprocess.Popen(sys.argv[3:]) for _ in range(int(sys.argv[2]))]
sys.exit(max(process.wait() for process in processes))
"""


def test_kit_certifies_nothing_where_ranks_are_apart(tmp_path):
    strange = Path(tmp_path, "mpiexec.py")
    strange.write_text(STRANGE_MPIEXEC)
    command = ["-m", "pce_mpi", "conformance", "-n", "3", "pce", "--case", "random-logits/float32"]
    done = run(command, MPIEXEC=f"{sys.executable} {strange}")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "error: launched as 3 ranks, but MPI sees 1" in done.stderr
    assert "pass" not in done.stdout

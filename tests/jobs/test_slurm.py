"""Programs that Slurm starts, on a Slurm of one node that this file starts itself where it is installed."""

from importlib.metadata import PackageNotFoundError, version
import re
import shlex
import subprocess
import sys

import pytest

from jobs.faulty_tests import AFTER, FAULTS, START
from jobs.launch import ROOT, complete, job_environment
from jobs.one_node_slurm import missing, one_node_slurm
from jobs.test_faulty_tests import without_mpiexec, write
from pce_mpi.jobs.patience import slowdown

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

CLUSTERS = (ROOT / "docs" / "clusters.md").read_text("utf-8")
SRUN = re.findall(r"^\$ (srun .*? python -m mpi4py) \S+\.py", CLUSTERS, re.MULTILINE)
TWO_TASKS = ["--ntasks=2", "--ntasks-per-node=2", "--overcommit"]

TRAIN = """
import os, signal, sys
from mpi4py import MPI
import numpy as np
import pce_mpi as pce

comm = MPI.COMM_WORLD
loss = pce.softmax_cross_entropy(np.zeros((2, 5)), np.array([0, 9]), comm=comm, num_classes=10)
sys.stdout.write(f"rank {comm.rank} of {comm.size}: {loss:.6f}\\n")
sys.stdout.flush()
comm.Barrier()
if comm.rank == 1 and "die" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
comm.Barrier()
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with one_node_slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def srun(environment, command):
    """Run `command`, after the word srun two tasks of it."""
    words = [sys.executable if word == "python" else word for word in command]
    # The last one of two equal options counts.
    at = words.index(sys.executable)
    return subprocess.run(
        [*words[:at], *TWO_TASKS, *words[at:]],
        cwd=ROOT,
        env=job_environment(2) | environment | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100 * slowdown(),
    )


@pytest.fixture
def documented_line(tmp_path):
    """The command line of docs/clusters.md for Slurm, with a program."""
    assert len(SRUN) == 1
    try:
        version("mpich")
    except PackageNotFoundError:
        pytest.skip("the line is for PyPI's MPICH, which is not installed: runs with make test MPI=mpich")
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    return [*shlex.split(SRUN[0]), str(program)]


def test_documented_srun_line_makes_ranks(slurm, documented_line):
    job = srun(slurm, documented_line)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == ["rank 0 of 2: 2.302585", "rank 1 of 2: 2.302585"]


def test_killed_rank_ends_documented_srun(slurm, documented_line):
    job = srun(slurm, [*documented_line, "die"])
    assert job.returncode != 0
    assert "rank 0 of 2" in job.stdout
    assert "Killed" in job.stderr


def test_tests_run_on_ranks_within_a_job(slurm, tmp_path):
    write(tmp_path, START + FAULTS["kill"][0] + AFTER)
    python, environment = without_mpiexec(tmp_path)
    command = ["salloc", "--ntasks=2", "--overcommit", python, "-m", "pytest", "--ranks=2", "--color=no"]
    # PyPI's MPICH is no cluster's own MPI, which Slurm knows.
    environment |= {"SLURM_CONF": slurm["SLURM_CONF"], "SLURM_MPI_TYPE": "pmi2"}
    job = complete(command, cwd=tmp_path, env=environment)
    assert "srun --overlap" in job.stdout, job.stdout + job.stderr
    assert "rank 1 of 2 died of SIGKILL" in job.stdout
    assert "1 failed, 1 passed in" in job.stdout


def test_tasks_of_plain_srun_are_found_apart(slurm):
    job = srun(slurm, ["srun", "--mpi=none", "python", "-m", "pce_mpi", "info"])
    assert job.returncode == 1, job.stderr
    assert job.stdout.count("warning: launched as 2 ranks (SLURM_STEP_NUM_TASKS=2), but MPI sees 1") == 2
    assert job.stdout.count("BLAS threads") >= 2

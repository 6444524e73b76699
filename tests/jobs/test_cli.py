"""The command line, as a user starts it."""

import json
import os
import subprocess
import sys

import pytest

from jobs.launch import ROOT, job_command, job_environment, launch
import pce_mpi

COMMAND = ["-m", "pce_mpi"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_info_tells_versions_the_library_and_where_each_rank_runs(ranks):
    job = launch(ranks, *COMMAND, "info", "--json")
    assert job.returncode == 0, job.stderr
    report = json.loads(job.stdout)
    assert report["versions"]["pce_mpi"] == pce_mpi.__version__
    assert {"library", "standard", "GPU-aware"} <= set(report["mpi"])
    assert [rank["rank"] for rank in report["ranks"]] == list(range(ranks))
    assert all(rank["size"] == ranks and rank["cores"] and rank["blas threads"] >= 1 for rank in report["ranks"])


def test_info_prints_one_line_a_rank_once():
    job = launch(3, *COMMAND, "info")
    host = os.uname().nodename
    assert sum(host in line and not line.startswith("warning") for line in job.stdout.splitlines()) == 3


def test_info_warns_of_more_blas_threads_than_cores():
    cores = len(os.sched_getaffinity(0))
    threads = {name: str(cores) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    if cores == 1:
        threads = dict.fromkeys(threads, "2")
    job = launch(2, *COMMAND, "info", env=threads)
    assert "BLAS threads in all on" in job.stdout
    assert "set OMP_NUM_THREADS=" in job.stdout
    assert "BLAS threads in all on" not in launch(1, *COMMAND, "info").stdout


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_check_passes_and_prints_one_table(ranks):
    job = launch(ranks, *COMMAND, "check")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("label_smoothing, weight") == 1
    assert "OFF" not in job.stdout
    assert "not run" not in job.stdout


def test_check_without_mpiexec_and_without_an_mpi_library_passes_too():
    program = "import sys; sys.modules['mpi4py.MPI'] = None; from pce_mpi.cli import main; main(['check'])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as they should be" in done.stdout


def test_check_fails_when_one_rank_computes_something_else():
    program = """
import numpy as np
from mpi4py import MPI
from pce_mpi.kernels import blockwise
from pce_mpi.cli import main
honest = blockwise.write_gradient
def wrong(out, *arguments, **options):
    honest(out, *arguments, **options)
    out *= 1.001
if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
    blockwise.write_gradient = wrong
main(["check"])
"""
    job = launch(2, "-c", program)
    assert job.returncode != 0
    assert "OFF" in job.stdout


def test_bench_measures_three_functions_beside_their_floors(tmp_path):
    plot = tmp_path / "bench.png"
    sizes = ["--rows", "64", "--classes", "300", "1000", "--repeat", "2"]
    job = launch(2, *COMMAND, "bench", *sizes, "--json", "--plot", str(plot))
    assert job.returncode == 0, job.stderr
    report = json.loads(job.stdout)
    measured = {(one["classes"], one["function"]): one for one in report["measurements"]}
    functions = ("forward", "backward", "value_and_grad")
    assert list(measured) == [(classes, name) for classes in (300, 1000) for name in functions]
    for (_, name), one in measured.items():
        sends = name != "backward"
        assert (one["payload_calls"], one["payload_bytes"]) == (sends, 64 * 24 * sends)
        assert one["seconds"] > 0 and one["times_floor"] > 0 and one["gigabytes_per_second"] > 0
        assert one["peak_mebibytes"] > 0
    assert report["agreement_seconds"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "1000 classes" in job.stderr  # the progress bar


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_bench_takes_every_dtype(dtype):
    job = launch(1, *COMMAND, "bench", "--rows", "8", "--classes", "50", "--repeat", "1", "--dtype", dtype)
    assert job.returncode == 0, job.stderr
    assert f"8 rows, {dtype}" in job.stdout


@pytest.mark.parametrize("arguments", [[], ["info"], ["check"], ["bench"]], ids=lambda a: " ".join(a) or "no command")
def test_help_is_printed_once(arguments):
    job = launch(3, *COMMAND, *arguments, "--help")
    assert job.returncode == 0
    assert job.stdout.count("usage:") == 1


@pytest.mark.parametrize("arguments", [[], ["chek"], ["bench", "--rows", "0"], ["bench", "--dtype", "int8"]], ids=str)
def test_a_wrong_command_line_is_explained_once_and_fails(arguments):
    job = launch(2, *COMMAND, *arguments)
    assert job.returncode != 0
    assert job.stderr.count("error:") == 1


MIDDLE_RANK_FAILS = """
from mpi4py import MPI
from pce_mpi.cli import check, main
if MPI.COMM_WORLD.rank == 1:
    check.run = None
main(["check"])
"""


def test_an_exception_on_one_rank_ends_the_job():
    job = launch(3, "-c", MIDDLE_RANK_FAILS, timeout=30)
    assert job.returncode != 0
    assert "rank 1 of 3" in job.stderr
    assert job.seconds < 20


def test_an_exception_on_one_rank_ends_a_job_that_was_started_without_the_help_of_mpi4py():
    command = job_command(3, "-c", MIDDLE_RANK_FAILS)
    at = command.index("mpi4py")
    plain = command[: at - 1] + command[at + 1 :]
    job = subprocess.run(plain, cwd=ROOT, env=job_environment(3), capture_output=True, text=True, timeout=30)
    assert job.returncode != 0
    assert "on rank 1 of 3" in job.stderr

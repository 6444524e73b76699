"""Start an MPI job from a single process, with the mpiexec that belongs to the running interpreter."""

from collections.abc import Mapping
import os
from pathlib import Path
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from typing import NamedTuple

from pce_mpi.conformance.launching import mpiexec, settings, stop

ROOT = Path(__file__).parents[2]


class CompletedJob(NamedTuple):
    returncode: int
    stdout: str
    stderr: str
    seconds: float


def launch(n: int, *args: str, timeout: float = 60, env: Mapping[str, str] | None = None) -> CompletedJob:
    """Run `python -m mpi4py ARGS` on `n` ranks, from the root of the repository; `env` adds to the environment.

    `TimeoutError`, with what the job has printed, if it has not ended after `timeout` seconds; it is killed then.
    """
    start = time.monotonic()
    command = job_command(n, *args)
    job = subprocess.Popen(
        command,
        cwd=ROOT,
        env=job_environment(n) | dict(env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        stop(job)
        stdout, stderr = job.communicate()
        raise TimeoutError(
            f"{shlex.join(command)} had not ended after {timeout} s\n----- stdout\n{stdout}\n----- stderr\n{stderr}"
        ) from None
    finally:
        stop(job)
    return CompletedJob(job.returncode, stdout, stderr, time.monotonic() - start)


def launch_source(
    n: int, source: str, *args: str, timeout: float = 60, env: Mapping[str, str] | None = None
) -> CompletedJob:
    """As `launch`, for a program that is given as a string; indentation common to all its lines is removed."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(textwrap.dedent(source), encoding="utf-8")
        return launch(n, str(program), *args, timeout=timeout, env=env)


def job_command(n: int, *args: str) -> list[str]:
    """The command line of `python -m mpi4py ARGS` on `n` ranks."""
    return [*mpiexec(), "-n", str(n), sys.executable, "-m", "mpi4py", *args]


def job_environment(n: int) -> dict[str, str]:
    """The environment of a job of `n` ranks: BLAS threads times ranks do not exceed the cores."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | settings(n) | {"PYTHONPATH": path}

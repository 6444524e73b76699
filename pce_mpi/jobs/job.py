"""Start ranks that keep a journal, follow them and end them; this process never uses MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
import os
from pathlib import Path
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from types import ModuleType
import weakref

from pce_mpi.jobs import guard, supervisor
from pce_mpi.jobs.journal import Follower, beginnings
from pce_mpi.jobs.mpiexec import LaunchError, memory_named_in, mpiexec, settings
from pce_mpi.temporary_files import abandoned, new_folder
from pce_mpi.text import bounded

# The part of a rank's output that is shown.
_LINES_SHOWN = 20
_CHARACTERS_SHOWN = 500  # in each line
_BYTES_READ = 1 << 18
# The names of the folders of all jobs begin with this.
_STEM = "pce_mpi-job-"


class Job:
    """Ranks that run `python WORKER FOLDER RANKS` and `begin` there, once `prepare` has written files to FOLDER.

    One rank needs no launcher if `alone`. A context manager that leaves no processes, files or shared memory behind. If
    it is killed, the next one of the same user removes what it left.
    """

    def __init__(
        self, ranks: int, worker: Sequence[str], prepare: Callable[[Path], None], *, alone: bool = False
    ) -> None:
        self.ranks = ranks
        try:
            temporary = Path(tempfile.gettempdir())
            for leftover in abandoned(temporary, _STEM):
                _remove(leftover)
            self.folder, lock = new_folder(temporary, _STEM)
            # Also if this process ends before the job.
            self._clean_up = weakref.finalize(self, _remove, self.folder, lock)
            prepare(self.folder)
        except OSError as error:
            raise LaunchError(f"no temporary file could be written: {error}; TMPDIR can name another folder") from None
        self._ends, self._output = self.folder / "ends", self.folder / "mpiexec.log"
        self.news = Follower(self.folder, ranks).news
        command = [*_alone(guard), *([] if alone else [*mpiexec(), "-n", str(ranks)])]
        command += [*_alone(supervisor), str(self._ends), sys.executable, *worker, str(self.folder), str(ranks)]
        with open(self._output, "wb") as output:
            try:
                self._guard = subprocess.Popen(
                    command,
                    env=settings(ranks) | os.environ,  # the user's own settings win
                    stdin=subprocess.PIPE,  # ends with this process
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                self._clean_up()
                raise LaunchError(f"a process could not be started: {error}") from None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.stop()
        finally:
            self._clean_up()

    @property
    def _pids(self) -> dict[int, int]:
        """The process of each rank that has begun."""
        return {rank: event["pid"] for rank, event in beginnings(self.folder).items()}

    @property
    def status(self) -> int | None:
        """The exit status of mpiexec, None while it or anything that it started runs."""
        return self._guard.poll()

    def ends(self) -> list[tuple[int | None, int]]:
        """Return rank, None before MPI, and exit status, a signal's negated, of each ended process, in their order."""
        if not self._ends.exists():
            return []
        pairs = re.findall(r"^(\d+) (-?\d+)$", self._ends.read_text(errors="replace"), re.MULTILINE)
        ranks = {pid: rank for rank, pid in self._pids.items()}
        return [(ranks.get(int(pid)), int(status)) for pid, status in pairs]

    def death(self, failed: bool = False) -> tuple[int | None, str]:
        """Return the rank that ended first, or first with another status than 0, None if not known, and how it did."""
        if not (ends := [end for end in self.ends() if end[1] or not failed]):
            return None, f"is gone: the launcher ended with exit status {self.status}"
        rank, status = ends[0]
        if status >= 0:
            return rank, f"ended with exit status {status}"
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        memory = status == -signal.SIGKILL
        return rank, f"died of {name}" + ", which the kernel sends where memory is short" * memory

    def printed(self, rank: int, since: int) -> str:
        """Return the output of `rank` after the first `since` bytes, or the end of that."""
        try:
            with (self.folder / f"output-{rank}").open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(since, size - _BYTES_READ))
                return file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def last_lines(self, since: Sequence[int], *, launcher: bool = True) -> str:
        """Return the last lines of each rank after its first `since` bytes; if there are none, those of mpiexec."""
        texts = {f"[rank {rank}] ": self.printed(rank, start) for rank, start in enumerate(since)}
        if launcher and not any(texts.values()):
            texts = {"": self._output.read_text(errors="replace")}
        return "\n".join(
            prefix + bounded(line, _CHARACTERS_SHOWN)
            for prefix, text in texts.items()
            for line in text.splitlines()[-_LINES_SHOWN:]
        )

    def stack(self, rank: int) -> str:
        """Return where `rank` is now, as faulthandler writes it, or '' if it does not answer."""
        pid = self._pids.get(rank)
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
        return path.read_bytes()[seen:].decode(errors="replace")

    def stop(self) -> None:
        """End mpiexec, all ranks and all that these have started."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        with suppress(subprocess.TimeoutExpired):  # a process that no signal ends, as it waits for a disk or device
            self._guard.wait(2 * guard.GRACE)


def _remove(folder: Path, lock: int | None = None) -> None:
    """Remove the folder of a job that is over, and the shared memory that killed ranks leave behind."""
    with suppress(OSError):
        for segment in memory_named_in(str(beginnings(folder))):
            segment.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def _alone(program: ModuleType) -> list[str]:
    """Return the command of a file that needs nothing but the standard library, and starts faster."""
    return [sys.executable, "-I", "-S", str(program.__file__)]

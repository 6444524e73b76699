"""What a command shows: its streams, which may be on a full disk or in a pipe that nobody reads, and its progress.

Progress goes to stderr: a bar, on a terminal and with tqdm installed, or else a line now and then. Processes under
mpiexec have no terminal, as mpiexec reads their output.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

if TYPE_CHECKING:
    from mpi4py import MPI

# The ranks that run a command; None without MPI.
Comm: TypeAlias = "MPI.Intracomm | None"


class Unwritten(SystemExit):
    """Ends a command whose output cannot be written; being no `OSError`, it is not taken for one of the work."""


class Stream:
    """Writes to `stream`; a write that fails raises `Unwritten`, but for lines of progress on a full disk.

    A lost line of progress is worth no report.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._has_results = stream, stream is sys.stdout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text`, and return its length."""
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Write what is in the buffer."""
        self._try(self._stream.flush)

    def _try(self, work: Callable[..., object], *arguments: str) -> None:
        try:
            work(*arguments)
        except OSError as error:
            with open(os.devnull, "w") as devnull:  # for what is left in the buffer, which Python writes at the end
                os.dup2(devnull.fileno(), self._stream.fileno())
            if isinstance(error, BrokenPipeError):
                raise Unwritten(128 + signal.SIGPIPE) from error
            if self._has_results:
                print(f"error: standard output: {error.strerror}", file=sys.stderr)
                raise Unwritten(2) from error


# Without a bar, a line is printed after each of this many parts of the work, and after this many seconds without
# one.
_PARTS = 10
_SILENCE = 60.0


def progress(work: str, names: Sequence[str], comm: Comm) -> Iterator[str]:
    """Yield each of `names`, and show the progress on rank 0's stderr."""
    with contextlib.closing(Bar(work, len(names), shown=comm is None or comm.rank == 0)) as bar:
        for name in names:
            bar.started(name)
            yield name
            bar.finished(name)


class Bar:
    """Shows how much of `total` is done, if `shown`."""

    def __init__(self, work: str, total: int, *, shown: bool = True) -> None:
        self._work, self.total, self._shown = work, total, shown
        self.done = 0
        self._name = self._printed_text = ""
        self._begin = self._last_line = time.monotonic()
        self._tqdm: Any = None
        if shown and sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._tqdm = tqdm(total=total, desc=work, file=sys.stderr, leave=False)

    def __str__(self) -> str:
        return f"{self._work}: {self.done} of {self.total}"

    def started(self, name: str) -> None:
        """Begin `name`."""
        self._name = name
        self.tell("")

    def tell(self, text: str) -> None:
        """Show a remark on the current item, on a terminal only."""
        remark = f"{self._name} {text}".rstrip()
        if self._tqdm is not None and remark != self._printed_text:
            self._tqdm.set_postfix_str(remark)
            self._printed_text = remark

    def finished(self, text: str, *, worth_a_line: bool = False) -> None:
        """Count an item as done, with `text` as its result, on a line of its own if it is `worth_a_line`."""
        self.done += 1
        if self._tqdm is not None:
            self._tqdm.set_postfix_str(text, refresh=False)
            self._tqdm.update()
        if worth_a_line:
            self.say(f"{self._work} {self.done}/{self.total}  {text}")
        elif self._tqdm is None and self._is_line_due():
            self.say(f"{self._work} {self.done}/{self.total}  {text}{self._time_left()}")

    def _time_left(self) -> str:
        """If every item takes as long as those that are done: what a bar of tqdm shows too."""
        seconds = (time.monotonic() - self._begin) / self.done * (self.total - self.done)
        time_left = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
        return f", {time_left} left" if self.done < self.total else ""

    def _is_line_due(self) -> bool:
        parts, before = (_PARTS * done // self.total for done in (self.done, self.done - 1))
        return parts > before or time.monotonic() - self._last_line >= _SILENCE

    def say(self, text: str) -> None:
        if self._tqdm is not None:
            self._tqdm.write(text, file=sys.stderr)
        elif self._shown:
            print(text, file=sys.stderr, flush=True)
            self._last_line = time.monotonic()

    def close(self) -> None:
        """Remove the bar."""
        if self._tqdm is not None:
            self._tqdm.close()

"""How far a run has got, on stderr: a progress bar on a terminal where tqdm is installed, or else a line now and then.

What mpiexec starts has no terminal, as mpiexec reads all that it prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

# Without a bar, a line is printed each time that another of so many parts of the work is done, and after so many
# seconds without one.
_PARTS = 10
_SILENCE = 60.0


def progress(work: str, names: Sequence[str], comm: MPI.Intracomm | None) -> Iterator[str]:
    """Yield each of `names` and show on rank 0's stderr how far that has got."""
    with contextlib.closing(Bar(work, len(names), shown=comm is None or comm.rank == 0)) as bar:
        for name in names:
            bar.started(name)
            yield name
            bar.finished(name)


class Bar:
    """How much of `total` is done; nothing is said unless `shown`."""

    def __init__(self, work: str, total: int, *, shown: bool = True) -> None:
        self._work, self._total, self._shown = work, total, shown
        self.done = 0
        self._name = self._printed_text = ""
        self._last_line = time.monotonic()
        self._tqdm: Any = None
        if shown and sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._tqdm = tqdm(total=total, desc=work, file=sys.stderr, leave=False)

    def __str__(self) -> str:
        return f"{self._work}: {self.done} of {self._total}"

    def started(self, name: str) -> None:
        """`name` is what is done now."""
        self._name = name
        self.tell("")

    def tell(self, text: str) -> None:
        """What is to be said of the one that is done now, on a terminal alone."""
        told = f"{self._name} {text}".rstrip()
        if self._tqdm is not None and told != self._printed_text:
            self._tqdm.set_postfix_str(told)
            self._printed_text = told

    def finished(self, text: str, *, worth_a_line: bool = False) -> None:
        """One more is done, and `text` says of it what there is to say; a line of its own if it is worth one."""
        self.done += 1
        if self._tqdm is not None:
            self._tqdm.set_postfix_str(text, refresh=False)
            self._tqdm.update()
        if worth_a_line or (self._tqdm is None and self._is_line_due()):
            self.say(f"{self._work} {self.done}/{self._total}  {text}")

    def _is_line_due(self) -> bool:
        parts, before = (_PARTS * done // self._total for done in (self.done, self.done - 1))
        return parts > before or time.monotonic() - self._last_line >= _SILENCE

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._tqdm is not None:
            self._tqdm.write(text, file=sys.stderr)
        elif self._shown:
            print(text, file=sys.stderr, flush=True)
            self._last_line = time.monotonic()

    def close(self) -> None:
        """Take the bar away."""
        if self._tqdm is not None:
            self._tqdm.close()

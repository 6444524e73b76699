"""How far a run has got: a progress bar on the terminal, or plain lines where tqdm is not installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Bar", "progress"]


def progress(names: Sequence[str], comm: MPI.Intracomm | None) -> Iterator[str]:
    """Yield each of `names` and show on rank 0's stderr how far that has got."""
    if comm is not None and comm.rank > 0:
        yield from names
        return
    try:
        from tqdm import tqdm
    except ImportError:
        for number, name in enumerate(names, 1):
            print(f"{number}/{len(names)} {name}", file=sys.stderr)
            yield name
        return
    with tqdm(names, file=sys.stderr) as bar:
        for name in bar:
            bar.set_description(name)
            yield name


class Bar:
    """How much of `total` is done, on stderr: a bar on a terminal where tqdm is installed, or else a line each."""

    def __init__(self, work: str, total: int) -> None:
        self._work, self._total = work, total
        self.done = 0
        self._name = self._shown = ""
        self._tqdm: Any = None
        if sys.stderr.isatty():
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
        shown = f"{self._name} {text}".rstrip()
        if self._tqdm is not None and shown != self._shown:
            self._tqdm.set_postfix_str(shown)
            self._shown = shown

    def finished(self, name: str, how: str, *, worth_a_line: bool = False, silent: bool = False) -> None:
        """`name` is done; a line of its own says so where there is no bar, unless `silent`, or if it is worth one."""
        self.done += 1
        if self._tqdm is not None:
            self._tqdm.update()
        if worth_a_line or (self._tqdm is None and not silent):
            self.say(f"{self._work} {self.done}/{self._total}  {how:11}  {name}")

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._tqdm is not None:
            self._tqdm.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._tqdm is not None:
            self._tqdm.close()

"""How something ended on each rank: told to every rank without waiting for ever, and shown as one failure."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import takewhile
from os import sched_yield
import re
from signal import SIG_DFL, SIG_IGN, SIGALRM, signal
from threading import current_thread, main_thread
import time
from typing import TYPE_CHECKING, Any

from pce_mpi.comm.errors import ranks_text
from pce_mpi.jobs.patience import Patience

if TYPE_CHECKING:
    from mpi4py import MPI

# There may be more ranks than cores, so that a rank that waits leaves its core to the others. One that yields it hears
# of the last rank within microseconds, one that sleeps within a millisecond: at first a rank yields.
_YIELDS = 1_000
_NAP = 0.0002
_naps = (time.sleep,)  # as it is at import: a test may patch it, in every module that has it

Data = dict[str, Any]  # a report, as pytest serializes it


def exchange(
    comm: MPI.Comm, passed: bool, errors: int, wait: Callable[[float], None], place: int = 0
) -> tuple[bool, int, list[int]]:
    """Return whether all ranks have passed, the most errors of a rank, and the `place` of each in its program.

    `comm` carries nothing else meanwhile. `wait` is told again and again for how many seconds of `Patience` other ranks
    have been missing; it may end the job.
    """
    mine, of_all = array("q", [passed, errors, place]), array("q", [0, 0, 0] * comm.size)
    arrivals = comm.Iallgather(mine, of_all)
    with _without_alarms():
        for _ in range(_YIELDS):
            if arrivals.Test():
                break
            sched_yield()
        else:
            patience = Patience(0.0)
            while not arrivals.Test():
                patience.is_over()
                wait(-patience.left)
                _naps[0](max(_NAP, min(-patience.left, 1.0) / 100))  # a hundredth of the time is not much later
    return all(of_all[::3]), max(of_all[1::3]), [*of_all[2::3]]


@contextmanager
def _without_alarms() -> Iterator[None]:
    """Let no alarm, such as that of pytest-timeout, fail a rank for the time of another one."""
    if current_thread() is not main_thread():  # to which Python gives all signals
        yield
        return
    before = signal(SIGALRM, SIG_IGN)
    try:
        yield
    finally:
        signal(SIGALRM, before or SIG_DFL)


@dataclass(frozen=True)
class Crash:
    """The place and the message of a failure, as summaries show them."""

    path: str
    lineno: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.lineno}: {self.message.partition(chr(10))[0]}"


class RanksFailure:
    """The representation of a failure of some ranks, for reports of pytest: a heading and a body for each text.

    `blocks` are JSON: a heading, the serialized report of one rank or a text, and whose it is, for a line of summary.
    """

    def __init__(self, blocks: Sequence[Sequence[Any]], config: Any = None) -> None:
        self._blocks, crashes = [], list[Crash]()
        self._is_one_line = config is not None and config.option.tbstyle == "line"  # which pytest writes by itself
        for heading, body, who in blocks:
            if isinstance(body, Mapping):
                report = config.hook.pytest_report_from_serializable(config=config, data=deepcopy(body))
                crash = getattr(report.longrepr, "reprcrash", None)
                text = crash.message if crash else _reason(report)
                path, line = (crash.path, crash.lineno) if crash else ("", 0)
                crashes.append(Crash(path, line, f"{who}{text}"))
                body = report.longrepr if crash else text
            self._blocks.append((heading, body))
        self.reprcrash = [*crashes, Crash("", 0, self._blocks[0][0])][0]

    def toterminal(self, out: Any) -> None:
        """Write all blocks to a `TerminalWriter`."""
        for heading, body in [] if self._is_one_line else self._blocks:
            out.sep("-", heading)
            if hasattr(body, "toterminal"):
                body.toterminal(out)
            else:
                out.line(str(body))

    def __str__(self) -> str:
        return "\n".join(f"----- {heading}\n{body}" for heading, body in self._blocks)


def blocks_of(reports: Sequence[Data]) -> list[list[Any]]:
    """Return the blocks of a `RanksFailure` from the report of each rank; ranks that say the same share one."""
    ranks_by_text: dict[tuple[str, str, str], list[int]] = {}
    for rank, report in enumerate(reports):
        heard = report.get("heard", "")
        alike = re.sub(r"\b0x[0-9a-f]+", "0x...", heard or str(report["longrepr"]))
        ranks_by_text.setdefault((report["outcome"], heard, alike), []).append(rank)
    passed = sum(report["outcome"] == "passed" for report in reports)
    held = f"; passed on {passed} other{'s' * (passed > 1)}" if passed else ""
    own = [rank for rank, report in enumerate(reports) if report["outcome"] != "passed" and not report.get("heard")]
    who = f"{ranks_text(own)} of {len(reports)}: " if len(own) < len(reports) else ""
    blocks: list[list[Any]] = []
    for (outcome, heard, _), ranks in sorted(
        ranks_by_text.items(), key=lambda each: (each[0][0] != "failed", each[0][1])
    ):
        where = "every rank" if len(ranks) == len(reports) else ranks_text(ranks)
        if heard:
            blocks.append([f"{where} of {len(reports)} heard of it in a call of this package", heard, who])
        elif outcome != "passed":
            blocks.append([f"{where} of {len(reports)} {outcome}{held}", reports[ranks[0]], who])
    return blocks


def own_stack(lines: Iterable[str]) -> str:
    """Return the stack of a rank, whose most recent call comes first, without the frames of pytest."""
    inner = takewhile(lambda line: "/_pytest/" not in line, lines)
    own = (line for line in inner if not re.search("/(hypothesis/(core|internal)|pluggy|pce_mpi/testing)/", line))
    return "\n".join(own) or "waits for the others, as this phase of the test is over here"


def _reason(report: Any) -> str:
    """Return the text of a report that has no place of a failure, such as that of a skipped test."""
    text = report.longrepr
    return str(text[2] if isinstance(text, Sequence) and not isinstance(text, str) else text)

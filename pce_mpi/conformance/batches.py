"""Run the cases of a candidate over as many launches as that takes: after a case that hung or died, the next goes on.

A launch runs its cases one after the other. It ends early where a rank dies, where ranks raised differently, or where
nothing is heard of any rank for a while; what can be known of the case at fault is then put into words here.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
import shlex
import signal
import time
from typing import Any, Protocol

from pce_mpi.conformance.cases import Case
from pce_mpi.conformance.launcher import Job
from pce_mpi.conformance.launching import LaunchError
from pce_mpi.conformance.offers import Offer
from pce_mpi.conformance.orders import Orders, Task
from pce_mpi.conformance.outcomes import Finding, Outcome, Report, Verdict
from pce_mpi.conformance.stacks import innermost

DEFAULT_TIMEOUT = 30.0

# How often the ranks' files are looked into.
_POLL = 0.02
# Once a rank has raised, the others can be waiting for it; they get this part of the timeout to show that they are not,
# and so many seconds at least.
_AFTER_AN_ERROR = 1 / 6
_AFTER_AN_ERROR_AT_LEAST = 5.0
# After so many seconds of silence the display is told of it, again and again.
_WAITING = 3.0
# Until the first case, a framework may have to be imported by ranks that share few cores.
_STARTUP = 120.0
# What shrinking all failures may take, launches included.
_SHRINKING = 60.0


class Display(Protocol):
    """What shows to a user how far a run has got."""

    def begin(self, work: str, total: int) -> None:
        """`total` cases come now, for the sake of `work`."""

    def started(self, case: str) -> None:
        """`case` has started."""

    def waiting(self, seconds: float, timeout: float) -> None:
        """No rank has shown a sign of life for so many seconds; after `timeout` the case is deadlocked."""

    def finished(self, case: str, outcome: Outcome | None) -> None:
        """`case` has ended; an outcome of None: it does not fail at a smaller shape."""

    def printed(self, text: str) -> None:
        """The last lines that each rank has printed, where one case was run alone."""

    def warn(self, text: str) -> None:
        """Something went wrong that is no outcome of a case."""


def run_cases(orders: Orders, ranks: int, *, timeout: float, shrinking: bool, display: Display) -> Report:
    """Run what `orders` select on `ranks` ranks, in as many launches as it takes.

    `timeout`: seconds without a sign of life from any rank after which a case is deadlocked. `shrinking`: look for the
    smallest shape at which each failing case still fails.

    Interrupted by KeyboardInterrupt, it returns what is known by then, unless that is nothing. Raises `LaunchError`
    where ranks cannot be started or the candidate cannot be loaded. However it ends, no process is left behind.
    """
    batches = _Batches(orders, ranks, timeout, display)
    outcomes: list[Outcome] = []
    interrupted = False
    try:
        with closing(batches.outcomes(None)) as results:
            for _, outcome in results:
                assert outcome is not None
                outcomes.append(outcome)
        if shrinking and orders.rows is None and orders.classes is None:
            _shrink(outcomes, batches)
    except KeyboardInterrupt:
        if not outcomes:
            raise
        interrupted = True
    assert batches.offer is not None
    for outcome in outcomes:
        if outcome.failed:
            outcome.rerun = _command(orders, ranks, timeout, outcome)
    return Report(
        candidate=orders.candidate,
        offer=batches.offer,
        ranks=ranks,
        versions=batches.versions,
        seed=orders.seed,
        strict=orders.strict,
        tolerance=orders.tolerance,
        outcomes=outcomes,
        interrupted=interrupted,
    )


def asked_offer(orders: Orders, *, timeout: float, display: Display) -> Offer:
    """What the candidate of `orders` offers, by the word of one rank that loads it; raises as `run_cases`."""
    batches = _Batches(orders, 1, timeout, display)
    with Job(1, replace(orders, tasks=())) as job:
        list(_Launch(batches, job, ()).results())
    assert batches.offer is not None
    return batches.offer


def _shrink(outcomes: list[Outcome], batches: _Batches) -> None:
    """Give the failures among `outcomes` the smallest shapes that show the same, as far as they are found in time."""
    failures = {
        outcome.case: outcome
        for outcome in outcomes
        if outcome.verdict is Verdict.FAIL and outcome.findings and batches.cases[outcome.case].shrinkable
    }
    if not failures:
        return
    tasks = [Task(name, (outcome.findings[0].kind,)) for name, outcome in failures.items()]
    deadline = time.monotonic() + _SHRINKING
    with closing(batches.outcomes(tasks)) as results:
        for task, small in results:
            if small is not None:
                _take_over(failures[task.case], small)
            if time.monotonic() > deadline:
                break


def _take_over(failure: Outcome, small: Outcome) -> None:
    """The shape of `small`, and what it shows there; the larger problem's words say more of the cause, and stay."""
    failure.shrunk = True
    failure.rows, failure.classes, failure.splits = small.rows, small.classes, small.splits
    kind = failure.findings[0].kind
    text = next(finding.text for finding in small.findings if finding.kind == kind)
    failure.findings.append(Finding(kind, f"at the smallest shape: {text}"))


class _Batches:
    """A run, as it is known so far: what the candidate offers, and with that the cases."""

    def __init__(self, orders: Orders, ranks: int, timeout: float, display: Display) -> None:
        self.orders, self.ranks, self.timeout, self.display = orders, ranks, timeout, display
        self.offer: Offer | None = None
        self.versions: dict[str, str] = {}
        self.cases: dict[str, Case] = {}

    def ready(self, offer: Offer, versions: dict[str, str]) -> None:
        """The candidate is loaded."""
        self.offer, self.versions = offer, versions
        self.cases = self.orders.cases(offer)

    def outcomes(self, tasks: Sequence[Task] | None) -> Generator[tuple[Task, Outcome | None]]:
        """What comes of each task, None if it is to reproduce what does not show; without tasks: of each case."""
        if tasks is not None:
            self.display.begin("looking for the smallest shape", len(tasks))
        while tasks is None or tasks:
            try:
                with Job(self.ranks, replace(self.orders, tasks=None if tasks is None else tuple(tasks))) as job:
                    launch = _Launch(self, job, tasks)
                    for result in launch.results():
                        yield from self._shown(result)
                tasks = launch.unfinished
            except LaunchError as error:
                if tasks is None:
                    raise
                # It could be started before: what one of the cases has done keeps it from starting again.
                text = f"could not be run, as the candidate did not start again: {error}"
                for task in tasks:
                    yield from self._shown((task, self.failure(task, Verdict.CRASHED, text)))
                return

    def _shown(self, result: tuple[Task, Outcome | None]) -> Generator[tuple[Task, Outcome | None]]:
        """Give the result away before it is shown: an interrupt on the way loses nothing that was seen."""
        yield result
        self.display.finished(result[0].case, result[1])

    def failure(self, task: Task, verdict: Verdict, text: str, printed: str = "") -> Outcome | None:
        """The outcome of a case that did not come to its end."""
        if task.reproduce:
            return None
        case = self.cases[task.case]
        assert self.offer is not None
        orders = self.orders
        setting = case.setting(self.offer, self.ranks, seed=orders.seed, rows=orders.rows, classes=orders.classes)
        findings = [Finding(str(verdict), text)]
        if printed:
            findings.append(Finding(str(verdict), printed))
        outcome = Outcome(case.name, case.catches, verdict, findings, ranks=self.ranks, dtype=case.dtype)
        try:
            problem = case.build(setting)
        except Exception as error:
            # What keeps it from being built may be what the ranks have met with; their outcomes are not to be lost.
            findings.append(Finding(str(verdict), f"its shape is not known: {type(error).__name__}: {error}"))
            return outcome
        return replace(outcome, rows=problem.rows, classes=problem.classes, splits=problem.splits)


@dataclass
class _Rank:
    """What one rank has told last."""

    task: int = -1
    doing: str = ""
    error: str = ""
    printed: int = 0


class _Launch:
    """One launch, followed from its first sign of life to its end."""

    def __init__(self, batches: _Batches, job: Job, tasks: Sequence[Task] | None) -> None:
        self._batches, self._job = batches, job
        self.tasks = [] if tasks is None else list(tasks)
        self._all = tasks is None
        self._ranks = [_Rank() for _ in range(job.ranks)]
        self._finished = 0
        self._ready = self._over = False

    def results(self) -> Iterator[tuple[Task, Outcome | None]]:
        """Each task that has ended and what came of it; the last one may be the one that ended the launch."""
        heard = time.monotonic()
        while not self._over:
            # Asked before the news are read, so that these hold all that was done before the end.
            ended = bool(self._job.ends()) or self._job.status is not None
            silent = True
            for rank, event in self._job.news():
                heard, silent = time.monotonic(), False
                if event["event"] == "outcome":
                    yield self._next(None if event["outcome"] is None else Outcome.from_json(event["outcome"]))
                else:
                    self._take_in(rank, event)
            if not silent:
                continue
            if ended and not self._over:
                yield from self._fault(Verdict.CRASHED, self._death())
                return
            silence = time.monotonic() - heard
            if silence > (timeout := self._timeout()):
                yield from self._fault(Verdict.DEADLOCKED, self._standstill())
                return
            if self._ready and silence > _WAITING:
                self._batches.display.waiting(silence, timeout)
            time.sleep(_POLL)

    def _timeout(self) -> float:
        """How many seconds of silence are too many now."""
        timeout = self._batches.timeout
        if not self._ready:
            return max(timeout, _STARTUP)
        raised = {each.doing == "raised" for each in self._ranks}
        return min(timeout, max(_AFTER_AN_ERROR_AT_LEAST, _AFTER_AN_ERROR * timeout)) if len(raised) > 1 else timeout

    @property
    def unfinished(self) -> list[Task]:
        """The tasks that have not ended."""
        return self.tasks[self._finished :]

    def _take_in(self, rank: int, event: dict[str, Any]) -> None:
        mine = self._ranks[rank]
        match event["event"]:
            case "apart":
                raise LaunchError(event["text"])
            case "unusable":
                raise LaunchError(f"{self._batches.orders.candidate} cannot be loaded and started: {event['text']}")
            case "ready":
                self._ready = True
                self._batches.ready(Offer(**event["offer"]), event["versions"])
                if self._all:
                    self.tasks = [Task(name) for name in self._batches.cases]
                    self._batches.display.begin("conformance", len(self.tasks))
            case "started":
                if event["task"] > max(each.task for each in self._ranks):
                    self._batches.display.started(self.tasks[event["task"]].case)
                self._ranks[rank] = _Rank(event["task"], "started", printed=event["printed"])
            case "called" | "returned" | "raised" as doing:
                mine.doing, mine.error = doing, event.get("error", "")
            case "torn":
                self._over = True
            case "done":
                self._over = True
                self._wait_for_the_end()

    def _next(self, outcome: Outcome | None) -> tuple[Task, Outcome | None]:
        self._finished += 1
        if outcome is not None and outcome.verdict is not Verdict.CRASHED and self._all and len(self.tasks) == 1:
            # Of a crash they are in the outcome.
            self._batches.display.printed(self._job.last_lines([each.printed for each in self._ranks], launcher=False))
        return self.tasks[self._finished - 1], outcome

    def _fault(self, verdict: Verdict, text: str) -> Iterator[tuple[Task, Outcome | None]]:
        """The outcome of the case during which, or before which, the launch came to a bad end."""
        printed = self._job.last_lines([each.printed for each in self._ranks])
        if not self._ready:
            raise LaunchError(f"{text}, before the candidate was loaded and started\n{printed}".rstrip())
        if self._finished == len(self.tasks):
            self._batches.display.warn(f"after the last case, {text}")
            return
        task = self.tasks[self._finished]
        sentence = f"{verdict} in case {task.case}: {text}"
        yield self._next(self._batches.failure(task, verdict, sentence, printed))

    def _death(self) -> str:
        """Which rank died first, and of what."""
        ends = self._job.ends()
        if not ends:
            return f"mpiexec ended with exit status {self._job.status}"
        rank, status = ends[0]
        who = "a rank" if rank is None else f"rank {rank}"
        how = f"died of {_signal_name(-status)}" if status < 0 else f"ended with exit status {status}"
        if rank is None:
            return f"{who} {how}"
        mine = self._ranks[rank]
        if mine.doing == "raised":
            return f"{who} raised {mine.error} and {how}"
        place = innermost(self._job.printed(rank, mine.printed))
        return f"{who} {how}" + (f" at {place}" if place else "")

    def _standstill(self) -> str:
        """What each rank did last."""
        phrases: dict[str, list[int]] = {}
        for number, each in enumerate(self._ranks):
            phrases.setdefault(self._last(number, each), []).append(number)
        # Who never returned is what a reader looks for first.
        order = sorted(phrases, key=lambda phrase: not phrase.startswith("never"))
        return "; ".join(f"{_names(phrases[phrase])} {phrase}" for phrase in order)

    def _last(self, number: int, rank: _Rank) -> str:
        if not self._ready:
            place = self._job.where(number)
            return f"never got past {place}" if place else "never got ready"
        if rank.task != self._finished:
            return "never began"
        match rank.doing:
            case "called":
                place = self._job.where(number)
                return f"never returned from {place}" if place else "never returned"
            case "raised":
                return f"raised {rank.error}"
            case "returned":
                return "returned"
        return "never called the candidate"

    def _wait_for_the_end(self) -> None:
        """Let the ranks end by themselves, and say so where they cannot."""
        deadline = time.monotonic() + self._batches.timeout
        while self._job.status is None and time.monotonic() < deadline:
            time.sleep(_POLL)
        if self._job.status is None:
            self._batches.display.warn("after the last case, the ranks did not end by themselves")
        elif any(status for _, status in self._job.ends()):
            self._batches.display.warn(f"after the last case, {self._death()}")


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _command(orders: Orders, ranks: int, timeout: float, outcome: Outcome) -> str:
    """The command that runs the case of `outcome` alone, at its shape if that was shrunk to."""
    command = ["python", "-m", "pce_mpi", "conformance", "-n", str(ranks)]
    if orders.adapter is not None:
        command += ["--adapter", orders.adapter]
    command += [orders.candidate, "--case", outcome.case]
    if orders.dtypes is not None:
        command += ["--dtype", outcome.dtype]
    if orders.strict:
        command.append("--strict")
    for name, value, default in (
        ("--tolerance", orders.tolerance, 1.0),
        ("--timeout", timeout, DEFAULT_TIMEOUT),
        ("--seed", orders.seed, 0),
        ("--rows", outcome.rows if outcome.shrunk else orders.rows, None),
        ("--classes", outcome.classes if outcome.shrunk else orders.classes, None),
    ):
        if value != default:
            command += [name, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(command)

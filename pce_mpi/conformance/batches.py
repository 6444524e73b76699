"""Run the cases of a candidate in one launch, or more: after a case that hangs or crashes, the next launch goes on.

A launch runs its cases in order. It ends early if a rank dies, if some ranks raise and others do not, or if no rank
shows a sign of life for a while; this module then describes the case at fault.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
import shlex
import signal
import time
from typing import Any, Protocol

from pce_mpi.conformance.cases import Case, fits, problem_of
from pce_mpi.conformance.contradictions import withdraw_contradicted
from pce_mpi.conformance.launcher import Job
from pce_mpi.conformance.launching import LaunchError, most_ranks
from pce_mpi.conformance.offers import Offer, unmet_need
from pce_mpi.conformance.orders import Orders, Task
from pce_mpi.conformance.outcomes import Finding, Outcome, Report, Verdict, of_json
from pce_mpi.conformance.shrinking import shows_the_same, usable_shapes
from pce_mpi.conformance.stacks import innermost
from pce_mpi.conformance.units import Tolerance

DEFAULT_TIMEOUT = 30.0
# Seconds for a case of 2**31 elements.
LARGE_TIMEOUT = 900.0

# Seconds between reads of the ranks' files.
_POLL = 0.02
# Once a rank has raised, the others may wait for it: a silence of this part of the timeout is a deadlock, of this many
# seconds at least.
_AFTER_AN_ERROR = 1 / 6
_AFTER_AN_ERROR_AT_LEAST = 5.0
# After this many seconds of silence, the display shows it.
_WAITING = 3.0
# Seconds between two looks at where the ranks are.
_MOMENT = 0.3
# Before the first case, ranks that share few cores may have to import a framework.
_STARTUP = 120.0
# After so many cases that ended their launch in the same way, and no other ones, the rest is not run.
_ALIKE = 3
# Seconds for shrinking all failures, launches included.
_SHRINKING = 60.0


class Display(Protocol):
    """Shows the progress of a run to a user."""

    def begin(self, work: str, total: int) -> None: ...
    def started(self, case: str) -> None: ...
    def finished(self, case: str, outcome: Outcome) -> None: ...

    # No rank has shown a sign of life for `seconds`; after `timeout` the case is deadlocked.
    def waiting(self, seconds: float, timeout: float) -> None: ...

    # The last lines of each rank's output, if one case was run alone.
    def printed(self, text: str) -> None: ...

    # A fault that is no outcome of a case.
    def warn(self, text: str) -> None: ...


def run_cases(
    orders: Orders,
    ranks: Sequence[int],
    *,
    timeout: float,
    shrinking: bool,
    display: Display,
    known: Sequence[str] = (),
) -> Report:
    """Run the cases that `orders` select on each of the numbers of `ranks`, in as many launches as necessary.

    `timeout`: seconds without a sign of life from any rank after which a case is deadlocked. `shrinking`: find the
    smallest shape at which each failing case still fails. `known`: names, families or shell patterns of the cases that
    are known to fail; one of these that passes is a failure.

    After a KeyboardInterrupt, returns the outcomes so far, if there are any. Raises `LaunchError` if ranks cannot be
    started or the candidate cannot be loaded. Leaves no process behind.
    """
    outcomes: list[Outcome] = []
    offer, versions = Offer(), dict[str, str]()
    interrupted = False
    for size in ranks:
        batches = _Batches(orders, size, timeout, display)
        of_size: list[Outcome] = []
        try:
            with closing(batches.outcomes(None)) as results:
                of_size += (outcome for _, outcome in results)
            if shrinking and orders.rows is None and orders.classes is None:
                _shrink(of_size, batches)
        except KeyboardInterrupt:
            if not of_size and not outcomes:
                raise
            interrupted = True
        if batches.offer is not None:
            offer, versions = batches.offer, batches.versions
            tolerance = Tolerance(orders.strict, orders.tolerance)
            withdraw_contradicted(of_size, batches.cases, offer, orders.seed, tolerance)
        outcomes += of_size
        if interrupted:
            break
    _compare_with_known(outcomes, known)
    for outcome in outcomes:
        if outcome.failed:
            outcome.rerun = _command(orders, timeout, outcome)
    return Report(
        candidate=orders.candidate,
        offer=offer,
        ranks=tuple(ranks),
        versions=versions,
        seed=orders.seed,
        strict=orders.strict,
        tolerance=orders.tolerance,
        outcomes=outcomes,
        interrupted=interrupted,
    )


def _compare_with_known(outcomes: Sequence[Outcome], known: Sequence[str]) -> None:
    """Take failures for what was known; fail a known case that passes on every number of ranks."""
    by_name: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if any(fits(outcome.case, pattern) for pattern in known) and outcome.verdict is not Verdict.NOT_OFFERED:
            by_name.setdefault(outcome.case, []).append(outcome)
    for found in by_name.values():
        for outcome in found:
            if outcome.failed:
                outcome.verdict, outcome.note = Verdict.KNOWN, f"{outcome.verdict}: {outcome.findings[0].text}"
        if all(outcome.verdict is Verdict.PASS for outcome in found):
            text = "passes, and is known to fail: remove it from the file of known failures"
            found[0].verdict, found[0].findings = Verdict.FAIL, [Finding("known", text)]


def asked_offer(orders: Orders, *, timeout: float, display: Display) -> Offer:
    """Return the offer of the candidate of `orders`, which one rank loads; raise as `run_cases`."""
    batches = _Batches(orders, 1, timeout, display)
    with Job(1, replace(orders, tasks=())) as job:
        list(_Launch(batches, job, ()).results())
    assert batches.offer is not None
    return batches.offer


def _shrink(outcomes: list[Outcome], batches: _Batches) -> None:
    """Replace the shapes of failures by the smallest ones that fail in the same way, as far as time allows."""
    failures = {
        outcome.case: outcome
        for outcome in outcomes
        if outcome.verdict is Verdict.FAIL and outcome.findings and batches.cases[outcome.case].shrinkable
    }
    if not failures:
        return
    assert batches.offer is not None
    tasks = [
        Task(name, *shape)
        for name, outcome in failures.items()
        for shape in usable_shapes(outcome, batches.cases[name], batches.offer, batches.orders.seed)
    ]
    deadline = time.monotonic() + _SHRINKING
    with closing(batches.outcomes(sorted(tasks, key=lambda task: (task.rows or 0) * (task.classes or 0)))) as results:
        for task, small in results:
            if task.case in failures and shows_the_same(small, failures[task.case]):
                failure = failures.pop(task.case)
                failure.shrunk = True  # the findings of the larger problem stay, as they say more
                failure.rows, failure.classes, failure.splits = small.rows, small.classes, small.splits
            if not failures or time.monotonic() > deadline:
                break


class _Batches:
    """The state of a run: the offer of the candidate, and with that the cases."""

    def __init__(self, orders: Orders, ranks: int, timeout: float, display: Display) -> None:
        self.orders, self.ranks, self.timeout, self.display = orders, ranks, timeout, display
        self.offer: Offer | None = None
        self.versions: dict[str, str] = {}
        self.cases: dict[str, Case] = {}

    def ready(self, offer: Offer, versions: dict[str, str]) -> None:
        """The candidate is loaded."""
        self.offer, self.versions = offer, versions
        self.cases = self.orders.cases(offer)

    def outcomes(self, tasks: Sequence[Task] | None) -> Generator[tuple[Task, Outcome]]:
        """Yield the outcome of each task, or, without tasks, of each case."""
        if tasks is not None:
            self.display.begin("looking for the smallest shape", len(tasks))
        endless = tasks is None  # every launch has ended in the first case that it judged
        endings: list[Finding] = []
        while tasks is None or tasks:
            judged: list[Outcome] = []
            try:
                with Job(self.ranks, replace(self.orders, tasks=None if tasks is None else tuple(tasks))) as job:
                    launch = _Launch(self, job, tasks)
                    for result in launch.results():
                        judged += [result[1]] * (result[1].verdict is not Verdict.NOT_OFFERED)
                        yield from self._shown(result)
                tasks = launch.unfinished
            except LaunchError as error:
                if tasks is None:
                    raise
                # It has started before: the effect of a case keeps it from starting again.
                text = f"could not be run, as the candidate did not start again: {error}"
                yield from self._unrun(tasks, Verdict.CRASHED, text)
                return
            endless = endless and len(judged) == 1
            endings += [Finding(str(outcome.verdict), _without_case(outcome)) for outcome in judged]
            if endless and len(endings) == _ALIKE and len({each.likeness for each in endings}) == 1:
                text = f"not run, as the first {_ALIKE} cases ended alike: {endings[0].text}"
                yield from self._unrun(tasks, judged[0].verdict, text)
                return

    def _unrun(self, tasks: Sequence[Task], verdict: Verdict, text: str) -> Generator[tuple[Task, Outcome]]:
        """Yield the outcomes of tasks that are not run; those that are not offered are no failures."""
        for task in tasks:
            yield from self._shown((task, self.not_offered(task) or self.failure(task, verdict, text)))

    def not_offered(self, task: Task) -> Outcome | None:
        """Return the outcome of a case that is not offered; None if it is."""
        case = self.cases[task.case]
        assert self.offer is not None
        missing = unmet_need(self.offer, case.needs, case.dtype)
        if missing is None:
            return None
        without = Verdict.NOT_OFFERED
        return Outcome(case.name, case.catches, without, ranks=self.ranks, dtype=case.dtype, note=missing)

    def _shown(self, result: tuple[Task, Outcome]) -> Generator[tuple[Task, Outcome]]:
        """Yield the result before it is shown: an interrupt between the two loses nothing that the user saw."""
        yield result
        self.display.finished(result[0].case, result[1])

    def failure(self, task: Task, verdict: Verdict, text: str, printed: str = "") -> Outcome:
        """Return the outcome of a case that did not end."""
        case = self.cases[task.case]
        assert self.offer is not None
        orders = self.orders
        findings = [Finding(str(verdict), text)]
        if printed:
            findings.append(Finding(str(verdict), printed))
        outcome = Outcome(case.name, case.catches, verdict, findings, ranks=self.ranks, dtype=case.dtype)
        try:
            problem = problem_of(
                case,
                self.offer,
                self.ranks,
                seed=orders.seed,
                rows=task.rows or orders.rows,
                classes=task.classes or orders.classes,
            )
        except Exception as error:
            # The ranks may have failed for the same reason; keep their outcomes.
            findings.append(Finding(str(verdict), f"its shape is not known: {type(error).__name__}: {error}"))
            return outcome
        return replace(outcome, rows=problem.rows, classes=problem.classes, splits=problem.splits)


@dataclass
class _Rank:
    """The last event of one rank."""

    task: int = -1
    doing: str = ""
    error: str = ""
    printed: int = 0


class _Launch:
    """One launch, from its first event to its end."""

    def __init__(self, batches: _Batches, job: Job, tasks: Sequence[Task] | None) -> None:
        self._batches, self._job = batches, job
        self.tasks = [] if tasks is None else list(tasks)
        self._all = tasks is None
        self._ranks = [_Rank() for _ in range(job.ranks)]
        self._finished = 0
        self._ready = self._over = False

    def results(self) -> Iterator[tuple[Task, Outcome]]:
        """Yield each task that has ended, with its outcome; the last one may have ended the launch."""
        heard = time.monotonic()
        while not self._over:
            # Before reading the events, so that these include everything before the end.
            ended = bool(self._job.ends()) or self._job.status is not None
            self._job.limit_output()
            silent = True
            for rank, event in self._job.news():
                heard, silent = time.monotonic(), False
                try:
                    outcome = self._take_in(rank, event)
                except (LookupError, TypeError, ValueError) as error:  # an event without its fields, or of no task
                    text = f"the file in which rank {rank} notes its steps is damaged: {type(error).__name__}: {error}"
                    yield from self._fault(Verdict.CRASHED, text)
                    return
                if outcome is not None:
                    yield self._next(outcome)
            if not silent:
                continue
            if ended and not self._over:
                yield from self._fault(Verdict.CRASHED, self._death())
                return
            silence = time.monotonic() - heard
            if silence > (timeout := self._timeout()):
                verdict, text = self._standstill()
                if verdict is not Verdict.SLOW or silence > self._batches.timeout:
                    yield from self._fault(verdict, text)
                    return
            if self._ready and silence > _WAITING:
                self._batches.display.waiting(silence, timeout)
            time.sleep(_POLL)

    def _timeout(self) -> float:
        """Return how many seconds of silence are too many now."""
        timeout = self._batches.timeout
        if not self._ready:
            return max(timeout, _STARTUP)
        raised = {each.doing == "raised" for each in self._ranks}
        return min(timeout, max(_AFTER_AN_ERROR_AT_LEAST, _AFTER_AN_ERROR * timeout)) if len(raised) > 1 else timeout

    @property
    def unfinished(self) -> list[Task]:
        """The tasks that have not ended."""
        return self.tasks[self._finished :]

    def _take_in(self, rank: int, event: dict[str, Any]) -> Outcome | None:
        """Note the event, and return the outcome that it has, if any; `ValueError` or the like if it is damaged."""
        mine = self._ranks[rank]
        match event["event"]:
            case "outcome":
                outcome = of_json(event["outcome"])
                if self._finished == len(self.tasks) or outcome.case != self.tasks[self._finished].case:
                    raise ValueError(f"an outcome of {outcome.case}")
                return outcome
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
            case "damaged":
                raise ValueError("a line that is no event")
        return None

    def _next(self, outcome: Outcome) -> tuple[Task, Outcome]:
        self._finished += 1
        if outcome.verdict is not Verdict.CRASHED and self._all and len(self.tasks) == 1:
            # The outcome of a crash has them.
            self._batches.display.printed(self._job.last_lines([each.printed for each in self._ranks], launcher=False))
        return self.tasks[self._finished - 1], outcome

    def _fault(self, verdict: Verdict, text: str) -> Iterator[tuple[Task, Outcome]]:
        """Yield the outcome of the case during which, or before which, the launch failed."""
        printed = self._job.last_lines([each.printed for each in self._ranks])
        if not self._ready:
            raise LaunchError(f"{text}, before the candidate was loaded and started\n{printed}".rstrip())
        if self._finished == len(self.tasks):
            self._batches.display.warn(f"after the last case, {text}")
            return
        task = self.tasks[self._finished]
        if without := self._batches.not_offered(task):
            self._batches.display.warn(f"before case {task.case}, which is not offered, {text}")
            yield self._next(without)
            return
        sentence = f"{verdict} in case {task.case}: {text}"
        yield self._next(self._batches.failure(task, verdict, sentence, printed))

    def _death(self) -> str:
        """Say which rank died first, and why."""
        ends = self._job.ends()
        if not ends:
            return f"mpiexec ended with exit status {self._job.status}"
        rank, status = ends[0]
        who = "a rank" if rank is None else f"rank {rank}"
        how = f"died of {_signal_name(-status)}" if status < 0 else f"ended with exit status {status}"
        if status == -signal.SIGKILL:
            how += ", which the kernel sends where memory is short (--memory bounds it)"
        if rank is None:
            return f"{who} {how}"
        mine = self._ranks[rank]
        if mine.doing == "raised":
            return f"{who} raised {mine.error} and {how}"
        place = innermost(self._job.printed(rank, mine.printed))
        return f"{who} {how}" + (f" at {place}" if place else "")

    def _standstill(self) -> tuple[Verdict, str]:
        """Say what each rank did last, and whether they wait for each other as far as one can know.

        Ranks that are all inside the candidate, or at another line a moment later, may be busy.
        """
        before = [self._last(number, each) for number, each in enumerate(self._ranks)]
        time.sleep(_MOMENT)
        phrases: dict[str, list[int]] = {}
        for number, each in enumerate(self._ranks):
            phrases.setdefault(self._last(number, each), []).append(number)
        # The ranks that never returned come first.
        order = sorted(phrases, key=lambda phrase: not phrase.startswith("never"))
        text = "; ".join(f"{_names(phrases[phrase])} {phrase}" for phrase in order)
        moving = any(before[number] != phrase for phrase in phrases for number in phrases[phrase])
        inside = all(each.task == self._finished and each.doing == "called" for each in self._ranks)
        if self._ready and (moving or inside):
            return Verdict.SLOW, f"{text}; --timeout gives more time"
        return Verdict.DEADLOCKED, text

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
        """Wait until the ranks end by themselves, and warn if they do not."""
        deadline = time.monotonic() + self._batches.timeout
        while self._job.status is None and time.monotonic() < deadline:
            time.sleep(_POLL)
        if self._job.status is None:
            self._batches.display.warn("after the last case, the ranks did not end by themselves")
        elif any(status for _, status in self._job.ends()):
            self._batches.display.warn(f"after the last case, {self._death()}")


def _without_case(outcome: Outcome) -> str:
    """Return the first finding without the name of the case."""
    return (
        outcome.findings[0].text.removeprefix(f"{outcome.verdict} in case {outcome.case}: ") if outcome.failed else ""
    )


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _command(orders: Orders, timeout: float, outcome: Outcome) -> str:
    """Return the command that runs the case of `outcome` alone, at its shrunk shape if it has one."""
    command = ["python", "-m", "pce_mpi", "conformance", "-n", str(outcome.ranks)]
    command += ["--oversubscribe"] * (outcome.ranks > most_ranks())
    if orders.adapter is not None:
        command += ["--adapter", orders.adapter]
    command += [orders.candidate, "--case", outcome.case]
    if orders.dtypes is not None:
        command += ["--dtype", outcome.dtype]
    command += ["--strict"] * orders.strict + ["--large"] * orders.large
    for name, value, default in (
        ("--tolerance", orders.tolerance, 1.0),
        ("--timeout", timeout, DEFAULT_TIMEOUT),
        ("--seed", orders.seed, 0),
        ("--rows", outcome.rows if outcome.shrunk else orders.rows, None),
        ("--classes", outcome.classes if outcome.shrunk else orders.classes, None),
        ("--memory", orders.memory, None),
    ):
        if value != default:
            command += [name, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(command)

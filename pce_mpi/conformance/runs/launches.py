"""Run the cases of a candidate in one launch, or more: after a case that hangs or crashes, the next launch goes on.

A launch is followed from its first event to its end, and runs its cases in order. It ends early if a rank dies, if some
ranks raise and others do not, if a rank damages the file of its events, or if no rank shows a sign of life for a while.
The time in which rank 0 judges is not limited.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
import shlex
import time
from typing import Any, Protocol

from pce_mpi.comm.errors import ranks_text
from pce_mpi.conformance.candidates.fitting import problem_of, unmet_need
from pce_mpi.conformance.candidates.offers import Offer
from pce_mpi.conformance.judging.outcomes import Finding, Outcome, Report, Verdict, agree, shaped
from pce_mpi.conformance.problems.cases import Case, fits
from pce_mpi.conformance.runs.orders import KIT, Orders
from pce_mpi.conformance.serialization import from_json
from pce_mpi.conformance.text import innermost
from pce_mpi.jobs.job import Job
from pce_mpi.jobs.mpiexec import LaunchError, most_ranks
from pce_mpi.text import grouped

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


class Display(Protocol):
    """Shows the progress of a run to a user."""

    def begin(self, total: int) -> None: ...
    def started(self, case: str) -> None: ...
    def finished(self, outcome: Outcome) -> None: ...

    # No rank has shown a sign of life for `seconds`; after `timeout` the case is deadlocked. None: it is being judged.
    def waiting(self, seconds: float, timeout: float | None) -> None: ...

    # The last lines of each rank's output, if one case was run alone.
    def printed(self, text: str) -> None: ...

    # A fault that is no outcome of a case.
    def warn(self, text: str) -> None: ...


@dataclass
class Run:
    """The state that the launches of a run share: its settings and, once one has loaded the candidate, the cases."""

    orders: Orders
    ranks: int
    timeout: float
    display: Display
    offer: Offer | None = None
    versions: dict[str, str] = field(default_factory=dict)
    cases: dict[str, Case] = field(default_factory=dict)

    def outcome(self, name: str, verdict: Verdict, note: str = "") -> Outcome:
        """Return the outcome of a case that did not end by itself: not offered, if it is not, else this verdict."""
        case = self.cases[name]
        assert self.offer is not None
        if missing := unmet_need(self.offer, case.needs, case.dtype):
            verdict, note = Verdict.NOT_OFFERED, missing
        return Outcome(
            case.name, case.catches, verdict, ranks=self.ranks, dtype=case.dtype, note=note, about=case.about
        )

    def with_shape(self, outcome: Outcome) -> Outcome:
        """Add the shape of the case's problem to its outcome."""
        orders = self.orders
        assert self.offer is not None
        try:
            case, size = self.cases[outcome.case], {"rows": orders.rows, "classes": orders.classes}
            problem = problem_of(case, self.offer, self.ranks, seed=orders.seed, **size)
            return shaped(outcome, problem)
        except Exception as error:
            # The ranks may have failed for the same reason; keep their outcomes.
            text = f"its shape is not known: {type(error).__name__}: {error}"
            outcome.findings.append(Finding(str(outcome.verdict), text))
            return outcome


@dataclass
class _Rank:
    """The last event of one rank."""

    task: int = -1
    doing: str = ""
    error: str = ""
    printed: int = 0


class Launch:
    """One launch, which runs the cases of these names; without any, each case."""

    def __init__(self, run: Run, job: Job, tasks: Sequence[str] | None) -> None:
        self._run, self._job = run, job
        self._tasks = [] if tasks is None else list(tasks)
        self._all = tasks is None
        self._ranks = [_Rank() for _ in range(job.ranks)]
        self._finished = 0
        # The outcomes that come next.
        self._known: list[Outcome] = []
        self._ready = self._over = self._whole = self._judging = False

    def results(self) -> Iterator[Outcome]:
        """Yield the outcome of each case that has ended; the last one may have ended the launch.

        An outcome waits until the files of all ranks have been read once more: they have all that came before it.
        """
        heard, shown = time.monotonic(), -1
        while True:
            last_look, known = self._over, len(self._known)
            # Before reading the events, so that these include everything before the end.
            ended = bool(self._job.ends()) or self._job.status is not None
            silent = True
            for rank, event in self._job.news():
                heard, silent = time.monotonic(), False
                try:
                    self._take_in(rank, event)
                except (LookupError, TypeError, ValueError) as error:  # an event without its fields, or of no task
                    yield from self._outcomes(max(self._ranks[rank].task - self._finished, 0))
                    text = f"the file in which rank {rank} notes its steps is damaged: {type(error).__name__}: {error}"
                    yield from self._fault(Verdict.CRASHED, text)
                    return
            yield from self._outcomes(known)
            if shown < (begun := max(each.task for each in self._ranks)) == self._finished:
                shown = begun
                self._run.display.started(self._tasks[begun])
            if last_look:
                if self._whole:
                    self._wait_for_the_end()
                return
            if not silent or self._over:
                continue
            if ended:
                yield from self._fault(Verdict.CRASHED, self._death())
                return
            silence = time.monotonic() - heard
            timeout = self._timeout()
            if timeout is not None and silence > timeout:
                verdict, text = self._standstill()
                if verdict is not Verdict.SLOW or silence > self._run.timeout:
                    yield from self._fault(verdict, text)
                    return
            if self._ready and silence > _WAITING:
                self._run.display.waiting(silence, timeout)
            time.sleep(_POLL)

    def _outcomes(self, most: int) -> Iterator[Outcome]:
        for outcome in self._known[:most]:
            yield self._next(outcome)
        del self._known[:most]

    def _timeout(self) -> float | None:
        """Return how many seconds of silence are too many now; None: the candidate has no part in it."""
        if self._judging:
            return None
        timeout = self._run.timeout
        if not self._ready:
            return max(timeout, _STARTUP)
        raised = {each.doing == "raised" for each in self._ranks}
        return min(timeout, max(_AFTER_AN_ERROR_AT_LEAST, _AFTER_AN_ERROR * timeout)) if len(raised) > 1 else timeout

    @property
    def unfinished(self) -> list[str]:
        """The cases that have not ended."""
        return self._tasks[self._finished :]

    def _take_in(self, rank: int, event: dict[str, Any]) -> None:
        """Note the event; raise `ValueError` or the like if it is damaged."""
        mine, run = self._ranks[rank], self._run
        match event["event"]:
            case "outcome":
                self._judging = False
                outcome = from_json(Outcome, event["outcome"])
                if outcome.case != self.unfinished[len(self._known)]:
                    raise ValueError(f"an outcome of {outcome.case}")
                self._known.append(outcome)
            case "apart":
                raise LaunchError(event["text"])
            case "unusable":
                raise LaunchError(f"{run.orders.candidate} cannot be loaded and started: {event['text']}")
            case "ready":
                run.offer, run.versions = from_json(Offer, event["offer"]), event["versions"]
                run.cases = run.orders.cases(run.offer)
                self._ready = True
                if self._all:
                    self._tasks = list(run.cases)
                    run.display.begin(len(self._tasks))
            case "judging":
                self._judging = True
            case "started":
                self._tasks[event["task"]]  # `LookupError` or `TypeError` for a number of none
                self._ranks[rank] = _Rank(event["task"], "started", printed=event["printed"])
            case "called" | "returned" | "raised" as doing:
                mine.doing, mine.error = doing, event.get("error", "")
            case "torn" | "done" as end:
                self._over, self._whole = True, end == "done"
            case "damaged":
                raise ValueError("a line that is no event")

    def _next(self, outcome: Outcome) -> Outcome:
        self._finished += 1
        if outcome.verdict is not Verdict.CRASHED and self._all and len(self._tasks) == 1:
            # The outcome of a crash has them.
            self._run.display.printed(self._job.last_lines([each.printed for each in self._ranks], launcher=False))
        return outcome

    def _fault(self, verdict: Verdict, text: str) -> Iterator[Outcome]:
        """Yield the outcome of the case during which, or before which, the launch failed."""
        printed = self._job.last_lines([each.printed for each in self._ranks])
        if not self._ready:
            raise LaunchError(f"{text}, before the candidate was loaded and started\n{printed}".rstrip())
        if not self.unfinished:
            self._run.display.warn(f"after the last case, {text}")
            return
        outcome = self._run.outcome(self.unfinished[0], verdict)
        if outcome.verdict is Verdict.NOT_OFFERED:
            self._run.display.warn(f"before case {outcome.case}, which is not offered, {text}")
        else:
            texts = [f"{verdict} in case {outcome.case}: {text}", *([printed] if printed else [])]
            outcome.findings += [Finding(str(verdict), each) for each in texts]
            outcome = self._run.with_shape(outcome)
        yield self._next(outcome)

    def _death(self) -> str:
        """Say which rank died first, and why."""
        if not self._job.ends():
            return f"mpiexec ended with exit status {self._job.status}"
        rank, how = self._job.death()
        if "SIGKILL" in how:
            how += " (--memory bounds it)"
        if rank is None:
            return f"a rank {how}"
        who = f"rank {rank}"
        mine = self._ranks[rank]
        if mine.doing == "raised":
            return f"{who} raised {mine.error} and {how}"
        place = innermost(self._job.printed(rank, mine.printed))
        return f"{who} {how}" + (f" at {place}" if place else "")

    def _standstill(self) -> tuple[Verdict, str]:
        """Say what each rank did last, and whether they wait for each other as far as one can know."""
        before = [self._last(number, each) for number, each in enumerate(self._ranks)]
        time.sleep(_MOMENT)
        phrases = grouped((self._last(number, each), number) for number, each in enumerate(self._ranks))
        # The ranks that never returned come first.
        order = sorted(phrases, key=lambda phrase: not phrase.startswith("never"))
        text = "; ".join(f"{ranks_text(phrases[phrase])} {phrase}" for phrase in order)
        # Ranks that are all at the same step, or at another line a moment later, may be busy.
        moving = any(before[number] != phrase for phrase in phrases for number in phrases[phrase])
        steps = {each.doing for each in self._ranks if each.task == self._finished}
        together = len(steps) == 1 and all(each.task == self._finished for each in self._ranks)
        if self._ready and (moving or together):
            return Verdict.SLOW, f"{text}; --timeout gives more time"
        return Verdict.DEADLOCKED, text

    def _last(self, number: int, rank: _Rank) -> str:
        if not self._ready:
            place = innermost(self._job.stack(number))
            return f"never got past {place}" if place else "never got ready"
        if rank.task != self._finished:
            return "never began"
        match rank.doing:
            case "called":
                place = innermost(self._job.stack(number))
                return f"never returned from {place}" if place else "never returned"
            case "raised":
                return f"raised {rank.error}"
            case "returned":
                place = innermost(self._job.stack(number))
                return "returned" + f", and wait for results at {place}" * bool(place)
        return "never called the candidate"

    def _wait_for_the_end(self) -> None:
        """Wait until the ranks end by themselves, and warn if they do not."""
        deadline = time.monotonic() + self._run.timeout
        while self._job.status is None and time.monotonic() < deadline:
            time.sleep(_POLL)
        if self._job.status is None:
            self._run.display.warn("after the last case, the ranks did not end by themselves")
        elif any(status for _, status in self._job.ends()):
            self._run.display.warn(f"after the last case, {self._death()}")


DEFAULT_TIMEOUT = 30.0
# Seconds for a case of 2**31 elements.
LARGE_TIMEOUT = 900.0

# After so many cases that ended their launch in the same way, and no other ones, the rest is not run.
_ALIKE = 3


def run_cases(
    orders: Orders,
    ranks: Sequence[int],
    *,
    timeout: float,
    display: Display,
    known: Sequence[str] = (),
    to_first: bool = False,
) -> Report:
    """Run the cases that `orders` select on each of the numbers of `ranks`, in as many launches as necessary.

    After `timeout` seconds without a sign of life a case is deadlocked; cases that fit `known` are known to fail, and
    fail if they pass. `to_first`: the first other case that fails ends the run. Returns what there is after a
    KeyboardInterrupt. Raises `LaunchError` if ranks cannot be started or the candidate cannot be loaded. Leaves no
    process behind.
    """
    outcomes: list[Outcome] = []
    offer, versions = Offer(), dict[str, str]()
    interrupted = stopped = False
    for size in ranks:
        run, of_size = Run(orders, size, timeout, display), list[Outcome]()
        try:
            with closing(_outcomes(run)) as results:
                for outcome in results:
                    of_size.append(outcome)
                    if to_first and outcome.failed and not any(fits(outcome.case, pattern) for pattern in known):
                        stopped = True
                        break
        except KeyboardInterrupt:
            if not of_size and not outcomes:
                raise
            interrupted = True
        if run.offer is not None:
            offer, versions = run.offer, run.versions
        if stopped:
            left = [name for name in run.cases if name not in {outcome.case for outcome in of_size}]
            of_size += [run.outcome(name, Verdict.NOT_RUN, f"not run, as {of_size[-1].case} failed") for name in left]
        outcomes += of_size
        if interrupted or stopped:
            break
    _compare_with_known(outcomes, known)
    agree(outcomes)
    for outcome in outcomes:
        if outcome.failed:
            outcome.rerun = rerun_command(orders, timeout, outcome)
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
    offered = (outcome for outcome in outcomes if outcome.verdict is not Verdict.NOT_OFFERED)
    of_known = ((each.case, each) for each in offered if any(fits(each.case, pattern) for pattern in known))
    for found in grouped(of_known).values():
        for outcome in found:
            if outcome.failed:
                outcome.verdict, outcome.note = Verdict.KNOWN, f"{outcome.verdict}: {outcome.findings[0].text}"
        if all(outcome.verdict is Verdict.PASS for outcome in found):
            text = "passes, and is known to fail: remove it from the file of known failures"
            found[0].verdict, found[0].findings = Verdict.FAIL, [Finding("known", text)]


def asked_offer(orders: Orders, *, timeout: float, display: Display) -> Offer:
    """Return the offer of the candidate of `orders`, which one rank loads; raise as `run_cases`."""
    run = Run(orders, 1, timeout, display)
    with _job(1, replace(orders, tasks=())) as job:
        list(Launch(run, job, ()).results())
    assert run.offer is not None
    return run.offer


def _job(ranks: int, orders: Orders) -> Job:
    return Job(ranks, ["-m", "pce_mpi.conformance.runs.worker"], orders.write)


def _outcomes(run: Run) -> Generator[Outcome]:
    """Yield the outcome of each case."""
    tasks: list[str] | None = None  # the names of the cases that are left; None: all
    endless = True  # every launch has ended in the first case that it judged
    endings: list[Finding] = []
    while tasks is None or tasks:
        judged: list[Outcome] = []
        try:
            with _job(run.ranks, replace(run.orders, tasks=None if tasks is None else tuple(tasks))) as job:
                launch = Launch(run, job, tasks)
                for outcome in launch.results():
                    judged += [outcome] * (outcome.verdict is not Verdict.NOT_OFFERED)
                    yield from _shown(run, outcome)
            tasks = launch.unfinished
        except LaunchError as error:
            if tasks is None:
                raise
            # It has started before: the effect of a case keeps it from starting again.
            text = f"the candidate did not start again: {error}"
            break
        endless = endless and len(judged) == 1
        endings += [Finding(str(outcome.verdict), outcome.fault) for outcome in judged]
        if endless and len(endings) == _ALIKE and len({each.likeness for each in endings}) == 1:
            text = f"the first {_ALIKE} cases ended alike: {endings[0].text}"
            break
    for task in tasks:
        yield from _shown(run, run.outcome(task, Verdict.NOT_RUN, f"not run, as {text}"))


def _shown(run: Run, outcome: Outcome) -> Iterator[Outcome]:
    """Yield the outcome before it is shown: an interrupt between the two loses nothing that the user saw."""
    yield outcome
    run.display.finished(outcome)


def rerun_command(orders: Orders, timeout: float, outcome: Outcome) -> str:
    """Return the command that runs the case of `outcome` alone."""
    command = [*KIT, "-n", str(outcome.ranks), *["--oversubscribe"] * (outcome.ranks > most_ranks())]
    if orders.adapter is not None:
        command += ["--adapter", orders.adapter]
    command += [orders.candidate, "--case", outcome.case]
    if orders.dtypes is not None:
        command += ["--dtype", outcome.dtype]
    if timeout != DEFAULT_TIMEOUT:
        command += ["--timeout", f"{timeout:g}"]
    return shlex.join(command + orders.settings())

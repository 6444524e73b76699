"""Run the cases of a candidate in one launch, or more: after a case that hangs or crashes, the next launch goes on."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
import shlex

from pce_mpi.conformance.candidates.offers import Offer
from pce_mpi.conformance.judging.causes import agree
from pce_mpi.conformance.judging.outcomes import Finding, Outcome, Report, Verdict
from pce_mpi.conformance.problems.cases import fits
from pce_mpi.conformance.runs.following import Display, Launch, Run
from pce_mpi.conformance.runs.orders import KIT, Orders
from pce_mpi.jobs.job import Job
from pce_mpi.jobs.mpiexec import LaunchError, most_ranks

DEFAULT_TIMEOUT = 30.0
# Seconds for a case of 2**31 elements.
LARGE_TIMEOUT = 900.0

# After so many cases that ended their launch in the same way, and no other ones, the rest is not run.
_ALIKE = 3


def run_cases(
    orders: Orders, ranks: Sequence[int], *, timeout: float, display: Display, known: Sequence[str] = ()
) -> Report:
    """Run the cases that `orders` select on each of the numbers of `ranks`, in as many launches as necessary.

    After `timeout` seconds without a sign of life a case is deadlocked; cases that fit `known` are known to fail, and
    fail if they pass. Returns what there is after a KeyboardInterrupt. Raises `LaunchError` if ranks cannot be started
    or the candidate cannot be loaded. Leaves no process behind.
    """
    outcomes: list[Outcome] = []
    offer, versions = Offer(), dict[str, str]()
    interrupted = False
    for size in ranks:
        run, of_size = Run(orders, size, timeout, display), list[Outcome]()
        try:
            with closing(_outcomes(run)) as results:
                of_size.extend(results)
        except KeyboardInterrupt:
            if not of_size and not outcomes:
                raise
            interrupted = True
        if run.offer is not None:
            offer, versions = run.offer, run.versions
        outcomes += of_size
        if interrupted:
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

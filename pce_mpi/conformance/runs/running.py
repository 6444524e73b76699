"""Run one case on all ranks of a communicator, and return the same outcome on each.

The candidate gets a duplicate of the communicator, which is freed afterwards. An exception is an outcome. Results are
read through DLPack, compared with the arguments, gathered, and judged on rank 0.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
import faulthandler
from functools import cache
import os
import re
import sys
import threading
import time
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

import numpy as np

from pce_mpi.comm.errors import text_by_rank
from pce_mpi.comm.launcher import why_apart
from pce_mpi.conformance.candidates.fitting import problem_of, unmet_need
from pce_mpi.conformance.candidates.loading import check_call
from pce_mpi.conformance.candidates.offers import Offer, offer_of
from pce_mpi.conformance.judging.comparing import Tolerance
from pce_mpi.conformance.judging.judge import Answer, judge
from pce_mpi.conformance.judging.outcomes import Finding, Outcome, Verdict, shaped, together
from pce_mpi.conformance.problems.cases import Case, Expects
from pce_mpi.conformance.problems.problem import PRODUCTS, Problem
from pce_mpi.conformance.runs.procedures import PROCEDURES, BadResult, Trial
from pce_mpi.conformance.text import error_text, meant
from pce_mpi.jobs.mpiexec import LaunchError
from pce_mpi.loss.problem import target_text

if TYPE_CHECKING:
    from mpi4py import MPI

Candidate = Callable[..., Any]

_USUAL = Tolerance()


def _nobody() -> None:
    """Tell nobody that the candidate's part of a case is over."""


_GATHERED = (
    "the logits of all classes, passed on every rank by mistake, were taken for shards, and no rank refused them; "
    "where num_classes is not looked at, declare it: @offers(num_classes=False)"
)

_FREED = "it freed the communicator that it was given, and its caller goes on with that: free what it has made itself"

# Python's texts for a call with wrong arguments. Whoever raises that has not looked at the targets.
_WRONG_CALL = re.compile(r"TypeError: .*(unexpected keyword argument|positional arguments? but|missing \d+ required)")


def run_case(
    candidate: Candidate,
    case: Case,
    comm: MPI.Intracomm | None,
    *,
    tolerance: Tolerance = _USUAL,
    seed: int = 0,
    rows: int | None = None,
    classes: int | None = None,
    offer: Offer | None = None,
) -> Outcome:
    """Run one case of the conformance kit, and return its outcome, the same on every rank.

    Parameters
    ----------
    candidate : callable
        The loss to judge; `pce_mpi.conformance.offers` says how it is called. If it has `start`, it must have been
        started.
    case : Case
        One of `cases()`.
    comm : mpi4py.MPI.Intracomm or None
        The ranks over which the classes are sharded. None: one process, without MPI.
    tolerance : Tolerance
        How far off an answer may be.
    seed : int
        Seed of the random numbers.
    rows, classes : int, optional
        Replace the case's own size, if the case is resizable.
    offer : Offer, optional
        What the candidate offers, if not what `offer_of(candidate)` says.

    Returns
    -------
    Outcome
        The verdict, what was found, and how accurate the candidate was.

    Raises
    ------
    LaunchError
        `comm` is COMM_WORLD and MPI does not see the other processes that were started with this one.

    Notes
    -----
    Collective over `comm`: a few small messages besides the candidate's own. It does not return if the candidate
    does not.

    Examples
    --------
    >>> from pce_mpi import conformance, softmax_cross_entropy_value_and_grad
    >>> (case,) = conformance.cases(pattern="p-near-1/float32")
    >>> print(run_case(softmax_cross_entropy_value_and_grad, case, None).verdict)
    pass
    """
    offer = offer_of(candidate) if offer is None else offer
    settings: dict[str, Any] = {"tolerance": tolerance, "seed": seed, "rows": rows, "classes": classes, "offer": offer}
    return run_and_tell(candidate, case, comm, **settings)


def run_and_tell(
    candidate: Candidate,
    case: Case,
    comm: MPI.Intracomm | None,
    *,
    tolerance: Tolerance,
    seed: int,
    rows: int | None,
    classes: int | None,
    offer: Offer,
    judging: Callable[[], None] = _nobody,
) -> Outcome:
    """Do what `run_case` does; call `judging` on rank 0 once nothing is left to do for the candidate."""
    if comm is not None:
        from mpi4py import MPI

        if comm == MPI.COMM_WORLD and (apart := why_apart(comm)):
            raise LaunchError(apart)
    size = 1 if comm is None else comm.size
    outcome = Outcome(case.name, case.catches, Verdict.PASS, ranks=size, dtype=case.dtype, about=case.about)
    if missing := unmet_need(offer, case.needs, case.dtype):
        return replace(outcome, verdict=Verdict.NOT_OFFERED, note=missing)

    @cache
    def problem(which: int) -> Problem:
        return problem_of(case, offer, size, seed=seed + which, rows=rows, classes=classes)

    start = time.perf_counter()
    private = None if comm is None else comm.Dup()
    trial = Trial(candidate, offer, private, problem, watches_logits=case.needs.keeps_logits)
    raised = None
    try:
        PROCEDURES[case.procedure](trial)
    except BadResult as error:
        trial.find("result", str(error))
    except Exception as error:
        raised = error_text(error)
    outcome = replace(shaped(outcome, problem(0)), seconds=time.perf_counter() - start)
    freed = comm is not None and private == MPI.COMM_NULL
    if freed and raised is None:
        trial.find("freed", _FREED)
    elif freed:  # may have raised for that in a second call
        raised = f"{raised}; {_FREED}"
    returned = trial.answers, trial.findings
    if comm is None or private is None:
        settle(outcome, case, problem, [raised], [returned], tolerance, {})
        return outcome
    _arrive(comm)
    ends = comm.allgather((raised, len(trial.answers), freed))
    errors = [error for error, _, _ in ends]
    # If some raised, others may still be in a collective on it.
    if len({error is None for error in errors}) == 1 and not any(its_freed for _, _, its_freed in ends):
        private.Free()
    same_answers = set(ends) == {(None, len(trial.answers), False)}  # on every rank or on none
    if offer.same_bits and case.compares_bits and comm.size > 1 and same_answers:
        trial.call_on_one_rank()
    gathered = comm.gather(returned)
    if gathered is not None:
        judging()
        settle(outcome, case, problem, errors, gathered, tolerance, trial.on_one_rank)
    _arrive(comm)
    return comm.bcast(outcome)


def assert_conforms(
    candidate: Candidate,
    case: Case,
    comm: MPI.Intracomm | None = None,
    *,
    tolerance: Tolerance = _USUAL,
    seed: int = 0,
    timeout: float = 60.0,
) -> None:
    """Raise `AssertionError`, the same on every rank, unless a candidate passes a case.

    Parameters
    ----------
    candidate : callable
        The loss to judge. If it has `start(comm)`, it is started with the first case, and stopped when the process
        ends.
    case : Case
        One of `cases(candidate)`.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks over which the classes are sharded; all of the job unless given.
    tolerance : Tolerance
        How far off an answer may be.
    seed : int
        Seed of the random numbers.
    timeout : float
        Seconds after which this process prints where it is, and aborts, which ends the job.

    Raises
    ------
    AssertionError
        The case failed; the message has the findings.
    TypeError
        The candidate cannot be called as one: it may need `adapted`.
    unittest.SkipTest
        The candidate does not offer the case; pytest reports it as skipped.

    Notes
    -----
    Collective over `comm`. Ranks that wait for others which have raised would hang as the candidate's own users do,
    hence the limit on time. The command `python -m pce_mpi conformance` calls that "deadlocked" and goes on.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> from pce_mpi import conformance, softmax_cross_entropy_value_and_grad
    >>> for case in conformance.cases(pattern="p-near-1/float32"):
    ...     assert_conforms(softmax_cross_entropy_value_and_grad, case, MPI.COMM_SELF)
    """
    __tracebackhide__ = True  # pytest shows the text alone, not this function
    from mpi4py import MPI

    comm = MPI.COMM_WORLD if comm is None else comm
    check_call(candidate)
    _start(candidate, comm)
    if not faulthandler.is_enabled():  # pytest enables it, on the stderr that it does not capture
        faulthandler.enable()
    over = threading.Event()
    threading.Thread(target=_abort_unless, args=(over, timeout, threading.get_ident()), daemon=True).start()
    try:
        outcome = run_case(candidate, case, comm, tolerance=tolerance, seed=seed)
    finally:
        over.set()
    if outcome.verdict == Verdict.NOT_OFFERED:
        raise SkipTest(f"{case} is not offered: {outcome.note}")
    if outcome.failed:
        raise AssertionError(_as_text(outcome))


def _arrive(comm: MPI.Intracomm) -> None:
    """Wait for all ranks without using a core: there may be more ranks than cores."""
    arrival = comm.Ibarrier()
    while not arrival.Test():
        time.sleep(0.0002)


def _abort_unless(over: threading.Event, timeout: float, caller: int) -> None:
    """Abort this process, which prints where it is and ends the job, if the call is not over in so many seconds."""
    if over.wait(timeout):
        return
    frame = sys._current_frames().get(caller)
    while frame is not None and frame.f_code is not _arrive.__code__:
        frame = frame.f_back
    # A rank that only waits leaves the ranks it waits for a second in which to print: they know what is wrong.
    if frame is None or not over.wait(1.0):
        os.abort()


_Returned = tuple[list[tuple[int, str, Answer]], list[Finding]]


def settle(
    outcome: Outcome,
    case: Case,
    problem: Callable[[int], Problem],
    errors: Sequence[str | None],
    returned: Sequence[_Returned],
    tolerance: Tolerance,
    on_one_rank: Mapping[int, Answer],
) -> None:
    """Complete the outcome from the exceptions, or the results and findings, of all ranks."""
    raised = {rank: error for rank, error in enumerate(errors) if error is not None}
    if len(raised) == len(errors):
        if case.expects == Expects.ANSWER or any(map(_WRONG_CALL.match, raised.values())):
            outcome.verdict = Verdict.REFUSED
            outcome.findings.append(Finding("raised", text_by_rank(raised)))
        else:
            outcome.note = f"refused: {text_by_rank(raised)}"
        return
    if raised:
        others = ", ".join(str(rank) for rank, error in enumerate(errors) if error is None)
        text = f"not all ranks raised: {text_by_rank(raised)}; returned: rank {others}"
        outcome.findings.append(Finding("raised on some ranks", text))
    else:
        answers = [answers for answers, _ in returned]
        if case.expects == Expects.REFUSAL:
            outcome.findings.append(Finding("not refused", _not_refused(problem(0), answers[0])))
        elif len({len(each) for each in answers}) == 1:  # else some ranks returned no result
            for answers_of_call in zip(*answers, strict=True):
                _judge(outcome, problem, answers_of_call, tolerance, case.form, on_one_rank)
            if case.of_bits:
                of_numbers = {problem(0).kind.noun, "gradient", "gradient at targets", *PRODUCTS, "not finite"}
                outcome.findings = [each for each in outcome.findings if each.kind not in of_numbers]
                outcome.accuracies, outcome.picture = [], None
            if case.needs.num_classes and outcome.findings:
                outcome.findings[0] = Finding(outcome.findings[0].kind, f"{_GATHERED} ({outcome.findings[0].text})")
        # Before the numbers only in cases about memory, and where numbers follow: a gradient that is overwritten.
        found = together([findings for _, findings in returned])
        first = [finding for finding in found if case.needs.keeps_logits or finding.kind == "overwritten"]
        outcome.findings[:0] = first
        outcome.findings += [finding for finding in found if finding not in first]
    if outcome.findings:
        outcome.verdict = Verdict.FAIL


def _judge(
    outcome: Outcome,
    problem: Callable[[int], Problem],
    answers: Sequence[tuple[int, str, Answer]],
    tolerance: Tolerance,
    form: bool,
    on_one_rank: Mapping[int, Answer],
) -> None:
    which, name, _ = answers[0]
    joined = problem(which).joined([answer for _, _, answer in answers])
    judgement = judge(problem(which), joined, tolerance, on_one_rank.get(which))
    for finding in (judgement.form if form else []) + judgement.findings:
        text = f"{name}: {finding.text}" if name else finding.text
        outcome.findings.append(replace(finding, text=text))
    outcome.picture = outcome.picture or judgement.picture
    by_quantity = {accuracy.quantity: accuracy for accuracy in outcome.accuracies}
    for accuracy in judgement.accuracies:
        known = by_quantity.get(accuracy.quantity)
        if known is None or accuracy.error / accuracy.allowed > known.error / known.allowed:
            by_quantity[accuracy.quantity] = accuracy
    outcome.accuracies = list(by_quantity.values())


def _not_refused(problem: Problem, answers: Sequence[tuple[int, str, Answer]]) -> str:
    targets = problem.targets.reshape(-1)
    beyond = np.flatnonzero(problem.valid & ((targets < 0) | (targets >= problem.classes)))
    what = f"{target_text(targets, problem.rows_shape, beyond[0])} is outside [0, {problem.classes})"
    losses = [np.array2string(each.loss.astype(np.float64), precision=5, threshold=6) for _, _, each in answers]
    given = "".join(f": the {problem.kind.noun} is {loss}" for loss in losses)  # none if it is no array of numbers
    return f"{what}, and no rank refused it{given}; {meant(checks_targets=False)}"


def _as_text(outcome: Outcome) -> str:
    lines = [f"{outcome.case} on {outcome.ranks} rank{'s' * (outcome.ranks != 1)}: {outcome.verdict}"]
    lines += [f"  {finding.kind}: {finding.text}" for finding in outcome.findings]
    lines += [
        f"  error of the {each.quantity}: {each.error:.3g} ulp of {each.dtype}, {each.allowed:.3g} allowed"
        for each in outcome.accuracies
    ]
    return "\n".join([*lines, f"  what this case catches: {outcome.catches}"])


_started: list[Candidate] = []


def _start(candidate: Any, comm: MPI.Intracomm) -> None:
    if hasattr(candidate, "start") and not any(each is candidate for each in _started):
        candidate.start(comm)
        _started.append(candidate)
        if hasattr(candidate, "stop"):
            atexit.register(candidate.stop)

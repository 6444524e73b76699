"""Withdraw a claim about the candidate's arithmetic that a case which passed contradicts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from pce_mpi.conformance.cases import Case, Expects, Problem, problem_of
from pce_mpi.conformance.diagnosis import MANY
from pce_mpi.conformance.faults import roundings
from pce_mpi.conformance.judging import Answer, judge
from pce_mpi.conformance.offers import Gradient, Offer
from pce_mpi.conformance.outcomes import Outcome, Verdict
from pce_mpi.conformance.textbook import Textbook
from pce_mpi.conformance.units import Tolerance


def withdraw_contradicted(
    outcomes: Iterable[Outcome], cases: dict[str, Case], offer: Offer, seed: int, tolerance: Tolerance
) -> None:
    """Remove from the findings each rounding that would have made a case of the same dtype fail that passed."""
    outcomes = list(outcomes)
    for outcome in outcomes:
        claimed = [finding for finding in outcome.findings if finding.cause and outcome.verdict is Verdict.FAIL]
        if not claimed:
            continue
        with np.errstate(all="ignore"):
            texts = [text for text, _ in roundings(Textbook.of(_problem(cases[outcome.case], outcome, offer, seed)))]
        for finding in claimed:
            if not any(text in finding.cause for text in texts):
                continue
            passed = (
                _problem(cases[other.case], other, offer, seed)
                for other in outcomes
                if other.verdict is Verdict.PASS
                and other.dtype == outcome.dtype
                and other.rows * other.classes < MANY
                # A call that was to be refused has no exact answer.
                and cases[other.case].expects is Expects.ANSWER
            )
            if any(_would_fail(finding.cause, problem, offer, tolerance) for problem in passed):
                finding.text = finding.text[len(finding.cause) :].strip(" ()")


def _problem(case: Case, outcome: Outcome, offer: Offer, seed: int) -> Problem:
    problem = problem_of(case, offer, outcome.ranks, seed=seed, rows=outcome.rows, classes=outcome.classes)
    # The formulas are those of a loss, the negative of a log-probability.
    return replace(problem, kind="loss", reduction="none") if problem.kind == "log_prob" else problem


def _would_fail(cause: str, problem: Problem, offer: Offer, tolerance: Tolerance) -> bool:
    """Return True if the rounding that `cause` names, in each of its forms, fails this problem."""
    failing = []
    with np.errstate(all="ignore"):
        for text, answer in roundings(Textbook.of(problem)):
            if text not in cause:
                continue
            losses = problem.expected[0] if answer.losses is None else answer.losses[0]
            gradient = problem.row_major(problem.expected[1]) if answer.gradient is None else answer.gradient
            shaped = np.moveaxis(gradient.reshape(*problem.rows_shape, problem.classes), -1, problem.axis)
            given = [
                Answer(
                    np.asarray(losses),
                    None if offer.gradient is Gradient.NONE else problem.part(shaped.astype(problem.dtype), rank),
                )
                for rank in range(problem.ranks)
            ]
            failing.append(bool(judge(problem, given, tolerance).findings))
    return bool(failing) and all(failing)

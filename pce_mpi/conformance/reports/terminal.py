"""A report as plain text: what was run, the table of verdicts, each failure, how accurate the candidate is."""

from __future__ import annotations

from collections.abc import Iterator
import textwrap

from pce_mpi.conformance.outcomes import Outcome, Report
from pce_mpi.conformance.reports.summary import (
    cost_rows,
    extreme_rows,
    facts,
    headline,
    printed,
    problem,
    shape,
    verdict_rows,
)
from pce_mpi.tables import table

__all__ = ["render"]

_WIDTH = 120
# The last ones of what was printed; other reports have more.
_LINES_SHOWN = 12


def render(report: Report) -> str:
    """The report as text that ends in a newline."""
    return "\n\n".join(_parts(report)) + "\n"


def _parts(report: Report) -> Iterator[str]:
    given = facts(report)
    width = max(map(len, given))
    yield "\n".join(_wrapped(f"{name:{width}}  ", value) for name, value in given.items())
    yield table(verdict_rows(report))
    for outcome in report.failed:
        yield "\n".join(_failure(outcome))
    if rows := extreme_rows(report):
        yield "Errors in ulps; help(pce_mpi.conformance.judging) says of what"
        yield table(rows)
    if rows := cost_rows(report):
        yield "What a call takes"
        yield table(rows)
    yield headline(report)


def _failure(outcome: Outcome) -> Iterator[str]:
    yield f"{outcome.verdict} {outcome.case}"
    yield _wrapped("  ", problem(outcome))
    if seen := shape(outcome):
        yield f"  {'smallest' if outcome.shrunk else 'seen at'}: {seen}"
    yield from (f"  | {line}" for line in printed(outcome).splitlines()[-_LINES_SHOWN:])
    if outcome.rerun:
        yield f"  rerun: {outcome.rerun}"  # in one line, to be copied


def _wrapped(start: str, text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_long_words=False)

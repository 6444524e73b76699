"""A report as plain text: the settings, the table of verdicts, each failure, and the largest errors."""

from __future__ import annotations

from collections.abc import Iterator
import textwrap

from pce_mpi.conformance.outcomes import Outcome, Report
from pce_mpi.conformance.reports.summary import (
    at_the_smallest,
    cause_rows,
    extreme_rows,
    facts,
    headline,
    hint,
    printed,
    problem,
    shape,
    verdict_rows,
)
from pce_mpi.conformance.reports.tables import Cell, table

_WIDTH = 120
# Lines of a candidate's output; other reports have more.
_LINES_SHOWN = 12


def render(report: Report) -> str:
    """Render the report as text that ends in a newline."""
    return "\n\n".join(_parts(report)) + "\n"


def _parts(report: Report) -> Iterator[str]:
    given = facts(report)
    width = max(map(len, given))
    yield "\n".join(_wrapped(f"{name:{width}}  ", value) for name, value in given.items())
    yield table(verdict_rows(report))
    if rows := cause_rows(report):
        yield "\n".join(_causes(rows))
    for outcome in report.failed:
        yield "\n".join(_failure(outcome))
    if rows := extreme_rows(report):
        yield "Largest errors in ulps (help(pce_mpi.conformance.judging) says of what); sums may err by log2(rows) more"
        yield table(rows)
    if more := hint(report):
        yield _wrapped("", more)
    yield headline(report)


def _causes(rows: list[list[Cell]]) -> Iterator[str]:
    """Yield a table of two columns, with two lines or more in each cell of the second."""
    (what, cases, _), *groups = rows
    yield f"{cases}  {what}"
    yield f"{'-' * len(str(cases))}  {'-' * len(str(what))}"
    for text, count, names in groups:
        yield _wrapped(f"{count:>{len(str(cases))}}  ", str(text))
        yield _wrapped(" " * 9, f"in {names}")


def _failure(outcome: Outcome) -> Iterator[str]:
    yield f"{outcome.verdict} {outcome.case}"
    yield _wrapped("  ", problem(outcome))
    if seen := shape(outcome):
        yield f"  {'smallest' if outcome.shrunk else 'seen at'}: {seen}"
    if small := at_the_smallest(outcome):
        yield _wrapped("  ", small)
    yield from (f"  | {line}" for line in printed(outcome).splitlines()[-_LINES_SHOWN:])
    if outcome.rerun:
        yield f"  rerun: {outcome.rerun}"  # one line, to be copied


def _wrapped(start: str, text: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )

"""A report as plain text: the settings, the largest errors, and each cause of failures."""

from __future__ import annotations

from collections.abc import Iterator
import textwrap

from pce_mpi.conformance.outcomes import Outcome, Report
from pce_mpi.conformance.reports import summary
from pce_mpi.conformance.reports.tables import table
from pce_mpi.conformance.texts import visible

_WIDTH = 120
# Lines of a candidate's output; other reports have more.
_LINES_SHOWN = 12


def render(report: Report) -> str:
    """Render the report as text that ends in a newline."""
    return visible("\n\n".join(_parts(report))) + "\n"


def _parts(report: Report) -> Iterator[str]:
    given = summary.facts(report)
    width = max(map(len, given))
    yield "\n".join(_wrapped(f"{name:{width}}  ", value) for name, value in given.items())
    if rows := summary.extreme_rows(report):
        yield "Largest errors in ulps (help(pce_mpi.conformance.judging) says of what); sums may err by log2(rows) more"
        yield table(rows)
    for failed in summary.by_cause(report):
        yield "\n".join(_failures(failed, report))
    if more := summary.hint(report):
        yield _wrapped("", more)
    yield summary.headline(report)


def _failures(failed: list[Outcome], report: Report) -> Iterator[str]:
    """Yield the lines on failures of one cause: all their names, and the details of the first."""
    first = failed[0]
    yield _wrapped(f"{first.verdict} ", ", ".join(summary.title(each, report) for each in failed))
    yield _wrapped("  ", summary.problem(first))
    if seen := summary.shape(first):
        yield f"  seen at: {seen}"
    yield from (f"  | {line}" for line in summary.printed(first).splitlines()[-_LINES_SHOWN:])
    if first.rerun:
        yield f"  rerun: {first.rerun}"  # one line, to be copied


def _wrapped(start: str, text: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )

"""A report as Markdown, for a pull request: a summary, and each failure folded below it."""

from __future__ import annotations

from collections.abc import Iterator
import html
import re

from pce_mpi.conformance.outcomes import Outcome, Report
from pce_mpi.conformance.reports import summary
from pce_mpi.conformance.reports.tables import Cell, piped


def render(report: Report) -> str:
    """Render the report as Markdown that ends in a newline."""
    return "\n\n".join(_parts(report)) + "\n"


def _parts(report: Report) -> Iterator[str]:
    sign = "\N{CROSS MARK}" if report.failed else "\N{WHITE HEAVY CHECK MARK}"
    yield f"### {sign} Conformance of {_code(report.candidate)}: {summary.headline(report)}"
    yield "\n".join(
        f"- {name}: {_escaped(value)}" for name, value in summary.facts(report).items() if name != "candidate"
    )
    if more := summary.hint(report):
        yield _escaped(more)
    if rows := summary.cause_rows(report):
        yield piped(_escaped_rows(rows))
    yield from (_failure(outcome, summary.title(outcome, report)) for outcome in report.failed)
    if rows := summary.extreme_rows(report):
        yield _folded("How accurate: largest errors in ulps", piped(_escaped_rows(rows)))
    yield _folded("All cases by verdict", piped(_escaped_rows(summary.verdict_rows(report))))


def _failure(outcome: Outcome, name: str) -> str:
    heading = f"<b>{outcome.verdict}</b> <code>{html.escape(name)}</code>"
    parts = [f"- {_escaped(line)}" for line in summary.lines(outcome) or [summary.problem(outcome)]]
    if seen := summary.shape(outcome):
        parts.append(f"- seen at: {_escaped(seen)}")
    parts.append(f"- what the case catches: {_escaped(outcome.catches)}")
    if output := summary.printed(outcome):
        parts.append(f"\nWhat was printed:\n\n{_block(output)}")
    if outcome.rerun:
        parts.append(f"\nRun it alone:\n\n{_block(outcome.rerun)}")
    return _folded(f"{heading}: {html.escape(summary.problem(outcome))}", "\n".join(parts))


def _folded(title: str, content: str) -> str:
    # After a tag and an empty line, text is Markdown again.
    return f"<details><summary>{title}</summary>\n\n{content}\n\n</details>"


def _escaped_rows(rows: list[list[Cell]]) -> list[list[Cell]]:
    return [[_escaped(value) if isinstance(value, str) else value for value in row] for row in rows]


def _escaped(text: str) -> str:
    """Escape HTML, Markdown and formulas in `text`."""
    return re.sub(r"([\\`*_\[\]~$])", r"\\\1", html.escape(summary.in_a_line(text), quote=False))


def _code(text: str) -> str:
    return f"<code>{_escaped(text)}</code>"


def _block(text: str) -> str:
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks}\n{text}\n{ticks}"

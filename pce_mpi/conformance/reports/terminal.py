"""A report as plain text, each cause of failures, the settings and the largest errors; and a list of cases."""

from collections.abc import Iterable, Iterator
from itertools import groupby
import textwrap
from typing import Any

from pce_mpi.conformance.candidates.fitting import unmet_need
from pce_mpi.conformance.candidates.offers import Offer
from pce_mpi.conformance.judging.outcomes import Outcome, Report
from pce_mpi.conformance.problems.cases import Case
from pce_mpi.conformance.reports import summary
from pce_mpi.conformance.text import visible
from pce_mpi.text import table

_WIDTH = 120
# Lines of a candidate's output; other reports have more.
_LINES_SHOWN = 12


def render(report: Report) -> str:
    """Render the report as text that ends in a newline."""
    return visible("\n\n".join(_parts(report))) + "\n"


def _parts(report: Report) -> Iterator[str]:
    for failed in summary.by_cause(report):
        yield "\n".join(_failures(failed, report))
    facts = summary.facts(report)
    width = max(map(len, facts))
    yield "\n".join(wrapped(f"{name:{width}}  ", value) for name, value in facts.items())
    if rows := summary.extreme_rows(report):
        yield "Largest errors in ulps (help(pce_mpi.conformance.judging) says of what); sums may err by log2(rows) more"
        yield table(rows)
    if more := summary.hint(report):
        yield wrapped("", more)
    yield "\n".join(filter(None, (summary.headline(report), summary.open_contracts(report))))


def _failures(failed: list[Outcome], report: Report) -> Iterator[str]:
    """Yield the lines on failures of one cause: all their names, and the details of the first."""
    first = failed[0]
    yield wrapped(f"{first.verdict} ", ", ".join(summary.title(each, report) for each in failed))
    yield wrapped("  ", summary.problem(first))
    if seen := summary.shape(first, report):
        yield f"  seen at: {seen}"
    yield from (f"  | {line}" for line in summary.printed(first).splitlines()[-_LINES_SHOWN:])
    if first.rerun:
        yield f"  rerun: {first.rerun}"  # one line, to be copied


def wrapped(start: str, text: str, indent: str | None = None) -> str:
    """Break a text into lines that begin with the spaces of its start, or with `indent`."""
    rest = " " * len(start) if indent is None else indent
    whole_words: Any = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, _WIDTH, initial_indent=start, subsequent_indent=rest, **whole_words)


def listing(cases: Iterable[Case], offer: Offer | None = None, width: int = 120) -> str:
    """Render a line for each case, and if an `offer` covers it; below those that catch the same fault, that fault."""
    cases = list(cases)
    names = max((len(case.name) for case in cases), default=0)
    dtypes = max((len(case.dtype) for case in cases), default=0)
    lines: list[str] = []
    for catches, alike in groupby(cases, key=lambda case: case.catches):
        lines += [f"{case.name:{names}}  {case.dtype:{dtypes}}  {_offered(case, offer)}".rstrip() for case in alike]
        lines += textwrap.wrap(catches, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(lines)


def _offered(case: Case, offer: Offer | None) -> str:
    if offer is None:
        return ""
    missing = unmet_need(offer, case.needs, case.dtype)
    if missing is not None:
        return f"not offered: {missing}"
    return "offered" + ", to the bits of one rank" * (offer.same_bits and case.compares_bits)

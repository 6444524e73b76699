"""A report as one page of HTML, which contains its styles and pictures and loads nothing."""

from __future__ import annotations

from importlib import resources
import inspect
from typing import Any

import jinja2
import markupsafe

from pce_mpi.conformance import judging
from pce_mpi.conformance.outcomes import Outcome, Report
from pce_mpi.conformance.reports import summary, tables
from pce_mpi.conformance.reports.pictures import drawn, of_ranks


def render(report: Report) -> str:
    """Render the page; importing this file needs jinja2 and matplotlib."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["cell"] = tables.text
    template = resources.files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        report=report,
        headline=summary.headline(report),
        facts=summary.facts(report),
        meaning=summary.MEANING,
        hint=summary.hint(report),
        causes=_table(summary.cause_rows(report)),
        matrix=_matrix(report),
        extremes=_table(summary.extreme_rows(report)),
        failures=[_failure(number, outcome, report) for number, outcome in enumerate(report.failed)],
        outcomes=[_line(outcome) for outcome in report.outcomes],
        measure=inspect.cleandoc(judging.__doc__ or ""),
    )


def _matrix(report: Report) -> dict[str, list[dict[str, Any]]]:
    """Return a cell for each case, by family; that of a failure leads to its article."""
    number = {id(outcome): place for place, outcome in enumerate(report.failed, start=1)}
    families: dict[str, list[dict[str, Any]]] = {}
    for outcome in report.outcomes:
        cell = {
            "verdict": outcome.verdict,
            "title": f"{summary.title(outcome, report)}: {outcome.verdict}",
            "link": number.get(id(outcome)),
        }
        families.setdefault(outcome.family, []).append(cell)
    return families


def _table(rows: list[list[tables.Cell]]) -> list[list[dict[str, Any]]]:
    """Return the text and the alignment of each cell."""
    if not rows:
        return []
    right = tables.numeric(rows)
    return [[{"text": tables.text(cell), "right": end} for cell, end in zip(row, right, strict=True)] for row in rows]


def _failure(number: int, outcome: Outcome, report: Report) -> dict[str, Any]:
    picture = outcome.picture
    shown = {
        "outcome": outcome,
        "title": summary.title(outcome, report),
        "lines": summary.lines(outcome) or [summary.problem(outcome)],
        "printed": summary.printed(outcome),
        "shape": summary.shape(outcome),
        "accuracies": _table(summary.accuracy_rows(outcome)),
        "picture": None,
    }
    if picture is not None and picture.errors and picture.errors[0]:
        shown["picture"] = markupsafe.Markup(drawn(picture, f"picture{number}"))
        shown["of_ranks"] = of_ranks(picture)
    return shown


def _line(outcome: Outcome) -> dict[str, Any]:
    said = summary.problem(outcome) if outcome.failed else summary.in_a_line(outcome.note)
    return {"outcome": outcome, "said": said}

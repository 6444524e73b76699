"""A report as one page of HTML, which contains its styles and pictures and loads nothing."""

from __future__ import annotations

from importlib import resources
import inspect

import jinja2
import markupsafe

from pce_mpi.conformance import judging
from pce_mpi.conformance.judging.outcomes import Report
from pce_mpi.conformance.reports import pictures, summary, tables


def render(report: Report) -> str:
    """Render the page; importing this file needs jinja2 and matplotlib."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"cell": tables.text, "numeric": tables.numeric, "markup": markupsafe.Markup}
    template = resources.files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    measure = inspect.cleandoc(judging.__doc__ or "")
    return environment.from_string(template).render(report=report, measure=measure, summary=summary, pictures=pictures)

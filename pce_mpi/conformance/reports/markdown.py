"""A report as Markdown, for a pull request: a heading, and the report as text, folded below it."""

import html
import re

from pce_mpi.conformance.judging.outcomes import Report
from pce_mpi.conformance.reports import summary, terminal


def render(report: Report) -> str:
    """Render the report as Markdown that ends in a newline."""
    sign = "\N{CROSS MARK}" if report.failed else "\N{WHITE HEAVY CHECK MARK}"
    name = re.sub(r"([\\`*_\[\]~$])", r"\\\1", html.escape(summary.in_a_line(report.candidate), quote=False))
    text = terminal.render(report)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    heading = f"### {sign} Conformance of <code>{name}</code>: {summary.headline(report)}"
    # After a tag and an empty line, text is Markdown again.
    folded = "<details><summary>The report</summary>", f"{fence}text\n{text}{fence}", "</details>"
    return "\n\n".join([heading, *folded]) + "\n"

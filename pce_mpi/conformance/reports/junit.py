"""A report as JUnit XML: one test suite, the cases of a family in one class.

Wrong answers and refusals are failures; crashes and deadlocks are errors; cases that are not offered, or were not run,
are skipped.
"""

import re
from xml.etree import ElementTree

from pce_mpi.conformance.judging.outcomes import Outcome, Report, Verdict
from pce_mpi.conformance.reports.summary import in_a_line, lines, printed, problem, shape, title

# The output of a candidate may have characters that XML does not allow.
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(report: Report) -> str:
    """Render the report as an XML document."""
    tags = [_tag(outcome.verdict) for outcome in report.outcomes]
    counts = {
        "tests": str(len(tags)),
        "failures": str(tags.count("failure")),
        "errors": str(tags.count("error")),
        "skipped": str(tags.count("skipped")),
        "time": f"{sum(outcome.seconds for outcome in report.outcomes):.3f}",
    }
    suites = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": _clean(report.candidate), **counts})
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in {"ranks": ", ".join(map(str, report.ranks)), "seed": report.seed, **report.versions}.items():
        ElementTree.SubElement(properties, "property", name=name, value=_clean(str(value)))
    for outcome, tag in zip(report.outcomes, tags, strict=True):
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=_clean(f"{report.candidate}.{outcome.family}"),
            name=_clean(title(outcome, report)),
            time=f"{outcome.seconds:.3f}",
        )
        if tag:
            start = f"{outcome.verdict}: " if tag == "skipped" else ""
            element = ElementTree.SubElement(case, tag, message=_clean(start + problem(outcome)))
            if tag != "skipped":
                element.set("type", str(outcome.verdict))
                element.text = _clean(_details(outcome, report))
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _tag(verdict: Verdict) -> str:
    if not verdict.failed:
        return "skipped" * (verdict is not Verdict.PASS)
    return "error" if verdict.unended else "failure"


def _details(outcome: Outcome, report: Report) -> str:
    seen = [*lines(outcome), printed(outcome), shape(outcome, report)]
    notes = [outcome.catches and f"catches: {in_a_line(outcome.catches)}", outcome.rerun and f"rerun: {outcome.rerun}"]
    return "\n".join(line for line in (*seen, *notes) if line)


def _clean(text: str) -> str:
    return _NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text)

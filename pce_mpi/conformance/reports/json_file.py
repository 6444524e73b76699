"""A report as JSON, for other programs.

One object:

    format       "pce_mpi conformance report"
    version      2; it rises if a field changes its meaning or is removed, not if one is added
    candidate    the candidate's name, as given on the command line
    offer        what it offers; the fields of `offers.Offer`
    ranks, seed, strict, tolerance, versions
                 the settings of the run; `ranks` is a list, `versions` by the name of the package
    interrupted  true if the user stopped the run before its last case
    failed       true if any case failed: crashed, deadlocked, slow, refused where an answer was due, or FAIL
    counts       the number of cases by verdict
    outcomes     one object per case, with the fields of `outcomes.Outcome`: `case`, `verdict` ("pass", "FAIL", "not
                 offered", "refused", "crashed", "deadlocked", "slow", "known", "not run"), `findings` (`kind`, `text`,
                 `faults`), `accuracies` (in ulps), `picture` (errors of the gradient; null, or the fields of
                 `outcomes.ErrorMap`), `rerun`, ...

Numbers that are not finite are the strings "nan", "inf" and "-inf": JSON has none.
"""

import json

from pce_mpi.conformance.judging.outcomes import Report
from pce_mpi.conformance.serialization import from_json, to_json

_FORMAT = {"format": "pce_mpi conformance report", "version": 2}


def render(report: Report) -> str:
    """Render the report as JSON that ends in a newline."""
    content = {**_FORMAT, "failed": bool(report.failed), "counts": report.counts, **to_json(report)}
    return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def parse(text: str) -> Report:
    """Read the report that `render` wrote; raise `ValueError` for any other text."""
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("format") != _FORMAT["format"]:
        raise ValueError(f"this is no {_FORMAT['format']}")
    if content["version"] != _FORMAT["version"]:
        raise ValueError(f"the report must be of version {_FORMAT['version']}, got {content['version']}")
    return from_json(Report, content)

"""A list of cases, with the fault that each catches and, for a candidate, its offer."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
import textwrap

from pce_mpi.conformance.cases import Case
from pce_mpi.conformance.fitting import unmet_need
from pce_mpi.conformance.offers import Offer


def render(cases: Iterable[Case], offer: Offer | None = None, width: int = 120) -> str:
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

"""Candidates with faults that projects have shipped: each with a case, and the words that its report begins with."""

from typing import NamedTuple

from pce_mpi.conformance.candidates.catalogue import cases
from pce_mpi.conformance.runs.running import run_case


class Shipped(NamedTuple):
    """A candidate, a case, and the words of its first finding, in which `{ranks}` may stand, from so many ranks on."""

    candidate: type
    case: str
    words: str
    least_ranks: int = 1

    def __str__(self):
        return f"{self.candidate.__name__}-{self.case}"


def assert_named_first(shipped, comm):
    candidate = shipped.candidate()
    (case,) = cases(candidate, pattern=shipped.case)
    outcome = run_case(candidate, case, comm)
    assert outcome.failed == (comm.size >= shipped.least_ranks)
    if outcome.failed:
        assert shipped.words.format(ranks=comm.size) in outcome.findings[0].text, outcome.findings


def defined_in(*modules):
    """Return the classes that are written in these modules."""
    return {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    }

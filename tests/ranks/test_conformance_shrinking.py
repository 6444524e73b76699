"""The smallest shape at which a case still fails, on all ranks."""

from candidates.wrong.rows import MeanOverAllRows
from pce_mpi.conformance import cases, run_case
from pce_mpi.conformance.outcomes import Finding
from pce_mpi.conformance.shrinking import shrink


def test_smallest_shape_shows_same_fault(comm):
    candidate = MeanOverAllRows()
    (case,) = cases(candidate, pattern="ignored/negative")
    tried = []

    def at(rows, classes):
        tried.append((rows, classes))
        outcome = run_case(candidate, case, comm, rows=rows, classes=classes)
        if (rows, classes) == (1, 8):  # the same kind, but another cause
            outcome.findings = [Finding("loss", "label smoothing is left out (loss is 1 where 2 is right)")]
        return outcome

    small = shrink(at, ["loss"], [(1, 4), (1, 8), (2, 4), (2, 8)], comm)
    assert tried == [(None, None), (1, 4), (1, 8), (2, 4)]
    assert small.shrunk and (small.rows, small.classes) == (2, 4)
    assert small.findings[0].cause == "the mean divides by all 2 rows, not by the 1 that are not ignored"
    assert shrink(at, ["ranks differ"], [(2, 4)], comm) is None

"""Find the smallest shape at which a case still fails in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from pce_mpi.conformance.cases import Case, problem_of
from pce_mpi.conformance.offers import Offer
from pce_mpi.conformance.outcomes import Outcome

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 64, 256, 1024, 4096, 16384)


def shapes(rows: int, classes: int, ranks: int) -> list[tuple[int, int]]:
    """Return smaller (rows, classes), from few elements to many, with a class for each rank.

    >>> shapes(2, 5, 2)
    [(1, 2), (1, 3), (1, 4), (2, 2), (1, 5), (2, 3), (2, 4)]
    """
    few = {ranks, ranks + 1, 2 * ranks, 3 * ranks, 4 * ranks}
    while max(few) < classes:
        few.add(2 * max(few))
    smaller = [
        (r, c)
        for r in sorted({each for each in _ROWS if each < rows} | {rows})
        for c in sorted({each for each in few if each < classes} | {classes})
        if (r, c) != (rows, classes)
    ]
    return sorted(smaller, key=lambda shape: (shape[0] * shape[1], shape))


def usable_shapes(failure: Outcome, case: Case, offer: Offer, seed: int) -> Iterator[tuple[int, int]]:
    """Yield the shapes that leave no rank without classes, unless the case does: that can show another fault."""

    def has_an_empty_shard(splits: tuple[int, ...]) -> bool:
        return any(start == stop for start, stop in pairwise(splits))

    for rows, classes in shapes(failure.rows, failure.classes, failure.ranks):
        problem = problem_of(case, offer, failure.ranks, seed=seed, rows=rows, classes=classes)
        if has_an_empty_shard(failure.splits) or not has_an_empty_shard(problem.splits):
            yield rows, classes


def shows_the_same(small: Outcome, failure: Outcome) -> bool:
    """Return True if a finding of `small` is of the kind, and of the known cause, of the first one of `failure`."""
    first = failure.findings[0]
    shown = next((finding for finding in small.findings if finding.kind == first.kind), None)
    return shown is not None and (not first.cause or shown.likeness == first.likeness)

"""Find the smallest shape at which a case still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
import time
from typing import TYPE_CHECKING

from pce_mpi.conformance.outcomes import Outcome

if TYPE_CHECKING:
    from mpi4py import MPI

# Seconds for the search of one shape, without its first call.
_SECONDS = 4.0

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


def shrink(
    run: Callable[[int | None, int | None], Outcome],
    kinds: Collection[str],
    shapes: Iterable[tuple[int, int]],
    comm: MPI.Intracomm,
) -> Outcome | None:
    """Return the outcome of `run` at the first of `shapes` with the finding of the case's own shape, (None, None).

    The finding is of one of `kinds`, and of the same cause if one is known. None if no shape has it in time.
    Collective over `comm`; rank 0's clock decides.
    """
    whole = next((finding for finding in run(None, None).findings if finding.kind in kinds), None)
    if whole is None:
        return None
    start = time.monotonic()  # the first call may load a framework
    for shape in shapes:
        if comm.bcast(time.monotonic() - start > _SECONDS):
            break
        outcome = run(*shape)
        shown = next((finding for finding in outcome.findings if finding.kind in kinds), None)
        if shown is not None and (not whole.cause or shown.likeness == whole.likeness):
            outcome.shrunk = True
            return outcome
    return None

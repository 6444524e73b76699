"""Tell every rank how something ended on every rank, without waiting for ever."""

import os
import re
import time
from typing import NamedTuple

from mpi4py import MPI

from patience import Patience

PASSED = "passed"

# A rank that failed may have left its peers inside a collective. It gives them this much `Patience` to get out.
GRACE = 5.0

# There may be more ranks than cores, so that a rank that waits leaves its core to the others. One that yields it hears
# of the last rank within microseconds, one that sleeps within a millisecond: at first a rank yields.
YIELDS = 1_000
NAP = 0.0002

# pytest captures standard error while tests run, not while its plugins are set up, when this file is imported first.
STDERR = open(os.dup(2), "w", buffering=1)


class Verdict(NamedTuple):
    """The outcome on one rank, and a text about it."""

    outcome: str
    text: str = ""


def exchange(comm: MPI.Comm, mine: Verdict, where: str) -> list[Verdict]:
    """Give every rank's verdict, in rank order; collective over `comm`, which carries nothing else.

    If this rank did not pass and its peers stay away longer than `GRACE`, the job ends here, and standard error
    has `where` and the text: there is nobody left who could report it.
    """
    all_well = bytearray(comm.size)
    arrivals = comm.Iallgather([bytearray([mine.outcome == PASSED]), MPI.BYTE], [all_well, MPI.BYTE])
    for _ in range(YIELDS):
        if arrivals.Test():
            break
        os.sched_yield()
    else:
        patience = Patience(GRACE)
        while not arrivals.Test():
            if mine.outcome != PASSED and patience.is_over():
                end_job(comm, f"{where} {mine.outcome} here and left other ranks waiting", mine.text)
            time.sleep(NAP)
    if all(all_well):
        return [mine] * comm.size
    return comm.allgather(mine)


def end_job(comm: MPI.Comm, reason: str, text: str) -> None:
    """Say why on standard error and end every rank of the job."""
    STDERR.write(f"\n[rank {comm.rank} of {comm.size}] {reason}\n{text}\n")
    comm.Abort(1)


def describe(verdicts: list[Verdict]) -> str:
    """Return the texts of the ranks that did not pass; a text that several share, but for addresses, stands once."""
    ranks_by_text: dict[tuple[str, str], list[int]] = {}
    for rank, (outcome, text) in enumerate(verdicts):
        if outcome != PASSED:
            alike = re.sub(r"\b0x[0-9a-f]+", "0x...", text)
            ranks_by_text.setdefault((outcome, alike), []).append(rank)
    blocks = []
    for (outcome, text), ranks in ranks_by_text.items():
        where = "every rank" if len(ranks) == len(verdicts) else "rank " + ", ".join(map(str, ranks))
        blocks.append(f"----- {outcome} on {where} of {len(verdicts)}\n{text}")
    return "\n".join(blocks)

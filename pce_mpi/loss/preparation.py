"""What all ranks must know of a call before any of it is done: that they make the same one, and who has which classes.

Nothing local raises by itself: what a rank's own checks found goes into the agreement, after which either every rank
has a `Problem` or every rank has raised the same error.
"""

from __future__ import annotations

from dataclasses import replace
import operator
from typing import Any
import zlib

import numpy as np

from pce_mpi.comm.collectives import agree, raise_together
from pce_mpi.comm.communicators import CollectiveError, CollectiveTimeout, by_value, check_comm, is_comm, prefix_of
from pce_mpi.loss.arguments import Call, Problem, check, target_text

__all__ = ["prepare"]

HostArray = np.ndarray[Any, Any]


def prepare(call: Call) -> Problem:
    """Check `call` here, and agree on it everywhere.

    Collective over `call.comm` and `call.batch_comm`: one Allgather of 56 bytes over each. Every rank returns, or
    every rank raises the same error.
    """
    if call.comm is not None:
        check_comm(call.comm, call.over)
    problem: Problem | None = None
    error: Exception | None = None
    try:
        problem = check(call)
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    try:
        placed = _place(call, problem, error)
        if call.batch_comm is None:
            return placed
        problem, error = placed, None
    except CollectiveTimeout:
        raise
    except Exception as caught:  # as above
        if call.batch_comm is None or not is_comm(call.batch_comm):
            raise
        error = caught
    description = {} if problem is None else problem.described() | {"num_classes": problem.num_classes}
    description.pop("rows", None)
    named = call.comm is not None
    agree(call.batch_comm, call.operation, description, error=error, over=call.batch_over, ranks_named=named)
    assert problem is not None  # its error would have been raised by now
    return problem


def _place(call: Call, problem: Problem | None, error: Exception | None) -> Problem:
    """`problem` with its place among all classes, once the ranks of `call.comm` have agreed on the rest."""
    if call.comm is None:
        if error is not None or problem is None:
            raise error or RuntimeError("nothing was checked")
        facts = np.array([_facts(call, problem)])
    else:
        description = {} if problem is None else problem.described()
        description |= {
            "class_start given": call.class_start is not None,
            "num_classes": None if problem is None or call.num_classes is None else operator.index(call.num_classes),
            "batch_comm given": call.batch_comm is not None,
        }
        facts = agree(
            call.comm,
            call.operation,
            description,
            error=error,
            facts=() if problem is None else _facts(call, problem),
            over=call.over,
        )
        assert problem is not None  # its error has been raised everywhere
    checksums, starts, counts, lowest, highest = facts.T
    num_classes = int(counts.sum())
    if call.num_classes is not None and num_classes != call.num_classes:
        shards = by_value({rank: str(count) for rank, count in enumerate(counts)}, prefix_of(call.over))
        raise ValueError(
            f"num_classes = {call.num_classes}, but the shards have {num_classes} classes together: {shards}"
        )
    if num_classes == 0:
        raise ValueError("there are no classes: every shard is empty")
    if call.class_start is None:
        starts = np.cumsum(counts) - counts
    else:
        _check_ranges(starts, counts, prefix_of(call.over))
    if (lowest < 0).any() or (highest >= num_classes).any():
        out_of_range = _out_of_range(problem, num_classes, call.comm is None and call.over == "comm")
        if call.comm is None:
            raise out_of_range or RuntimeError("targets changed while they were checked")
        raise_together(call.comm, call.operation, out_of_range, over=call.over)
    if (checksums != checksums[0]).any():
        said = {rank: f"checksum {value:08x}" for rank, value in enumerate(checksums)}
        sums = by_value(said, prefix_of(call.over))
        raise CollectiveError(f"ranks disagree on the values of targets: {sums}")
    rank = 0 if call.comm is None else call.comm.rank
    return replace(problem, class_start=int(starts[rank]), num_classes=num_classes)


def _facts(call: Call, problem: Problem) -> tuple[int, ...]:
    """Checksum of the targets, first class (-1: not said), number of classes, lowest and highest target that counts."""
    start = -1 if call.class_start is None else operator.index(call.class_start)
    if problem.targets is None:
        return 0, start, problem.classes, 0, -1
    if problem.valid.all():
        counted = problem.targets
    else:
        counted = problem.targets[problem.valid]
    lowest, highest = (int(counted.min()), int(counted.max())) if counted.size else (0, -1)
    return zlib.crc32(problem.targets.data), start, problem.classes, lowest, highest


def _check_ranges(starts: HostArray, counts: HostArray, prefix: str) -> None:
    expected = 0
    for rank in np.lexsort((counts, starts)):  # empty shards first among equals
        if counts[rank] == 0:
            continue
        if starts[rank] != expected:
            ranges = ", ".join(
                f"[{start}, {int(start) + int(count)}) ({prefix}rank {rank})"
                for rank, (start, count) in enumerate(zip(starts, counts, strict=True))
            )
            problem = "overlap" if starts[rank] < expected else "leave a gap"
            raise ValueError(f"class ranges {problem} at class {min(starts[rank], expected)}: {ranges}")
        expected += counts[rank]


def _out_of_range(problem: Problem, num_classes: int, hint: bool) -> IndexError | None:
    targets = problem.targets
    if targets is None:
        return None
    wrong = np.flatnonzero(problem.valid & ((targets < 0) | (targets >= num_classes)))
    if not wrong.size:
        return None
    text = f"{target_text(targets, problem.rows_shape, wrong[0])} is outside [0, {num_classes})"
    return IndexError(f"{text}: without comm, these logits are all classes" if hint else text)

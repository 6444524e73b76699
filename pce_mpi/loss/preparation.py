"""What all ranks must know of a call before any of it is done: that they make the same one, and who has which classes.

Nothing local raises by itself: what a rank's own checks found goes into the agreement, after which either every rank
has a `Problem` or every rank has raised the same error.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
import math
import operator
from typing import Any
import zlib

import numpy as np

from pce_mpi.arrays import to_host
from pce_mpi.comm.agreement import agree, raise_together
from pce_mpi.comm.communicators import CollectiveError, CollectiveTimeout
from pce_mpi.comm.library import check_comm, is_comm
from pce_mpi.comm.rank_texts import prefix_of, text_by_rank
from pce_mpi.loss.arguments import Call, Problem, check, target_text

__all__ = ["prepare"]

HostArray = np.ndarray[Any, Any]

# Checksums of samples are remainders of it, and so fit 64 bits.
_PRIME = 2**61 - 1


def prepare(call: Call) -> Problem:
    """Check `call` here, and agree on it everywhere.

    Collective over `call.comm` and `call.batch_comm`: one Allgather of 56 bytes over each. Every rank returns, or
    every rank raises the same error.
    """
    if call.comm is not None:
        check_comm(call.comm, call.over)
    problem: Problem | None = None
    facts: tuple[int, ...] = ()
    error: Exception | None = None
    try:
        problem = check(call)
        facts = _facts(call, problem)
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    try:
        placed = _place(call, problem, facts, error)
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


def _place(call: Call, problem: Problem | None, facts: tuple[int, ...], error: Exception | None) -> Problem:
    """`problem` with its place among all classes, once the ranks of `call.comm` have agreed on the rest."""
    if call.comm is None:
        if error is not None or problem is None:
            raise error or RuntimeError("nothing was checked")
        said = np.array([facts])
    else:
        description = {} if problem is None else problem.described()
        description |= {
            "class_start given": call.class_start is not None,
            "num_classes": None if problem is None or call.num_classes is None else operator.index(call.num_classes),
            "batch_comm given": call.batch_comm is not None,
        }
        said = agree(call.comm, call.operation, description, error=error, facts=facts, over=call.over)
        assert problem is not None  # its error has been raised everywhere
    checksums, starts, counts, lowest, highest, samples = said.T
    num_classes = int(counts.sum())
    if call.num_classes is not None and num_classes != call.num_classes:
        shards = text_by_rank({rank: str(count) for rank, count in enumerate(counts)}, prefix_of(call.over))
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
        sums = text_by_rank(
            {rank: f"checksum {value:08x}" for rank, value in enumerate(checksums)}, prefix_of(call.over)
        )
        raise CollectiveError(f"ranks disagree on the values of targets: {sums}")
    _check_not_gathered(counts, samples, prefix_of(call.over))
    rank = 0 if call.comm is None else call.comm.rank
    return replace(problem, class_start=int(starts[rank]), num_classes=num_classes)


def _facts(call: Call, problem: Problem) -> tuple[int, ...]:
    """What the other ranks must know of this one's shard.

    A checksum of the targets, the first class (-1: not said), the number of classes, the lowest and the highest target
    that counts, and a checksum of a sample of the logits (0: no matter whether the others pass the same).
    """
    start = -1 if call.class_start is None else operator.index(call.class_start)
    alone = call.comm is None or call.comm.size == 1
    sample = 0 if alone or call.num_classes is not None else _sample(problem.logits, problem.axis)
    if problem.targets is None:
        return 0, start, problem.classes, 0, -1, sample
    if problem.valid.all():
        counted = problem.targets
    else:
        counted = problem.targets[problem.valid]
    lowest, highest = (int(counted.min()), int(counted.max())) if counted.size else (0, -1)
    return zlib.crc32(problem.targets.data), start, problem.classes, lowest, highest, sample


def _sample(logits: Any, axis: int) -> int:
    """A checksum of a few logits, 0 if no row of them has two different finite values.

    Shards of different classes are equal for a good reason then: they are zero before the first step, for example.
    """
    if logits.size == 0:
        return 0
    index, classes_first = _sampled(logits.shape, axis)
    # From a GPU this waits for the work that fills the logits, as the merge of the shards has to do in any case.
    sample = to_host(logits[index])
    rows = sample.T if classes_first else sample
    # Lists of so few numbers are searched faster than arrays.
    if not any(map(_has_two_values, rows.tolist())):
        return 0
    return int.from_bytes(rows.tobytes(), "little") % _PRIME


@lru_cache(maxsize=1024)
def _sampled(shape: tuple[int, ...], axis: int) -> tuple[tuple[int | slice | None, ...], bool]:
    """The index of up to 29 classes of up to 5 rows along the longest other axis, and whether classes come first.

    Odd strides: what is the same in every second class, or row, is not all that is seen.
    """
    index: list[int | slice | None] = [0] * len(shape)
    index[axis] = slice(None, None, shape[axis] // 15 | 1)
    others = [other for other in range(len(shape)) if other != axis]
    if not others:
        return (None, *index), False
    longest = max(others, key=lambda other: shape[other])
    index[longest] = slice(None, None, shape[longest] // 3 | 1)
    return tuple(index), axis < longest


def _has_two_values(row: list[float]) -> bool:
    """Whether `row` has two different finite values."""
    lowest, highest = min(row), max(row)
    if -math.inf < lowest < highest < math.inf:
        return True
    finite = {value for value in row if math.isfinite(value)}
    return len(finite) > 1


def _check_not_gathered(counts: HostArray, samples: HostArray, prefix: str) -> None:
    """Raise unless some ranks pass different logits, as far as their samples tell."""
    with_classes = np.flatnonzero(counts).tolist()
    first = with_classes[0]
    if len(with_classes) == 1 or not samples[first]:
        return
    if (counts[with_classes] != counts[first]).any() or (samples[with_classes] != samples[first]).any():
        return
    same = text_by_rank(dict.fromkeys(with_classes, f"the same logits of {counts[first]} classes"), prefix)
    raise ValueError(
        f"ranks pass {same}: gathered logits, it seems, but each rank must pass its own classes only; "
        f"if these are different classes whose logits are equal, say so with num_classes={counts.sum()}"
    )


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

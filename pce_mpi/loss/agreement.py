"""The agreement of the ranks on one call: they make the same one, and each knows which classes the others have.

A rank's own checks do not raise before the agreement: it tells their errors to the other ranks. After it, every rank
has a `Problem`, or every rank has raised the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate
import json
import math
import operator
from typing import Any
import zlib

import numpy as np

from pce_mpi.arrays import Array, HostArray, array_namespace, checksum_of, cupy_of, to_host
from pce_mpi.comm.agreement import Signature, agree_on_call, all_gather_text, local_checks, raise_together
from pce_mpi.comm.errors import CollectiveError, ranks_text, text_by_rank
from pce_mpi.comm.library import check_comm, is_comm
from pce_mpi.comm.rehearsed import FakeComm
from pce_mpi.gpu import Download
from pce_mpi.hints import hinted
from pce_mpi.hollow import Hollow
from pce_mpi.kernels import host_kernel, kernel_of, sets_arithmetic
from pce_mpi.loss.options import Options
from pce_mpi.loss.problem import LARGEST, Pending, Problem, as_int64, check, class_numbers_of, entry_text, target_text
from pce_mpi.validation import check_floating_point

Facts = tuple[int, ...]
# In place of `_values` that are told later; the highest target is none.
_LATER = -1, 0, 0, 0
_NOTHING = Pending()
# So many parts of an array are compared at a time.
_PARTS = 64


def prepare(options: Options, logits: Any, targets: Any = None, **more: Any) -> Problem:
    """Check the arguments on this rank, and agree on the call with the others; the arguments are those of `check`.

    The caller calls `settle` and `confirm`.
    """
    return agree_on(options, partial(check, options, logits, targets, later=True, **more))


def agree_on(options: Options, check_arguments: Callable[[], Problem]) -> Problem:
    """Check the arguments on this rank, and agree on the call with the others; in a block `with standard_arithmetic()`.

    Collective over `comm` and `batch_comm`: one Allgather of 56 bytes over each. Every rank returns, or every rank
    raises the same error.
    """
    if options.comm is not None:
        check_comm(options.comm, options.over)
    problem: Problem | None = None
    facts: Facts = ()
    with local_checks() as checks:
        for found in options.found:
            raise found
        if not sets_arithmetic:
            check_floating_point()
        problem = check_arguments()
        if isinstance(options.comm, FakeComm) and type(problem.logits) is not Hollow:
            raise TypeError(
                "arrays with elements need ranks: in a rehearsal, distributed arrays and hollow ones are taken"
            )
        # The first class (-1: not given), how many there are, and `_values`, or that these are told later
        start = -1 if options.class_start is None else operator.index(options.class_start)
        facts = start, problem.classes, *(_values(problem) if problem.pending is None else _LATER)
        host_kernel()  # a rank without the kernel that was chosen raises before the others wait
    error = checks.error
    if options.batch_comm is None or not is_comm(options.batch_comm):
        return _place(options, problem, facts, error)
    with local_checks() as checks:
        problem = _place(options, problem, facts, error)
    call = _call(options, problem, {} if problem is None else {"num_classes": problem.num_classes})
    facts = (problem is not None and problem.pending is not None and problem.pending.over_classes,)
    (later,) = _agree_over_rows(options, call, checks.error, facts)
    assert problem is not None  # its error would have been raised by now
    if any(later):
        problem.pending = problem.pending or Pending()
        problem.pending.over_rows = True
    return problem


def _agree_over_rows(options: Options, call: Signature, error: Exception | None, facts: Facts = ()) -> list[Facts]:
    named = options.comm is not None
    return agree_on_call(options.batch_comm, call, facts, error=error, over=options.batch_over, ranks_named=named)


def settle(problem: Problem) -> None:
    """Check the values of arrays on GPUs, which `agree_on` has left, as it does; the GPU may work meanwhile.

    Collective over `comm` and `batch_comm`: one Allgather of 56 bytes over each, if one of its ranks has such arrays.
    """
    pending = problem.pending
    if pending is None or not (pending.over_classes or pending.over_rows):
        return
    options, comm = problem.options, problem.options.comm
    call = Signature(options.operation, {})
    facts: Facts = ()
    with local_checks() as checks:
        if pending.over_classes and comm is None:
            _check_values(problem, problem.num_classes, *((fact,) for fact in _values(problem)))
        elif pending.over_classes:
            with local_checks() as own:
                facts = _values(problem)
            said = agree_on_call(comm, call, facts, error=own.error, over=options.over)
            _check_values(problem, problem.num_classes, *said)
    if pending.over_rows:
        _agree_over_rows(options, call, checks.error)
    elif checks.error is not None:
        raise checks.error
    pending.over_classes = pending.over_rows = False


def confirm(problem: Problem) -> None:
    """Raise, as `agree_on` does, if a GPU has found a target that is no class; waits for that check and no later work.

    It is called after the last launch, or before a launch that cannot leave what it writes as it was.
    """
    found = problem.wrong
    if found is None:
        return
    problem.pending = None
    if found.wait()[0]:
        has_rows = problem.options.batch_comm is not None
        problem.pending = Pending(numbers=Download(problem.targets), over_classes=True, over_rows=has_rows)
        settle(problem)
        raise _changed()


def _call(options: Options, problem: Problem | None, more: Mapping[str, Hashable]) -> Signature:
    """Return all that must be the same on every rank; only the operation, if the checks of this rank failed."""
    return Signature(options.operation, {}) if problem is None else problem.call(more)


def _place(options: Options, problem: Problem | None, facts: Facts, error: Exception | None) -> Problem:
    """Return `problem` with its place among all classes; the ranks of `comm` have agreed on the rest."""
    comm: Any = options.comm
    over = options.over
    said: list[Facts]
    if comm is None:
        if error is not None or problem is None:
            raise error or RuntimeError("nothing was checked")
        said = [(fact,) for fact in facts]
    else:
        asked = None if problem is None or options.num_classes is None else operator.index(options.num_classes)
        more = {
            "rows": () if problem is None else problem.rows_shape,
            "class_start given": options.class_start is not None,
            "num_classes": asked,
            "batch_comm given": options.batch_comm is not None,
        }
        said = agree_on_call(comm, _call(options, problem, more), facts, error=error, over=over)
        assert problem is not None  # its error has been raised everywhere
    if isinstance(comm, FakeComm):
        problem.place(0, asked or 0)
        return problem
    starts, counts, highest, *others = said
    num_classes = sum(counts)
    if options.num_classes is not None and num_classes != options.num_classes:
        wrong = f"num_classes = {options.num_classes}, but"
        if comm is None:
            raise ValueError(f"{wrong} without comm these are all classes, and they are {num_classes}")
        shards = text_by_rank({rank: str(count) for rank, count in enumerate(counts)}, over)
        padding = num_classes - options.num_classes
        remedy = "slice these columns off, or mask them by -inf and leave num_classes out"
        remedy = f"; where the last {padding} are padding, {remedy}" * (padding > 0)
        raise ValueError(f"{wrong} the shards have {num_classes} classes together: {shards}{remedy}")
    if num_classes == 0:
        raise ValueError("there are no classes: every shard is empty")
    if options.class_start is None:
        starts = tuple(accumulate(counts, initial=0))
    else:
        _check_ranges(starts, counts, over)
    problem.shards, later = (starts, counts), _LATER[0] in highest
    if later:
        problem.pending = problem.pending or Pending(over_classes=True)
    else:
        _check_values(problem, num_classes, highest, *others)
    problem.place(starts[0 if comm is None else comm.rank], num_classes)
    has_sample = later and comm is not None and options.num_classes is None
    if problem.pending and has_sample and cupy_of(sample := _sample(problem)) is not None:
        problem.pending.sample = Download(problem.xp.ascontiguousarray(sample))
    return problem


def _check_values(
    problem: Problem, num_classes: int, highest: Facts, checksums: Facts, samples: Facts, sums: Facts
) -> None:
    """Check what the ranks of `comm` say of the values of their arrays."""
    comm, over = problem.options.comm, problem.options.over
    if max(highest) >= num_classes:
        out_of_range = _out_of_range(problem, num_classes)
        if comm is None:
            raise out_of_range or _changed()
        raise_together(comm, problem.options.operation, out_of_range, over=over)
    if checksums.count(checksums[0]) < len(checksums):
        raise CollectiveError(_difference(problem, problem.targets_name, problem.alike, problem.targets_shape))
    if sums.count(sums[0]) < len(sums):
        hidden: Any = problem.hidden
        raise CollectiveError(_difference(problem, "hidden", hidden, (*problem.rows_shape, hidden.shape[-1])))
    name = "logits" if problem.sharded[0] is problem.logits else "w"
    _check_not_gathered(problem.shards[1], samples, over, name)


def _values(problem: Problem) -> Facts:
    """Return the facts of the values of this rank's arrays.

    They are the highest target, a checksum of the targets or of the rows that count, one of a sample of the logits (0:
    the other ranks may pass the same), and one of `hidden` in linear functions.
    """
    comm = problem.options.comm
    pending = problem.pending or _NOTHING
    if pending.numbers is not None:
        array, ignore_index = pending.numbers.wait().reshape(problem.targets_shape), problem.options.ignore_index
        problem.targets = numbers = class_numbers_of(array, problem.targets_name, ignore_index)
        problem.valid, _, highest = kernel_of(numbers).valid_rows(numbers, as_int64(ignore_index, array.dtype))
        problem.highest_target = min(highest, LARGEST)
    if comm is None or comm.size == 1 or isinstance(comm, FakeComm):
        return problem.highest_target, 0, 0, 0
    of_sample = 0
    if problem.options.num_classes is None:  # else the ranks may pass the same logits
        of_sample = _checksum_of_sample(to_host(_sample(problem)) if pending.sample is None else pending.sample.wait())
    checksum = 0 if problem.alike is None else zlib.crc32(problem.alike.data)
    hidden = 0 if problem.hidden is None else checksum_of(problem.hidden)
    return problem.highest_target, checksum, of_sample, hidden


def _difference(problem: Problem, name: str, array: Any, shape: Facts) -> str:
    """Return the text of the error for arrays that differ, with the first element that does.

    Collective over `comm`: two Allgathers for each factor of 64 in the number of elements, and two more. The checksum
    of an array on the host follows from those of its parts, so that one of them differs.
    """
    options = problem.options
    gather = partial(all_gather_text, comm=options.comm, operation=options.operation, over=options.over)
    numbers = np.ascontiguousarray(to_host(array)).reshape(-1)
    bits = numbers.view(f"u{numbers.itemsize}")
    start, stop = 0, bits.size
    while stop - start > 1:
        length = -((start - stop) // _PARTS)
        parts = range(start, stop, length)
        sums = json.dumps([zlib.crc32(bits[part : min(part + length, stop)].data) for part in parts])
        everyones = zip(*map(json.loads, gather(sums)), strict=True)
        differing = [part for part, several in zip(parts, everyones, strict=True) if len({*several}) > 1]
        if not differing:  # the checksum of the same array on a GPU is another one
            libraries = dict(enumerate(gather(array_namespace(array).__name__)))
            return f"ranks disagree on the library of {name}: {text_by_rank(libraries, options.over)}"
        start, stop = differing[0], min(differing[0] + length, stop)
    number = numbers[start]
    text = str(number) if number == number else f"{number} of bits {bits[start]:#x}"
    by_rank = text_by_rank(dict(enumerate(gather(text))), options.over)
    text = f"ranks disagree on the values of {name}: {entry_text(shape, start, name)} = {by_rank}"
    return hinted(text, "values differ", name=name)


def _sample(problem: Problem) -> Array:
    """Return a few rows of a few logits each."""
    logits, axis = problem.sharded
    if logits.size == 0:
        return np.empty((0, 0))
    index, classes_first = _sampled(logits.shape, axis)
    return logits[index].T if classes_first else logits[index]


def _checksum_of_sample(rows: HostArray) -> int:
    """Return a checksum of a few logits; 0 if none of these rows has two different finite values.

    Shards of different classes may then be equal, as logits are before the first step of a training.
    """
    if not any(map(_has_two_values, rows)):
        return 0
    # The hash of a whole number is its remainder modulo a prime below 2^61, and faster than the operator.
    return hash(int.from_bytes(rows.tobytes(), "little"))


@lru_cache(maxsize=1024)
def _sampled(shape: Facts, axis: int) -> tuple[tuple[int | slice | None, ...], bool]:
    """Return the index of up to 29 classes of up to 5 rows along the longest other axis; True if classes come first.

    The strides are odd: with even ones, logits that repeat in every second class or row would look constant.
    """
    index: list[int | slice | None] = [0] * len(shape)
    index[axis] = slice(None, None, shape[axis] // 15 | 1)
    others = [other for other in range(len(shape)) if other != axis]
    if not others:
        return (None, *index), False
    longest = max(others, key=lambda other: shape[other])
    index[longest] = slice(None, None, shape[longest] // 3 | 1)
    return tuple(index), axis < longest


def _has_two_values(row: HostArray) -> bool:
    """Return whether `row` has two different finite values."""
    values: list[float] = row.tolist()  # a list of so few numbers is searched faster than an array
    lowest, highest = min(values), max(values)
    if -math.inf < lowest < highest < math.inf:
        return True
    finite = {value for value in values if math.isfinite(value)}
    return len(finite) > 1


def _check_not_gathered(counts: Sequence[int], samples: Sequence[int], over: str, name: str) -> None:
    """Raise unless some ranks pass different logits, or weights w, judged by their samples."""
    if len(counts) == 1 or len({said for said in zip(counts, samples, strict=True) if said[0]}) > 1:
        return
    with_classes = [rank for rank, count in enumerate(counts) if count]
    first = with_classes[0]
    if len(with_classes) == 1 or not samples[first]:
        return
    same = text_by_rank(dict.fromkeys(with_classes, f"the same {name} of {counts[first]} classes"), over)
    raise ValueError(
        f"ranks pass {same}: gathered {name}, it seems, but each rank must pass its own classes only. "
        f"Leave {over} out if every rank has all classes, as after take_classes; "
        f"if these are different classes whose logits are equal, say so with num_classes={sum(counts)}"
    )


def _check_ranges(starts: Sequence[int], counts: Sequence[int], over: str) -> None:
    expected = 0
    for rank in sorted(range(len(starts)), key=lambda rank: (starts[rank], counts[rank])):  # empty shards first
        if counts[rank] == 0:
            continue
        if starts[rank] != expected:
            ranges = ", ".join(
                f"[{start}, {start + count}) ({ranks_text([rank], over)})"
                for rank, (start, count) in enumerate(zip(starts, counts, strict=True))
            )
            problem = "overlap" if starts[rank] < expected else "leave a gap"
            text = f"class ranges {problem} at class {min(starts[rank], expected)}: {ranges}"
            raise ValueError(hinted(text, "class_start by hand"))
        expected += counts[rank]


def _changed() -> RuntimeError:
    return RuntimeError("targets changed while they were checked")


def _out_of_range(problem: Problem, num_classes: int) -> IndexError | None:
    mistakes = []
    if problem.options.comm is not None:
        mistakes = ["other class numbers"]
    elif problem.options.over == "comm":
        mistakes = ["forgotten comm"]
    found: list[tuple[str, HostArray, Facts, HostArray | bool]] = []
    if problem.targets is not None:
        found.append((problem.targets_name, problem.targets, problem.targets_shape, problem.valid))
    if problem.members is not None:
        found.append(("ids of the support", problem.members, problem.members.shape, True))
    for name, numbers, shape, valid in found:
        wrong = np.flatnonzero(valid & ((numbers < 0) | (numbers >= num_classes)))
        if wrong.size:
            if name == "targets" and np.all(numbers[wrong] == -1):
                mistakes = ["-1 for no class"]
            text = f"{target_text(numbers, shape, wrong[0], name)} is outside [0, {num_classes})"
            return IndexError(hinted(text, *mistakes))
    return None

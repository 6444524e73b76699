"""Cases about the split of the classes over the ranks, and about the shape and memory order of the logits."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np

from pce_mpi.conformance.problems.cases import EACH_REDUCTION, Cases, Expects, Setting, table
from pce_mpi.conformance.problems.generators import Splits, chunks, even, random_problem, uneven
from pce_mpi.conformance.problems.problem import Problem

CASES = Cases()
# Those that take GiB of memory.
LARGE = Cases()

# The large case has more elements than this on a rank, in so many classes.
BEYOND = 2**31
_COLUMNS = 4_100


@CASES.case("uneven-shards/chunks", shards="array_split", classes=23)
def _uneven_chunks(setting: Setting) -> Problem:
    """A last shard that is shorter, as torch.chunk makes it: class numbers computed as rank times local length."""
    splits = uneven(setting) if setting.shards == "array_split" else chunks(setting.classes, setting.ranks)
    return random_problem(setting, splits)


@CASES.case("uneven-shards/any", shards="any", classes=29)
def _uneven(setting: Setting) -> Problem:
    """Shards of any length: class numbers computed as rank times local length, and gathers that expect equal parts
    (PyTorch's loss_parallel: an index error on one rank, the others wait).
    """
    return random_problem(setting, uneven(setting))


@CASES.case("empty-shard/last", shards="chunks")
def _last_is_empty(setting: Setting) -> Problem:
    """A rank without classes, as torch.chunk leaves the last one: a maximum of nothing raises there, and the other
    ranks wait (PyTorch's loss_parallel).
    """
    ranks = setting.ranks
    if setting.shards == "any" and ranks > 1:
        return random_problem(setting, (*even(replace(setting, ranks=ranks - 1)), setting.classes))
    # The largest number of classes for which torch.chunk leaves the last rank none.
    return random_problem(setting, chunks(max(1, (ranks - 1) ** 2), ranks))


@CASES.case("empty-shard/{name}", table("name which", ("first", 0), ("middle", 1)), shards="any")
def _one_is_empty(setting: Setting, which: int) -> Problem:
    """A rank without classes that is not the last."""
    if setting.ranks == 1:
        return random_problem(setting)
    splits = list(even(replace(setting, ranks=setting.ranks - 1)))
    place = min(which, setting.ranks - 1)
    splits.insert(place, splits[place])
    return random_problem(setting, tuple(splits))


@CASES.case("fewer-classes-than-ranks", shards="chunks", resizable=False)
def _few_classes(setting: Setting) -> Problem:
    """One class for each rank but the last, which has none."""
    return random_problem(setting, chunks(max(1, setting.ranks - 1), setting.ranks))


@CASES.case("one-class", shards="chunks", resizable=False)
def _one_class(setting: Setting) -> Problem:
    """One class in all: the loss is 0, and so is the gradient."""
    return random_problem(setting, chunks(1, setting.ranks))


@CASES.case(
    "targets-at-shard-borders/{name}",
    table("name split shards", ("equal", even, "equal"), ("uneven", uneven, "array_split")),
    targets=True,
    rows=16,
)
def _targets_at_borders(setting: Setting, split: Callable[[Setting], Splits]) -> Problem:
    """Comparisons that are off by one where a shard begins or ends: a target that two ranks take for theirs, or
    none.
    """
    problem = random_problem(setting, split(setting))
    # Row by row, the first class of the first shard, its last class, the first class of the next, and so on.
    borders = [number for start, stop in pairwise(problem.splits) if stop > start for number in (start, stop - 1)]
    return replace(problem, targets=np.resize(np.array(borders, np.int64), setting.rows))


@CASES.case("targets-on-one-rank", targets=True)
def _targets_on_one_rank(setting: Setting) -> Problem:
    """All targets in one shard: who takes the gradient at the target from another rank's share is wrong on the ranks
    that own none (ms-swift).
    """
    problem = random_problem(setting)
    start, stop = [shard for shard in pairwise(problem.splits) if shard[0] < shard[1]][-1]
    return replace(problem, targets=start + problem.targets % (stop - start))


@CASES.case("dims/{dims}-D", [{"dims": each, "resizable": each > 1} for each in range(1, 6)], rows=36)
def _dims(setting: Setting, dims: int) -> Problem:
    """Logits of another number of dimensions than two, the classes last: PyTorch's loss_parallel has the gradient of
    4-D logits wrong, and that of 3-D and 5-D ones right.
    """
    return random_problem(setting, axes=dims - 1)


@CASES.case(
    "axis/{dims}-D-{name}",
    [
        {"dims": dims, "axis": axis, "name": ("first", "second", "third", "fourth")[axis]}
        for dims, axis in ((2, 0), (3, 0), (3, 1), (4, 0), (4, 1), (4, 2), (5, 0), (5, 1), (5, 3))
    ],
    any_axis=True,
    rows=36,
)
def _axis(setting: Setting, dims: int, axis: int) -> Problem:
    """A class axis that is not the last, as PyTorch's (N, C, d1, ...): a gradient that is transposed, or rows that are
    mixed up, where rows are flattened without moving the axis.
    """
    return random_problem(setting, axes=dims - 1, axis=axis)


@CASES.case("strides/transposed", strided=True)
def _transposed(setting: Setting) -> Problem:
    """Logits in Fortran order, the transpose of what a matrix product gave: a kernel that takes the class axis for
    contiguous reads other rows.
    """
    return random_problem(setting, memory="F")


@CASES.case("strides/every-second", strided=True)
def _every_second(setting: Setting) -> Problem:
    """Logits that are every second element of a larger array."""
    return random_problem(setting, memory="strided")


@CASES.case("padded-columns/sliced-off", strided=True)
def _sliced_off(setting: Setting) -> Problem:
    """A vocabulary padded to a round number, the padding sliced off: a kernel that takes rows to follow each other in
    memory counts the padding, here 6e4.
    """
    return random_problem(setting, memory="padded")


@CASES.case("padded-columns/masked", special=True)
def _masked_padding(setting: Setting) -> Problem:
    """A padded vocabulary with the padding left in place and set to -inf, on the last rank: its probability and its
    gradient are 0.
    """
    problem = random_problem(setting)
    real = max(1, problem.classes - 3)
    logits = problem.logits.copy()
    logits[:, real:] = -np.inf
    return replace(problem, logits=logits, targets=problem.targets % real)


@CASES.case("gathered-logits", num_classes=True, expects=Expects.EITHER)
def _gathered(setting: Setting) -> Problem:
    """The logits of all classes, passed on every rank by mistake: refused, or right, but not a loss that is off by
    log(ranks) without a word (Megatron).
    """
    return random_problem(setting, gathered=True)


@CASES.case("zero-rows/{reductions[0]}", EACH_REDUCTION, empty=True, rows=0, resizable=False)
def _zero_rows(setting: Setting) -> Problem:
    """A step without rows: nothing to reduce must not hang or crash. The mean of no row is nan, the sum is 0."""
    return random_problem(setting)


@LARGE.case("large/more-than-2**31-elements", reductions=("none",), procedure="copies", rows=32, resizable=False)
def _large(setting: Setting) -> Problem:
    """A place in the logits that is computed in 32 bits: beyond 2**31 elements of a shard it is negative."""
    ranks = setting.ranks
    equal = tuple(_COLUMNS * rank for rank in range(ranks + 1))
    # The first shard is large; the others have one class, or are as large where shards must be equal.
    one_class_each = (0, *range(_COLUMNS, _COLUMNS + ranks))
    problem = random_problem(setting, one_class_each if setting.shards == "any" else equal)
    return replace(problem, copies=BEYOND // (setting.rows * _COLUMNS) + 1)


@LARGE.case("large/vocabulary-{classes}", table("classes", (32_003,), (50_257,), (128_256,), (151_936,)), rows=8)
def _vocabulary(setting: Setting) -> Problem:
    """A vocabulary as models have it, on shards of several lengths, with targets at their borders: class numbers that
    are kept in 16 bits or in bfloat16, and tiles that do not divide it.
    """
    return _targets_at_borders(setting, uneven)


@LARGE.case("large/65536-tokens", rows=65_536, classes=64)
def _tokens(setting: Setting) -> Problem:
    """As many tokens as a long context has: places of rows that are kept in 16 bits, and sums over all of them."""
    return random_problem(setting)

"""Cases about the split of the classes over the ranks, and about the shape and memory order of the logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

from pce_mpi.conformance.cases import Case, Expects, Memory, Problem, Setting
from pce_mpi.conformance.catalogue.drawing import chunks, even, random_problem, uneven
from pce_mpi.conformance.offers import REDUCTIONS, Needs

# The large case has more elements than this on a rank, in so many classes.
BEYOND = 2**31
_COLUMNS = 4_100


def families(main: str) -> Iterator[Case]:
    """Yield every case of this file."""
    yield from _splits(main)
    yield from _shapes(main)
    yield from _memory(main)
    yield Case(
        "gathered-logits",
        "The logits of all classes, passed on every rank by mistake: refused, or right, but not a loss that is off by "
        "log(ranks) without a word (Megatron).",
        main,
        partial(random_problem, gathered=True),
        Needs(num_classes=True),
        expects=Expects.EITHER,
    )
    for reduction in REDUCTIONS:
        yield Case(
            f"zero-rows/{reduction}",
            "A step without rows: nothing to reduce must not hang or crash. The mean of no row is nan, the sum is 0.",
            main,
            random_problem,
            Needs(reductions=(reduction,), empty=True),
            rows=0,
            shrinkable=False,
        )


def large(dtype: str) -> Case:
    """Return the case that takes GiB of memory."""
    return Case(
        "large/more-than-2**31-elements",
        "A place in the logits that is computed in 32 bits: beyond 2**31 elements of a shard it is negative.",
        dtype,
        _large,
        Needs(reductions=("none",)),
        procedure="copies",
        rows=32,
        shrinkable=False,
    )


def _splits(main: str) -> Iterator[Case]:
    yield Case(
        "uneven-shards/chunks",
        "A last shard that is shorter, as torch.chunk makes it: class numbers computed as rank times local length.",
        main,
        lambda setting: random_problem(setting, chunks(setting.classes, setting.ranks)),
        Needs(shards="chunks"),
        classes=23,
    )
    yield Case(
        "uneven-shards/any",
        "Shards of any length: class numbers computed as rank times local length, and gathers that expect equal parts "
        "(PyTorch's loss_parallel: an index error on one rank, the others wait).",
        main,
        lambda setting: random_problem(setting, uneven(setting)),
        Needs(shards="any"),
        classes=29,
    )
    yield Case(
        "empty-shard/last",
        "A rank without classes, as torch.chunk leaves the last one: a maximum of nothing raises there, and the other "
        "ranks wait (PyTorch's loss_parallel).",
        main,
        lambda setting: random_problem(setting, _last_is_empty(setting)),
        Needs(shards="chunks"),
    )
    for name, which in (("first", 0), ("middle", 1)):
        yield Case(
            f"empty-shard/{name}",
            "A rank without classes that is not the last.",
            main,
            partial(_one_is_empty, which=which),
            Needs(shards="any"),
        )
    yield Case(
        "fewer-classes-than-ranks",
        "One class for each rank but the last, which has none.",
        main,
        lambda setting: random_problem(setting, chunks(max(1, setting.ranks - 1), setting.ranks)),
        Needs(shards="chunks"),
        shrinkable=False,
    )
    yield Case(
        "one-class",
        "One class in all: the loss is 0, and so is the gradient.",
        main,
        lambda setting: random_problem(setting, chunks(1, setting.ranks)),
        Needs(shards="chunks"),
        shrinkable=False,
    )
    for name, of_shards in (("equal", even), ("uneven", uneven)):
        yield Case(
            f"targets-at-shard-borders/{name}",
            "Comparisons that are off by one where a shard begins or ends: a target that two ranks take for theirs, or "
            "none.",
            main,
            partial(_targets_at_borders, uneven_shards=of_shards is uneven),
            Needs(shards="equal" if of_shards is even else "chunks"),
            rows=16,
        )
    yield Case(
        "targets-on-one-rank",
        "All targets in one shard: who takes the gradient at the target from another rank's share is wrong on the "
        "ranks that own none (ms-swift).",
        main,
        _targets_on_one_rank,
    )


def _shapes(main: str) -> Iterator[Case]:
    for dims in range(1, 6):
        yield Case(
            f"dims/{dims}-D",
            "Logits of another number of dimensions than two, the classes last: PyTorch's loss_parallel has the "
            "gradient of 4-D logits wrong, and that of 3-D and 5-D ones right.",
            main,
            partial(random_problem, axes=dims - 1),
            Needs(dims=dims),
            rows=36,
            shrinkable=dims > 1,
        )
    for dims, axis, where in (
        (2, 0, "first"),
        (3, 0, "first"),
        (3, 1, "second"),
        (4, 0, "first"),
        (4, 1, "second"),
        (4, 2, "third"),
        (5, 0, "first"),
        (5, 1, "second"),
        (5, 3, "fourth"),
    ):
        yield Case(
            f"axis/{dims}-D-{where}",
            "A class axis that is not the last, as PyTorch's (N, C, d1, ...): a gradient that is transposed, or rows "
            "that are mixed up, where rows are flattened without moving the axis.",
            main,
            partial(random_problem, axes=dims - 1, axis=axis),
            Needs(dims=dims, any_axis=True),
            rows=36,
        )


def _memory(main: str) -> Iterator[Case]:
    strides: tuple[tuple[str, Memory, str], ...] = (
        (
            "transposed",
            "F",
            "Logits in Fortran order, the transpose of what a matrix product gave: a kernel that takes "
            "the class axis for contiguous reads other rows.",
        ),
        ("every-second", "strided", "Logits that are every second element of a larger array."),
    )
    for name, memory, catches in strides:
        yield Case(
            f"strides/{name}",
            catches,
            main,
            partial(random_problem, memory=memory),
            Needs(strided=True),
        )
    yield Case(
        "padded-columns/sliced-off",
        "A vocabulary padded to a round number, the padding sliced off: a kernel that takes rows to follow each other "
        "in memory counts the padding, here 6e4.",
        main,
        partial(random_problem, memory="padded"),
        Needs(strided=True),
    )
    yield Case(
        "padded-columns/masked",
        "The same with the padding left in place and set to -inf, on the last rank: its probability and its gradient "
        "are 0.",
        main,
        _masked_padding,
    )


def _large(setting: Setting) -> Problem:
    """The first shard is large; the others have one class, or are as large where shards must be equal."""
    ranks = setting.ranks
    equal = tuple(_COLUMNS * rank for rank in range(ranks + 1))
    one_class_each = (0, *range(_COLUMNS, _COLUMNS + ranks))
    problem = random_problem(setting, one_class_each if setting.shards == "any" else equal)
    return replace(problem, copies=BEYOND // (setting.rows * _COLUMNS) + 1)


def _last_is_empty(setting: Setting) -> tuple[int, ...]:
    ranks = setting.ranks
    if setting.shards == "any" and ranks > 1:
        return (*even(replace(setting, ranks=ranks - 1)), setting.classes)
    # The largest number of classes for which torch.chunk leaves the last rank none.
    return chunks(max(1, (ranks - 1) ** 2), ranks)


def _one_is_empty(setting: Setting, which: int) -> Problem:
    if setting.ranks == 1:
        return random_problem(setting)
    splits = list(even(replace(setting, ranks=setting.ranks - 1)))
    place = min(which, setting.ranks - 1)
    splits.insert(place, splits[place])
    return random_problem(setting, tuple(splits))


def _targets_at_borders(setting: Setting, uneven_shards: bool) -> Problem:
    """Row by row, the first class of the first shard, its last class, the first class of the next, and so on."""
    problem = random_problem(setting, (uneven if uneven_shards else even)(setting))
    borders = [number for start, stop in pairwise(problem.splits) if stop > start for number in (start, stop - 1)]
    return replace(problem, targets=np.resize(np.array(borders, np.int64), setting.rows))


def _targets_on_one_rank(setting: Setting) -> Problem:
    problem = random_problem(setting)
    start, stop = [shard for shard in pairwise(problem.splits) if shard[0] < shard[1]][-1]
    return replace(problem, targets=start + problem.targets % (stop - start))


def _masked_padding(setting: Setting) -> Problem:
    problem = random_problem(setting)
    real = max(1, problem.classes - 3)
    logits = problem.logits.copy()
    logits[:, real:] = -np.inf
    return replace(problem, logits=logits, targets=problem.targets % real)

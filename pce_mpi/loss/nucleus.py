"""The classes that top-k, top-p and min-p leave, over the classes of all shards, without gathering a logit.

Each of the three keeps a prefix of a row's classes in the order of their logits, the largest first, so that a threshold
describes the set. It is found bit by bit, from the highest bit of a logit to the lowest: is the set of the logits that
are at least so large enough? In each round the ranks merge the number of these classes and their mass, the softmax
state of the set, 48 bytes a row: 16 rounds for halves, 32 for float32, 64 for float64. Rounds of two bits, with three
sets each, would be half as many and send 1.5 times as many bytes; histograms of eight bits 32 times as many. For 2048
rows of float32 on two ranks they took 14 ms, 26 ms and 0.9 s. A mass is an integer on the grid of the row's largest
logit, so that the question whether it is p times another one has one answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache, partial
import math
from typing import Any, NamedTuple

import numpy as np

from pce_mpi.arrays import Array, HostArray, cupy_of, to_host
from pce_mpi.comm.collectives import all_gather, all_reduce
from pce_mpi.comm.tracing import cause
from pce_mpi.hollow import Hollow
from pce_mpi.kernels import converted
from pce_mpi.kernels.classes import bits_of, nought_of
from pce_mpi.kernels.elementary import log, log1p
from pce_mpi.kernels.interface import Pass, Precision, StateFields
from pce_mpi.loss.agreement import agree_on
from pce_mpi.loss.options import Options, check_scale_is_near
from pce_mpi.loss.passes import merge_of
from pce_mpi.loss.problem import Problem, check, rows_and_classes
from pce_mpi.validation import integer, real

_ALL = np.iinfo(np.int64).max
Function = Callable[[HostArray], HostArray]


class Nucleus(NamedTuple):
    """The classes that are kept, and their mass; those of row r are `ids[offsets[r]:offsets[r + 1]]`.

    Attributes
    ----------
    ids : array of int64
        Global class numbers, ascending in each row.
    offsets : array of int64
        (rows + 1,), over the rows of the logits, flattened without the class axis.
    mass : array
        The sum of the probabilities of the classes that are kept, in the softmax over all classes; shaped as the logits
        without the class axis, in the compute dtype.
    log_mass : array
        Its logarithm, which keeps its digits where the mass is close to 1.
    """

    ids: Array
    offsets: Array
    mass: Array
    log_mass: Array


class Limits(NamedTuple):
    """The limits of a set, as the caller gives them."""

    top_k: Any
    top_p: Any
    min_p: Any

    def checked(self) -> Limits:
        """Return the limits as Python's numbers, None for one that takes no class away."""
        top_k = None if self.top_k is None else integer(self.top_k, "top_k")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k}")
        top_p = 1.0 if self.top_p is None else real(self.top_p, "top_p")
        if not 0.0 < top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {top_p}")
        min_p = 0.0 if self.min_p is None else real(self.min_p, "min_p")
        if not 0.0 <= min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {min_p}")
        return Limits(top_k, None if top_p == 1.0 else top_p, min_p or None)


def nucleus_of(options: Options, logits: Any, limits: Limits) -> Nucleus:
    """Return the result of `nucleus`; collective over `options.comm`, in a block `with standard_arithmetic()`."""
    problem = agree_on(options, partial(_check, options, logits, limits))
    with np.errstate(all="ignore"):
        shard = shard_of(problem)
        kept = _kept(shard, limits.checked(), problem.precision)
        bad, inside = kept.mass == 0, np.maximum(kept.mass, 1)
        mass = np.where(bad, np.nan, (inside / np.maximum(kept.total, 1)).astype(np.float64))
        log_mass = np.where(bad, np.nan, 0.0 - log1p(((kept.total - inside) / inside).astype(np.float64)))
    masses = [each.astype(problem.options.compute_dtype).reshape(problem.rows_shape) for each in (mass, log_mass)]
    sets = _gathered(shard, kept)
    sets = sets if options.support_rows is None else _of_all_rows(options, *sets)
    return Nucleus(*map(problem.xp.asarray, (*sets, *masses)))


def _check(options: Options, logits: Any, limits: Limits) -> Problem:
    limits = limits.checked()
    problem = check(options, logits, None, needs_targets=False)
    check_scale_is_near(problem.options)
    if type(problem.logits) is Hollow:
        raise TypeError("nucleus takes no hollow arrays: how many classes are kept depends on elements")
    problem.also = limits._asdict()
    return problem


class _Kept(NamedTuple):
    """The set of each row: logits above `value`, and the first `tied` of the classes whose logit is equal to it.

    `value` is nan in rows that keep nothing. Masses are Python's integers, in units of the row's grid: that of the set,
    and of all classes.
    """

    value: HostArray
    tied: HostArray
    mass: HostArray
    total: HostArray


def _kept(shard: Shard, limits: Limits, precision: Precision) -> _Kept:
    """Find the set of each row; collective over `options.comm`."""
    everything, nothing = shard.of(shard.least), shard.nothing
    top, total = everything["state"]["top"], mass_of(everything, precision)
    value, found = shard.least, everything
    if limits.top_k is not None:
        value, found, _ = shard.search(shard.of, lambda a: a["count"] >= limits.top_k, everything, nothing)
    mass, tied = mass_of(found, precision), np.full(len(value), _ALL)
    if limits.top_p is not None:
        numerator, denominator = limits.top_p.as_integer_ratio()
        needed = -(-numerator * mass // denominator)
        value, found, above = shard.search(
            shard.of, lambda a: (mass_of(a, precision) >= needed).astype(np.bool_), found, nothing
        )
        less, ties = mass_of(above, precision), np.maximum(found["count"] - above["count"], 1)
        each = np.maximum((mass_of(found, precision) - less) // ties, 1)
        tied = -((less - needed) // each)
        mass, tied = less + tied * each, tied.astype(np.int64)
    if limits.min_p is not None:
        distance = float(log(np.array([limits.min_p]))[0]) / shard.problem.options.logit_scale
        _, _, least = shard.search(lambda a: a, lambda a: a - top < distance, value, value)
        is_less, value = least > value, np.maximum(least, value)
        mass = np.where(is_less, mass_of(shard.of(value), precision), mass)
        tied = np.where(is_less, _ALL, tied)
    bad = ~np.isfinite(top)
    return _Kept(np.where(bad, np.nan, value), tied, np.where(bad, 0, mass), total)


def _gathered(shard: Shard, kept: _Kept) -> tuple[HostArray, HostArray]:
    """Return the classes that are kept and the offsets of the rows, on every rank; collective over `comm`."""
    problem, rows = shard.problem, shard.rows
    options, good = problem.options, ~np.isnan(kept.value)
    value = np.where(good, kept.value, np.inf)
    place, logits = shard.elements(value)
    row, column = np.divmod(place, max(1, shard.classes))
    is_tied = logits == value[row]
    above, tied = (np.bincount(row[each], minlength=rows) * good for each in (~is_tied, is_tied))
    said = [np.concatenate([[problem.class_start], above, tied])]
    if options.comm is not None:
        with cause(options.operation, options.over, "the numbers of classes that are kept"):
            said = all_gather(said[0], options.comm, [said[0].shape] * options.comm.size)
    # The lowest of classes with equal logits are kept, so those of ranks with lower classes come first.
    in_order = sorted(range(len(said)), key=lambda rank: said[rank][0])
    taken, left = np.zeros((len(said), rows), np.int64), kept.tied.copy()
    for rank in in_order:
        taken[rank] = np.minimum(left, said[rank][1 + rows :])
        left -= taken[rank]
    counts = np.stack([each[1 : 1 + rows] for each in said]) + taken
    number = np.cumsum(is_tied)  # counts ties up to this one, from the first row on
    before = np.concatenate([[0], number])[np.searchsorted(row, np.arange(rows))]
    own = taken[0 if options.comm is None else options.comm.rank]
    ids = [column[~is_tied | (number - before[row] <= own[row])] + problem.class_start]
    if options.comm is not None:
        with cause(options.operation, options.over, "the classes that are kept"):
            ids = all_gather(ids[0], options.comm, [(count,) for count in counts.sum(axis=1).tolist()])
    ends = np.cumsum(counts, axis=1)
    parts = [
        [each[start:stop] for start, stop in zip(starts, stops, strict=True)]
        for each, starts, stops in zip(ids, (ends - counts).tolist(), ends.tolist(), strict=True)
    ]
    offsets = np.concatenate([[0], np.cumsum(counts.sum(axis=0))])
    nothing = np.empty(0, np.int64)
    return np.concatenate([nothing, *(parts[rank][row] for row in range(rows) for rank in in_order)]), offsets


def _of_all_rows(options: Options, ids: HostArray, offsets: HostArray) -> tuple[HostArray, HostArray]:
    """Return the classes that are kept and the offsets of all ranks' rows; collective over `batch_comm`."""
    (total, mine), comm = options.support_rows, options.batch_comm
    said = np.zeros((2, total), np.int64)
    said[0, mine], said[1, mine] = np.diff(offsets), comm.rank
    with cause(options.operation, options.batch_over, "the classes that are kept, of all rows"):
        counts, owner = all_reduce(said, comm, "sum")
        shapes = [(int(counts[owner == rank].sum()),) for rank in range(comm.size)]
        given = np.concatenate(all_gather(ids, comm, shapes))
    ends, order = np.cumsum(counts), np.argsort(owner, kind="stable")  # of rows, as they are given
    behind = (ends - counts)[order] - (np.cumsum(counts[order]) - counts[order])
    found = np.empty_like(given)
    found[np.arange(given.size) + np.repeat(behind, counts[order])] = given
    return found, np.concatenate([[0], ends])


_FIELDS = StateFields()
# The number of classes in a set, and its state.
_SET = np.dtype([("count", np.int64), ("state", _FIELDS.dtype)])
# The number of classes of a block, of which one a row is summed in each round.
_WIDTH = 128
# The number of logits that are compared at once.
_BLOCK = 2**18


class Shard(ABC):
    """The logits of this shard, (rows, classes), and sets of their classes over all shards.

    Values are numbers of `wide`, on the host. `least` has the smallest finite one of each row, `nothing` empty sets.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.how = problem, Pass(_FIELDS, problem.transform, problem.precision)
        self.rows, self.classes, self.dtype = math.prod(problem.rows_shape), problem.classes, problem.logits.dtype
        logits = rows_and_classes(problem.logits, problem.options.axis)
        self.logits = logits.swapaxes(1, 2).reshape(self.rows, self.classes)
        self.wide = np.float64 if self.dtype == np.float64 else np.float32
        self.least = np.full(self.rows, np.finfo(self.wide).min, self.wide)
        self.nothing = np.zeros(self.rows, _SET)
        self.nothing["state"] = _FIELDS.identity(self.rows)

    @abstractmethod
    def own(self, value: HostArray) -> HostArray:
        """Return the sets of this shard's logits that are at least `value`, which is finite or inf."""

    @abstractmethod
    def elements(self, value: HostArray) -> tuple[HostArray, HostArray]:
        """Return the logits that are at least `value`, row after row: their flat indices, and themselves."""

    def states_of(self, x: Array) -> Array:
        """Return the states of rows of logits."""
        return self.problem.kernel.fill_states(x[:, :, None], None, self.how, self.problem.class_weights, 0)

    def of(self, value: HostArray) -> HostArray:
        """Return the sets of the logits that are at least `value`, which is finite or inf; collective over `comm`."""
        sets, options = self.own(value), self.problem.options
        if options.comm is None:
            return sets
        with cause(options.operation, options.over, "sets of classes of the shards, merged"):
            return all_reduce(sets, options.comm, _merge_of(self.how))

    def search(
        self, of: Function, is_enough: Function, at: HostArray, above: HostArray
    ) -> tuple[HostArray, HostArray, HostArray]:
        """Return the largest value of each row that is enough, `of` it, and `of` the next larger value.

        Smaller values must be enough too. `at` and `above` are the results if all values are, or none is.
        """
        bits = 8 * self.dtype.itemsize
        key = np.zeros(self.rows, np.uint64)
        for bit in reversed(range(bits)):
            candidate = key | np.uint64(1 << bit)
            found = of(self._value_of(candidate))
            enough = is_enough(found)
            key, at, above = (np.where(enough, *two) for two in ((candidate, key), (found, at), (above, found)))
        return self._value_of(key), at, above

    def _value_of(self, key: HostArray) -> HostArray:
        """Return the logit with this number in the order of all logits; -inf and nan become the nearest other value."""
        bits = 8 * self.dtype.itemsize
        sign = np.uint64(1 << (bits - 1))
        number = np.where(key & sign, key ^ sign, ~key).astype(f"u{self.dtype.itemsize}").view(self.dtype)
        value = number.astype(self.wide)
        value = np.where(np.isnan(value), np.where(key & sign, np.inf, -np.inf), value).astype(self.wide)
        return np.maximum(value, self.least)


class HostShard(Shard):
    """A shard on the host, which puts its logits in order once.

    `x` has the logits of each row in ascending order, (rows, blocks * width), with -inf in front. `ends` has the states
    of the classes from the start of a block on, (blocks + 1, rows): the state of a set is that of an end, merged with
    that of a part of one block.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        rows, classes = self.rows, self.classes
        self.merge_states = merge_of(self.how)
        self.blocks = -(-classes // _WIDTH)
        self.width = -(-classes // max(1, self.blocks))
        self.x = np.full((rows, self.blocks * self.width), -np.inf, self.wide)
        self.x[:, self.x.shape[1] - classes :] = self.logits
        self.x.sort(axis=1)
        self.ends = _FIELDS.identity(self.blocks + 1, rows)
        states = self.states_of(self.x.reshape(rows * self.blocks, self.width))
        self.ends[:-1] = states.reshape(rows, self.blocks).T
        for block in reversed(range(self.blocks)):
            self.merge_states(self.ends[block + 1], self.ends[block])

    def _number_below(self, value: HostArray) -> HostArray:
        """Return the number of elements of each row of `x` that are less than its value."""
        columns, row = self.x.shape[1], np.arange(self.rows)
        number = np.zeros(self.rows, np.int64)
        for bit in reversed(range(columns.bit_length())):
            ahead = number + (1 << bit)
            is_below = (ahead <= columns) & (self.x[row, np.minimum(ahead, columns) - 1] < value)
            number = np.where(is_below, ahead, number)
        return number

    def own(self, value: HostArray) -> HostArray:
        (rows, columns), row, place = self.x.shape, np.arange(self.rows), self._number_below(value)
        sets = self.nothing.copy()
        sets["count"] = columns - place
        if columns:
            block = np.minimum(place // self.width, self.blocks - 1)
            part = self.x.reshape(rows, self.blocks, self.width)[row, block]
            part[np.arange(self.width) < (place - block * self.width)[:, None]] = -np.inf
            states = self.states_of(part)
            self.merge_states(self.ends[block + 1, row], states)
            sets["state"] = states
        return sets

    def elements(self, value: HostArray) -> tuple[HostArray, HostArray]:
        step = max(1, _BLOCK // max(1, self.classes))
        starts = range(0, self.rows, step)
        found = [
            np.flatnonzero(self.logits[start : start + step] >= value[start : start + step, None])
            + start * self.classes
            for start in starts
        ]
        place = np.concatenate([np.empty(0, np.int64), *found])
        return place, self.logits[np.divmod(place, max(1, self.classes))].astype(self.wide)


class GpuShard(Shard):
    """A shard on a GPU, which passes over its logits in each round."""

    def own(self, value: HostArray) -> HostArray:
        sets = self.nothing.copy()
        kept, counts = self.problem.kernel.kept_at_least(self.logits, value)
        if self.classes:
            sets["state"] = to_host(self.states_of(kept)).view(_FIELDS.dtype).reshape(self.rows)
        sets["count"] = to_host(counts)
        return sets

    def elements(self, value: HostArray) -> tuple[HostArray, HostArray]:
        kept = self.problem.kernel.kept_at_least(self.logits, value)[0].reshape(-1)
        place = self.problem.xp.flatnonzero(bits_of(kept) != nought_of(self.dtype))
        logits = to_host(converted(bits_of(kept)[place].view(self.dtype), np.float64)).astype(self.wide)
        is_number = ~np.isnan(logits)
        return to_host(place)[is_number], logits[is_number]


def shard_of(problem: Problem) -> Shard:
    """Return the shard of a problem."""
    return HostShard(problem) if cupy_of(problem.logits) is None else GpuShard(problem)


def mass_of(sets: HostArray, precision: Precision) -> HostArray:
    """Return the masses of sets as Python's integers, in units of the grid of the row's largest logit.

    A set that is not empty has that logit, and the limb j of its state is the sum of the elements, each divided by
    2^(j width) and cut.
    """
    limbs, width = sets["state"]["sum"], precision.width
    digits = limbs.copy()
    digits[:, :2] -= limbs[:, 1:] << np.uint64(width)
    low, middle, high = digits.astype(object).T
    return low + (middle << width) + (high << 2 * width)


@lru_cache(maxsize=64)
def _merge_of(how: Pass) -> Callable[[HostArray, HostArray], None]:
    """Make the function that merges sets of some classes into sets of others, of the same rows."""
    merge_states = merge_of(how)

    def merge(a: HostArray, b: HostArray) -> None:
        states = np.ascontiguousarray(b["state"])
        merge_states(np.ascontiguousarray(a["state"]), states)
        b["count"] += a["count"]
        b["state"] = states

    return merge

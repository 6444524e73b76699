"""Sets of classes over all shards: for each row, the logits that are at least a value, on the host and on a GPU.

A set has the number of its classes and their softmax state, which ranks merge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import cupy_of, to_host
from pce_mpi.comm.collectives import all_reduce
from pce_mpi.comm.tracing import cause
from pce_mpi.kernels import converted
from pce_mpi.kernels.chosen import bits_of, nought_of
from pce_mpi.kernels.elementary import Precision
from pce_mpi.kernels.parameters import Transform
from pce_mpi.kernels.softmax_state import StateFields
from pce_mpi.loss.passes import Merge
from pce_mpi.loss.problem import Problem, rows_and_classes

Array = Any  # numpy.ndarray or cupy.ndarray
HostArray = np.ndarray[Any, Any]

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
        self.problem = problem
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
        problem = self.problem
        return problem.kernel.fill_states(
            x[:, :, None],
            None,
            _FIELDS,
            weights=problem.class_weights,
            transform=problem.transform,
            precision=problem.precision,
            class_start=0,
        )

    def of(self, value: HostArray) -> HostArray:
        """Return the sets of the logits that are at least `value`, which is finite or inf; collective over `comm`."""
        sets, options = self.own(value), self.problem.options
        if options.comm is None:
            return sets
        with cause(options.operation, options.over, "sets of classes of the shards, merged"):
            return all_reduce(sets, options.comm, _merge_of(self.problem.transform, self.problem.precision))

    def search(
        self,
        of: Callable[[HostArray], HostArray],
        is_enough: Callable[[HostArray], HostArray],
        at: HostArray,
        above: HostArray,
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
        self.merge_states = Merge(_FIELDS, problem.transform, problem.precision)
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
def _merge_of(transform: Transform, precision: Precision) -> Callable[[HostArray, HostArray], None]:
    """Make the function that merges sets of some classes into sets of others, of the same rows."""
    merge_states = Merge(_FIELDS, transform, precision)

    def merge(a: HostArray, b: HostArray) -> None:
        states = np.ascontiguousarray(b["state"])
        merge_states(np.ascontiguousarray(a["state"]), states)
        b["count"] += a["count"]
        b["state"] = states

    return merge

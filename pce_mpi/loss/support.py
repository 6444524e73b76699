"""A support: the classes of each row over which statistics are taken.

Each rank copies its members of every row into an array (rows, most members of a row), filled up with -inf, which adds
nothing to any sum. The loops run on that as they do on the logits of all classes. The states number a member by the
shard's first class plus its column there: numbers that are in the order of the classes, as ties need them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from pce_mpi.arrays import as_array
from pce_mpi.hollow import Hollow
from pce_mpi.kernels.chosen import nought_of
from pce_mpi.loss.problem import Problem, class_numbers_of

Array = Any  # numpy.ndarray or cupy.ndarray
HostArray = np.ndarray[Any, Any]


class Outside(StrEnum):
    """The meaning of a target outside its support: an error, a probability of 0, or one more class of the support."""

    RAISE = "raise"
    NOUGHT = "-inf"
    ADD = "add"

    @classmethod
    def named(cls, name: Any) -> Outside:
        if not isinstance(name, str) or name not in list(cls):
            raise ValueError(f"outside must be 'raise', '-inf' or 'add', got {name!r}")
        return cls(name)


def checked_support(support: Any, rows: int) -> tuple[HostArray, HostArray]:
    """Return the ids and the offsets of a support of so many rows, on the host."""
    pair = [support.ids, support.offsets] if hasattr(support, "offsets") else support  # a Nucleus has masses besides
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"support must be a pair (ids, offsets), or what nucleus gives, got {type(support).__name__}")
    names = "ids of the support", "offsets of the support"
    arrays = [as_array(part, name) for part, name in zip(pair, names, strict=True)]
    for name, array in zip(names, arrays, strict=True):
        if (array.size and array.dtype.kind not in "iu") or array.ndim != 1:
            raise TypeError(f"{name} must be integers with one axis, got {array.dtype} of {array.shape}")
        if type(array) is Hollow:
            raise TypeError(f"{name} must have elements, got a hollow array")
    ids, offsets = (class_numbers_of(array, name) for array, name in zip(arrays, names, strict=True))
    if len(offsets) != rows + 1:
        raise ValueError(f"offsets of the support must be one more than the rows, {rows + 1}, got {len(offsets)}")
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if falls.size:
        before, after = offsets[falls[0] : falls[0] + 2]
        raise ValueError(f"offsets of the support must not fall, got {before} and then {after} after row {falls[0]}")
    if offsets[0] != 0 or offsets[-1] != len(ids):
        ends = f"{offsets[0]} to {offsets[-1]}"
        raise ValueError(f"offsets of the support must go from 0 to the {len(ids)} ids, got {ends}")
    return ids, offsets


@dataclass(eq=False)
class Support:
    """The members of each row, on the host: `keys`, in rising order, are row * span + class."""

    rows: int
    span: int
    keys: HostArray

    @classmethod
    def of(
        cls, ids: HostArray, offsets: HostArray, numbers: HostArray, more: HostArray | None = None
    ) -> Support | None:
        """Return the support of the rows with these `numbers`; `more` are (row, class) pairs to be added if missing.

        None if some class cannot exist, which the agreement of the ranks tells.
        """
        extra = np.empty((2, 0), np.int64) if more is None else more
        lowest, highest = (int(f(np.concatenate([ids, extra[1]]), initial=0)) for f in (np.min, np.max))
        rows, span = len(numbers), highest + 1
        if lowest < 0 or span * max(1, rows) >= 2**62:
            return None
        place = np.full(len(offsets) - 1, -1)
        place[numbers] = np.arange(rows)
        row = np.repeat(place, np.diff(offsets))
        keys = row * span + ids
        if rows < len(place):
            keys = keys[row >= 0]
        if (keys[1:] <= keys[:-1]).any():
            keys = np.sort(keys)
            twice = np.flatnonzero(keys[1:] == keys[:-1])
            if twice.size:
                where, number = divmod(int(keys[twice[0]]), span)
                raise ValueError(f"the support of row {numbers[where]} has class {number} twice")
        if extra.size:
            keys = np.union1d(keys, extra[0] * span + extra[1])
        return cls(rows, span, keys)

    def place_of(self, classes: HostArray) -> tuple[HostArray, HostArray]:
        """Return the places of (rows, several) classes among all members, and which of them are members."""
        if type(classes) is Hollow:
            return classes, classes >= 0
        keys = np.arange(self.rows)[:, None] * self.span + classes
        places = np.searchsorted(self.keys, keys)
        # A number below the first key is that of no member.
        found = np.append(self.keys, -1)[places] == keys
        return places, found & (classes >= 0) & (classes < self.span)

    @cached_property
    def first(self) -> HostArray:
        """The place of each row's first member, (rows,)."""
        return np.searchsorted(self.keys, np.arange(self.rows) * self.span)


@dataclass(eq=False)
class Members:
    """The members that this shard has: their `columns` in it, (rows, most members of a row), -1 after the last one.

    `inner` is the problem of these alone, with the logits (rows, most members of a row).
    """

    support: Support
    columns: HostArray
    first: HostArray
    inner: Problem

    @classmethod
    def of(cls, support: Support, problem: Problem) -> Members:
        start, axis = problem.class_start, problem.options.axis
        own = np.arange(support.rows) * support.span
        skipped, end = (
            np.searchsorted(support.keys, own + min(c, support.span)) for c in (start, start + problem.classes)
        )
        counts = end - skipped
        places = np.arange(counts.max(initial=0))
        member = np.minimum(skipped[:, None] + places, len(support.keys) - 1)
        columns = np.where(places < counts[:, None], support.keys[member] - (own + start)[:, None], -1)
        dtype = problem.logits.dtype
        logits = problem.kernel.taken(problem.logits, axis, columns, nought_of(dtype)).view(dtype)
        inner = replace(
            problem,
            options=problem.options.with_checked({"axis": 1}, None),
            logits=logits,
            rows_shape=logits.shape[:1],
            classes=logits.shape[1],
        )
        return cls(support, columns, skipped, inner)

    def columns_of(self, classes: HostArray, valid: HostArray) -> tuple[HostArray, HostArray]:
        """Return the columns of (rows, several) classes in the logits of `inner`, and which valid ones are no members.

        A class that is not valid, or no member of this shard, has the column -1.
        """
        places, found = self.support.place_of(classes)
        columns = places - self.first[:, None]
        here = found & valid & (columns >= 0) & (columns < self.counts)
        return np.where(here, columns, -1), valid & ~found

    @cached_property
    def counts(self) -> HostArray:
        """The number of this shard's members of each row, (rows, 1)."""
        return (self.columns >= 0).sum(axis=1, keepdims=True)

    def classes_of(self, numbers: Array, largest: Array) -> Array:
        """Return the classes of members from their numbers in states, (rows,).

        A row whose `largest` logit is -inf has its lowest class, or -1 if its support is empty.
        """
        if type(numbers) is Hollow:
            return numbers
        support, xp = self.support, self.inner.xp
        starts = np.unique([start for start, count in zip(*self.inner.shards, strict=False) if count])
        keys, last = np.append(support.keys, -1), np.append(support.first[1:], len(support.keys))
        own = np.arange(support.rows) * support.span
        lowest = np.where(support.first < last[: support.rows], keys[support.first] - own, -1)
        keys, starts, own, lowest = map(xp.asarray, (keys, starts, own, lowest))
        start = starts[xp.searchsorted(starts, numbers, side="right") - 1]
        places = xp.searchsorted(keys[:-1], own + start) + (numbers - start)
        return xp.where(largest == -np.inf, lowest, keys[xp.clip(places, 0, len(keys) - 1)] - own)

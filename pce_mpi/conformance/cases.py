"""A case, and the problem that it builds.

A problem is global, the same on every rank, and made from a seed alone. `Problem.shard` cuts out what one rank is
handed; `Problem.expected` is what `dense` makes of it in float64, of logits that were rounded to the candidate's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cached_property
import math
from typing import Any, Literal

import numpy as np

from pce_mpi import dense
from pce_mpi.conformance.offers import Needs, Offer, Shards

__all__ = ["Case", "Expects", "Memory", "Problem", "Setting", "Shard"]

Array = np.ndarray[Any, Any]

# How a shard of the logits lies in memory: C order; Fortran order; every second element of a wider array, in rows and
# in classes; the first columns of a wider array, whose other columns are not for anybody to read.
Memory = Literal["C", "F", "strided", "padded"]


class Expects(StrEnum):
    """What is due: the right answer; an exception on every rank; or one of the two, but never a wrong answer."""

    ANSWER = "an answer"
    REFUSAL = "a refusal"
    EITHER = "an answer or a refusal"


@dataclass(frozen=True)
class Setting:
    """For what a case builds its problem: `rows` and `classes` are wishes, `shards` is what the candidate offers."""

    ranks: int
    rows: int
    classes: int
    dtype: str
    reduction: str
    seed: int
    shards: Shards


@dataclass(frozen=True, eq=False)
class Shard:
    """What one rank is handed, as NumPy arrays of its own; `options` has `weight`, `reduction` and `axis` as well."""

    logits: Array
    targets: Array
    class_start: int
    num_classes: int
    options: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Problem:
    """The logits, targets and options of all ranks.

    logits     of all classes, in the candidate's dtype
    targets    global class numbers, the logits' shape without the class axis; or probabilities of the logits' shape
    splits     the shard of rank r has the classes [splits[r], splits[r + 1])
    options    as the candidate gets them, but for `weight`: of all classes
    dloss      upstream gradient, shaped as the loss; None: ones
    memory     how a shard of the logits lies in memory
    gathered   every rank is handed the logits of all classes, by mistake
    may_be_nan (rows,) in which PyTorch's dense function gives nan and `dense` a number: there nan passes, unless the
               judge is strict; in the gradient, and in the loss if the row counts. None: in none
    """

    logits: Array
    targets: Array
    splits: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    reduction: str = "mean"
    axis: int = -1
    dloss: Array | None = None
    memory: Memory = "C"
    gathered: bool = False
    may_be_nan: Array | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the logits."""
        return self.logits.dtype

    @property
    def ranks(self) -> int:
        """How many shards there are."""
        return len(self.splits) - 1

    @property
    def classes(self) -> int:
        """The number of classes of all shards."""
        return int(self.logits.shape[self.axis])

    @property
    def rows(self) -> int:
        """The number of rows, all axes but the class axis flattened."""
        return math.prod(self.rows_shape)

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """The logits' shape without the class axis."""
        shape = list(self.logits.shape)
        del shape[self.axis]
        return tuple(shape)

    @property
    def loss_shape(self) -> tuple[int, ...]:
        """The shape that the loss is due to have."""
        return self.rows_shape if self.reduction == "none" else ()

    @property
    def with_probabilities(self) -> bool:
        """Whether targets are probabilities."""
        return self.targets.dtype.kind not in "iu"

    @property
    def valid(self) -> Array:
        """(rows,) which rows count."""
        if self.with_probabilities:
            return np.ones(self.rows, np.bool_)
        return self.targets.reshape(-1) != self.options.get("ignore_index", -100)

    @cached_property
    def expected(self) -> tuple[Array, Array]:
        """The exact loss, and the gradient of the logits that `dloss` makes of it; float64, all classes."""
        loss, gradient = dense.softmax_cross_entropy_value_and_grad(
            self.logits, self.targets, axis=self.axis, reduction=self.reduction, **self.options
        )
        if self.dloss is not None:
            upstream = self.dloss.astype(np.float64)
            gradient = gradient * (np.expand_dims(upstream, self.axis) if upstream.ndim else upstream)
        return np.asarray(loss), gradient

    def rank_of(self, number: int) -> int:
        """The rank whose shard has class `number`."""
        return int(np.searchsorted(self.splits, number, side="right")) - 1

    def row_major(self, array: Array) -> Array:
        """An array shaped as the logits, as (rows, classes)."""
        return np.moveaxis(array, self.axis, -1).reshape(self.rows, array.shape[self.axis])

    def part(self, array: Array, rank: int) -> Array:
        """What `rank` is due to hold of an array shaped as the logits; a view."""
        if self.gathered:
            return array
        return np.moveaxis(np.moveaxis(array, self.axis, 0)[slice(*self.splits[rank : rank + 2])], 0, self.axis)

    def shard(self, rank: int) -> Shard:
        """What `rank` is handed: copies, so that nothing done to them is done to the problem."""
        start, stop = self.splits[rank : rank + 2]
        options = dict(self.options)
        if "weight" in options:
            options["weight"] = options["weight"][slice(None) if self.gathered else slice(start, stop)].copy()
        targets = self.part(self.targets, rank) if self.with_probabilities else self.targets
        return Shard(
            logits=_laid_out(self.part(self.logits, rank), self.memory, self.axis),
            targets=targets.copy(order="C"),
            class_start=start,
            num_classes=self.classes,
            options=options | {"reduction": self.reduction, "axis": self.axis},
        )


def _laid_out(array: Array, memory: Memory, axis: int) -> Array:
    """A copy of `array` that lies in memory as told."""
    if memory == "C":
        return array.copy(order="C")
    if memory == "F":
        return array.copy(order="F")
    if memory == "padded":
        padding = [(0, 0)] * array.ndim
        padding[axis] = (0, 3)
        # Wide in the class axis, and more than any logit: who reads it is found out.
        wide = np.pad(array.astype(np.float64), padding, constant_values=6e4).astype(array.dtype)
        index = [slice(None)] * array.ndim
        index[axis] = slice(array.shape[axis])
        return wide[tuple(index)]
    wide = np.full([2 * length for length in array.shape], 6e4, array.dtype)
    view = wide[tuple(slice(None, None, 2) for _ in array.shape)]
    view[...] = array
    return view


@dataclass(frozen=True)
class Case:
    """One thing that a candidate is asked to do.

    name        unique, without spaces: "family" or "family/which"
    catches     the fault that it finds, and in what software it was seen
    dtype       of the logits
    needs       what a candidate has to offer
    expects     what is due
    procedure   the name of how `running` calls the candidate
    rows, classes   the size that `build` is asked for unless told otherwise
    build       makes the problem; the splits that it chooses are within what `Setting.shards` allows
    shrinkable  whether `rows` and `classes` may be less
    """

    name: str
    catches: str
    dtype: str
    build: Callable[[Setting], Problem]
    needs: Needs = field(default_factory=Needs)
    expects: Expects = Expects.ANSWER
    procedure: str = "plain"
    rows: int = 6
    classes: int = 24
    shrinkable: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def family(self) -> str:
        """The part of the name that cases of one kind share."""
        return self.name.partition("/")[0]

    def fits(self, pattern: str) -> bool:
        """Whether `pattern` is the name or the family of this case, or a shell pattern of its name."""
        return pattern in (self.name, self.family) or fnmatchcase(self.name, pattern)

    def setting(
        self, offer: Offer, ranks: int, *, seed: int = 0, rows: int | None = None, classes: int | None = None
    ) -> Setting:
        """For what this case builds its problem, for a candidate with this offer."""
        wanted = (rows, classes) if self.shrinkable else (None, None)
        return Setting(
            ranks=ranks,
            rows=self.rows if wanted[0] is None else wanted[0],
            classes=self.classes if wanted[1] is None else wanted[1],
            dtype=self.dtype,
            reduction=next((each for each in self.needs.reductions if each in offer.reductions), "mean"),
            seed=seed,
            shards=offer.shards,
        )

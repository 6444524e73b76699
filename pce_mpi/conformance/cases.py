"""A case, and the problem that it builds.

A problem is global, the same on every rank, and made from a seed alone. `Problem.shard` gives the arguments of one
rank; `Problem.expected` is the result of `dense` in float64, from logits rounded to the candidate's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cached_property
import math
from typing import Any, Literal

import numpy as np

from pce_mpi import dense
from pce_mpi.arrays import is_floating
from pce_mpi.conformance.needs import Needs, dims_for
from pce_mpi.conformance.offers import Kind, Offer, Shards, Smoothing

Array = np.ndarray[Any, Any]

# The memory of a shard of the logits: C order; Fortran order; every second element of a wider array, in rows and in
# classes; the first columns of a wider array, whose other columns nobody may read; one element with strides of 0.
Memory = Literal["C", "F", "strided", "padded", "expanded"]


class Expects(StrEnum):
    """The expected result: the right answer; an exception on every rank; or either, but never a wrong answer."""

    ANSWER = "an answer"
    REFUSAL = "a refusal"
    EITHER = "an answer or a refusal"


@dataclass(frozen=True)
class Setting:
    """The arguments of `Case.build`: `rows` and `classes` are wishes, `shards` is what the candidate offers."""

    ranks: int
    rows: int
    classes: int
    dtype: str
    reduction: str
    seed: int
    shards: Shards
    ignore_index: int = -100
    normalized: bool = False


@dataclass(frozen=True, eq=False)
class Shard:
    """The arguments of one rank, as NumPy arrays of its own; `options` includes `weight`, `reduction` and `axis`."""

    logits: Array
    targets: Array
    class_start: int
    num_classes: int
    options: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Problem:
    """The logits, targets and options of all ranks.

    logits                       the logits of all classes, in the candidate's dtype
    targets                      global class numbers, the logits' shape without the class axis; or probabilities of the
                                 logits' shape
    splits                       the shard of rank r has the classes [splits[r], splits[r + 1])
    options                      the options of the candidate; `weight` has all classes
    reduction                    "mean", "sum" or "none"
    axis                         the class axis
    smoothing                    the convention of label smoothing, as in `Offer`
    dloss                        the upstream gradient, shaped as the loss; None: ones
    memory                       the memory order of a shard of the logits: "C", "F", "strided" or "padded"
    target_memory, dloss_memory  those of index targets and of the upstream gradient: "C", "strided" or, for equal
                                 elements, "expanded"
    kind                         the kind of the candidate, as in `Offer`
    gathered                     every rank gets the logits of all classes, by mistake
    copies                       how many times a candidate gets these rows, one after the other
    may_be_nan                   (rows,) where PyTorch's dense function gives nan and `dense` a number: nan passes there
                                 unless the judge is strict, in the gradient, and in the loss if the row counts. None:
                                 nowhere
    """

    logits: Array
    targets: Array
    splits: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    reduction: str = "mean"
    axis: int = -1
    smoothing: Smoothing = "all"
    dloss: Array | None = None
    memory: Memory = "C"
    target_memory: Memory = "C"
    dloss_memory: Memory = "C"
    kind: Kind = "loss"
    gathered: bool = False
    copies: int = 1
    may_be_nan: Array | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the logits."""
        return self.logits.dtype

    @property
    def ranks(self) -> int:
        """The number of shards."""
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
        """The expected shape of the loss."""
        return self.rows_shape if self.reduction == "none" else ()

    @property
    def with_probabilities(self) -> bool:
        """True if the targets are probabilities."""
        return self.targets.dtype.kind not in "iu"

    @property
    def with_numbers(self) -> bool:
        """True if the targets are class numbers, and are passed."""
        return not self.with_probabilities and self.kind != "entropy"

    @property
    def exact_options(self) -> dict[str, Any]:
        """The options for `dense`, which smooths over all classes."""
        if self.smoothing == "all" or "label_smoothing" not in self.options or self.classes < 2:
            return self.options
        more = self.classes / (self.classes - 1)
        return self.options | {"label_smoothing": self.options["label_smoothing"] * more}

    @property
    def valid(self) -> Array:
        """The rows that count, as a mask of shape (rows,)."""
        if not self.with_numbers:
            return np.ones(self.rows, np.bool_)
        return self.targets.reshape(-1) != self.options.get("ignore_index", -100)

    @cached_property
    def expected(self) -> tuple[Array, Array]:
        """The exact loss and, for `dloss`, the gradient of the logits; float64, all classes."""
        if self.kind != "loss":
            arguments: dict[str, Any] = self.options | {"axis": self.axis}
            if self.kind == "log_prob":
                arguments["targets"] = self.targets
            statistics = dense.class_statistics(self.logits, **arguments)
            arguments[self.kind] = np.ones(()) if self.dloss is None else self.dloss
            return getattr(statistics, self.kind), dense.class_statistics_backward(self.logits, **arguments)
        loss, gradient = dense.softmax_cross_entropy_value_and_grad(
            self.logits, self.targets, axis=self.axis, reduction=self.reduction, **self.exact_options
        )
        if self.dloss is not None:
            upstream = self.dloss.astype(np.float64)
            gradient = gradient * (np.expand_dims(upstream, self.axis) if upstream.ndim else upstream)
        return np.asarray(loss), gradient

    def rank_of(self, number: int) -> int:
        """Return the rank whose shard has a class."""
        return int(np.searchsorted(self.splits, number, side="right")) - 1

    def row_major(self, array: Array) -> Array:
        """Flatten all axes but the class axis, and put that last."""
        return np.moveaxis(array, self.axis, -1).reshape(self.rows, array.shape[self.axis])

    def part(self, array: Array, rank: int) -> Array:
        """Return the part of an array that a rank has."""
        if self.gathered:
            return array
        return np.moveaxis(np.moveaxis(array, self.axis, 0)[slice(*self.splits[rank : rank + 2])], 0, self.axis)

    def repeated(self, rows: Array) -> Array:
        """Return the array that has all copies of these rows."""
        return rows if self.copies == 1 else np.tile(rows, (self.copies, *(1,) * (rows.ndim - 1)))

    def shard(self, rank: int) -> Shard:
        """Return the arguments of a rank, as copies: a candidate may write to them."""
        start, stop = self.splits[rank : rank + 2]
        options = dict(self.options)
        if "weight" in options:
            options["weight"] = options["weight"][slice(None) if self.gathered else slice(start, stop)].copy()
        targets = self.part(self.targets, rank) if self.with_probabilities else self.targets
        return Shard(
            logits=stored(self.repeated(self.part(self.logits, rank)), self.memory, self.axis),
            targets=stored(self.repeated(targets), "C" if self.with_probabilities else self.target_memory),
            class_start=start,
            num_classes=self.classes,
            options=options | {"reduction": self.reduction, "axis": self.axis},
        )


def fits(name: str, pattern: str) -> bool:
    """Return True if a case of this name has the pattern for its name or family, or fits it as a shell pattern."""
    return pattern in (name, name.partition("/")[0]) or fnmatchcase(name, pattern)


def grid(ranks: int) -> tuple[int, int]:
    """Return how many parts of the rows, and of the classes, a grid of so many ranks has."""
    return (2, ranks // 2) if ranks % 2 == 0 else (ranks, 1)


def stored(array: Array, memory: Memory, axis: int = -1) -> Array:
    """Copy `array` in this memory order."""
    if memory == "C" or array.size == 0 or array.ndim == 0:
        return array.copy(order="C")
    if memory == "expanded":
        one = array.reshape(-1)[:1].copy()
        return np.ndarray(array.shape, array.dtype, one, strides=(0,) * array.ndim)
    if memory == "F":
        return array.copy(order="F")
    lengths, index = [2 * length for length in array.shape], [slice(None, None, 2)] * array.ndim
    if memory == "padded":
        lengths, index = list(array.shape), [slice(length) for length in array.shape]
        lengths[axis] += 3
    # More than any logit, and no class, so that reading it shows.
    view = np.full(lengths, 6e4 if is_floating(array.dtype) else -7, array.dtype)[tuple(index)]
    view[...] = array
    return view


def _in_two_axes(problem: Problem) -> Problem:
    """Return the problem with its rows in two axes, the second of length 2 if it can be."""
    inner = 2 if problem.rows % 2 == 0 else 1
    shape = problem.rows // inner, inner
    targets, dloss = problem.targets, problem.dloss
    return replace(
        problem,
        logits=problem.logits.reshape(*shape, problem.classes),
        targets=targets.reshape(*shape, *targets.shape[1:]),
        dloss=dloss.reshape(shape) if dloss is not None and dloss.ndim else dloss,
    )


@dataclass(frozen=True)
class Case:
    """One call, or sequence of calls, that a candidate is judged by.

    Parameters
    ----------
    name : str
        Unique, without spaces: "family" or "family/which".
    catches : str
        The fault that it finds, and the software in which that was seen.
    dtype : str
        The dtype of the logits.
    build : callable
        Builds the `Problem` for a `Setting`; the split points are within what `Setting.shards` allows.
    needs : Needs
        What a candidate has to offer.
    expects : Expects
        The expected result.
    procedure : str
        A name in `procedures.PROCEDURES`: how the candidate is called.
    rows, classes : int
        The usual size.
    resizable : bool
        The case makes sense at other sizes too.
    form : bool
        The case is about shapes and dtypes of the results; other cases do not look at them.
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
    resizable: bool = True
    form: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def family(self) -> str:
        """The part of the name that cases of one kind share."""
        return self.name.partition("/")[0]

    @property
    def compares_bits(self) -> bool:
        """True if results with `same_bits` are compared with those on one rank.

        Not so for targets that are no class, for logits that were gathered by mistake, and for copies of rows, which
        take all memory.
        """
        return self.expects is not Expects.REFUSAL and not self.needs.num_classes and self.procedure != "copies"


def problem_of(
    case: Case, offer: Offer, ranks: int, *, seed: int = 0, rows: int | None = None, classes: int | None = None
) -> Problem:
    """Build the problem of a case in the conventions of an offer; `rows` and `classes` if the case is resizable."""
    needs = case.needs
    setting = Setting(
        ranks=ranks,
        rows=case.rows if rows is None or not case.resizable else rows,
        classes=case.classes if classes is None or not case.resizable else classes,
        dtype=case.dtype,
        reduction=next((each for each in needs.reductions if each in offer.reductions), "mean"),
        seed=seed,
        shards=offer.shards,
        ignore_index=-100 if offer.ignore_index is None else offer.ignore_index,
        normalized=offer.normalized,
    )
    problem = replace(case.build(setting), smoothing=offer.smoothing, kind=offer.kind)
    return problem if dims_for(offer, needs) in (problem.logits.ndim, None) else _in_two_axes(problem)

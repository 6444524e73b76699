"""The kinds of candidates, and the problems that candidates solve.

A problem is global, the same on every rank, and made from a seed alone. `Problem.shard` gives the arguments of one
rank; `Problem.expected` is the result of `dense` in float64, from logits rounded to the candidate's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
import math
import re
from typing import Any, Literal, NamedTuple

import numpy as np

from pce_mpi.arrays import compute_dtype_of, is_floating

Array = np.ndarray[Any, Any]

# The memory of a shard of the logits: C order; Fortran order; every second element of a wider array, in rows and in
# classes; the first columns of a wider array, whose other columns nobody may read; one element with strides of 0.
Memory = Literal["C", "F", "strided", "padded", "expanded"]

# The gradients of the factors of logits.
PRODUCTS = ("dhidden", "dw", "dbias")


class Told(NamedTuple):
    """An explanation of numbers: the causes that give them, what these do, and how many of the first are told.

    `shared` are causes that fit the numbers of any one case, and are told where several cases agree on them.
    """

    causes: tuple[str, ...]
    effect: str = ""
    alike: int = 1
    shared: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Kind:
    """The arguments and results of the candidates of one kind, and how these are judged.

    noun, plural         the words for what it gives for a row; `returns`, where a call returns something else
    exact                the exact numbers of a problem and, for `dloss`, the gradient of the logits; all classes
    sizes                of a textbook: how large the summands of both are, as `judging` says
    sums                 of a problem: the sum of magnitudes of each row whose roundings the numbers have, 0 for none
    faults               of a textbook: what projects have shipped, as in `textbook`
    told                 what to declare where the numbers of another kind turn out to be these
    options, reductions  those that it may take
    arrays               the names of what it is called with: this rank's logits, or their factors; and targets, or a
                         teacher's logits, or none
    facts                the keywords that it is always called with, beside `comm`
    negates              the kind whose numbers are the negatives of these, and whose faults are known
    tell                 of a textbook, "loss" or "gradient", and numbers: an exact test that no other kind has
    beside               of a problem and its answers, whose numbers are right: what else is wrong, in a sentence
    fitted               makes the problem of a case for all kinds one for this kind
    lost_has_nan         whether the gradient of a row without a result has a nan; else any will do
    words                what a class and logits are called here
    shared_cases         whether cases for all kinds are its cases too: classes are sharded, not rows
    cases                those for this kind alone
    without              names or patterns of other cases that make no sense for it
    catches              what a family of cases catches, where that of a loss is something else
    """

    noun: str
    plural: str
    exact: Callable[[Problem], tuple[Array, Array]]
    sizes: Callable[[Any], tuple[Array, Array, Array]]
    faults: Callable[[Any], Iterator[tuple[str, Any]]]
    told: str
    options: tuple[str, ...]
    reductions: tuple[str, ...] = ("none",)
    returns: str = ""
    arrays: tuple[str, ...] = ("logits", "targets")
    facts: tuple[str, ...] = ("class_start", "num_classes")
    negates: Kind | None = None
    tell: Callable[[Any, str, Array], Told | None] = lambda book, name, got: None
    beside: Callable[[Problem, Sequence[Any]], str | None] = lambda problem, answers: None
    sums: Callable[[Problem], Array] = lambda problem: np.zeros(problem.rows)
    lost_has_nan: bool = True
    words: Mapping[str, str] = field(default_factory=dict)
    fitted: Callable[[Problem, int], Problem] = lambda problem, seed: problem
    shared_cases: bool = True
    cases: Any = None  # `cases.Cases`, as those are made of problems
    without: tuple[str, ...] = ()
    catches: Mapping[str, str] = field(default_factory=dict)

    def worded(self, text: str) -> str:
        """Return an explanation in the words of this kind."""
        return _replaced(text, {"the loss": f"the {self.noun}", **self.words})

    def of_results(self, text: str) -> str:
        """Return what is said of the results of a call in the words of this kind."""
        return _replaced(text, {"loss": self.returns or self.noun, **self.words})

    def said(self, family: str, catches: str) -> str:
        """Say what a case catches in the words of this kind."""
        text = self.catches.get(family, catches)
        an = "n" * self.noun.startswith(("a", "e", "i", "o", "u"))
        words = (("a loss", f"a{an} {self.noun}"), ("loss", self.noun), ("losses", self.plural))
        return _replaced(text, {form(word): form(its) for word, its in words for form in (str, str.capitalize)})


def _replaced(text: str, words: Mapping[str, str]) -> str:
    """Return a text with whole words replaced by others, one after the other."""
    for word, its in words.items():
        text = re.sub(rf"\b{word}\b", its, text)
    return text


@dataclass(frozen=True, eq=False)
class Shard:
    """The arguments of one rank, as NumPy arrays of its own; `options` includes `weight`, `reduction` and `axis`."""

    arrays: dict[str, Array]
    class_start: int
    num_classes: int
    options: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Operands:
    """The factors of logits that are a product, in the candidate's dtype.

    hidden         (rows, features)
    w              (features, classes), all of them
    bias           (classes,), if there is one
    with_identity  hidden is the identity with its rows reversed: w has the logits, and dw has their gradient
    """

    hidden: Array
    w: Array
    bias: Array | None = None
    with_identity: bool = False


@dataclass(frozen=True, eq=False)
class Problem:
    """The logits, targets and options of all ranks.

    logits                       the logits of all classes, in the candidate's dtype
    targets                      global class numbers, the logits' shape without the class axis; or probabilities of the
                                 logits' shape
    splits                       the shard of rank r has the classes [splits[r], splits[r + 1])
    kind                         the kind of the candidate
    options                      the options of the candidate; `weight` has all classes
    reduction                    "mean", "sum" or "none"
    axis                         the class axis
    conventions                  which numbers are meant, where there are several: fields of `Offer`
    dloss                        the upstream gradient, shaped as the loss; None: ones
    memory                       the memory order of a shard of the logits, as `Memory` says
    target_memory, dloss_memory  those of index targets and of the upstream gradient
    gathered                     every rank gets the logits of all classes, by mistake
    copies                       how many times a candidate gets these rows, one after the other
    may_be_nan                   (rows,) where PyTorch's dense function gives nan and `dense` a number: nan passes there
                                 unless the judge is strict, in the gradient, and in the loss if the row counts. None:
                                 nowhere
    over_all                     the problem with a support that this one has by logits of -inf
    operands                     the factors that a candidate gets in place of the logits, which are exact then, float64
    """

    logits: Array
    targets: Array
    splits: tuple[int, ...]
    kind: Kind
    options: dict[str, Any] = field(default_factory=dict)
    reduction: str = "mean"
    axis: int = -1
    conventions: Mapping[str, Any] = field(default_factory=dict)
    dloss: Array | None = None
    memory: Memory = "C"
    target_memory: Memory = "C"
    dloss_memory: Memory = "C"
    gathered: bool = False
    copies: int = 1
    may_be_nan: Array | None = None
    over_all: Problem | None = None
    operands: Operands | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the logits, or of their factors."""
        return self.logits.dtype if self.operands is None else self.operands.w.dtype

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
        return not self.with_probabilities and "targets" in self.kind.arrays

    @property
    def exact_options(self) -> dict[str, Any]:
        """The options for `dense`, which smooths over all classes, and has a scale for a temperature."""
        if "temperature" in self.options:
            options = {name: value for name, value in self.options.items() if name != "temperature"}
            return replace(self, options=options | {"logit_scale": 1.0 / self.options["temperature"]}).exact_options
        if self.conventions.get("smoothing") != "others" or "label_smoothing" not in self.options or self.classes < 2:
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
    def over_support(self) -> Problem:
        """The problem without the option `support`: classes that are not in it have a logit of -inf."""
        if "support" not in self.options:
            return self
        ids, offsets = self.options["support"]
        inside = np.zeros((self.rows, self.classes), np.bool_)
        inside[np.repeat(np.arange(self.rows), np.diff(offsets)), ids] = True
        options = {name: value for name, value in self.options.items() if name != "support"}
        return replace(self.within(inside), options=options, over_all=self)

    def within(self, inside: Array) -> Problem:
        """Return the problem with a logit of -inf for classes outside of a mask (rows, classes)."""
        shaped = np.moveaxis(inside.reshape(*self.rows_shape, self.classes), -1, self.axis)
        return replace(self, logits=np.where(shaped, self.logits, np.asarray(-np.inf, self.dtype)))

    @cached_property
    def expected(self) -> tuple[Array, Array]:
        """The exact loss and, for `dloss`, the gradient of the logits; float64, all classes."""
        return self.kind.exact(self)

    @property
    def upstream(self) -> Array:
        """The upstream gradient in float64, to be multiplied with the logits' gradient."""
        upstream = np.ones(()) if self.dloss is None else self.dloss.astype(np.float64)
        return np.expand_dims(upstream, self.axis) if upstream.ndim else upstream

    @property
    def gradients(self) -> tuple[str, ...]:
        """The names of the gradients that are due."""
        if self.operands is None:
            return ("dlogits",)
        return PRODUCTS[:2] if self.operands.bias is None else PRODUCTS

    @property
    def largest_sums(self) -> Array:
        """The largest sum of magnitudes in the products of a row, (rows,), as roundings follow it; 0 for exact ones."""
        if self.operands is None or self.operands.with_identity:
            return self.kind.sums(self)
        hidden, w, bias = _wide(self.operands, np.dtype(np.float64))
        sums = np.abs(hidden) @ np.abs(w) + np.where(np.isfinite(bias), np.abs(bias), 0.0)
        return np.asarray(sums.max(axis=-1, initial=0.0))

    @property
    def room(self) -> Array:
        """Roundings that are not the candidate's add this to what is allowed, in the loss's shape or for all."""
        return np.zeros(())

    @cached_property
    def with_plain_product(self) -> Problem:
        """The problem with the logits of a plain product in the dtype of the arithmetic."""
        assert self.operands is not None
        hidden, w, bias = _wide(self.operands, compute_dtype_of(self.dtype))
        return replace(self, logits=(hidden @ w + bias).astype(np.float64).reshape(self.logits.shape))

    def rank_of(self, numbers: Any) -> Any:
        """Return the rank whose shard has a class, or those of several classes."""
        return np.searchsorted(self.splits, numbers, side="right") - 1

    def row_name(self, row: int) -> str:
        """Name a row in a message."""
        return row_name(self.rows_shape, row)

    def row_major(self, array: Array) -> Array:
        """Flatten all axes but the class axis, and put that last."""
        return np.moveaxis(array, self.axis, -1).reshape(self.rows, array.shape[self.axis])

    def part(self, array: Array, rank: int) -> Array:
        """Return the part of an array that a rank has."""
        if self.gathered:
            return array
        return np.moveaxis(np.moveaxis(array, self.axis, 0)[slice(*self.splits[rank : rank + 2])], 0, self.axis)

    def joined(self, answers: Sequence[Any]) -> Sequence[Any]:
        """Return the answers of all ranks as they are judged."""
        return answers

    def repeated(self, rows: Array) -> Array:
        """Return the array that has all copies of these rows."""
        return rows if self.copies == 1 else np.tile(rows, (self.copies, *(1,) * (rows.ndim - 1)))

    def shard(self, rank: int) -> Shard:
        """Return the arguments of a rank, as copies: a candidate may write to them."""
        start, stop = self.splits[rank : rank + 2]
        options = dict(self.options)
        if self.operands is not None and self.operands.bias is not None:
            options["bias"] = self.operands.bias
        for name in {"weight", "bias"} & options.keys():
            options[name] = options[name][slice(None) if self.gathered else slice(start, stop)].copy()
        targets = self.part(self.targets, rank) if self.with_probabilities else self.targets
        if self.operands is None:
            arrays = {self.kind.arrays[0]: stored(self.repeated(self.part(self.logits, rank)), self.memory, self.axis)}
        else:
            hidden = self.operands.hidden.reshape(*self.rows_shape, -1 if self.rows else self.operands.w.shape[0])
            arrays = {"hidden": hidden.copy(), "w": stored(self.part(self.operands.w, rank), self.memory)}
        if len(self.kind.arrays) > len(arrays):
            memory = "C" if self.with_probabilities else self.target_memory
            arrays[self.kind.arrays[-1]] = stored(self.repeated(targets), memory)
        return Shard(arrays, start, self.classes, options | {"reduction": self.reduction, "axis": self.axis})


def row_name(shape: tuple[int, ...], row: int) -> str:
    """Name a row in a message; `shape` is that of all rows."""
    if len(shape) == 1:
        return f"row {row}"
    index = ", ".join(str(int(i)) for i in np.unravel_index(row, shape)) if shape else ""
    return f"row ({index})"


def _wide(operands: Operands, dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
    """Return the factors in a dtype, with a bias of 0 where there is none."""
    bias = np.zeros(operands.w.shape[1]) if operands.bias is None else operands.bias
    return operands.hidden.astype(dtype), operands.w.astype(dtype), bias.astype(dtype)


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

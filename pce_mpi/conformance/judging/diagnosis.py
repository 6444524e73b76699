"""Explain a wrong answer: by the known fault that gives this answer, or else by the place of its errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from pce_mpi.arrays import compute_dtype_of, dtype_named
from pce_mpi.conformance.judging.comparing import Product, coarsest, finest
from pce_mpi.conformance.judging.outcomes import Fault
from pce_mpi.conformance.problems.cases import has_dtype
from pce_mpi.conformance.problems.kinds import KINDS
from pce_mpi.conformance.problems.kinds.sharding import factors
from pce_mpi.conformance.problems.problem import Array, Kind, Problem
from pce_mpi.conformance.problems.textbook import Answer, Faults, Given, Textbook

# An answer is that of a fault if it is this much closer to it than to the truth, one number alone so much more ...
_CLOSER, _ALONE = 8.0, 256.0
# ... and this close, in eps of the dtype: fault and candidate may round in another order.
_CLOSE = {2: 1.0, 4: 64.0, 8: 4096.0}
_HALVES = 2.0**-10
# Halves have the bits of a fault if so many of those that tell do.
_BUT_FOR_RARE = 0.998
# Less than this many eps of the arithmetic, for a p of about 1, is no error, by the bytes of a logit.
_FLOOR = {2: 2.0, 4: 16.0, 8: 16.0}
# A fault is compared with about so many rows first.
_SAMPLE = 512
# Larger problems are not compared with known faults: they are about the number of entries. Eight rows of the largest
# vocabularies, of 262,208 classes, are smaller.
MANY = 9 * 2**18


def explain(
    problem: Problem,
    losses: Sequence[Any],
    dlogits: Any,
    wrong_losses: Any,
    wrong_dlogits: Any,
    products: Sequence[Product] = (),
) -> list[Fault]:
    """Explain an answer by one fault, or by one of each quantity; [] if it is right, or if only its numbers are known.

    losses          of each rank, shaped as the loss
    dlogits         the concatenated gradients of all ranks, shaped as the logits; None: the loss alone
    wrong_losses    (ranks, *shape of the loss), the losses that do not pass
    wrong_dlogits   shaped as the logits, the entries of the gradient that do not pass
    products        the gradients of the factors of the logits, in place of theirs
    """
    declared, problem = problem.kind, problem.over_support
    if declared.negates is not None:
        losses = [-np.asarray(loss) for loss in losses]
        dlogits = None if dlogits is None else -np.asarray(dlogits)
        problem = replace(problem, kind=declared.negates)
    with np.errstate(all="ignore"):
        book = Textbook.of(problem)
        quantities = [_of_losses(book, losses, wrong_losses)]
        if dlogits is not None:
            quantities.append(_of_gradient(book, dlogits, wrong_dlogits))
        of_products = [_of_product(problem, each, declared.negates is not None) for each in products]
        evidence = _Evidence(book, declared, quantities, of_products)
        explanations = (explainer(evidence) for explainer in _EXPLAINERS)
        return next((faults for faults in explanations if faults is not None), [])


@dataclass(frozen=True)
class _Evidence:
    """The loss and the gradient of an answer, those of the factors of logits, and faults that may explain them."""

    book: Textbook
    declared: Kind
    quantities: list[_Quantity]
    products: list[_Quantity]

    @cached_property
    def wrong(self) -> list[_Quantity]:
        return [quantity for quantity in self.quantities if quantity.wrong.any()]

    @property
    def faults(self) -> Faults:
        return self.declared.faults(self.book) if self.book.p.size <= MANY else iter(())

    @cached_property
    def multiples(self) -> list[tuple[str, Answer]]:
        return _explaining(self.wrong, factors(self.book))

    @cached_property
    def known(self) -> list[tuple[str, Answer]]:
        return [*self.multiples, *_explaining(self.wrong, self.faults)]

    @cached_property
    def by_exact_test(self) -> dict[str, Fault | None]:
        return {quantity.name: _by_exact_test(self.book, quantity) for quantity in self.wrong}

    @cached_property
    def apart(self) -> dict[str, Fault | None]:
        """The fault of each wrong quantity by itself, by its name: what an exact test tells, or else formulas."""
        faults = dict(self.by_exact_test)
        for quantity in self.wrong:
            if (fault := faults[quantity.name]) is None:
                faults[quantity.name] = _by_formulas(self, quantity)
            elif _is_zero(quantity) and (more := _fitting([quantity], self.known, lone=True)):
                faults[quantity.name] = replace(fault, causes=[*fault.causes, *more.causes])
        return faults


def _one_fault_of_products(evidence: _Evidence) -> list[Fault] | None:
    if not any(product.wrong.any() for product in evidence.products):
        return None
    known = _explaining([*evidence.wrong, *evidence.products], chain(factors(evidence.book), evidence.faults))
    fault = _fitting([*evidence.quantities, *evidence.products], known, lone=False)
    return [fault] if fault and fault.alike else None


def _nothing_wrong(evidence: _Evidence) -> list[Fault] | None:
    return None if evidence.wrong else []


def _another_kind(evidence: _Evidence) -> list[Fault] | None:
    """Tell what to declare if these are the right numbers of another kind of candidate."""
    problem, declared = evidence.book.problem, evidence.declared
    if not problem.with_numbers or not any(each.error > each.close for each in evidence.quantities):
        return None
    arrays = tuple(name for name in declared.arrays if name != "targets")
    for kind in KINDS.values():
        if kind.negates is declared or declared.negates is kind:
            numbers, gradient = (-each for each in problem.expected)
        elif kind is not declared and problem.reduction == "none" and not problem.options and kind.arrays == arrays:
            numbers, gradient = replace(problem, kind=kind).expected
        else:
            continue
        answer = Given((numbers,), problem.row_major(gradient))
        if all(each.is_that_of(answer) for each in evidence.quantities):
            return [Fault([kind.told])]
    return None


def _one_fault(evidence: _Evidence) -> list[Fault] | None:
    """Tell the fault that explains all quantities; an exact test comes first, as numbers may be close to another's."""
    book, wrong = evidence.book, evidence.wrong
    if any(evidence.by_exact_test.values()):
        return None
    fault = _fitting(evidence.quantities, evidence.known, lone=len(wrong) < 2)
    # Many faults give nan or 0: one is told by the rows that have it, or by other cases.
    if fault and (any(map(_is_zero, wrong)) or (len(fault.causes) > 1 and all(each.is_nan for each in wrong))):
        place = "; ".join(each.said for each in _of_each(book, wrong, evidence.by_exact_test))
        return [replace(fault, alike=0, place=place)]
    return [fault] if fault else None


def _one_fault_in_several_forms(evidence: _Evidence) -> list[Fault] | None:
    """Tell the causes that loss and gradient have in common."""
    if not len(evidence.wrong) == len(evidence.quantities) > 1:
        return None
    causes = [fault.causes if fault and fault.alike else [] for fault in evidence.apart.values()]
    shared = [cause for cause in causes[0] if all(cause in each for each in causes)]
    return [Fault(shared)] if shared else None


def _fault_of_each(evidence: _Evidence) -> list[Fault] | None:
    if len(evidence.wrong) < 2:
        return None
    return _of_each(evidence.book, evidence.wrong, evidence.apart)


def _fault_of_one(evidence: _Evidence) -> list[Fault] | None:
    (quantity,) = evidence.wrong
    fault = evidence.apart[quantity.name] or Fault([], 0)
    if not fault.alike:
        place = fault.place or _place(evidence.book, quantity) or ""
        return [replace(fault, place=place)] if place or fault.causes else None
    if len(evidence.quantities) < 2 or quantity.name in fault.said:
        return [fault]
    return [replace(fault, form=f"{fault.form}, in the {quantity.name} only")]


# In order of precedence; the first that returns faults, or [] for none, has the last word.
_EXPLAINERS: tuple[Callable[[_Evidence], list[Fault] | None], ...] = (
    _one_fault_of_products,
    _nothing_wrong,
    _another_kind,
    _one_fault,
    _one_fault_in_several_forms,
    _fault_of_each,
    _fault_of_one,
)


def _explaining(wrong: Sequence[_Quantity], faults: Faults) -> list[tuple[str, Answer]]:
    """Return those that explain one of these quantities; the others are not kept in memory."""
    return [each for each in faults if any(quantity.is_that_of(each[1]) for quantity in wrong)]


def _by_exact_test(book: Textbook, q: _Quantity) -> Fault | None:
    """Return what an exact test tells of a quantity."""
    if q.got.any() and q.dtype == book.problem.dtype.name and (text := _rounded_to(q)):
        return Fault([text])
    if told := book.problem.kind.tell(book, q.name, q.got):
        alike = told.alike if told.causes else 0
        form = "{}" + f": {told.effect}" * bool(told.effect)
        return Fault(list(told.causes), alike, form, told.effect, list(told.shared))
    return None


def _by_formulas(evidence: _Evidence, q: _Quantity) -> Fault | None:
    """Return what formulas tell of one quantity; no cause that only another case can tell from others is told."""
    if not _is_zero(q) and (fault := _fitting([q], evidence.multiples, lone=True) or _factor(evidence.book, q)):
        return fault
    fault = _fitting([q], evidence.known, lone=True)
    if fault is None:
        return None
    # A fault that does not explain what else is wrong fits roundings of halves by accident.
    accidental = q.close >= _HALVES and len(evidence.wrong) > 1
    return replace(fault, alike=0) if accidental or q.is_nan or _is_zero(q) else fault


def _is_zero(q: _Quantity) -> bool:
    return not q.got.any() and bool(np.isfinite(q.truth).all())


@dataclass(frozen=True)
class _Quantity:
    """The loss, (ranks, numbers), or the gradient, (rows, classes).

    `alone` are the numbers that are measured by their own size; others are measured by the largest of their row.
    `dtype` is the one of their ulps. A product of the gradient is made `of` that.
    """

    name: str
    dtype: str
    got: Array
    truth: Array
    wrong: Array
    close: float
    floor: Array | float  # smaller errors count as 0
    alone: Array
    of: Callable[[Array], Array] = lambda gradient: gradient

    @property
    def is_nan(self) -> bool:
        """True if all that is wrong is nan."""
        return bool(np.isnan(self.got[self.wrong]).all())

    @property
    def is_one(self) -> bool:
        """True if all numbers are equal, as those of a mean."""
        return len(np.unique(self.got)) == 1

    @cached_property
    def error(self) -> float:
        """The distance from the right numbers."""
        return self.distance(self.truth)

    def distance(self, other: Array) -> float:
        """Return the largest difference from `other`, relative to the sizes of the numbers."""
        size = _sizes(np.maximum(np.abs(other), np.abs(self.truth)), self.alone)
        same = (self.got == other) | (np.isnan(self.got) & np.isnan(other))
        comparable = np.isfinite(self.got) & np.isfinite(other)
        error = np.maximum(np.abs(self.got - other) - self.floor, 0.0)
        relative = np.where(error == 0.0, 0.0, error / size)
        return float(np.where(same, 0.0, np.where(comparable, relative, np.inf)).max(initial=0.0))

    @cached_property
    def _sample(self) -> slice:
        """Rows of a gradient that tell most answers that are not these numbers; all rows of a loss and of few rows."""
        return slice(None, None, max(1, len(self.got) // _SAMPLE))

    def _is_far_from(self, other: Array) -> bool:
        """Return True if some rows of many show that `other` does not explain the numbers."""
        if self._sample.step == 1:
            return False
        floor = np.broadcast_to(self.floor, self.got.shape)[self._sample]
        rows = {name: getattr(self, name)[self._sample] for name in ("got", "truth", "wrong", "alone")}
        return not replace(self, floor=floor, **rows).distance(other[self._sample]) <= self.close

    def part(self, answer: Answer) -> Array:
        """Return this quantity of an answer."""
        if self.name != "loss":
            return self.truth if answer.gradient is None else self.of(answer.gradient)
        if answer.losses is None:
            return self.truth
        rows = np.stack([loss.reshape(-1) for loss in answer.losses])
        return np.broadcast_to(rows, self.got.shape)

    def is_that_of(self, answer: Answer, lone: bool = False) -> bool:
        """Return True if a fault with this answer explains the numbers; `lone`: no other quantity shows it."""
        part = self.part(answer)
        if self.close < _HALVES and self._is_far_from(part):
            return False
        distance = self.distance(part)
        if not distance <= self.close:
            return self._has_bits_of(part)
        if not self.wrong.any():
            return True
        # Beside the floor, any two numbers near 0 are close, by coincidence.
        if self.name == "loss" and self.is_one:
            if (np.abs(self.got - part) * _CLOSER > np.abs(self.got)).any():
                return False
        return distance * (_ALONE if lone and self.is_one else _CLOSER) <= self.error > 0.0

    def is_nearly(self, numbers: Array) -> bool:
        """Return True if the numbers are these, but for rounding in another order, and not the right ones."""
        distance = self.distance(numbers)
        return distance <= self.close and distance * _CLOSER <= self.error

    def _has_bits_of(self, other: Array) -> bool:
        """Return True for halves of other bits than are due, and of those of `other`, but for rare ones.

        A number inside that is near the border of two roundings may have been rounded to either.
        """
        if self.close < _HALVES or not self.wrong.any():
            return False
        due, faulty = (each.astype(dtype_named(self.dtype)).astype(np.float64) for each in (self.truth, other))
        telling = (due != faulty) | (due != self.got)
        return bool((self.got == faulty)[telling].mean() > _BUT_FOR_RARE)


def _sizes(values: Array, alone: Array) -> Array:
    """Return the size that each number is measured by."""
    values = np.where(np.isfinite(values), values, 0.0)
    return np.where(alone, values, np.where(alone, 0.0, values).max(axis=-1, keepdims=True, initial=0.0))


def _of_losses(book: Textbook, losses: Sequence[Any], wrong: Any) -> _Quantity:
    problem = book.problem
    dtype = np.result_type(*(np.asarray(loss) for loss in losses)) if losses else problem.dtype
    got = np.stack([np.asarray(loss).astype(np.float64).reshape(-1) for loss in losses])
    truth = np.broadcast_to(problem.expected[0].reshape(-1), got.shape)
    floor = _FLOOR[4] * _eps(compute_dtype_of(problem.dtype)) * np.abs(book.total).max(initial=1.0)
    if problem.reduction == "sum":
        floor *= max(problem.rows, 1)
    mask = np.asarray(wrong).reshape(got.shape)
    unit = finest(coarsest(compute_dtype_of(problem.dtype).name, dtype.name), problem.dtype.name)
    return _quantity("loss", unit, got, truth, mask, dtype, floor, np.ones(got.shape, np.bool_))


def _of_gradient(book: Textbook, dlogits: Any, wrong: Any) -> _Quantity:
    problem = book.problem
    got = problem.row_major(np.asarray(dlogits)).astype(np.float64)
    truth = problem.row_major(problem.expected[1])
    factor = np.abs(book.g / book.divisor) * np.abs(book.total) * np.abs(book.slope).max(axis=-1, initial=0.0)
    allowance = _FLOOR[problem.dtype.itemsize] * _eps(compute_dtype_of(problem.dtype))
    floor = np.where(np.isfinite(factor), factor, 0.0)[:, None] * allowance
    if problem.dtype == np.float16:
        floor = floor + 2.0**-24  # subnormal numbers of other dtypes do not matter
    mask = problem.row_major(np.asarray(wrong))
    alone = book.q != 0 if problem.with_numbers else np.zeros(got.shape, np.bool_)
    return _quantity("gradient", problem.dtype.name, got, truth, mask, problem.dtype, floor, alone)


def _of_product(problem: Problem, product: Product, negated: bool) -> _Quantity:
    sign = -1.0 if negated else 1.0

    def flat(numbers: Array) -> Array:
        return np.asarray(numbers.reshape(-1, numbers.shape[-1]))

    got, mask = flat(sign * product.numbers), flat(product.wrong)
    truth = flat(product.of(problem.row_major(problem.expected[1])))
    quantity = _quantity(
        "product", problem.dtype.name, got, truth, mask, problem.dtype, flat(product.slack), np.zeros_like(mask)
    )
    return replace(quantity, of=lambda gradient: flat(product.of(gradient)))


def _quantity(
    name: str, unit: str, got: Array, truth: Array, wrong: Array, dtype: Any, floor: Any, alone: Array
) -> _Quantity:
    close = _CLOSE[np.dtype(dtype).itemsize] * _eps(dtype)
    got = np.where(np.isnan(got) & ~wrong, truth, got)  # nan that the judge allows is no fault
    return _Quantity(name, unit, got, truth, wrong, close, floor, alone)


def _fitting(quantities: list[_Quantity], known: list[tuple[str, Answer]], *, lone: bool) -> Fault | None:
    """Return a fault with the causes that explain all of these quantities."""
    distances: dict[str, float] = {}
    for text, answer in known:
        if all(q.is_that_of(answer, lone) for q in quantities):
            distance = sum(q.distance(q.part(answer)) for q in quantities)
            distances[text] = min(distance, distances.get(text, distance))
    if not distances:
        return None
    causes = sorted(distances, key=lambda text: distances[text])
    least = distances[causes[0]]
    alike = sum(bool(np.isclose(each, least, rtol=1e-6, atol=1e-12)) for each in distances.values())
    if not any(q.got[q.wrong & np.isfinite(q.got)].any() for q in quantities):
        alike = 1  # 0 and infinity are those of many: the first of them is told
    # One number in half precision is near that of some fault by accident.
    (first, *more) = [q for q in quantities if q.wrong.any()]
    return Fault(causes, 0 if lone and not more and first.is_one and first.close >= _HALVES else alike)


def _of_each(book: Textbook, wrong: list[_Quantity], faults: dict[str, Fault | None]) -> list[Fault]:
    """Explain loss and gradient, each wrong in its own way."""
    known, unknown = list[Fault](), list[Fault]()
    for quantity in wrong:
        fault, name = faults[quantity.name] or Fault([], 0), quantity.name
        if fault.alike or fault.place:
            plain = name in fault.said or (name == "loss" and None in faults.values())
            known.append(fault if plain else replace(fault, form=f"in the {name}: {fault.form}"))
        elif place := _place(book, quantity):
            known.append(replace(fault, place=place))
        elif fault.causes or any(each and each.said for each in faults.values()):
            unknown.append(replace(fault, place=f"the {name} is wrong too"))
    return known + unknown


def _factor(book: Textbook, q: _Quantity) -> Fault | None:
    """Return the place of errors that are one factor on all numbers."""
    largest = np.unravel_index(np.argmax(np.abs(np.where(np.isfinite(q.truth), q.truth, 0.0))), q.truth.shape)
    factor = q.got[largest] / q.truth[largest]
    if not abs(factor - 1.0) > 0.01 or q.distance(factor * q.truth) > q.close:
        return None
    place = _place(book, q)
    return None if place is None else Fault([], 0, place=place)


def _place(book: Textbook, q: _Quantity) -> str | None:
    return _inexact_and_rounded(q) or (_place_of_gradient if q.name == "gradient" else _place_of_loss)(book, q)


def _eps(dtype: Any) -> float:
    return 2.0**-7 if np.dtype(dtype).name == "bfloat16" else float(np.finfo(dtype).eps)


# Errors that no known fault gives: by exact relations to the right numbers, and by their place.

# This many right rows or classes before all wrong ones are no accident.
_LEADING = 32
# Coarser dtypes, in which every entry may be representable, by the dtype of the numbers; and the error of a rounding.
_COARSER = {"float64": ("bfloat16", "float16", "float32"), "float32": ("bfloat16", "float16")}
_ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
# So many different numbers with more bits in their fractions than that are of a coarser dtype by no accident. A
# number further from the truth than `_FAR` has another fault, which matters more.
_NUMBERS, _BITS, _FAR = 4, 4, 2.0**-4


def _rounded_to(q: _Quantity) -> str | None:
    """Return the dtype, coarser than their own, that all numbers are rounded to, in a sentence; None if none is."""
    every = "every entry of " * (q.got.shape[-1] > 1)
    for narrow in _kept_by(q):
        if q.error <= 1.1 * _ROUNDING[narrow]:  # half an ulp of rounding, and the candidate's own arithmetic
            return f"{every}the {q.name} is rounded to {narrow}"
        if narrow == "float32" and q.error <= 2.0**-10:  # 29 bits that are 0 are no accident
            return f"{every}the {q.name} is computed in {narrow}"
    return None


def _inexact_and_rounded(q: _Quantity) -> str | None:
    """Return that all numbers are rounded to a dtype coarser than their own, whatever else they are, in a sentence."""
    fractions = np.frexp(np.unique(q.got[np.isfinite(q.got)]))[0] * 2.0**_BITS
    if np.count_nonzero(fractions % 1.0) < _NUMBERS or q.error > _FAR:
        return None
    for narrow in _kept_by(q):
        before = ", and was inexact before" * (q.error > 1.1 * _ROUNDING[narrow])
        return f"every entry of the {q.name} is rounded to {narrow}{before}"
    return None


def _kept_by(q: _Quantity) -> Iterator[str]:
    """Yield the dtypes coarser than their own that have all numbers, and not all right ones."""
    finite, due = np.isfinite(q.got), q.truth.astype(dtype_named(q.dtype)).astype(np.float64)
    for narrow in filter(has_dtype, _COARSER.get(q.dtype, ())):
        rounded, right = (each.astype(dtype_named(narrow)).astype(np.float64) for each in (q.got, q.truth))
        if (rounded == q.got)[finite].all() and not (right == due)[finite].all():
            yield narrow


def _place_of_loss(b: Textbook, q: _Quantity) -> str | None:
    """Describe the errors of losses (ranks, numbers); None if they have no pattern."""
    ranks = np.flatnonzero(q.wrong.any(axis=-1))
    where = [f"on {_some('rank', ranks)} only"] if len(ranks) < len(q.got) else []
    rows = q.wrong[ranks[0]]
    if b.problem.reduction == "none" and not rows.all():
        where += _smallest(rows, _rows(b)) or [f"in {_some('row', np.flatnonzero(rows))}"]
    only = np.zeros_like(q.wrong)
    only[ranks[0]] = rows
    return _sentence("loss", where, _relation(b, q, only))


def _place_of_gradient(b: Textbook, q: _Quantity) -> str | None:
    """Describe the errors of a gradient (rows, classes); None if they have no pattern."""
    if text := _other_logits(b, q):
        return text
    where = [] if q.wrong.all() else _smallest(q.wrong, _entries(b, q.truth))
    return _sentence("gradient", where, _relation(b, q, q.wrong))


def _other_logits(b: Textbook, q: _Quantity) -> str | None:
    """Name a logsumexp of other logits: probabilities of a row that are all too large, or too small, by one factor."""
    if "targets" not in b.problem.kind.arrays or not b.valid.any():
        return None
    factor = b.slope * (b.g / b.divisor)[:, None]
    of_lse = b.total + sum(derivative for _, derivative in b.of_lse())
    probabilities = (q.got / factor + b.u) / of_lse[:, None]
    sums = probabilities.sum(axis=-1)
    close = np.abs(probabilities - sums[:, None] * b.p).max(axis=-1, initial=0.0) <= q.close * b.p.max(axis=-1)
    off = np.where(b.valid, np.abs(sums - 1.0), 0.0)
    row = int(np.argmax(off))
    # One factor in all rows is another fault; rows of halves are off by roundings.
    if not close[b.valid].all() or off[row] <= 2.0 * q.close or np.ptp(sums[b.valid]) <= q.close:
        return None
    text = f"the probabilities of {b.problem.row_name(row)} sum to {sums[row]:.6g}, and have to sum to 1"
    return f"the gradient is wrong: its logsumexp is of other logits than its own, as of a rounded forward pass: {text}"


def _sentence(name: str, where: list[str], relation: str) -> str | None:
    if not where and not relation:
        return None
    return " ".join([f"the {name} is wrong", *where]) + (f": {relation}" if relation else "")


def _relation(b: Textbook, q: _Quantity, wrong: Array) -> str:
    """Return the relation of these wrong numbers to the right ones, "" if there is none."""
    these, right = q.got[wrong], q.truth[wrong]
    if np.isnan(these).all():
        return "nan" + " in rows that have a logit of -inf" * bool((b.x == -np.inf).any(axis=-1).all())
    if not np.isfinite(these).all() or not np.isfinite(right).all():
        return ""
    if not these.any():
        return f"0 where numbers up to {np.abs(right).max(initial=0.0):.3g} are due"
    largest = int(np.argmax(np.abs(right)))
    factor = float(these[largest] / right[largest]) if right[largest] else np.nan
    if np.isfinite(factor) and q.is_nearly(np.where(wrong, factor * q.truth, q.got)):
        meaning = _times(factor, b)
        if meaning or these.size > 1:
            return meaning or f"{factor:.4g} times what is due" * (abs(factor - 1.0) > 0.01)
    offset = float(these[largest] - right[largest])
    if q.name == "loss" and q.is_nearly(np.where(wrong, q.truth + offset, q.got)):
        meaning = _constant(abs(offset), b)
        if meaning or these.size > 1:
            return f"off by the constant {offset:.6g}{meaning}"
    return ""


def _times(factor: float, b: Textbook) -> str:
    """Explain a factor, "" if it has no meaning."""
    if np.isclose(factor, -1.0, rtol=1e-5):
        return "of the opposite sign"
    for number, what in ((b.problem.ranks, "ranks"), (b.problem.rows, "rows")):
        for times, side in ((factor, "large"), (1.0 / factor, "small")):
            if number > 1 and np.isclose(times, number, rtol=1e-5):
                return f"{times:.4g} times too {side}, the number of {what}"
    return ""


def _constant(size: float, b: Textbook) -> str:
    for number, what in ((b.problem.ranks, "the number of ranks"), (b.problem.classes, "the number of classes")):
        if number > 1 and np.isclose(size, np.log(number), rtol=1e-5):
            return f" = log({number}), {what}"
    return ""


def _entries(b: Textbook, truth: Array) -> Iterator[tuple[str, Array]]:
    """Yield sets of entries of the gradient, with a name."""
    problem = b.problem
    shape = b.p.shape
    target = b.q != 0
    if problem.with_numbers:
        yield "at the targets only", target
        yield "everywhere but at the targets", ~target
    owned = np.zeros(shape, np.bool_)
    first, last = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    for rank in range(problem.ranks):
        shard = b.in_shard(rank)
        owned |= b.owns(rank)[:, None] & shard
        yield f"on rank {rank} only", np.broadcast_to(shard, shape)
        if truth[:, shard].any():  # else it cannot be wrong there
            yield f"on all ranks but {rank}", np.broadcast_to(np.logical_not(shard), shape)
        columns = np.flatnonzero(shard)
        first[:, columns[:1]] = last[:, columns[-1:]] = True
    if problem.with_numbers and problem.ranks > 1:
        yield "on the shard that owns the target only", owned
        yield "on the shards that do not own the target only", ~owned & b.valid[:, None]
    yield "at the first class of each shard only", first
    yield "at the last class of each shard only", last
    yield "at logits of -inf only", b.x == -np.inf
    for text, rows in _rows(b):
        yield text, np.broadcast_to(rows[:, None], shape)


def _rows(b: Textbook) -> Iterator[tuple[str, Array]]:
    """Yield sets of rows, with a name."""
    problem, splits = b.problem, np.array(b.problem.splits)
    if problem.with_numbers:
        yield "in ignored rows only", ~b.valid
        yield "in rows that count", b.valid
        yield "in rows whose target is the first class of a shard only", np.isin(b.t, splits[:-1])
        yield "in rows whose target is the last class of a shard only", np.isin(b.t, splits[1:] - 1)
        for rank in range(problem.ranks):
            yield f"in rows whose target is on rank {rank} only", b.owns(rank)
    special = ~np.isfinite(b.x)
    yield "in rows with nan or infinite logits only", np.asarray(special.any(axis=-1))


def _smallest(wrong: Array, sets: Iterator[tuple[str, Array]]) -> list[str]:
    """Return the name of the smallest set, or side, that has all wrong numbers and is at least half wrong."""
    sides = []
    for axis, what in enumerate(("row", "class")[: wrong.ndim]):
        start = int(wrong.any(axis=tuple(other for other in range(wrong.ndim) if other != axis)).argmax())
        if start >= _LEADING:
            members = np.zeros_like(wrong)
            members[(slice(None),) * axis + (slice(start, None),)] = True
            sides.append((f"from {what} {start} on", members))
    fitting = [
        (int(members.sum()), text)
        for text, members in (*sets, *sides)
        if not (wrong & ~members).any() and not members.all() and 2 * wrong.sum() >= members.sum()
    ]
    return [min(fitting, key=lambda each: each[0])[1]] if fitting else []


def _some(what: str, numbers: Array) -> str:
    shown = ", ".join(map(str, numbers[:4])) + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")
    return f"{what}{'s' * (len(numbers) > 1)} {shown}"

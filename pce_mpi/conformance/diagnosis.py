"""Explain a wrong answer: by the known fault that gives this answer, or else by the place of its errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pce_mpi.arrays import compute_dtype_of
from pce_mpi.conformance.kinds import KINDS
from pce_mpi.conformance.places import inexact_and_rounded, place_of_gradient, place_of_loss, rounded_to
from pce_mpi.conformance.problems import Array, Kind, Problem
from pce_mpi.conformance.textbook import Answer, Given, Textbook
from pce_mpi.conformance.units import coarsest, finest

# An answer is that of a fault if it is this much closer to it than to the truth, one number alone so much more ...
_CLOSER, _ALONE = 8.0, 256.0
# ... and this close, in eps of the dtype: fault and candidate may round in another order.
_CLOSE = {2: 4.0, 4: 64.0, 8: 4096.0}
_HALVES = _CLOSE[2] * 2.0**-10
# Less than this many eps of the arithmetic, for a p of about 1, is no error, by the bytes of a logit.
_FLOOR = {2: 2.0, 4: 16.0, 8: 16.0}
# Larger problems are not compared with known faults: they are about the number of entries. Eight rows of the largest
# vocabularies, of 262,208 classes, are smaller.
MANY = 9 * 2**18


def explain(problem: Problem, losses: Sequence[Any], dlogits: Any, wrong_losses: Any, wrong_dlogits: Any) -> str | None:
    """Explain an answer in one line; None if it is right, or if only its numbers are known.

    losses          of each rank, shaped as the loss
    dlogits         the concatenated gradients of all ranks, shaped as the logits; None: the loss alone
    wrong_losses    (ranks, *shape of the loss), the losses that do not pass
    wrong_dlogits   shaped as the logits, the entries of the gradient that do not pass
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
        wrong = [quantity for quantity in quantities if quantity.wrong.any()]
        if not wrong:
            return None
        if meant := _another_kind(problem, declared, quantities):
            return meant
        known = list(declared.faults(book)) if book.p.size <= MANY else []
        # An exact test comes before formulas: the same numbers may be close to another fault's.
        texts = {
            q.name: (rounded_to(*q.beside_truth) if q.got.any() and q.dtype == problem.dtype.name else None)
            or declared.tell(book, q.name, q.got)
            or (None if q.got.any() else _place(book, q))
            for q in wrong
        }
        if not any(texts.values()) and (fitting := _fitting(quantities, known, lone=len(wrong) < 2)):
            # Many faults give nan: one is told by the rows that have it, if at all.
            told = len(set(fitting)) == 1 or not all(q.is_nan for q in wrong)
            return fitting[0] if told else _of_both(book, wrong, texts)
        for q in wrong:
            # A fault that does not explain what else is wrong fits roundings of halves by accident.
            if (text := texts[q.name] or _factor(book, q)) or not (q.is_nan or (q.close >= _HALVES and len(wrong) > 1)):
                texts[q.name] = text or next(iter(_fitting([q], known, lone=True)), None)
        if len(set(texts.values())) == 1 and len(texts) == len(quantities) and None not in texts.values():
            return next(iter(texts.values()))  # a fault with more than one form
        if len(wrong) > 1:
            return _of_both(book, wrong, texts)
        (only,) = wrong
        if (fault := texts[only.name]) is None:
            return _place(book, only)
        return f"{fault}, in the {only.name} only" if len(quantities) > 1 and only.name not in fault else fault


def _another_kind(problem: Problem, declared: Kind, quantities: Sequence[_Quantity]) -> str | None:
    """Return what to declare if these are the right numbers of another kind of candidate."""
    if not problem.with_numbers or not any(each.distance(each.truth) > each.close for each in quantities):
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
        if all(each.is_that_of(answer) for each in quantities):
            return kind.told
    return None


@dataclass(frozen=True)
class _Quantity:
    """The loss, (ranks, numbers), or the gradient, (rows, classes).

    `alone` are the numbers that are measured by their own size; others are measured by the largest of their row.
    `dtype` is the one of their ulps.
    """

    name: str
    dtype: str
    got: Array
    truth: Array
    wrong: Array
    close: float
    floor: Array | float  # smaller errors count as 0
    alone: Array

    @property
    def is_nan(self) -> bool:
        """True if all that is wrong is nan."""
        return bool(np.isnan(self.got[self.wrong]).all())

    @property
    def beside_truth(self) -> tuple[str, str, Array, Array, float]:
        """Its name and dtype, the numbers, the right ones and the distance of both."""
        return self.name, self.dtype, self.got, self.truth, self.distance(self.truth)

    def distance(self, other: Array) -> float:
        """Return the largest difference from `other`, relative to the sizes of the numbers."""
        size = _sizes(np.maximum(np.abs(other), np.abs(self.truth)), self.alone)
        same = (self.got == other) | (np.isnan(self.got) & np.isnan(other))
        comparable = np.isfinite(self.got) & np.isfinite(other)
        error = np.maximum(np.abs(self.got - other) - self.floor, 0.0)
        relative = np.where(error == 0.0, 0.0, error / size)
        return float(np.where(same, 0.0, np.where(comparable, relative, np.inf)).max(initial=0.0))

    def part(self, answer: Answer) -> Array:
        """Return this quantity of an answer."""
        if self.name == "gradient":
            return self.truth if answer.gradient is None else answer.gradient
        if answer.losses is None:
            return self.truth
        rows = np.stack([loss.reshape(-1) for loss in answer.losses])
        return np.broadcast_to(rows, self.got.shape)

    def is_that_of(self, answer: Answer, lone: bool = False) -> bool:
        """Return True if a fault with this answer explains the numbers; `lone`: no other quantity shows it."""
        distance = self.distance(self.part(answer))
        if not distance <= self.close:
            return False
        if not self.wrong.any():
            return True
        alone = len(np.unique(self.got)) == 1
        # Beside the floor, any two numbers near 0 are close, by coincidence.
        if alone and self.name == "loss" and (np.abs(self.got - self.part(answer)) * _CLOSER > np.abs(self.got)).any():
            return False
        return distance * (_ALONE if lone and alone else _CLOSER) <= self.distance(self.truth) > 0.0


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


def _quantity(
    name: str, unit: str, got: Array, truth: Array, wrong: Array, dtype: Any, floor: Any, alone: Array
) -> _Quantity:
    close = _CLOSE[np.dtype(dtype).itemsize] * _eps(dtype)
    got = np.where(np.isnan(got) & ~wrong, truth, got)  # nan that the judge allows is no fault
    return _Quantity(name, unit, got, truth, wrong, close, floor, alone)


def _fitting(quantities: list[_Quantity], known: list[tuple[str, Answer]], *, lone: bool) -> list[str]:
    """Return the faults that explain all of these quantities, the closest first."""
    found = [
        (sum(q.distance(q.part(answer)) for q in quantities), text)
        for text, answer in known
        if all(q.is_that_of(answer, lone) for q in quantities)
    ]
    return [text for _, text in sorted(found, key=lambda each: each[0])]


def _of_both(book: Textbook, wrong: list[_Quantity], faults: dict[str, str | None]) -> str | None:
    """Explain loss and gradient, each wrong in its own way."""
    said, unknown = [], []
    for quantity in wrong:
        fault, name = faults[quantity.name], quantity.name
        if fault is not None:
            said.append(
                fault if name in fault or (name == "loss" and None in faults.values()) else f"in the {name}: {fault}"
            )
        elif (place := _place(book, quantity)) is not None:
            said.append(place)
        elif any(faults.values()):
            unknown.append(f"the {name} is wrong too")
    return "; ".join(said + unknown) or None


def _factor(book: Textbook, q: _Quantity) -> str | None:
    """Return the place of errors that are one factor on all numbers."""
    largest = np.unravel_index(np.argmax(np.abs(np.where(np.isfinite(q.truth), q.truth, 0.0))), q.truth.shape)
    factor = q.got[largest] / q.truth[largest]
    return _place(book, q) if abs(factor - 1.0) > 0.01 and q.distance(factor * q.truth) <= q.close else None


def _place(book: Textbook, q: _Quantity) -> str | None:
    place = place_of_gradient if q.name == "gradient" else place_of_loss

    def close(numbers: Array) -> bool:
        distance = q.distance(numbers)
        return distance <= q.close and distance * _CLOSER <= q.distance(q.truth)

    return inexact_and_rounded(*q.beside_truth) or place(book, q.got, q.truth, q.wrong, close)


def _eps(dtype: Any) -> float:
    return 2.0**-7 if np.dtype(dtype).name == "bfloat16" else float(np.finfo(dtype).eps)

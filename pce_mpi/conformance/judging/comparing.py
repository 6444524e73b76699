"""Compare losses and gradients with the exact ones: how far off, at which place, in words. `judging` has the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import compute_dtype_of, dtype_named
from pce_mpi.conformance.judging.outcomes import Accuracy, ErrorMap, Finding
from pce_mpi.conformance.problems.problem import Array, Problem
from pce_mpi.conformance.problems.tolerances import Tolerance, Units, allowed, coarsest, finest
from pce_mpi.ulps import ulp

_MAP_ROWS, _MAP_CLASSES = 48, 192


def errors_in(got: Array, exact: Array, unit: Array) -> Array:
    """Return errors in `unit`s: 0 for equal special values, infinite for others, or if `exact` rounds to infinity."""
    with np.errstate(all="ignore"):
        error = np.abs(got.astype(np.float64) - exact) / unit
        rounded = exact.astype(got.dtype).astype(np.float64)
    wide = got.astype(np.float64)
    same = (wide == rounded) | (np.isnan(wide) & np.isnan(exact))
    special = ~np.isfinite(wide) | ~np.isfinite(exact)
    return np.where(special, np.where(same, 0.0, np.inf), error)


class Compared:
    """Numbers beside the exact ones, with their errors in `_unit`s and what is allowed of each; all of one shape.

    `_quantities` are judged apart: a name, and a mask of the numbers that have it.
    """

    _dtype: str  # the dtype of the units
    _quantities: list[tuple[str, Array]]
    numbers: Array  # float64
    _exact: Array
    _unit: Array
    errors: Array
    _allowed: Array
    _plain: Array | None = None  # the numbers of plain products, where logits are products

    @property
    def ratios(self) -> Array:
        """The errors beside what is allowed: numbers of more than 1 do not pass."""
        return self.errors / self._allowed

    @property
    def wrong(self) -> Array:
        """The numbers that do not pass."""
        return self.errors > self._allowed

    def _where(self, place: tuple[int, ...]) -> str:
        raise NotImplementedError

    def _worst(self, where: Array) -> tuple[int, ...]:
        """Return the place of the error that is largest beside what is allowed."""
        ratio = np.where(where, self.ratios, -1.0)
        return tuple(map(int, np.unravel_index(np.argmax(ratio), ratio.shape)))

    def accuracies(self) -> list[Accuracy]:
        """Return the worst error of each quantity."""
        with np.errstate(all="ignore"):
            best = errors_in(self._exact.astype(dtype_named(self._dtype)), self._exact, self._unit)
        plain = None if self._plain is None else errors_in(self._plain, self._exact, self._unit)
        return [
            Accuracy(
                quantity=quantity,
                dtype=self._dtype,
                error=float(self.errors[worst]),
                best=float(best[where].max(initial=0.0)),
                allowed=float(self._allowed[worst]),
                where=self._where(worst),
                plain=None if plain is None else float(plain[where].max(initial=0.0)),
            )
            for quantity, where in self._quantities
            if where.any()
            for worst in [self._worst(where)]
        ]

    def findings(self) -> list[Finding]:
        """Return one finding at most, of the first quantity that is wrong."""
        for quantity, where in self._quantities:
            if (self.errors > self._allowed)[where].any():
                return [self._finding(quantity, self._worst(where))]
        return []

    def _finding(self, quantity: str, worst: tuple[int, ...]) -> Finding:
        got, exact, error = (float(numbers[worst]) for numbers in (self.numbers, self._exact, self.errors))
        where = self._where(worst)
        place = (" " if where.startswith("(") else " in ") + where if where else ""
        digits = next((n for n in range(6, 17) if f"{got:.{n}g}" != f"{exact:.{n}g}"), 17)
        numbers = f"{quantity} is {got:.{digits}g} where {exact:.{digits}g} is right{place}"
        if not math.isfinite(error):
            return Finding("not finite" if math.isfinite(exact) else quantity, numbers)
        limit = self._allowed[worst]
        if exact == 0.0:  # it has no digits, and so no ulps that tell anything
            return Finding(quantity, f"{numbers}: no more than {limit * self._unit[worst]:.3g} is allowed")
        return Finding(quantity, f"{numbers}: {error:.3g} ulp of {self._dtype} off, {limit:.3g} allowed")


class Losses(Compared):
    """Compares the losses of all ranks with the exact one; `errors` and `wrong` are (ranks, *shape of the loss).

    The logits are `of` a dtype, an ulp is at least `floor`, and a loss adds up so many rows and has `room` for more.
    """

    def __init__(
        self,
        name: str,
        losses: Sequence[Array],
        exact: Array,
        of: np.dtype[Any],
        floor: Array,
        room: Array,
        added: int,
        row_name: Callable[[int], str],
        tolerance: Tolerance,
    ) -> None:
        self._name, self.losses, self._row_name = name, losses, row_name
        arithmetic = compute_dtype_of(of).name
        self._dtype = finest(coarsest(arithmetic, *(loss.dtype.name for loss in losses)), of.name)
        unit = np.maximum(ulp(exact, coarsest(self._dtype, arithmetic)), floor)
        limit = allowed(tolerance, self._dtype) + room / unit
        limit = limit + math.log2(max(1, added)) * ulp(exact, arithmetic) / unit
        self.numbers = np.stack([loss.astype(np.float64) for loss in losses])
        self.errors = np.stack([errors_in(loss, exact, unit) for loss in losses])
        shape = self.errors.shape
        self._exact, self._unit, self._allowed = (np.broadcast_to(each, shape) for each in (exact, unit, limit))
        self._quantities = [(name, np.ones(shape, np.bool_))]

    @classmethod
    def of(cls, problem: Problem, losses: Sequence[Array], tolerance: Tolerance) -> Losses:
        """Return the losses of a problem."""
        name, exact, floor = problem.kind.noun, problem.expected[0], Units.of(problem, tolerance.strict).floor
        added = problem.rows if problem.reduction != "none" else 1
        compared = cls(name, losses, exact, problem.dtype, floor, problem.room, added, problem.row_name, tolerance)
        if problem.may_be_nan is not None and not tolerance.strict:
            counts = (problem.may_be_nan & problem.valid).reshape(problem.rows_shape)
            forgiven = counts if problem.reduction == "none" else counts.any()
            compared.errors[np.isnan(compared.numbers) & forgiven] = 0.0
        if problem.operands is not None and not problem.operands.with_identity:
            compared._plain = np.broadcast_to(problem.with_plain_product.expected[0], compared.numbers.shape)
        return compared

    def _where(self, place: tuple[int, ...]) -> str:
        rank, *index = place
        row = self._row_name(int(np.ravel_multi_index(index, self._exact.shape[1:]))) if index else ""
        return f"{row} (rank {rank})".strip() if self.differing() else row

    @property
    def unequal(self) -> Array:
        """The losses that are not those of rank 0, which has none of these."""
        first = self.numbers[0]
        return (self.numbers != first) & ~(np.isnan(self.numbers) & np.isnan(first))

    def differing(self) -> list[Finding]:
        """Return the first difference between two ranks."""
        first = self.losses[0]
        for rank, loss in enumerate(self.losses[1:], start=1):
            if loss.dtype != first.dtype:
                text = f"the {self._name} has dtype {first.dtype} on rank 0 and {loss.dtype} on rank {rank}"
                return [Finding("ranks differ", text)]
            if (unequal := self.unequal[rank]).any():
                row = int(np.argmax(unequal))
                place = f" in {self._row_name(row)}" if first.ndim else ""
                one, other = (self.numbers[each].reshape(-1)[row] for each in (0, rank))
                text = f"the {self._name}{place} is {one:.9g} on rank 0 and {other:.9g} on rank {rank}"
                return [Finding("ranks differ", text)]
        return []


class Gradients(Compared):
    """Compares the concatenated gradient of all shards with the exact one.

    `array` and `wrong` are shaped as the logits. Gathered logits have a gradient on each rank: the worst is compared.
    """

    def __init__(self, problem: Problem, shards: Sequence[Array], tolerance: Tolerance) -> None:
        self._problem, self._tolerance = problem, tolerance
        self._dtype = problem.dtype.name
        self._exact = problem.row_major(problem.expected[1])
        self._allowed = np.full(self._exact.shape, allowed(tolerance, self._dtype))
        units = Units.of(problem, tolerance.strict)
        self._unit, self._at_target = units.gradient, units.at_target
        self._quantities = [("gradient", ~self._at_target), ("gradient at targets", self._at_target)]
        whole = list(shards) if problem.gathered else [np.concatenate(shards, axis=problem.axis)]
        errors = [self._judged(problem.row_major(array)) for array in whole]
        worst = int(np.argmax([each.max(initial=0.0) for each in errors]))
        self.array, self.errors = whole[worst], errors[worst]
        self.numbers = problem.row_major(self.array).astype(np.float64)

    @property
    def wrong(self) -> Array:
        """The entries that do not pass, shaped as the logits."""
        by_row = super().wrong.reshape(*self._problem.rows_shape, self._problem.classes)
        return np.moveaxis(by_row, -1, self._problem.axis)

    def _judged(self, got: Array) -> Array:
        errors = errors_in(got, self._exact, self._unit)
        missing = np.isnan(got.astype(np.float64))
        # In a row without a softmax, any entries may be nan, as long as some are.
        lost = np.isnan(self._exact).any(axis=-1)
        any_will_do = missing[lost].any(axis=-1) | (not self._problem.kind.lost_has_nan)
        errors[lost] = np.where(any_will_do, 0.0, np.inf)[:, None]
        if self._problem.may_be_nan is not None and not self._tolerance.strict:
            errors[missing & self._problem.may_be_nan[:, None]] = 0.0
        return errors

    def _where(self, place: tuple[int, ...]) -> str:
        row, number = place
        text = self._problem.kind.worded(f"{self._problem.row_name(row)}, class {number}")
        return text if self._problem.gathered else f"{text} (rank {self._problem.rank_of(number)})"

    def _finding(self, quantity: str, worst: tuple[int, ...]) -> Finding:
        if np.isnan(self._exact[worst]) and not np.isnan(self.numbers[worst[0]]).any():
            row = self._problem.row_name(worst[0])
            return Finding(quantity, f"the gradient of {row} is finite where nan is right")
        return super()._finding(quantity, worst)

    def picture(self) -> ErrorMap:
        """Return the errors by (row, class)."""
        rows, classes = self.errors.shape
        row_starts = _block_starts(rows, _MAP_ROWS)
        class_starts = _block_starts(classes, _MAP_CLASSES)

        def worst(errors: Array) -> Array:
            return np.maximum.reduceat(np.maximum.reduceat(errors, row_starts, axis=0), class_starts, axis=1)

        errors, below = self.ratios, self.numbers < self._exact
        too_large, too_small = (worst(np.where(below == side, errors, 0.0)) for side in (False, True))
        blocks = np.where(too_large >= too_small, too_large, -too_small)
        at = zip((row_starts, class_starts), np.nonzero(self._at_target), strict=True)
        of_targets = [(np.searchsorted(starts, numbers, side="right") - 1).tolist() for starts, numbers in at]
        return ErrorMap(
            errors=blocks.tolist(),
            splits=[split * class_starts.size / classes for split in self._problem.splits],
            rows=rows,
            classes=classes,
            targets=sorted(set(zip(*of_targets, strict=True))),
        )


def _block_starts(length: int, most: int) -> Array:
    """Return the starts of at most `most` nearly equal blocks."""
    blocks = min(length, most)
    return np.arange(blocks) * length // blocks

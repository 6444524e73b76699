"""Compare losses and gradients with the exact ones: how far off, at which place, in words. `judging` has the rules."""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import compute_dtype_of, dtype_named
from pce_mpi.conformance.judging.outcomes import Accuracy, ErrorMap, Finding
from pce_mpi.conformance.problems.problem import Array, Problem
from pce_mpi.conformance.problems.tolerances import Tolerance, Units, allowed, coarsest, finest, ulp

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


def errors_of_losses(
    losses: Sequence[Array],
    exact: Array,
    of: np.dtype[Any],
    floor: Array,
    room: Array,
    added: int,
    tolerance: Tolerance,
) -> tuple[str, Array, Array, Array]:
    """Return the dtype of an ulp, its size, how many are allowed, and the errors of each rank's losses.

    The logits are `of` a dtype, an ulp is at least `floor`, and a loss adds up so many rows and has `room` for more.
    """
    arithmetic = compute_dtype_of(of).name
    dtype = finest(coarsest(arithmetic, *(loss.dtype.name for loss in losses)), of.name)
    unit = np.maximum(ulp(exact, coarsest(dtype, arithmetic)), floor)
    limit = np.full(np.shape(exact), allowed(tolerance, dtype))
    limit += room / unit
    limit += math.log2(max(1, added)) * ulp(exact, arithmetic) / unit
    return dtype, unit, limit, np.stack([errors_in(loss, exact, unit) for loss in losses])


def ulps_off(exact: float, error: float, allowed: float, unit: float, dtype: str) -> str:
    """Say how far off a number is, and may be; 0 has no digits, and so no ulps that tell anything."""
    if exact == 0.0:
        return f"no more than {allowed * unit:.3g} is allowed"
    return f"{error:.3g} ulp of {dtype} off, {allowed:.3g} allowed"


class Compared:
    """Numbers beside the exact ones, with their errors in `_unit`s and what is allowed of each; all of one shape.

    `_quantities` are judged apart: a name, and a mask of the numbers that have it.
    """

    _problem: Problem
    _dtype: str  # the dtype of the units
    _quantities: list[tuple[str, Array]]
    _got: Array
    _exact: Array
    _unit: Array
    _errors: Array
    _allowed: Array
    _plain: Array | None = None  # the numbers of plain products, where logits are products

    def _where(self, place: tuple[int, ...]) -> str:
        raise NotImplementedError

    def _worst(self, where: Array) -> tuple[int, ...]:
        """Return the place of the error that is largest beside what is allowed."""
        ratio = np.where(where, self._errors / self._allowed, -1.0)
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
                error=float(self._errors[worst]),
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
            if (self._errors > self._allowed)[where].any():
                return [self._finding(quantity, self._worst(where))]
        return []

    def _finding(self, quantity: str, worst: tuple[int, ...]) -> Finding:
        got, exact, error = (float(numbers[worst]) for numbers in (self._got, self._exact, self._errors))
        where = self._where(worst)
        place = (" " if where.startswith("(") else " in ") + where if where else ""
        digits = next((n for n in range(6, 17) if f"{got:.{n}g}" != f"{exact:.{n}g}"), 17)
        numbers = f"{quantity} is {got:.{digits}g} where {exact:.{digits}g} is right{place}"
        if math.isfinite(error):
            said = ulps_off(exact, error, self._allowed[worst], self._unit[worst], self._dtype)
            return Finding(quantity, f"{numbers}: {said}")
        return Finding("not finite" if math.isfinite(exact) else quantity, numbers)


class Losses(Compared):
    """Compares the losses of all ranks with the exact one; `wrong` is (ranks, *shape of the loss)."""

    def __init__(self, problem: Problem, losses: Sequence[Array], tolerance: Tolerance) -> None:
        self._problem, self._name = problem, problem.kind.noun
        self.losses = losses
        exact, floor = problem.expected[0], Units.of(problem, tolerance.strict).floor
        added = problem.rows if problem.reduction != "none" else 1
        self._dtype, unit, limit, self._errors = errors_of_losses(
            losses, exact, problem.dtype, floor, problem.room, added, tolerance
        )
        self._got = np.stack([loss.astype(np.float64) for loss in losses])
        if problem.may_be_nan is not None and not tolerance.strict:
            counts = (problem.may_be_nan & problem.valid).reshape(problem.rows_shape)
            forgiven = counts if problem.reduction == "none" else counts.any()
            self._errors[np.isnan(self._got) & forgiven] = 0.0
        shape = self._errors.shape
        self._exact, self._unit, self._allowed = (np.broadcast_to(each, shape) for each in (exact, unit, limit))
        if problem.operands is not None and not problem.operands.with_identity:
            self._plain = np.broadcast_to(problem.with_plain_product.expected[0], shape)
        self._quantities = [(self._name, np.ones(shape, np.bool_))]
        self.wrong = self._errors > self._allowed

    def _where(self, place: tuple[int, ...]) -> str:
        rank, *index = place
        row = self._problem.row_name(int(np.ravel_multi_index(index, self._exact.shape[1:]))) if index else ""
        alike = all(_bits(loss) == _bits(self.losses[0]) for loss in self.losses)
        return row if alike else f"{row} (rank {rank})".strip()

    def differing(self) -> list[Finding]:
        """Return the first difference between the bits of two ranks."""
        first = self.losses[0]
        for rank, loss in enumerate(self.losses[1:], start=1):
            if loss.dtype != first.dtype:
                text = f"the {self._name} has dtype {first.dtype} on rank 0 and {loss.dtype} on rank {rank}"
                return [Finding("ranks differ", text)]
            if _bits(loss) != _bits(first):
                a, b = first.astype(np.float64).reshape(-1), loss.astype(np.float64).reshape(-1)
                row = int(np.argmax((a != b) & ~(np.isnan(a) & np.isnan(b))))
                place = f" in {self._problem.row_name(row)}" if first.ndim else ""
                text = f"the {self._name}{place} is {a[row]:.9g} on rank 0 and {b[row]:.9g} on rank {rank}"
                return [Finding("ranks differ", text)]
        return []


def _bits(array: Array) -> bytes:
    """Return the bytes of an array, with one nan and -0 as 0."""
    array = array + np.zeros((), array.dtype)
    return np.where(np.isnan(array.astype(np.float64)), np.asarray(np.nan, array.dtype), array).tobytes()


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
        self.array, self._errors = whole[worst], errors[worst]
        self._got = problem.row_major(self.array).astype(np.float64)
        wrong = (self._errors > self._allowed).reshape(*problem.rows_shape, problem.classes)
        self.wrong = np.moveaxis(wrong, -1, problem.axis)

    def _judged(self, got: Array) -> Array:
        errors = errors_in(got, self._exact, self._unit)
        missing = np.isnan(got.astype(np.float64))
        # In a row without a softmax, any entries may be nan, as long as some are.
        lost = np.isnan(self._exact).any(axis=-1)
        errors[lost] = np.where(missing[lost].any(axis=-1), 0.0, np.inf)[:, None]
        if self._problem.may_be_nan is not None and not self._tolerance.strict:
            errors[missing & self._problem.may_be_nan[:, None]] = 0.0
        return errors

    def _where(self, place: tuple[int, ...]) -> str:
        row, number = place
        text = f"{self._problem.row_name(row)}, class {number}"
        return text if self._problem.gathered else f"{text} (rank {self._problem.rank_of(number)})"

    def _finding(self, quantity: str, worst: tuple[int, ...]) -> Finding:
        if np.isnan(self._exact[worst]) and not np.isnan(self._got[worst[0]]).any():
            row = self._problem.row_name(worst[0])
            return Finding(quantity, f"the gradient of {row} is finite where nan is right")
        return super()._finding(quantity, worst)

    def picture(self) -> ErrorMap:
        """Return the errors by (row, class)."""
        rows, classes = self._errors.shape
        row_starts = _block_starts(rows, _MAP_ROWS)
        class_starts = _block_starts(classes, _MAP_CLASSES)

        def worst(errors: Array) -> Array:
            return np.maximum.reduceat(np.maximum.reduceat(errors, row_starts, axis=0), class_starts, axis=1)

        errors, below = self._errors / self._allowed, self._got < self._exact
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

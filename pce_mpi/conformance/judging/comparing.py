"""Compare losses, gradients and bits with those that are due: how far off, where, in words. `judging` has the rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
import math
import re
from typing import Any, NamedTuple

import numpy as np

from pce_mpi.arrays import compute_dtype_of, dtype_named
from pce_mpi.conformance.judging.outcomes import Accuracy, ErrorMap, Fault, Finding
from pce_mpi.conformance.problems.kinds.sharding import by_ranks
from pce_mpi.conformance.problems.problem import Array, Problem
from pce_mpi.conformance.problems.textbook import Textbook
from pce_mpi.conformance.text import meant
from pce_mpi.exact.products import product
from pce_mpi.ulps import FORMATS, ulp

_ALLOWED = {"float64": 32.0, "float32": 8.0, "float16": 2.0, "bfloat16": 2.0}
# Our own functions stay below these; in float64 `dense` errs as well.
_STRICT = {"float64": 8.0, "float32": 5.0, "float16": 1.0, "bfloat16": 1.0}


@dataclass(frozen=True)
class Tolerance:
    """The allowed error of an answer.

    Parameters
    ----------
    strict : bool
        Allow 8, 5 and 1 ulp of float64, float32 and the halves, without a floor, in place of 32, 8 and 2.
    factor : float
        Multiplies what is allowed.
    """

    strict: bool = False
    factor: float = 1.0


def allowed(tolerance: Tolerance, dtype: str) -> float:
    """Return how many ulps of a dtype pass."""
    return tolerance.factor * (_STRICT if tolerance.strict else _ALLOWED)[dtype]


def coarsest(*dtypes: str) -> str:
    """Return the dtype with the fewest bits in its fraction."""
    return min(dtypes, key=lambda dtype: FORMATS[dtype][0])


def finest(*dtypes: str) -> str:
    """Return the dtype with the most bits in its fraction."""
    return max(dtypes, key=lambda dtype: FORMATS[dtype][0])


def least_unit(sums: Array, arithmetic: str, strict: bool = False) -> Array:
    """Return the least ulp of each row: that of a term of size 1, or of the largest sum in its products, 0 for none."""
    return np.maximum(0.0 if strict else ulp(1.0, arithmetic), np.where(sums == 0.0, 0.0, ulp(sums, arithmetic)))


class Units(NamedTuple):
    """The size of one ulp.

    floor      shaped as the loss, of which an ulp is never less
    gradient   (rows, classes)
    at_target  (rows, classes) the entries that are measured by their own size
    """

    floor: Array
    gradient: Array
    at_target: Array

    @classmethod
    @np.errstate(all="ignore")
    def of(cls, problem: Problem, strict: bool) -> Units:
        """Return the units of a problem."""
        arithmetic = compute_dtype_of(problem.dtype).name
        upstream, slope, opposed = problem.kind.sizes(Textbook.of(problem))
        exact = np.abs(problem.row_major(problem.expected[1]))
        at_target = np.zeros(exact.shape, np.bool_)
        if problem.with_numbers:
            counted = np.flatnonzero(problem.valid)
            at_target[counted, problem.targets.reshape(-1)[counted]] = True
        size = np.maximum(exact, opposed)
        others = np.where(np.isfinite(size) & ~at_target, size, 0.0)
        size = np.where(at_target, size, others.max(axis=-1, keepdims=True, initial=0.0))
        floor = least_unit(problem.largest_sums, arithmetic, strict)
        by_row = floor * np.nan_to_num(upstream)
        by_row = by_row.reshape(problem.rows_shape) if problem.reduction == "none" else by_row.sum()
        gradient = np.maximum(ulp(size, problem.dtype.name), (floor * np.nan_to_num(slope))[:, None])
        return cls(by_row, gradient, at_target)


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


def other_bits(
    problem: Problem, losses: Sequence[Array], shards: Sequence[Array], loss: Array, gradient: Array | None
) -> list[Finding]:
    """Return the first difference of the ranks' losses from the loss on one rank, and that of the gradients."""

    def row(place: int) -> str:
        return f" in {problem.row_name(place)}" * (problem.loss_shape != ())

    def entry(place: int) -> str:
        places = np.arange(problem.logits.size).reshape(problem.logits.shape)
        row, number = map(int, np.argwhere(problem.row_major(places) == place)[0])
        return f" in {problem.row_name(row)}, class {number} (rank {problem.rank_of(number)})"

    name = problem.kind.noun
    texts = [
        f"{name}{f' on rank {rank}' * (rank > 0)}{text}"
        for rank, each in enumerate(losses)
        if (text := difference(each, loss, row))
    ][:1]
    if shards and gradient is not None:
        shapes = [problem.part(problem.logits, rank).shape for rank in range(len(shards))]
        parts = [shard.reshape(shape) for shard, shape in zip(shards, shapes, strict=True)]
        if text := difference(np.concatenate(parts, axis=problem.axis), gradient, entry):
            texts.append(f"gradient{text}")
    return [Finding("other bits", f"the bits differ from one rank's ({text})") for text in texts]


def difference(got: Array, one: Array, where: Callable[[int], str] = lambda place: "") -> str:
    """Describe the first difference, "" if there is none; `where` names the place of a number."""
    if got.size != one.size or got.dtype != one.dtype:
        return f": {got.dtype}{got.shape} against {one.dtype}{one.shape}"
    different = np.flatnonzero((_bytes(got) != _bytes(one)).any(axis=-1))
    if not different.size:
        return ""
    first = int(different[0])
    numbers = " against ".join(_hexadecimal(array.reshape(-1)[first]) for array in (got, one))
    return f"{where(first)}: {numbers}" + f"; {different.size} of {got.size} differ" * (got.size > 1)


def _bytes(array: Array) -> Array:
    """Return the bytes of each number, with one nan for all."""
    is_nan = np.isnan(array.astype(np.float64))
    one_nan = np.where(is_nan, np.asarray(np.nan, array.dtype), array) if is_nan.any() else array
    return np.frombuffer(one_nan.tobytes(), np.uint8).reshape(array.size, array.itemsize)


def _hexadecimal(number: Any) -> str:
    return re.sub(r"\.?0*p", "p", float(number).hex())


# Larger chunks are so few that sums of them in half precision pass.
_CHUNKS = (*range(1, 9), *(2**power for power in range(4, 9)))
# Sums in half precision explain errors that are so many times those that are left.
_CLOSER_SUMS = 4.0


def of_products(problem: Problem, answers: Sequence[Mapping[str, Array]], tolerance: Tolerance) -> list[Product]:
    """Return the comparisons of the gradients by name that all ranks gave."""
    if problem.operands is None or problem.gathered:
        return []
    with np.errstate(all="ignore"):
        return [Product(problem, name, [each[name] for each in answers], tolerance) for name in answers[0]]


class Product(Compared):
    """Compares one gradient, (ranks or 1, rows or features, features or classes).

    It is a product a @ b, of which either has the gradient of the logits.
    """

    def __init__(self, problem: Problem, name: str, gradients: Sequence[Array], tolerance: Tolerance) -> None:
        self._problem, self._name, self._dtype = problem, name, problem.dtype.name
        wide = compute_dtype_of(problem.dtype)
        gradient = problem.row_major(problem.expected[1])
        a, b = self._factors(gradient)
        exact = product(a, b, a.shape[-1])
        if name == "dhidden":
            shards = [slice(*each) for each in pairwise(problem.splits)]
            self._parts = np.stack([product(a[:, shard], b[shard], a.shape[-1]) for shard in shards])
            whole = [each.astype(np.float64).reshape(exact.shape) for each in gradients]
            self._each = np.stack(whole)
            if problem.conventions["dhidden"] == "partial":
                whole = [self._each.sum(axis=0)]
        else:
            self._parts = exact[None]
            whole = [np.concatenate(gradients, axis=-1).astype(np.float64).reshape(exact.shape)]
        self.numbers = np.stack(whole)
        of_gradient = Units.of(problem, tolerance.strict).gradient
        left, right = self._factors(of_gradient)
        blurred = np.sqrt(left**2 @ right**2)
        size = ulp(np.abs(a) @ np.abs(b), wide.name) + ulp(np.abs(self._parts).sum(axis=0), self._dtype)
        unit = ulp(np.abs(exact).max(axis=-1, keepdims=True, initial=0.0), self._dtype)
        limit = allowed(tolerance, self._dtype) * (1.0 + np.minimum((blurred + size) / unit, 1e300))
        a, b = (each.astype(wide) for each in self._factors(problem.row_major(problem.with_plain_product.expected[1])))
        shape = self.numbers.shape
        self._plain = np.broadcast_to((a @ b).astype(np.float64), shape)
        self._exact, self._unit, self._allowed = (np.broadcast_to(each, shape) for each in (exact, unit, limit))
        self.errors = errors_in(self.numbers, self._exact, self._unit)
        self._quantities = [(name, np.ones(shape, np.bool_))]

    def _factors(self, of_logits: Array) -> tuple[Array, Array]:
        """Return the factors of this gradient for that of the logits, float64."""
        operands = self._problem.operands
        assert operands is not None
        if self._name == "dhidden":
            return of_logits, operands.w.T.astype(np.float64)
        if self._name == "dw":
            return operands.hidden.T.astype(np.float64), of_logits
        return np.ones((1, len(of_logits))), of_logits

    def of(self, gradient: Array) -> Array:
        """Return the product that a gradient of the logits, (rows, classes), gives; on all ranks the same."""
        a, b = self._factors(gradient)
        return np.broadcast_to(a @ b, self.numbers.shape)

    @property
    def slack(self) -> Array:
        """The errors that pass."""
        return self._allowed * self._unit

    def accuracies(self) -> list[Accuracy]:
        """Return the worst error of a real product: sums of other cases may cancel as no head's do."""
        operands = self._problem.operands
        return [] if operands is not None and operands.with_identity else super().accuracies()

    def _where(self, place: tuple[int, ...]) -> str:
        rank, row, column = place
        if self._name == "dhidden":
            text = f"{self._problem.row_name(row)}, feature {column}"
            return f"{text} (rank {rank})" if len(self.numbers) > 1 else text
        text = f"class {column} (rank {self._problem.rank_of(column)})"
        return f"feature {row}, {text}" if self._name == "dw" else text

    def _finding(self, quantity: str, worst: tuple[int, ...]) -> Finding:
        finding = super()._finding(quantity, worst)
        if text := self._fault():
            finding.text, finding.faults = f"{text} ({finding.text})", [Fault([text])]
        return finding

    def _fault(self) -> str | None:
        """Name what a sum over the rows of dw, or over the ranks, has to do with the errors; None if nothing has."""
        ranks = self._problem.ranks
        if self._name == "dw" and self._problem.dtype.itemsize == 2:
            return self._narrow_sum()
        if self._name != "dhidden" or ranks == 1:
            return None
        for times, text in by_ranks(ranks):
            if len(self.numbers) > 1 and self._is(times * self._exact, times):
                return f"dhidden is {text}"
        if len(self.numbers) == 1:
            text, seen = f"{ranks} times too large: each rank has the sum over all ranks", self._exact
        else:
            text, seen = "of each rank's own classes: it is not summed over the ranks", self._parts
        declared = "summed" if len(self.numbers) == 1 else "partial"
        return f"dhidden is {text}; {meant(dhidden=declared)}" if self._is(seen) else None

    def _narrow_sum(self) -> str | None:
        """Name sums over chunks of rows that are kept in half precision; None if no chunk gives these errors."""
        hidden, gradient = self._factors(self._problem.row_major(self._problem.expected[1]))
        error = np.abs(self.numbers[0] - self._exact[0]).max()
        for rows in _CHUNKS:
            if rows >= hidden.shape[-1]:
                return None
            for added in (self._problem.dtype, compute_dtype_of(self._problem.dtype)):
                sums = np.zeros(self._exact[0].shape, self._problem.dtype)
                for start in range(0, hidden.shape[-1], rows):
                    part = hidden[:, start : start + rows] @ gradient[start : start + rows]
                    sums = (sums + part.astype(added)).astype(sums.dtype)
                # Roundings of another chunk are others, but for the small terms that a large sum loses.
                if np.abs(self.numbers[0] - sums.astype(np.float64)).max() * _CLOSER_SUMS <= error:
                    return f"dw is added up in {sums.dtype}, in steps of {rows} row{'s' * (rows > 1)}"
        return None

    def _is(self, numbers: Array, times: float = 1.0) -> bool:
        return bool((np.abs(self._each - numbers) <= times * self.slack).all())

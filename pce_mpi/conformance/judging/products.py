"""Compare the gradients of the factors of logits, hidden @ w + bias, with exact products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pce_mpi.arrays import compute_dtype_of
from pce_mpi.conformance.judging.comparing import Compared, errors_in
from pce_mpi.conformance.judging.outcomes import Accuracy, Fault, Finding
from pce_mpi.conformance.problems.problem import Array, Problem
from pce_mpi.conformance.problems.tolerances import Tolerance, Units, allowed
from pce_mpi.conformance.text import meant
from pce_mpi.exact.products import product
from pce_mpi.ulps import ulp

# Larger chunks are so few that sums of them in half precision pass.
_CHUNKS = (*range(1, 9), *(2**power for power in range(4, 9)))
# Sums in half precision explain errors that are so many times those that are left.
_CLOSER = 4.0


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
            shards = zip(problem.splits[:-1], problem.splits[1:], strict=True)
            self._parts = np.stack(
                [product(a[:, shard], b[shard], a.shape[-1]) for shard in (slice(*each) for each in shards)]
            )
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
        for times, text in (
            (float(ranks), f"{ranks} times too large: it is summed over the ranks once more"),
            (1.0 / ranks, f"{ranks} times too small: it is divided by the number of ranks"),
        ):
            if len(self.numbers) > 1 and self._is(times * self._exact, times):
                return f"dhidden is {text}"
        if len(self.numbers) == 1:
            text = (
                f"dhidden is {ranks} times too large: each rank has the sum over all ranks; {meant(dhidden='summed')}"
            )
            return text if self._is(np.broadcast_to(self._exact, self._each.shape)) else None
        text = f"dhidden is of each rank's own classes: it is not summed over the ranks; {meant(dhidden='partial')}"
        return text if self._is(self._parts) else None

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
                if np.abs(self.numbers[0] - sums.astype(np.float64)).max() * _CLOSER <= error:
                    return f"dw is added up in {sums.dtype}, in steps of {rows} row{'s' * (rows > 1)}"
        return None

    def _is(self, numbers: Array, times: float = 1.0) -> bool:
        return bool((np.abs(self._each - numbers) <= times * self.slack).all())

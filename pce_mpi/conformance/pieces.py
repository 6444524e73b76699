"""Pieces of a recording: the problems of some of its rows, and their exact numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from pce_mpi.conformance.launching import number_of_cores
from pce_mpi.conformance.problems import Array, Problem
from pce_mpi.conformance.recordings import Recording
from pce_mpi.conformance.textbook import Textbook
from pce_mpi.loss import (
    class_statistics_backward,
    class_statistics_forward,
    softmax_cross_entropy,
    softmax_cross_entropy_value_and_grad,
)

T = TypeVar("T")

# A piece has so many logits; where they are products of which w is read again for each piece, more.
LOGITS, _PRODUCTS = 2**18, 2**23


def pieces(recording: Recording) -> list[Array]:
    """Return the numbers of the rows of each piece of a recording."""
    rows = max(1, (_PRODUCTS if recording.has("hidden") else LOGITS) // recording.splits[-1])
    return np.array_split(np.arange(recording.rows), -(-recording.rows // rows))


def each_piece(work: Callable[[Array], T], all_rows: list[Array]) -> Iterator[tuple[Array, T]]:
    """Yield each piece and the result of the work on it; several are worked on at once."""
    # Once a block of this size was freed, the allocator keeps smaller ones: pages of new ones took half of the time.
    np.empty(2**25 - 2**20, np.uint8)
    with ThreadPoolExecutor(number_of_cores()) as pool:
        try:
            yield from zip(all_rows, pool.map(work, all_rows), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, eq=False)
class Piece(Problem):
    """Some rows of a recording; `sums` has the largest sum in the products of each, 0 where logits are recorded.

    `flips` has how much the number of each changes where errors of products round logits to the other neighbour.
    """

    sums: Array = field(default_factory=lambda: np.zeros(0))
    flips: Array = field(default_factory=lambda: np.zeros(0))

    @property
    def largest_sums(self) -> Array:
        """As of `Problem`, whose factors need not be in memory here."""
        return self.sums

    @property
    def room(self) -> Array:
        """As of `Problem`."""
        if self.reduction == "none":
            return self.flips.reshape(self.rows_shape)
        return np.asarray(self.flips.sum() / (Textbook.of(self).divisor if self.reduction == "mean" else 1.0))


def exact_numbers(name: str, problem: Problem, with_gradient: bool = False) -> tuple[Array, Array | None]:
    """Return the exact number of each row and, if wanted, the gradient of their sum; in the arithmetic of float64."""
    options: dict[str, Any] = {**problem.exact_options, "compute_dtype": np.float64}
    out = np.empty(problem.logits.shape) if with_gradient else None
    if name == "loss":
        options["reduction"] = "none"
        if out is None:
            return softmax_cross_entropy(problem.logits, problem.targets, **options), None
        return softmax_cross_entropy_value_and_grad(problem.logits, problem.targets, out=out, **options)
    targets = problem.targets if problem.with_numbers else None
    statistics, residuals = class_statistics_forward(problem.logits, targets, **options)
    numbers = getattr(statistics, name)
    if out is not None:
        class_statistics_backward(residuals, out=out, **{name: np.ones(problem.rows)})
    return numbers, out

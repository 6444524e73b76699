"""The answers that faults give, by the formulas of faults that projects have shipped.

The kinds of candidates have the formulas, a function for each family. A candidate in `tests/candidates` has each of
them; a fault that no project has shown has no place there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pce_mpi.conformance.problems import Array
from pce_mpi.conformance.textbook import Textbook


@dataclass(frozen=True)
class Given:
    """An answer; None is a quantity that the fault does not change.

    losses     of each rank, or one for all if they are equal
    gradient   (rows, classes)
    """

    losses: tuple[Array, ...] | None
    gradient: Array | None


@dataclass(frozen=True)
class Computed:
    """The answer of one textbook, or of one for each rank; computed on demand."""

    books: tuple[Textbook, ...]

    @cached_property
    def losses(self) -> tuple[Array, ...]:
        """As in `Given`."""
        return tuple(book.loss() for book in self.books)

    @cached_property
    def gradient(self) -> Array:
        """As in `Given`."""
        gradient = self.books[0].gradient()
        for rank, book in enumerate(self.books[1:], start=1):
            gradient = np.where(book.in_shard(rank), book.gradient(), gradient)
        return gradient


Answer = Given | Computed

# A description of the fault, and its answer.
Faults = Iterator[tuple[str, Answer]]


def all_ranks(book: Textbook) -> Computed:
    """Return the answer of a textbook on every rank."""
    return Computed((book,))


def each_rank(b: Textbook, change: Callable[[int], Textbook]) -> Computed:
    """Return the answer of another textbook on each rank."""
    return Computed(tuple(change(rank) for rank in range(b.problem.ranks)))


def of_gradient(gradient: Array) -> Given:
    """Return the right loss with a wrong gradient."""
    return Given(None, gradient)

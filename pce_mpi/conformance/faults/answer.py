"""What a fault gives, and how the families of faults say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pce_mpi.conformance.textbook import Textbook

__all__ = ["Answer", "Computed", "Faults", "Given", "each_rank", "of_gradient"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Given:
    """An answer; None where the fault leaves all as it should be.

    losses     of each rank, or one for all where they are equal
    gradient   (rows, classes)
    """

    losses: tuple[Array, ...] | None
    gradient: Array | None


@dataclass(frozen=True)
class Computed:
    """The answer of textbooks, one for each rank, or one for all; computed when it is asked for."""

    books: tuple[Textbook, ...]

    @cached_property
    def losses(self) -> tuple[Array, ...]:
        """As `Given` has it."""
        return tuple(book.loss() for book in self.books)

    @cached_property
    def gradient(self) -> Array:
        """As `Given` has it."""
        gradient = self.books[0].gradient()
        for rank, book in enumerate(self.books[1:], start=1):
            gradient = np.where(book.in_shard(rank), book.gradient(), gradient)
        return gradient


Answer = Given | Computed

# What is wrong, and the textbook that is wrong in this way, one for all ranks or one for each; or what it gives.
Faults = Iterator[tuple[str, Textbook | tuple[Textbook, ...] | Given]]


def of_gradient(gradient: Array) -> Given:
    """A fault of the gradient alone."""
    return Given(None, gradient)


def each_rank(b: Textbook, change: Callable[[int], Textbook]) -> tuple[Textbook, ...]:
    """A textbook for each rank."""
    return tuple(change(rank) for rank in range(b.problem.ranks))

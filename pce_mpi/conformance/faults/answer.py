"""The answer that a fault gives, and the form in which the families of faults describe it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pce_mpi.conformance.textbook import Textbook

Array = np.ndarray[Any, Any]


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

# A description of the fault, and the textbook that has it (one for all ranks, or one for each), or its answer.
Faults = Iterator[tuple[str, Textbook | tuple[Textbook, ...] | Given]]


def of_gradient(gradient: Array) -> Given:
    """Return the answer of a fault of the gradient alone."""
    return Given(None, gradient)


def each_rank(b: Textbook, change: Callable[[int], Textbook]) -> tuple[Textbook, ...]:
    """Return a textbook for each rank."""
    return tuple(change(rank) for rank in range(b.problem.ranks))

"""A training step as a problem: the tokens of all ranks and micro-batches, and what each of them counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
import math
from typing import Any

import numpy as np

from pce_mpi.conformance.problems import Array, Problem

# A gradient that is that far from any multiple of the due one gives its token no weight, by the bytes of a logit.
_OFF = {2: 0.05, 4: 1e-3, 8: 1e-3}


@dataclass(frozen=True, eq=False)
class Step(Problem):
    """The tokens of all ranks and micro-batches, in that order; each rank has all classes of its own tokens.

    lengths        the number of tokens of each rank's micro-batches
    context_ranks  so many ranks that follow each other share the sequences of one data rank
    averaged       what the trainer averages gradients over, as in `Offer`; over the rest it sums
    """

    lengths: tuple[tuple[int, ...], ...] = ()
    context_ranks: int = 1
    averaged: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """The number of gradients that are combined, by the names of `averaged`."""
        data = len(self.lengths) // self.context_ranks
        return {"data": data, "context": self.context_ranks, "micro-batches": len(self.lengths[0])}

    @property
    def places(self) -> tuple[Array, Array]:
        """The rank and the micro-batch of each token."""
        numbers = np.indices((len(self.lengths), len(self.lengths[0]))).reshape(2, -1)
        rank, micro_batch = np.repeat(numbers, np.concatenate(self.lengths), axis=1)
        return rank, micro_batch

    def row_name(self, row: int) -> str:
        """Name a token in a message."""
        rank, micro_batch = (int(numbers[row]) for numbers in self.places)
        return f"micro-batch {micro_batch} of rank {rank}"

    def micro_batches(self, of: int) -> list[Problem]:
        """Return the mean over each micro-batch of a rank as a problem."""
        rank, micro_batch = self.places
        axes = (1,) * (self.logits.ndim - 2)
        parts: list[Problem] = []
        for number in range(len(self.lengths[of])):
            mine = (rank == of) & (micro_batch == number)
            logits, targets = self.row_major(self.logits)[mine], self.targets.reshape(-1)[mine]
            logits, targets = logits.reshape(*axes, *logits.shape), targets.reshape(*axes, -1)
            parts.append(replace(self, logits=logits, targets=targets, reduction="mean"))
        return parts

    def weights(self, of: int, gradients: Sequence[Array]) -> Array:
        """Return what each token of a rank counts; nan for a nan gradient, infinite for no multiple of the due one."""
        mine = self.places[0] == of
        weights, due = self.expected[0].reshape(-1)[mine], self.row_major(self.expected[1])[mine]
        got = np.concatenate([each.reshape(-1, self.classes) for each in gradients]).astype(np.float64)
        got /= math.prod(self.sizes[each] for each in self.averaged)
        times, off = self._multiples(got, due)
        if off.any():  # -inf if they are multiples for the next token's target
            shifted = [replace(each, targets=np.roll(each.targets, -1)) for each in self.micro_batches(of)]
            following = np.concatenate([each.row_major(each.expected[1]) for each in shifted])
            off = np.where(off, np.inf if self._multiples(got, following)[1].any() else -np.inf, 0.0)
        found = np.where(off, off, times * weights)
        return np.where(np.isnan(got).any(axis=-1), np.nan, found)

    def _multiples(self, got: Array, due: Array) -> tuple[Array, Array]:
        """Return how many times the due one each gradient is, and which is no multiple of it."""
        squares = (due**2).sum(axis=-1)
        # The gradient of a token that is certain is 0, whatever it counts.
        with np.errstate(invalid="ignore", divide="ignore"):
            times = np.where(squares > 0.0, (got * due).sum(axis=-1) / squares, 1.0)
            off = np.abs(got - times[:, None] * due).max(axis=-1, initial=0.0)
            return times, off > _OFF[self.dtype.itemsize] * np.abs(times) * np.sqrt(squares)

    def joined(self, answers: Sequence[Any]) -> list[Any]:
        """Return one answer with the weights of all ranks, and the losses of all ranks and micro-batches."""
        losses = np.stack([answer.products["losses"] for answer in answers])
        weights = np.concatenate([answer.loss for answer in answers])
        return [replace(answers[0], loss=weights, products={"losses": losses})]

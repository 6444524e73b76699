"""The loss and its gradient in pieces that can be replaced, to compute the answers that faults give.

The kinds of candidates have the formulas of faults that projects have shipped, a function for each family, and
`kinds.sharding` those of a first draft. A candidate in `tests/candidates` has each of them; a fault that nobody has
shown has no place there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from pce_mpi.conformance.problems.problem import Array, Problem


@dataclass(frozen=True)
class Textbook:
    """One problem in float64, (rows, classes) and (rows,), in the plainest way; `dense` has the exact one.

    The loss of a row is sum_c u_c nll_c + z_loss lse**2 + lost, its gradient g (total p - u + 2 z_loss lse p) slope.
    """

    problem: Problem
    x: Array  # the logits
    z: Array  # ... after scale and softcap
    slope: Array  # dz/dx
    w: Array  # (classes,) class weights
    q: Array  # target probabilities; one-hot for index targets, zero in rows that are ignored
    t: Array  # (rows,) index targets, or those of the largest probability
    valid: Array  # (rows,) which rows count
    smoothing: float
    z_loss: float | Array
    u: Array
    p: Array
    nll: Array  # -log p
    lse: Array  # (rows,)
    total: Array  # (rows,) sum_c u_c
    lost: Array | float  # (rows,) added to the loss by a fault
    g: Array  # (rows,) upstream gradient
    divisor: Array | float  # the loss and the gradient are divided by it

    @classmethod
    def of(cls, problem: Problem) -> Textbook:
        """Return the right pieces for a problem."""
        problem = problem.over_support
        options = problem.exact_options
        x = problem.row_major(problem.logits).astype(np.float64)
        rows, classes = x.shape
        w = np.ones(classes) if options.get("weight") is None else np.asarray(options["weight"]).astype(np.float64)
        valid = problem.valid
        if problem.with_probabilities:
            q = problem.row_major(problem.targets).astype(np.float64)
            t = q.argmax(axis=-1) if classes else np.zeros(rows, np.int64)
            divisor = float(rows)
        else:
            t = problem.targets.reshape(-1).astype(np.int64)
            q = ((np.arange(classes) == t[:, None]) & valid[:, None]).astype(np.float64)
            divisor = float((q @ w).sum())
        lost: Array | float = 0.0
        scale, softcap = options.get("logit_scale", 1.0 / options.get("temperature", 1.0)), options.get("softcap")
        if "teacher" in problem.kind.arrays:  # sum q log(q / p) is the cross entropy with q, less the entropy of q
            of_teacher = softmax(scale * q)
            q, of_class = of_teacher["p"], np.where(of_teacher["p"] == 0.0, 0.0, of_teacher["p"] * of_teacher["nll"])
            w = w / scale**2 if problem.conventions["temperature_squared"] else w
            lost = -(w * of_class).sum(axis=-1)
        smoothing = options.get("label_smoothing", 0.0)
        z, slope = scale * x, np.full_like(x, scale)
        if softcap is not None:
            z, slope = np.where(np.isinf(x), x, softcap * np.tanh(z / softcap)), scale / np.cosh(z / softcap) ** 2
        made = cls(
            problem=problem,
            x=x,
            z=z,
            slope=slope,
            w=w,
            q=q,
            t=t,
            valid=valid,
            smoothing=smoothing,
            z_loss=options.get("z_loss", 0.0),
            u=np.zeros_like(x),
            **softmax(z),
            total=np.zeros(rows),
            lost=lost,
            g=np.broadcast_to(problem.upstream.reshape(-1), (rows,)),
            divisor=divisor if problem.reduction == "mean" else 1.0,
        )
        return made.with_u(w * (q * (1.0 - smoothing) + smoothing / max(classes, 1)))

    def but(self, **pieces: Any) -> Textbook:
        """Return the same with other pieces."""
        return replace(self, **pieces)

    def with_u(self, u: Array) -> Textbook:
        """Return the same with other coefficients, and their sum."""
        return self.but(u=u, total=u.sum(axis=-1))

    def row_losses(self) -> Array:
        """Return the losses (rows,) before any reduction; 0 for rows that do not count."""
        # If a fault has lost some of u, the logarithm of the sum still has the factor `total`.
        torn = self.total - self.u.sum(axis=-1)
        log_sum = self.nll.min(axis=-1, initial=np.inf)
        loss = np.where(self.u == 0.0, 0.0, self.u * self.nll).sum(axis=-1) + self.lost
        loss = loss + sum(term for term, _ in self.of_lse())
        return np.where(self.valid, loss + np.where(np.abs(torn) < 1e-12, 0.0, torn * log_sum), 0.0)

    def of_lse(self) -> list[tuple[Array, Array]]:
        """Return the terms (rows,) that are functions of logsumexp, each with its derivative by it."""
        lse = np.where(self.z_loss, self.lse, 0.0)
        return [(self.z_loss * lse**2, 2.0 * self.z_loss * lse)]

    def loss(self) -> Array:
        """Return the loss, in the shape of the problem."""
        rows = self.row_losses()
        if self.problem.reduction == "none":
            return rows.reshape(self.problem.rows_shape)
        # A fault may have a divisor for each row; a single one is applied after the sum, as 0 / 0 is nan for no rows.
        return np.asarray((rows / self.divisor).sum() if np.ndim(self.divisor) else rows.sum() / self.divisor)

    def gradient(self) -> Array:
        """Return the gradient, (rows, classes)."""
        more = sum(derivative for _, derivative in self.of_lse())
        return self.gradient_of(self.p * (self.total + more)[:, None] - self.u)

    def gradient_of(self, dz: Array) -> Array:
        """Return the gradient, (rows, classes), for the gradient `dz` of the sum of the rows with respect to z."""
        return np.where(self.valid[:, None], dz * self.slope * (self.g / self.divisor)[:, None], 0.0)

    def in_shard(self, rank: int) -> Array:
        """Return a mask (classes,) of the classes of `rank`."""
        mask = np.zeros(self.problem.classes, np.bool_)
        mask[slice(*self.problem.splits[rank : rank + 2])] = True
        return mask

    def owns(self, rank: int) -> Array:
        """Return a mask (rows,) of the rows whose target `rank` has."""
        start, stop = self.problem.splits[rank : rank + 2]
        return np.asarray(self.q[:, start:stop].any(axis=-1))


def softmax(z: Array) -> dict[str, Array]:
    """Return `p`, `nll` and `lse`."""
    top = z.max(axis=-1, keepdims=True, initial=-np.inf)
    e = np.exp(z - top)
    total = e.sum(axis=-1, keepdims=True)
    return {"p": e / total, "nll": np.log(total) - (z - top), "lse": (np.log(total) + top)[:, 0]}


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

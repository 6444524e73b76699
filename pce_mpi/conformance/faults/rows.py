"""Faults of rows: counted rows, divisors of a mean, probabilities, upstream gradients."""

from __future__ import annotations

import numpy as np

from pce_mpi.conformance.faults.answer import Faults, of_gradient
from pce_mpi.conformance.textbook import Textbook


def counted_rows(b: Textbook) -> Faults:
    """Wrong rows count, or a mean has a wrong divisor."""
    rows, left = b.problem.rows, int(b.valid.sum())
    if b.problem.reduction == "mean":
        if left == 0:
            text = "no row is left, where the mean is nan: it gives 0, as"
            yield f"{text} a divisor max(count, 1) or the number of all rows does", b.but(divisor=1.0)
        text = f"the mean divides by all {rows} rows, not by the {left} that are not ignored"
        yield text, b.but(divisor=float(rows))
        counted = b.valid & (b.row_losses().astype(np.float32) != 0)
        if counted.sum() < left:
            text = "the mean counts the rows whose loss is not 0, and leaves out those that are predicted perfectly"
            yield text, b.but(divisor=float((b.q[counted] @ b.w).sum()))
        if not b.problem.with_probabilities:
            owners = np.stack([b.owns(rank) for rank in range(b.problem.ranks)])
            share = owners @ (b.q @ b.w) * (owners.any(-1)).sum()
            of_means = b.but(divisor=np.where(b.valid, share @ owners, 1.0))
            yield "the mean is that of each rank's mean over the rows whose target it owns", of_means
    if left == rows:
        return
    inside = ~b.valid & (b.t >= 0) & (b.t < b.problem.classes)
    everywhere = b.but(valid=np.ones_like(b.valid))
    if inside.any():
        text = "an ignore_index inside the range is not heeded: ignored rows count as others do"
        one = np.where(inside[:, None], np.arange(b.problem.classes) == b.t[:, None], 0.0)
        counted = everywhere.with_u(b.u + (1.0 - b.smoothing) * b.w * one)
        yield text, counted.but(divisor=b.divisor + (one @ b.w).sum() if b.problem.reduction == "mean" else 1.0)
        yield text, counted
        # ColossalAI: their softmax is set to 0, and 1 is subtracted at the target all the same
        gradient = np.where(b.valid[:, None], b.gradient(), everywhere.gradient_of(-one))
        yield "ignored rows have a gradient of -1 at their target", of_gradient(gradient)
    gradient = np.where(b.valid[:, None], b.gradient(), everywhere.gradient_of(b.p))
    yield "ignored rows have a gradient", of_gradient(gradient)


def probabilities(b: Textbook) -> Faults:
    """Targets that are probabilities."""
    if not b.problem.with_probabilities:
        return
    one = b.but(total=np.ones_like(b.total))
    yield "the gradient takes for granted that target probabilities sum to 1", of_gradient(one.gradient())
    text = "the gradient is that of the log-probabilities: it has not gone through log_softmax"
    yield text, of_gradient(b.gradient_of(-b.u))


def upstream(b: Textbook) -> Faults:
    """The upstream gradient."""
    if b.problem.dloss is None or not b.g.size:
        return
    for text, g in (
        ("the upstream gradient is left out", np.ones_like(b.g)),
        ("the upstream gradient is applied twice", b.g * b.g),
        ("the upstream gradient of the first row is used for all rows", np.full_like(b.g, b.g[0])),
    ):
        yield text, of_gradient(b.but(g=g).gradient())

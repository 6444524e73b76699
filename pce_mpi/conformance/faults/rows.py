"""Faults of rows: counted rows, divisors of a mean, probabilities, upstream gradients."""

from __future__ import annotations

import numpy as np

from pce_mpi.conformance.faults.answer import Faults, each_rank, of_gradient
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
        yield "the mean is not divided by the number of rows: this is the sum", b.but(divisor=1.0)
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
        yield "ignored rows have a gradient, as if they were not ignored", of_gradient(counted.gradient())
    yield "ignored rows have a gradient", of_gradient(everywhere.gradient())
    for what, column in (("", None), (", as if class 0 were their target", 0), (", as if the last class were", -1)):
        one = np.zeros_like(b.u)
        if column is not None and b.problem.classes:
            one[:, column] = 1.0
        gradient = np.where(b.valid[:, None], b.gradient(), everywhere.gradient_of(b.p - one))
        yield f"ignored rows have a gradient{what}", of_gradient(gradient)


def probabilities(b: Textbook) -> Faults:
    """Targets that are probabilities."""
    if not b.problem.with_probabilities:
        return
    one = b.but(total=np.ones_like(b.total))
    yield "the gradient takes for granted that target probabilities sum to 1", of_gradient(one.gradient())
    text = "the gradient is that of the log-probabilities: it has not gone through log_softmax"
    yield text, of_gradient(b.gradient_of(-b.u))
    yield "target probabilities are divided by their sum", b.with_u(b.u / b.q.sum(-1, keepdims=True))
    most = np.arange(b.problem.classes) == b.t[:, None]
    yield "only the most probable class of each row counts", b.with_u(b.w * most)
    text = "the mean divides by the sum of the target probabilities, not by the number of rows"
    yield text, b.but(divisor=float(b.q.sum()) if b.problem.reduction == "mean" else 1.0)
    yield (
        "the sum of the target probabilities is of each rank's own classes only: it is never reduced over the ranks",
        each_rank(b, lambda rank: b.but(total=(b.u * b.in_shard(rank)).sum(-1))),
    )


def upstream(b: Textbook) -> Faults:
    """The upstream gradient."""
    if b.problem.dloss is None or not b.g.size:
        return
    for text, g in (
        ("the upstream gradient is left out", np.ones_like(b.g)),
        ("the upstream gradient is applied twice", b.g * b.g),
        ("the upstream gradient of the first row is used for all rows", np.full_like(b.g, b.g[0])),
        ("the mean of the upstream gradient is used for all rows", np.full_like(b.g, b.g.mean())),
        ("the sum of the upstream gradient is used for all rows", np.full_like(b.g, b.g.sum())),
    ):
        yield text, of_gradient(b.but(g=g).gradient())

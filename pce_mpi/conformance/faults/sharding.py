"""Faults of sharding: targets that no rank or two ranks find, and missing or repeated reductions over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pce_mpi.conformance.faults.answer import Computed, Faults, Given, each_rank, of_gradient
from pce_mpi.conformance.textbook import Textbook, softmax

Array = np.ndarray[Any, Any]


def target_owners(b: Textbook) -> Faults:
    """Targets that are not found, or found at the wrong class."""
    ranks, classes, splits = b.problem.ranks, b.problem.classes, b.problem.splits
    if b.problem.with_probabilities or not classes:
        return
    one = (1.0 - b.smoothing) * (b.q @ b.w)[:, None]  # u at the target
    rest = b.u - one * b.q
    shards = np.diff(splits)
    local = np.arange(classes) - np.repeat(splits[:-1], shards)
    down, up = classes // ranks, -(-classes // ranks)
    for text, starts in (
        (f"class_start is not heeded, but taken to be {down} * rank", [rank * down for rank in range(ranks)]),
        (f"class_start is not heeded, but taken to be {up} * rank", [rank * up for rank in range(ranks)]),
        ("class_start is not heeded, but taken to be local classes * rank", list(shards * np.arange(ranks))),
        ("class_start is not heeded: targets are taken for local class numbers", [0] * ranks),
    ):
        number = local + np.repeat(starts, shards)
        if not np.array_equal(number, np.arange(classes)):
            found = rest + one * ((number == b.t[:, None]) & b.valid[:, None])
            yield from ((text, book) for book in _targets_at(b, found))
    first = np.flatnonzero(shards)
    away = np.zeros_like(b.q)
    for rank in first:
        away[~b.owns(int(rank)) & b.valid, splits[rank]] = 1.0
    if away.any():
        yield (
            "1 is subtracted at the first class of every shard that does not own the target",
            of_gradient(b.but(u=b.u + one * away).gradient()),
        )
        owned = np.repeat(np.stack([b.owns(rank) for rank in range(ranks)]).T, shards, axis=1)
        text = "only the shard that owns a row's target has a gradient"
        yield text, of_gradient(np.where(owned, b.gradient(), 0.0))
    for which, edge in (("first", np.array(splits)[first]), ("last", np.array(splits)[first + 1] - 1)):
        at_edge = np.isin(b.t, edge) & b.valid
        if 0 < at_edge.sum():
            found = rest + one * b.q * ~at_edge[:, None]
            text = f"a target that is the {which} class of a shard is not found there"
            yield from ((text, book) for book in _targets_at(b, found))
    yield "1 is never subtracted at the target", of_gradient(b.but(u=rest).gradient())


def _targets_at(b: Textbook, u: Array) -> Iterator[Textbook]:
    """Lost or repeated targets, in code that sums shifted logits, or logits, or everything that u enters."""
    top = b.z.max(axis=-1, initial=-np.inf)
    # In logits that are not shifted, the target's includes the maximum.
    torn = b.total - u.sum(axis=-1)
    yield b.but(u=u)
    yield b.but(u=u, lost=np.where(np.abs(torn) < 1e-12, 0.0, torn * top))
    yield b.with_u(u)


def reductions(b: Textbook) -> Faults:
    """Missing reductions over the ranks."""
    ranks = b.problem.ranks
    if ranks == 1:
        return
    more = np.log(ranks)
    yield (
        f"the loss of a row is off by log({ranks}) = {more:.3f}: the logits are counted once per rank",
        b.but(p=b.p / ranks, nll=b.nll + more, lse=b.lse + more),
    )
    local = [softmax(b.z[:, b.in_shard(rank)])["lse"] for rank in range(ranks)]
    yield (
        "each rank takes the softmax of its own classes only: the sum of exponentials is never reduced",
        tuple(b.but(p=np.exp(b.z - lse[:, None]), nll=lse[:, None] - b.z, lse=lse) for lse in local),
    )
    apart = tuple(b.but(nll=lse[:, None] - b.z, lse=lse) for lse in local)
    yield (
        "the sum of exponentials is reduced to rank 0 alone, not to all ranks",
        Given((b.loss(), *(book.loss() for book in apart[1:])), None),
    )
    tops = np.stack([b.z[:, b.in_shard(rank)].max(-1, initial=-np.inf) for rank in range(ranks)])
    total = np.exp(np.stack(local) - tops)
    total = np.where(np.isfinite(total), total, 0.0).sum(0)
    top = tops.max(0)
    wrong = (np.log(total) + top)[:, None]
    yield (
        "sums of exponentials are added that are relative to each rank's own maximum",
        b.but(p=np.exp(b.z - wrong), nll=wrong - b.z, lse=wrong[:, 0]),
    )
    yield (
        "the target's logit is not reduced: only the rank that owns the target has it",
        Given(Computed(each_rank(b, lambda rank: b.but(u=b.u * b.in_shard(rank)))).losses, None),
    )


def factors(b: Textbook) -> Faults:
    """The number of ranks as a factor; faults of other families can give the same by accident."""
    ranks = b.problem.ranks
    if ranks == 1:
        return
    loss, gradient = (b.loss() * ranks,), b.gradient() * ranks
    yield f"the loss is {ranks} times too large: summed over the {ranks} ranks twice", Given(loss, None)
    yield f"the gradient is {ranks} times too large: summed over the {ranks} ranks twice", of_gradient(gradient)
    text = f"the gradient is {ranks} times too small: divided by the {ranks} ranks, which are no rows"
    yield text, of_gradient(b.gradient() / ranks)
    yield f"loss and gradient are {ranks} times too large: summed over the {ranks} ranks twice", Given(loss, gradient)

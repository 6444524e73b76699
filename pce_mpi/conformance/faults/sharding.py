"""Faults of sharding: targets that no rank or two ranks find, and missing or repeated reductions over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from pce_mpi.conformance.faults.answer import Faults, Given, of_gradient
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
    number = np.arange(classes) - np.repeat(splits[:-1], shards) + np.repeat(shards * np.arange(ranks), shards)
    if not np.array_equal(number, np.arange(classes)):
        found = rest + one * ((number == b.t[:, None]) & b.valid[:, None])
        text = "class_start is not heeded, but taken to be local classes * rank"
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
        text = "only the shard that owns a row's target has a gradient: an all-reduce that autograd does not see"
        yield text, of_gradient(np.where(owned, b.gradient(), 0.0))
        # ms-swift: the shard's maximum is not detached, though it is a constant after its all-reduce
        parts, largest = np.zeros_like(b.p), np.zeros_like(b.p)
        for start, stop in pairwise(splits):
            if start < stop:
                parts[:, start:stop] = b.p[:, start:stop].sum(axis=-1, keepdims=True)
                largest[np.arange(len(b.z)), start + b.z[:, start:stop].argmax(axis=-1)] = 1.0
        more = b.total[:, None] * largest * (1.0 - parts)
        yield text, of_gradient(np.where(owned, b.gradient() + b.gradient_of(more), 0.0))
    for which, edge in (("first", np.array(splits)[first]), ("last", np.array(splits)[first + 1] - 1)):
        at_edge = np.isin(b.t, edge) & b.valid
        if 0 < at_edge.sum():
            found = rest + one * b.q * ~at_edge[:, None]
            text = f"a target that is the {which} class of a shard is not found there"
            yield from ((text, book) for book in _targets_at(b, found))


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
    apart = tuple(b.but(nll=lse[:, None] - b.z, lse=lse) for lse in local)
    yield (
        "the sum of exponentials is reduced to rank 0 alone, not to all ranks",
        Given((b.loss(), *(book.loss() for book in apart[1:])), None),
    )

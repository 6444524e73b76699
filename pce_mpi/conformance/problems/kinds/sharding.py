"""Faults of a first draft of a sharded softmax: sums over the ranks, numbers of a rank's own classes, and factors."""

from collections.abc import Iterator
from itertools import chain, permutations

import numpy as np

from pce_mpi.conformance.problems.problem import Array
from pce_mpi.conformance.problems.textbook import Computed, Faults, Given, Textbook, softmax
from pce_mpi.conformance.text import meant

_LOCAL = "the softmax is of each rank's own classes only: its sum is never reduced over the ranks"
_MAXIMA = "the ranks add sums of exponentials that are relative to maxima of their own"
_ADDED = "the ranks' logsumexps are added, where the logsumexp of all classes is due"
_GLOBAL = "global class numbers are taken for numbers of each rank's own classes"
_CLAMPED = "a target of another rank is taken for a class of this one: it is clamped, and not masked"
_WRAPPED = "a target of another rank is taken for a class of this one: its number is wrapped, and not masked"
_EQUAL = "class_start is taken for the rank times its number of classes, which is right where all shards are equal"
_END_IN = "the first class of the next shard is taken for a class of this one: a mask ends a class too late"
_FIRST_OUT = "the first class of each shard is taken for one of another: a mask begins a class too late"
_LAST_OUT = "the last class of each shard is taken for one of another: a mask ends a class too early"
# A shard may be padded to a multiple of these, or to the length of the largest.
_TILES = (8, 64, 128)
# Of so many ranks, all orders of the shards are compared.
_FEW = 4


def softmaxes(b: Textbook) -> Iterator[tuple[str, tuple[Textbook, ...]]]:
    """Yield the fault, and the textbook with its softmax, or one for each rank."""
    if b.problem.ranks == 1:
        return
    shards = [b.z[:, b.in_shard(rank)] for rank in range(b.problem.ranks)]
    own, widths = [softmax(each) for each in shards], np.diff(b.problem.splits)
    lse = np.stack([each["lse"] for each in own])
    p, nll = (np.concatenate([each[name] for each in own], axis=-1) for name in ("p", "nll"))
    yield _LOCAL, tuple(b.but(p=p, nll=nll, lse=each) for each in lse)
    top = np.stack([each.max(axis=-1, initial=-np.inf) for each in shards])
    log_sum = np.log(np.where(top == -np.inf, 0.0, np.exp(lse - top)).sum(axis=0))
    yield _MAXIMA, _with(b, log_sum + top.max(axis=0))
    shifted = log_sum[:, None] - (b.z - np.repeat(top.T, widths, axis=-1))
    yield _MAXIMA, tuple(b.but(p=np.exp(-shifted), nll=shifted, lse=log_sum + each) for each in top)
    for shift in (0.0, top.max(axis=0)):
        yield _ADDED, _with(b, (lse - shift).sum(axis=0) + shift)


def _with(b: Textbook, lse: Array) -> tuple[Textbook]:
    nll = lse[:, None] - b.z
    return (b.but(p=np.exp(-nll), nll=nll, lse=lse),)


def _padded(b: Textbook) -> Iterator[tuple[str, tuple[Textbook, ...]]]:
    """Yield the softmax of logits with columns of padding, as `softmaxes`."""
    shards, classes = np.diff(b.problem.splits), b.problem.classes
    padding = (shards.max() - shards, *(-shards % tile for tile in _TILES))
    for columns in dict.fromkeys(int(each.sum()) for each in padding):
        if columns:
            text = f"the softmax is of {classes + columns} columns, and the classes are {classes}: padding counts"
            yield f"{text}, with logits of 0", _with(b, np.logaddexp(b.lse, np.log(columns)))


def of_losses(b: Textbook) -> Faults:
    """Yield what these faults make of a loss."""
    for text, books in chain(softmaxes(b), _padded(b)):
        wrong = Computed(books)
        yield text, wrong
        yield text, Given(wrong.losses, b.gradient())
        yield text, Given(None, wrong.gradient)
        if len(books) > 1:  # the logit at the target is that of all ranks
            logits = tuple(each.but(nll=each.lse[:, None] - b.z) for each in books)
            yield text, Given(Computed(logits).losses, wrong.gradient)
        if text == _LOCAL:
            own = np.stack([b.u[:, b.in_shard(rank)].sum(axis=-1) for rank in range(len(books))], axis=-1)
            parts = np.repeat(own, np.diff(b.problem.splits), axis=-1)
            yield text, Given(wrong.losses, b.gradient_of(parts * books[0].p - b.u))
    if b.problem.with_numbers and b.problem.ranks > 1:
        for text, columns in _columns(b):
            yield from with_targets(b, text, columns)


def _columns(b: Textbook) -> Iterator[tuple[str, Array]]:
    """Yield the fault, and the class of its own that each rank takes for the target of a row, less than 0 for none."""
    starts, widths = np.array(b.problem.splits[:-1])[:, None], np.diff(b.problem.splits)[:, None]
    own = b.t - starts
    yield _GLOBAL, np.broadcast_to(b.t, own.shape)
    yield _GLOBAL, np.minimum(b.t, widths - 1)
    yield _CLAMPED, np.where((own >= 0) & (own < widths), own, 0)
    yield _CLAMPED, np.clip(own, 0, widths - 1)
    inside = (own >= 0) & (own < widths)
    yield _END_IN, np.where(inside | (own == widths), np.minimum(own, widths - 1), -1)
    yield _FIRST_OUT, np.where(inside & (own != 0), own, -1)
    yield _LAST_OUT, np.where(inside & (own != widths - 1), own, -1)
    for number in (own, b.t):
        yield _WRAPPED, np.mod(number, np.maximum(widths, 1))
    yield f"{_EQUAL}; {meant(shards='equal')}", b.t - np.arange(len(widths))[:, None] * widths


def orders(b: Textbook) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the orders in which the ranks' shards may be taken by mistake, each with the fault."""
    ranks = tuple(range(b.problem.ranks))
    turned = (ranks[::-1], ranks[1:] + ranks[:1], ranks[-1:] + ranks[:-1])
    for order in dict.fromkeys(turned if len(ranks) > _FEW else permutations(ranks)):
        if order != ranks:
            yield f"the shards are taken in the order of ranks {', '.join(map(str, order))}", order


def with_targets(b: Textbook, text: str, columns: Array) -> Faults:
    """Yield the answers for other targets, (ranks, rows), by the numbers of each rank's own classes."""
    each = np.zeros_like(b.u)
    for rank, column in enumerate(columns):
        start, stop = b.problem.splits[rank : rank + 2]
        rows = np.flatnonzero((column >= 0) & (column < stop - start) & b.valid)
        each[rows, start + column[rows]] += 1.0
    hard = (1.0 - b.smoothing) * b.w
    u = b.u + hard * (each - b.q)
    with_all, right = b.with_u(u), b.gradient()
    books = [with_all]
    if (each.sum(axis=-1) != b.valid).any() or "weight" in b.problem.options:
        # The logit at the target is subtracted as it is, or less the maximum, from one logarithm of the sum; or -log p
        # is looked up, which has one for each target.
        top = np.where(b.valid, b.z.max(axis=-1, initial=-np.inf), 0.0)
        books += [b.but(u=u), b.but(u=u, lost=b.lost + (b.total - u.sum(axis=-1)) * top)]
    if b.problem.reduction == "mean" and "weight" in b.problem.options:
        books.append(with_all.but(divisor=float((each @ b.w).sum())))
    for book in books:
        losses = (book.loss(),)
        for gradient in (book.gradient(), right):
            yield text, Given(losses, gradient)


# Numbers that are due times a number of ranks, rows or classes, for all kinds of candidates.


def by_ranks(ranks: int) -> Iterator[tuple[float, str]]:
    """Yield factors on what is summed over the ranks, each with the fault."""
    yield float(ranks), f"{ranks} times too large: it is summed over the ranks once more"
    yield 1.0 / ranks, f"{ranks} times too small: it is divided by the number of ranks"


def factors(b: Textbook) -> Faults:
    """Yield answers that have one factor; Automodel, Model-Optimizer; torch's kl_div, unless "batchmean"."""
    problem, rows = b.problem, max(b.problem.rows, 1)
    loss, gradient = problem.expected[0], problem.row_major(problem.expected[1])
    by_rows = [(float(rows), "large"), (1.0 / rows, "small")]
    of_rows = ((times, f"{rows} times too {side}: the number of rows") for times, side in by_rows)
    for times, text in chain(by_ranks(problem.ranks), of_rows):
        if times != 1.0:
            yield f"the gradient is {text}", Given(None, times * gradient)
            yield f"the loss is {text}", Given((times * loss,), None)
    if problem.reduction == "mean" and problem.classes > 1:
        text = f"the mean divides by rows times classes, {problem.rows * problem.classes}, not by the rows"
        for counted in dict.fromkeys((b.divisor, float(problem.rows))):
            less = np.divide(b.divisor, counted * problem.classes)
            yield text, Given((loss * less,), gradient * less)

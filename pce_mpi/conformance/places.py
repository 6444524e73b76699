"""Describe the errors of an answer by their place and size, for answers that no known fault gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pce_mpi.conformance.textbook import Textbook

Array = np.ndarray[Any, Any]

# Factors, or differences, are equal if they agree to this.
_ALIKE = 1e-3
# This many right rows before all wrong ones are no accident.
_MANY = 32


def place_of_loss(b: Textbook, got: Array, truth: Array, wrong: Array) -> str | None:
    """Describe the errors of losses (ranks, numbers); None if they have no pattern."""
    ranks = np.flatnonzero(wrong.any(axis=-1))
    where = [f"on {_some('rank', ranks)} only"] if len(ranks) < len(got) else []
    rows = wrong[ranks[0]]
    if b.problem.reduction == "none" and not rows.all():
        where += _smallest(rows, _rows(b)) or [f"in {_some('row', np.flatnonzero(rows))}"]
    return _sentence("loss", where, _relation("loss", got[ranks[0]][rows], truth[0][rows], b))


def place_of_gradient(b: Textbook, got: Array, truth: Array, wrong: Array) -> str | None:
    """Describe the errors of a gradient (rows, classes); None if they have no pattern."""
    where = [] if wrong.all() else _smallest(wrong, _entries(b))
    return _sentence("gradient", where, _relation("gradient", got[wrong], truth[wrong], b))


def _sentence(name: str, where: list[str], relation: str) -> str | None:
    if not where and not relation:
        return None
    return " ".join([f"the {name} is wrong", *where]) + (f": {relation}" if relation else "")


def _relation(name: str, got: Array, truth: Array, b: Textbook) -> str:
    """Return the relation of the wrong numbers to the right ones, "" if there is none."""
    if np.isnan(got).all():
        return "nan"
    if not np.isfinite(got).all() or not np.isfinite(truth).all():
        return ""
    large = np.abs(truth) > np.abs(truth).max(initial=0.0) * 1e-6
    factors = got[large] / truth[large]
    if not got.any():
        size = np.abs(truth).max(initial=0.0)
        return f"0 where numbers up to {size:.3g} are due"
    differences = got - truth
    several = got.size > 1
    if factors.size and np.ptp(factors) <= _ALIKE * abs(factors[0]) and abs(factors[0] - 1.0) > _ALIKE:
        text = _times(float(factors[0]), b)
        if several or text:
            return text or f"{factors[0]:.4g} times what is due"
    if name == "loss" and np.abs(differences).max() > _ALIKE and np.ptp(differences) <= _ALIKE * abs(differences[0]):
        text = _constant(float(abs(differences[0])), b)
        if several or text:
            return f"off by the constant {differences[0]:.6g}{text}"
    size = np.abs(differences).max()
    largest = np.abs(b.z[np.isfinite(b.z)]).max(initial=0.0)
    eps = 2.0**-52 if b.problem.dtype == np.float64 else 2.0**-23
    if name == "loss" and largest > 64.0 and size <= 8.0 * eps * largest:
        return "errors as large as the rounding of the largest logit (is an offset subtracted too late?)"
    for dtype, lower in (("float32", 2.0**-23), ("float16 or TF32", 2.0**-10), ("bfloat16", 2.0**-7)):
        relative = size / np.abs(truth).max(initial=0.0)
        if dtype == "bfloat16" and b.problem.dtype == np.float16:
            continue  # no candidate converts one half to the other
        # A few numbers may have such errors by chance.
        if (got.size > 3 or dtype == "float32") and eps < lower / 8.0 and lower / 32.0 < relative < lower * 4.0:
            return f"errors as large as arithmetic in {dtype} makes them"
    return ""


def _times(factor: float, b: Textbook) -> str:
    """Explain a factor, "" if it has no meaning."""
    if abs(factor + 1.0) < _ALIKE:
        return "of the opposite sign"
    ranks, rows = b.problem.ranks, b.problem.rows
    for number, too_large, too_small in (
        (ranks, f"summed over the {ranks} ranks twice?", f"divided by the {ranks} ranks?"),
        (rows, f"not divided by the {rows} rows?", f"divided by the {rows} rows twice?"),
    ):
        if number > 1 and abs(factor / number - 1.0) < _ALIKE:
            return f"{factor:.3f} times too large ({too_large})"
        if number > 1 and abs(factor * number - 1.0) < _ALIKE:
            return f"{1.0 / factor:.3f} times too small ({too_small})"
    return ""


def _constant(size: float, b: Textbook) -> str:
    for number, what in ((b.problem.ranks, "the number of ranks"), (b.problem.classes, "the number of classes")):
        if number > 1 and abs(size / np.log(number) - 1.0) < _ALIKE:
            return f" = log({number}), {what}"
    return ""


def _entries(b: Textbook) -> Iterator[tuple[str, Array]]:
    """Yield sets of entries of the gradient, with a name."""
    problem = b.problem
    shape = b.p.shape
    target = b.q != 0
    if not problem.with_probabilities:
        yield "at the targets only", target
        yield "everywhere but at the targets", ~target
    owned = np.zeros(shape, np.bool_)
    first, last = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    for rank in range(problem.ranks):
        mine = b.in_shard(rank)
        owned |= b.owns(rank)[:, None] & mine
        yield f"on rank {rank} only", np.broadcast_to(mine, shape)
        yield f"on all ranks but {rank}", np.broadcast_to(np.logical_not(mine), shape)
        columns = np.flatnonzero(mine)
        first[:, columns[:1]] = last[:, columns[-1:]] = True
    if not problem.with_probabilities and problem.ranks > 1:
        yield "on the shard that owns the target only", owned
        yield "on the shards that do not own the target only", ~owned & b.valid[:, None]
        yield "at the first class of shards that do not own the target only", first & ~owned & b.valid[:, None]
    yield "at the first class of each shard only", first
    yield "at the last class of each shard only", last
    yield "at logits of -inf only", b.x == -np.inf
    for text, rows in _rows(b):
        yield text, np.broadcast_to(rows[:, None], shape)


def _rows(b: Textbook) -> Iterator[tuple[str, Array]]:
    """Yield sets of rows, with a name."""
    problem, splits = b.problem, np.array(b.problem.splits)
    if not problem.with_probabilities:
        yield "in ignored rows only", ~b.valid
        yield "in rows that count", b.valid
        yield "in rows whose target is the first class of a shard only", np.isin(b.t, splits[:-1])
        yield "in rows whose target is the last class of a shard only", np.isin(b.t, splits[1:] - 1)
        for rank in range(problem.ranks):
            yield f"in rows whose target is on rank {rank} only", b.owns(rank)
    special = ~np.isfinite(b.x)
    yield "in rows with nan or infinite logits only", np.asarray(special.any(axis=-1))


def _smallest(wrong: Array, sets: Iterator[tuple[str, Array]]) -> list[str]:
    """Return the name of the smallest set that has all wrong numbers, if at least half of the set is wrong."""
    first = int(wrong.any(axis=tuple(range(1, wrong.ndim))).argmax())
    from_first = np.zeros_like(wrong)
    from_first[first:] = True
    named = [*sets, (f"from row {first} on", from_first)] if first >= _MANY else [*sets]
    fitting = [
        (int(members.sum()), text)
        for text, members in named
        if not (wrong & ~members).any() and not members.all() and 2 * wrong.sum() >= members.sum()
    ]
    return [min(fitting, key=lambda each: each[0])[1]] if fitting else []


def _some(what: str, numbers: Array) -> str:
    shown = ", ".join(map(str, numbers[:4])) + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")
    return f"{what}{'s' * (len(numbers) > 1)} {shown}"

"""Describe errors that no known fault gives: by exact relations to the right numbers, and by their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pce_mpi.arrays import dtype_named
from pce_mpi.conformance.problems.problem import Array
from pce_mpi.conformance.problems.textbook import Textbook
from pce_mpi.conformance.problems.tolerances import has_dtype

# True if the numbers are the right ones, within what rounding in another order explains.
Close = Callable[[Array], bool]

# This many right rows or classes before all wrong ones are no accident.
_MANY = 32
# Coarser dtypes, in which every entry may be representable, by the dtype of the numbers; and the error of a rounding.
_COARSER = {"float64": ("bfloat16", "float16", "float32"), "float32": ("bfloat16", "float16")}
_EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
# So many different numbers with more bits in their fractions than that are of a coarser dtype by no accident. A
# number further from the truth than `_FAR` has another fault, which matters more.
_NUMBERS, _BITS, _FAR = 4, 4, 2.0**-4


def rounded_to(name: str, dtype: str, got: Array, truth: Array, error: float) -> str | None:
    """Return the dtype, coarser than their own, that all numbers are rounded to, in a sentence; None if none is."""
    every = "every entry of " * (got.shape[-1] > 1)
    for narrow in _kept_by(dtype, got, truth):
        if error <= 1.1 * _EPS[narrow]:  # half an ulp of rounding, and the candidate's own arithmetic
            return f"{every}the {name} is rounded to {narrow}"
        if narrow == "float32" and error <= 2.0**-10:  # 29 bits that are 0 are no accident
            return f"{every}the {name} is computed in {narrow}"
    return None


def inexact_and_rounded(name: str, dtype: str, got: Array, truth: Array, error: float) -> str | None:
    """Return that all numbers are rounded to a dtype coarser than their own, whatever else they are, in a sentence."""
    fractions = np.frexp(np.unique(got[np.isfinite(got)]))[0] * 2.0**_BITS
    if np.count_nonzero(fractions % 1.0) < _NUMBERS or error > _FAR:
        return None
    for narrow in _kept_by(dtype, got, truth):
        before = ", and was inexact before" * (error > 1.1 * _EPS[narrow])
        return f"every entry of the {name} is rounded to {narrow}{before}"
    return None


def _kept_by(dtype: str, got: Array, truth: Array) -> Iterator[str]:
    """Yield the dtypes coarser than `dtype` that have all numbers, and not all right ones."""
    finite = np.isfinite(got)
    for narrow in filter(has_dtype, _COARSER.get(dtype, ())):
        rounded, right = (each.astype(dtype_named(narrow)).astype(np.float64) for each in (got, truth))
        rounded_truth = truth.astype(dtype_named(dtype)).astype(np.float64)
        if (rounded == got)[finite].all() and not (right == rounded_truth)[finite].all():
            yield narrow


def place_of_loss(b: Textbook, got: Array, truth: Array, wrong: Array, close: Close) -> str | None:
    """Describe the errors of losses (ranks, numbers); None if they have no pattern."""
    ranks = np.flatnonzero(wrong.any(axis=-1))
    where = [f"on {_some('rank', ranks)} only"] if len(ranks) < len(got) else []
    rows = wrong[ranks[0]]
    if b.problem.reduction == "none" and not rows.all():
        where += _smallest(rows, _rows(b)) or [f"in {_some('row', np.flatnonzero(rows))}"]
    only = np.zeros_like(wrong)
    only[ranks[0]] = rows
    return _sentence("loss", where, _relation("loss", got, truth, only, close, b))


def place_of_gradient(b: Textbook, got: Array, truth: Array, wrong: Array, close: Close) -> str | None:
    """Describe the errors of a gradient (rows, classes); None if they have no pattern."""
    where = [] if wrong.all() else _smallest(wrong, _entries(b, truth))
    return _sentence("gradient", where, _relation("gradient", got, truth, wrong, close, b))


def _sentence(name: str, where: list[str], relation: str) -> str | None:
    if not where and not relation:
        return None
    return " ".join([f"the {name} is wrong", *where]) + (f": {relation}" if relation else "")


def _relation(name: str, got: Array, truth: Array, wrong: Array, close: Close, b: Textbook) -> str:
    """Return the relation of the wrong numbers to the right ones, "" if there is none."""
    these, right = got[wrong], truth[wrong]
    if np.isnan(these).all():
        return "nan" + " in rows that have a logit of -inf" * bool((b.x == -np.inf).any(axis=-1).all())
    if not np.isfinite(these).all() or not np.isfinite(right).all():
        return ""
    if not these.any():
        return f"0 where numbers up to {np.abs(right).max(initial=0.0):.3g} are due"
    largest = int(np.argmax(np.abs(right)))
    factor = float(these[largest] / right[largest]) if right[largest] else np.nan
    if np.isfinite(factor) and close(np.where(wrong, factor * truth, got)):
        meaning = _times(factor, b)
        if meaning or these.size > 1:
            return meaning or f"{factor:.4g} times what is due" * (abs(factor - 1.0) > 0.01)
    offset = float(these[largest] - right[largest])
    if name == "loss" and close(np.where(wrong, truth + offset, got)):
        meaning = _constant(abs(offset), b)
        if meaning or these.size > 1:
            return f"off by the constant {offset:.6g}{meaning}"
    return ""


def _times(factor: float, b: Textbook) -> str:
    """Explain a factor, "" if it has no meaning."""
    if np.isclose(factor, -1.0, rtol=1e-5):
        return "of the opposite sign"
    for number, what in ((b.problem.ranks, "ranks"), (b.problem.rows, "rows")):
        for times, side in ((factor, "large"), (1.0 / factor, "small")):
            if number > 1 and np.isclose(times, number, rtol=1e-5):
                return f"{times:.4g} times too {side}, the number of {what}"
    return ""


def _constant(size: float, b: Textbook) -> str:
    for number, what in ((b.problem.ranks, "the number of ranks"), (b.problem.classes, "the number of classes")):
        if number > 1 and np.isclose(size, np.log(number), rtol=1e-5):
            return f" = log({number}), {what}"
    return ""


def _entries(b: Textbook, truth: Array) -> Iterator[tuple[str, Array]]:
    """Yield sets of entries of the gradient, with a name."""
    problem = b.problem
    shape = b.p.shape
    target = b.q != 0
    if problem.with_numbers:
        yield "at the targets only", target
        yield "everywhere but at the targets", ~target
    owned = np.zeros(shape, np.bool_)
    first, last = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    for rank in range(problem.ranks):
        shard = b.in_shard(rank)
        owned |= b.owns(rank)[:, None] & shard
        yield f"on rank {rank} only", np.broadcast_to(shard, shape)
        if truth[:, shard].any():  # else it cannot be wrong there
            yield f"on all ranks but {rank}", np.broadcast_to(np.logical_not(shard), shape)
        columns = np.flatnonzero(shard)
        first[:, columns[:1]] = last[:, columns[-1:]] = True
    if problem.with_numbers and problem.ranks > 1:
        yield "on the shard that owns the target only", owned
        yield "on the shards that do not own the target only", ~owned & b.valid[:, None]
    yield "at the first class of each shard only", first
    yield "at the last class of each shard only", last
    yield "at logits of -inf only", b.x == -np.inf
    for text, rows in _rows(b):
        yield text, np.broadcast_to(rows[:, None], shape)


def _rows(b: Textbook) -> Iterator[tuple[str, Array]]:
    """Yield sets of rows, with a name."""
    problem, splits = b.problem, np.array(b.problem.splits)
    if problem.with_numbers:
        yield "in ignored rows only", ~b.valid
        yield "in rows that count", b.valid
        yield "in rows whose target is the first class of a shard only", np.isin(b.t, splits[:-1])
        yield "in rows whose target is the last class of a shard only", np.isin(b.t, splits[1:] - 1)
        for rank in range(problem.ranks):
            yield f"in rows whose target is on rank {rank} only", b.owns(rank)
    special = ~np.isfinite(b.x)
    yield "in rows with nan or infinite logits only", np.asarray(special.any(axis=-1))


def _smallest(wrong: Array, sets: Iterator[tuple[str, Array]]) -> list[str]:
    """Return the name of the smallest set, or side, that has all wrong numbers and is at least half wrong."""
    sides = []
    for axis, what in enumerate(("row", "class")[: wrong.ndim]):
        start = int(wrong.any(axis=tuple(other for other in range(wrong.ndim) if other != axis)).argmax())
        if start >= _MANY:
            members = np.zeros_like(wrong)
            members[(slice(None),) * axis + (slice(start, None),)] = True
            sides.append((f"from {what} {start} on", members))
    fitting = [
        (int(members.sum()), text)
        for text, members in (*sets, *sides)
        if not (wrong & ~members).any() and not members.all() and 2 * wrong.sum() >= members.sum()
    ]
    return [min(fitting, key=lambda each: each[0])[1]] if fitting else []


def _some(what: str, numbers: Array) -> str:
    shown = ", ".join(map(str, numbers[:4])) + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")
    return f"{what}{'s' * (len(numbers) > 1)} {shown}"

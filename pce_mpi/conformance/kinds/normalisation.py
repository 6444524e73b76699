"""Name the divisor of a step's loss from what its tokens count, and say what it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import dtype_named
from pce_mpi.conformance.kinds.step_problem import Step
from pce_mpi.conformance.problems import Array, Problem, Told
from pce_mpi.conformance.textbook import Textbook
from pce_mpi.conformance.units import has_dtype

# True if two arrays are equal but for rounding.
_Same = Callable[[Any, Any], bool]

_WHAT = {"data": "data ranks", "context": "context ranks", "micro-batches": "micro-batches"}
_SHIFTED = "targets that were shifted are shifted once more: each token has the target of the next one"
_FOLLOWING = "targets without the first of each micro-batch"
_WHOLE = "the divisor is the count of {}"
# Tokens that are counted together, in the order in which they are told apart where one size is 1.
_PARTS = {
    ("rank",): "each rank divides by its own count of {}",
    ("rank", "micro-batch"): "each rank divides each micro-batch by its own count of {}",
    ("micro-batch",): "each micro-batch is divided by its count of {} on all ranks",
    ("context",): "the divisor is the count of {} on the data ranks alone: each context rank has its own",
    ("data",): "the divisor is the count of {} on the context ranks alone: each data rank has its own",
    ("context", "micro-batch"): "each micro-batch is divided by its count of {} on the data ranks alone",
    ("data", "micro-batch"): "each micro-batch is divided by its count of {} on the context ranks alone",
}


def tell(book: Textbook, name: str, got: Array) -> Told | None:
    """Say how a step is normalised that gives its tokens these weights, and what that does; None if it is right."""
    step = book.problem
    assert isinstance(step, Step)
    same = _same_in(step)
    weights, (due, gradient) = got[0], step.expected
    if (weights == -np.inf).any():
        return Told((_SHIFTED,))
    if not np.isfinite(weights).all():
        return Told((), _not_finite(step, weights))
    # The gradient of a token that is certain is 0, and tells nothing.
    known = np.asarray(step.row_major(gradient).any(axis=-1))
    times = weights[known] / due.reshape(-1)[known]
    if same(times, 1.0):
        return None
    plain, others = _of_each(step, book, weights, known, same)
    if same(times, times[0]):
        whole = _of_all(step, book, float(times[0]), same)
        # Without a target that follows another, a gradient of 0 is that of many faults: other cases tell.
        none = not times.any() and not _counted(step, book)[_FOLLOWING].any()
        causes = (*whole, *plain, *[_SHIFTED] * none)
        return Told(causes, f"every token counts {_times(times[0])} what is due", len(whole) or bool(plain))
    effect = _unequal(step, weights, known, same)
    if known[step.valid].all() and not same(times.mean(), 1.0):
        effect += f", and all together count {_times(times.mean())} what is due"
    causes = tuple(plain or others)[: len(plain) or 1]
    if causes and not all(part.valid.any() for rank in range(len(step.lengths)) for part in step.micro_batches(rank)):
        effect += "; where a count is 0, so is the gradient, as with max(count, 1)"
    return Told(causes, effect, min(1, len(causes)))


def tell_losses(problem: Problem, answers: Sequence[Any]) -> str | None:
    """Say that losses, combined as gradients or alike on all ranks, are not the mean of the step; None if they are."""
    assert isinstance(problem, Step)
    step, losses, book, same = problem, answers[0].products["losses"], Textbook.of(problem), _same_in(problem)
    if np.isnan(losses).any():
        return None  # the nan has been told
    rank, micro_batch = step.places
    of_token, averages = book.row_losses(), {each: step.sizes[each] for each in step.averaged}
    due = of_token.sum() / max(step.valid.sum(), 1)
    found = losses.sum() / math.prod(averages.values())
    given = [found]
    if same(losses, losses[0]):
        whole = losses[0].sum()
        given += [whole / math.prod(averages.values()), whole / averages.get("micro-batches", 1)]
    if any(same(each, due) for each in given):
        return None
    sums, counts = np.zeros(losses.shape), np.zeros(losses.shape)
    np.add.at(sums, (rank, micro_batch), of_token)
    np.add.at(counts, (rank, micro_batch), step.valid)
    own = "each micro-batch has the mean of its own valid tokens" * same(losses, sums / np.maximum(counts, 1))
    cause = own or (", or ".join(_of_all(step, book, found / due, same)) if due else "")
    text = f"the gradient of the step is right, and its loss is {found:.6g} where {due:.6g} is right"
    return f"{text}: {cause}" if cause else text


def _same_in(step: Step) -> _Same:
    close = 1e-2 if step.dtype.itemsize == 2 else 1e-4
    return lambda a, b: bool(np.allclose(a, b, rtol=close, atol=0.0))


def _not_finite(step: Step, weights: Array) -> str:
    first = int(np.argmin(np.isfinite(weights)))
    part = step.row_name(first)
    if np.isnan(weights[first]):
        mine = np.all([numbers == numbers[first] for numbers in step.places], axis=0)
        reason = "" if step.valid[mine].any() else ", which has no valid token,"
        return f"the gradient of {part}{reason} is nan, and so is that of the step"
    if step.valid[first]:
        return f"the gradient of a token in {part} is no multiple of that of its cross entropy"
    return f"a token of {part} that is ignored has a gradient"


def _counted(step: Step, book: Textbook) -> dict[str, Array]:
    """Return which tokens a count may have."""
    first = np.diff(np.stack(step.places), axis=1, prepend=-1).any(axis=0)
    return {
        "valid tokens": step.valid,
        "all tokens, the ignored ones included": np.ones_like(step.valid),
        "tokens whose cross entropy is not 0": step.valid & (book.row_losses().astype(np.float32) != 0.0),
        _FOLLOWING: step.valid & ~first,
    }


def _of_all(step: Step, book: Textbook, times: float, same: _Same) -> list[str]:
    """Name what gives every token so many times what is due."""
    rank, micro_batch = step.places
    ranks, count, last = len(step.lengths), step.valid.sum(), step.sizes["micro-batches"] - 1
    of_ranks = np.bincount(rank[step.valid], minlength=ranks)
    divisors = {_WHOLE.format(what): mask.sum() for what, mask in _counted(step, book).items()} | {
        "the sum is not divided by the count of valid tokens": 1,
        f"the count over the {ranks} ranks, rounded down": count // ranks * ranks,
        "every rank takes the count of rank 0 for its own": step.valid[rank == 0].sum() * ranks,
        "every micro-batch is divided by the count of the last one": step.valid[micro_batch == last].sum(),
    }
    halves = list[tuple[str, float]]()
    for name in filter(has_dtype, ("float16", "bfloat16")):
        dtype = dtype_named(name)
        total = np.zeros((), dtype)
        for part in of_ranks:
            total = (total + part.astype(dtype)).astype(dtype)
        kept = {float(total), float(count.astype(dtype))} - {float(count)}
        halves += [(f"the count of valid tokens is kept in {name}", each) for each in kept]
    found = [text for text, divisor in (*divisors.items(), *halves) if divisor and same(count / divisor, times)]
    return found + [text for _, text in sorted(_factors(step, times, same))[:1]]


def _factors(step: Step, times: float, same: _Same) -> Iterator[tuple[bool, str]]:
    """Yield sentences in which so many times what is due is a product of sizes; with False, the likely ones."""
    combined = [each for each, size in step.sizes.items() if size > 1]
    for number in range(1, len(combined) + 1):
        for chosen in combinations(combined, number):
            size = math.prod(step.sizes[each] for each in chosen)
            these = " and the ".join(f"{step.sizes[each]} {_WHAT[each]}" for each in chosen)
            averaged = [each in step.averaged for each in chosen]
            names = " and ".join(f'"{each}"' for each in chosen)
            if same(times, size):
                sums = f"over which the trainer sums; where it averages, add {names} to `averaged`"
                said = "twice" if all(averaged) else sums if not any(averaged) else ""
                yield all(averaged), f"the gradient is multiplied by the {these}, {said}".removesuffix(", ")
            elif same(times, 1.0 / size) and all(averaged):
                unmade = f"the trainer averages over the {these}, and nothing makes up for it"
                yield False, f"{unmade}; where it sums, leave {names} out of `averaged`"
            elif same(times, 1.0 / size):
                said = "over which the trainer sums" if not any(averaged) else ""
                yield True, f"the gradient is divided by the {these}, {said}".removesuffix(", ")


def _of_each(step: Step, book: Textbook, weights: Array, known: Array, same: _Same) -> tuple[list[str], list[str]]:
    """Name the divisors of parts that give tokens these weights, and those that need one factor more."""
    rank, micro_batch = step.places
    data, context = np.divmod(rank, step.context_ranks)
    numbers = {"rank": rank, "micro-batch": micro_batch, "data": data, "context": context}
    averages = math.prod(step.sizes[each] for each in step.averaged)
    plain, others = list[str](), list[str]()
    for what, mask in _counted(step, book).items():
        for together, text in _PARTS.items():
            alike = np.logical_and.reduce([numbers[each][:, None] == numbers[each] for each in together])
            if alike.all():  # that is the whole
                continue
            products = (alike @ mask.astype(np.float64) * weights)[known]
            if same(products, products[0]):
                # Counts of other tokens may have the same ratios.
                exact = same(products[0], 1.0) or same(products[0] * averages, 1.0)
                (plain if exact else others).append(text.format(what))
    return plain, others


def _unequal(step: Step, weights: Array, known: Array, same: _Same) -> str:
    """Compare the tokens that count most and least."""
    rank, micro_batch = (numbers[known] for numbers in step.places)
    weights = weights[known]
    most, least = int(weights.argmax()), int(weights.argmin())
    forms = {
        "rank {rank}": (rank,),
        "micro-batch {micro_batch}": (micro_batch,),
        "micro-batch {micro_batch} of rank {rank}": (rank, micro_batch),
    }
    for form, numbers in forms.items():
        alike = np.logical_and.reduce([each[:, None] == each for each in numbers])
        if same(np.where(alike, weights, weights[:, None]), weights[:, None]):
            more, less = (form.format(rank=rank[at], micro_batch=micro_batch[at]) for at in (most, least))
            if weights[least] == 0.0:
                return f"a token of {less} does not count"
            return f"a token of {more} counts {_times(weights[most] / weights[least])} one of {less}"
    return "tokens of one micro-batch count differently"


def _times(factor: float) -> str:
    part = Fraction(factor).limit_denominator(9)
    return f"{part} of" if 0 < part < 1 and math.isclose(factor, part, rel_tol=1e-3) else f"{factor:.3g} times"

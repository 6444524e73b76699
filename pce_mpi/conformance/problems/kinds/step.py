"""The mean of a training step: what each token of all ranks counts in the gradient, and the divisor that this tells."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, combinations
import math
from typing import Any

import numpy as np

from pce_mpi import dense
from pce_mpi.arrays import dtype_named
from pce_mpi.conformance.problems.cases import Cases, Gradient, Setting, grid, has_dtype
from pce_mpi.conformance.problems.generators import normal_logits, random_targets, rounded
from pce_mpi.conformance.problems.problem import Array, Kind, Problem, Told
from pce_mpi.conformance.problems.textbook import Textbook

# A gradient that is that far from any multiple of the due one gives its token no weight, by the bytes of a logit.
_OFF = {2: 0.05, 4: 1e-3, 8: 1e-3}


@dataclass(frozen=True, eq=False)
class TrainingStep(Problem):
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
            in_it = (rank == of) & (micro_batch == number)
            logits, targets = self.row_major(self.logits)[in_it], self.targets.reshape(-1)[in_it]
            logits, targets = logits.reshape(*axes, *logits.shape), targets.reshape(*axes, -1)
            parts.append(replace(self, logits=logits, targets=targets, reduction="mean"))
        return parts

    def weights(self, of: int, gradients: Sequence[Array]) -> Array:
        """Return what each token of a rank counts; nan for a nan gradient, infinite for no multiple of the due one."""
        of_rank = self.places[0] == of
        weights, exact = self.expected[0].reshape(-1)[of_rank], self.row_major(self.expected[1])[of_rank]
        got = np.concatenate([each.reshape(-1, self.classes) for each in gradients]).astype(np.float64)
        got /= math.prod(self.sizes[each] for each in self.averaged)
        times, off = self._multiples(got, exact)
        if off.any():  # -inf if they are multiples for the next token's target
            shifted = [replace(each, targets=np.roll(each.targets, -1)) for each in self.micro_batches(of)]
            following = np.concatenate([each.row_major(each.expected[1]) for each in shifted])
            off = np.where(off, np.inf if self._multiples(got, following)[1].any() else -np.inf, 0.0)
        counts = np.where(off, off, times * weights)
        return np.where(np.isnan(got).any(axis=-1), np.nan, counts)

    def _multiples(self, got: Array, exact: Array) -> tuple[Array, Array]:
        """Return how many times the due one each gradient is, and which is no multiple of it."""
        squares = (exact**2).sum(axis=-1)
        # The gradient of a token that is certain is 0, whatever it counts.
        with np.errstate(invalid="ignore", divide="ignore"):
            times = np.where(squares > 0.0, (got * exact).sum(axis=-1) / squares, 1.0)
            off = np.abs(got - times[:, None] * exact).max(axis=-1, initial=0.0)
            return times, off > _OFF[self.dtype.itemsize] * np.abs(times) * np.sqrt(squares)

    def joined(self, answers: Sequence[Any]) -> list[Any]:
        """Return one answer with the weights of all ranks, and the losses of all ranks and micro-batches."""
        losses = np.stack([answer.products["losses"] for answer in answers])
        weights = np.concatenate([answer.loss for answer in answers])
        return [replace(answers[0], loss=weights, products={"losses": losses})]


# True if two arrays are equal but for rounding.
_Same = Callable[[Any, Any], bool]

_WHAT = {"data": "data ranks", "context": "context ranks", "micro-batches": "micro-batches"}
_SHIFTED = "targets that were shifted are shifted once more: each token has the target of the next one"
_FOLLOWING = "targets without the first of each micro-batch"
_WHOLE = "the divisor is the count of {}"
_AT_LEAST_1 = "a {} without valid tokens is counted as one token: the divisor is a sum of max(count, 1)"
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
    assert isinstance(step, TrainingStep)
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
        whole, unlikely = _of_all(step, book, float(times[0]), same)
        # Without a target that follows another, a gradient of 0 is that of many faults: other cases tell.
        none = not times.any() and not _counted(step, book)[_FOLLOWING].any()
        causes = (*whole, *plain, *unlikely, *[_SHIFTED] * none)
        effect = f"every token counts {_times(times[0])} what is due"
        alike = len(whole) + min(1, len(plain)) or min(1, len(unlikely))
        return Told(causes, effect, alike, shared=_constant(step, float(times[0]), same))
    effect = _unequal(step, weights, known, same)
    if known[step.valid].all() and not same(times.mean(), 1.0):
        effect += f", and all together count {_times(times.mean())} what is due"
    causes = tuple(plain or others)[: len(plain) or 1]
    if causes and not all(part.valid.any() for rank in range(len(step.lengths)) for part in step.micro_batches(rank)):
        effect += "; where a count is 0, so is the gradient, as with max(count, 1)"
    return Told(causes, effect, min(1, len(causes)))


def tell_losses(problem: Problem, answers: Sequence[Any]) -> str | None:
    """Say that losses, combined as gradients or alike on all ranks, are not the mean of the step; None if they are."""
    assert isinstance(problem, TrainingStep)
    step, losses, book, same = problem, answers[0].products["losses"], Textbook.of(problem), _same_in(problem)
    if np.isnan(losses).any():
        return None  # the nan has been told
    rank, micro_batch = step.places
    of_token, averages = book.row_losses(), {each: step.sizes[each] for each in step.averaged}
    exact = of_token.sum() / max(step.valid.sum(), 1)
    loss = losses.sum() / math.prod(averages.values())
    readings = [loss]
    if same(losses, losses[0]):
        whole = losses[0].sum()
        readings += [whole / math.prod(averages.values()), whole / averages.get("micro-batches", 1)]
    if any(same(each, exact) for each in readings):
        return None
    sums, counts = np.zeros(losses.shape), np.zeros(losses.shape)
    np.add.at(sums, (rank, micro_batch), of_token)
    np.add.at(counts, (rank, micro_batch), step.valid)
    own = "each micro-batch has the mean of its own valid tokens" * same(losses, sums / np.maximum(counts, 1))
    cause = own or (", or ".join(_of_all(step, book, loss / exact, same)[0]) if exact else "")
    text = f"the gradient of the step is right, and its loss is {loss:.6g} where {exact:.6g} is right"
    return f"{text}: {cause}" if cause else text


def _same_in(step: TrainingStep) -> _Same:
    close = 1e-2 if step.dtype.itemsize == 2 else 1e-4
    return lambda a, b: bool(np.allclose(a, b, rtol=close, atol=0.0))


def _not_finite(step: TrainingStep, weights: Array) -> str:
    first = int(np.argmin(np.isfinite(weights)))
    part = step.row_name(first)
    if np.isnan(weights[first]):
        in_it = np.all([numbers == numbers[first] for numbers in step.places], axis=0)
        reason = "" if step.valid[in_it].any() else ", which has no valid token,"
        return f"the gradient of {part}{reason} is nan, and so is that of the step"
    if step.valid[first]:
        return f"the gradient of a token in {part} is no multiple of that of its cross entropy"
    return f"a token of {part} that is ignored has a gradient"


def _counted(step: TrainingStep, book: Textbook) -> dict[str, Array]:
    """Return which tokens a count may have."""
    first = np.diff(np.stack(step.places), axis=1, prepend=-1).any(axis=0)
    return {
        "valid tokens": step.valid,
        "all tokens, the ignored ones included": np.ones_like(step.valid),
        "tokens whose cross entropy is not 0": step.valid & (book.row_losses().astype(np.float32) != 0.0),
        _FOLLOWING: step.valid & ~first,
    }


def _of_all(step: TrainingStep, book: Textbook, times: float, same: _Same) -> tuple[list[str], list[str]]:
    """Name what gives every token so many times what is due, and what is less likely to have done so."""
    rank, micro_batch = step.places
    ranks, count, last = len(step.lengths), step.valid.sum(), step.sizes["micro-batches"] - 1
    of_ranks = np.bincount(rank[step.valid], minlength=ranks)
    divisors = {_WHOLE.format(what): mask.sum() for what, mask in _counted(step, book).items()} | {
        "the sum is not divided by the count of valid tokens": 1,
        f"the count over the {ranks} ranks, rounded down": count // ranks * ranks,
        "every rank takes the count of rank 0 for its own": step.valid[rank == 0].sum() * ranks,
        "every micro-batch is divided by the count of the last one": step.valid[micro_batch == last].sum(),
    }
    for what, part in {
        "rank": rank,
        "micro-batch": micro_batch,
        "micro-batch of a rank": rank * (last + 1) + micro_batch,
    }.items():
        at_least_1 = np.maximum(np.bincount(part, step.valid), 1).sum()
        divisors |= {_AT_LEAST_1.format(what): at_least_1} if at_least_1 > count else {}
    halves = list[tuple[str, float]]()
    for name in filter(has_dtype, ("float16", "bfloat16")):
        dtype = dtype_named(name)
        total = np.zeros((), dtype)
        for part in of_ranks:
            total = (total + part.astype(dtype)).astype(dtype)
        kept = {float(total), float(count.astype(dtype))} - {float(count)}
        halves += [(f"the count of valid tokens is kept in {name}", each) for each in kept]
    causes = [text for text, divisor in (*divisors.items(), *halves) if divisor and same(count / divisor, times)]
    by_factor = sorted(_factors(step, times, same))
    likely = [text for unlikely, text in by_factor if unlikely == by_factor[0][0]]
    return causes + likely, [text for _, text in by_factor[len(likely) :]]


def _constant(step: TrainingStep, times: float, same: _Same) -> tuple[str, ...]:
    """Name a divisor that is a whole number, whatever the count: other cases tell if it is the same in them."""
    divisor = step.valid.sum() / times if times else 0.0
    return (f"the divisor is the constant {divisor:.0f}",) if divisor > 1.5 and same(divisor, round(divisor)) else ()


def _factors(step: TrainingStep, times: float, same: _Same) -> Iterator[tuple[bool, str]]:
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
                words = "twice" if all(averaged) else sums if not any(averaged) else ""
                yield all(averaged), f"the gradient is multiplied by the {these}, {words}".removesuffix(", ")
            elif same(times, 1.0 / size) and all(averaged):
                unmade = f"the trainer averages over the {these}, and nothing makes up for it"
                yield False, f"{unmade}; where it sums, leave {names} out of `averaged`"
            elif same(times, 1.0 / size):
                words = "over which the trainer sums" if not any(averaged) else ""
                yield True, f"the gradient is divided by the {these}, {words}".removesuffix(", ")


def _of_each(
    step: TrainingStep, book: Textbook, weights: Array, known: Array, same: _Same
) -> tuple[list[str], list[str]]:
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


def _unequal(step: TrainingStep, weights: Array, known: Array, same: _Same) -> str:
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


def _exact(problem: Problem) -> tuple[Array, Array]:
    """Return 1 / count for each valid token, and the gradient of the mean in one process."""
    _, gradient = dense.softmax_cross_entropy_value_and_grad(problem.logits, problem.targets, **problem.options)
    return (problem.valid / max(problem.valid.sum(), 1)).reshape(problem.rows_shape), gradient


def _sizes(book: Textbook) -> tuple[Array, Array, Array]:
    weights = book.problem.expected[0].reshape(-1)
    return weights, weights, np.zeros_like(book.p)


CASES = Cases(procedure="step", gradient=Gradient.VALUE, targets=True, classes=8, resizable=False)


def _few_on_rank_1(rank: int, micro_batch: int) -> int:
    return (6, 2, 4)[rank % 3] + rank // 3


def _uneven(rank: int, micro_batch: int) -> int:
    return (4, (1 + rank) ** 2, 2)[micro_batch]


def _step(
    setting: Setting, valid: Callable[[int, int], int], micro_batches: int = 1, context_ranks: int = 1
) -> TrainingStep:
    """Draw a step with so many valid tokens in a rank's micro-batch; those at its end are ignored, 2 or 3 of them."""
    counts = [[valid(rank, number) for number in range(micro_batches)] for rank in range(setting.ranks)]
    lengths = [[count + 2 + (rank + number) % 2 for number, count in enumerate(of)] for rank, of in enumerate(counts)]
    ends = [np.arange(length) >= count for length, count in zip(chain(*lengths), chain(*counts), strict=True)]
    ignored = np.concatenate(ends)
    targets = random_targets(setting, ignored.shape, setting.classes)
    targets[ignored] = setting.ignore_index
    return TrainingStep(
        rounded(setting, normal_logits(setting, (ignored.size, setting.classes), scale=1.0)),
        targets,
        (0, setting.classes),
        setting.kind,
        options={"ignore_index": setting.ignore_index},
        reduction="none",
        lengths=tuple(map(tuple, lengths)),
        context_ranks=context_ranks,
        averaged=setting.averaged,
    )


@CASES.case("step/data-ranks")
def _data_ranks(setting: Setting) -> Problem:
    """A mean of the ranks' means: tokens of a rank that has few of them count more (Megatron-LM, verl, torchtitan)."""
    return _step(setting, _few_on_rank_1)


@CASES.case("step/context-ranks")
def _context_ranks(setting: Setting) -> Problem:
    """Context ranks that are left out of the count, or over which an average is not made up for (Megatron-LM)."""
    return _step(setting, _few_on_rank_1, context_ranks=setting.ranks)


@CASES.case("step/micro-batches")
def _micro_batches(setting: Setting) -> Problem:
    """A mean of the micro-batches' means: accumulated gradients are not those of one (transformers, torchtune)."""
    return _step(setting, _uneven, micro_batches=3)


@CASES.case("step/data-and-context")
def _data_and_context(setting: Setting) -> Problem:
    """A number of ranks in the place of another: data ranks, context ranks, and all of them are three numbers."""
    return _step(setting, _uneven, micro_batches=3, context_ranks=grid(setting.ranks)[1])


@CASES.case("step/empty-rank")
def _empty_rank(setting: Setting) -> Problem:
    """A rank without a valid token: 0 / 0, or a mean in which it takes a share all the same."""
    return _step(setting, lambda rank, number: (3, 1)[number] * (rank > 0), micro_batches=2)


@CASES.case("step/empty-micro-batch")
def _empty_micro_batch(setting: Setting) -> Problem:
    """A micro-batch without a valid token on any rank: 0 / 0, though other micro-batches have some (mcore-bridge)."""
    return _step(setting, lambda rank, number: (4 + rank, 0, 2)[number], micro_batches=3)


@CASES.case("step/no-valid-token")
def _no_valid_token(setting: Setting) -> Problem:
    """A step without a valid token: its gradient is 0, and nan ends the training (OLMo-core, nanochat, cosmos-rl)."""
    return _step(setting, lambda rank, number: 0, micro_batches=2)


@CASES.case("step/one-token")
def _one_token(setting: Setting) -> Problem:
    """One valid token in all: it counts 1, however many context ranks and micro-batches have none (Megatron-LM)."""
    only = setting.ranks - 1, 1
    return _step(setting, lambda *place: int(place == only), micro_batches=2, context_ranks=setting.ranks)


@CASES.case("step/many-tokens")
def _many_tokens(setting: Setting) -> Problem:
    """A count that is kept in half precision: 2,051 and 259 are no numbers of float16 and bfloat16."""
    return _step(setting, lambda rank, _: 2_051 if rank == 0 else 259)


@CASES.case("step/certain-tokens", special=True)
def _certain_tokens(setting: Setting) -> Problem:
    """A count of the tokens whose cross entropy is not 0: one that the model is certain of counts too (ColossalAI)."""
    step = _step(setting, lambda rank, _: 5 + 2 * rank)
    certain = np.flatnonzero(step.valid)[::3]
    step.logits[certain, step.targets[certain]] = 2_000.0
    return step


STEP = Kind(
    noun="weight",
    plural="weights",
    returns="loss",
    exact=_exact,
    sizes=_sizes,
    faults=lambda book: iter(()),
    told='the gradient is a step\'s: that is declared by @offers(kind="step")',
    options=(),
    facts=("context_ranks", "micro_batches"),
    tell=tell,
    beside=tell_losses,
    shared_cases=False,
    cases=CASES,
)

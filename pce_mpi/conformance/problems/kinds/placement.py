"""Functions of an array that ranks hold together, and moves between placements, with the gradient of each rank's part.

Rows are sharded by elements, or each rank has one term of a partial array: that is an array of an element a rank.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from itertools import permutations
import math
from typing import Any

import numpy as np

from pce_mpi import dense
from pce_mpi.conformance.problems.cases import Cases, Gradient, Setting, table
from pce_mpi.conformance.problems.generators import chunks, random_problem, rounded, uneven
from pce_mpi.conformance.problems.problem import Array, Kind, Problem, Told
from pce_mpi.conformance.problems.textbook import Faults, Given, Textbook
from pce_mpi.conformance.text import meant

# The functions that only move elements, whose results are compared by their bits.
MOVES = ("replicate", "shard")

# A row of any length; its value, and the derivative by each element, nan where there is none.
_Function = Callable[[Array, str], tuple[float, Array]]


def _sum(row: Array, ties: str) -> tuple[float, Array]:
    return float(math.fsum(row) if np.isfinite(row).all() else row.sum()), np.ones(row.size)


def _mean(row: Array, ties: str) -> tuple[float, Array]:
    total, ones = _sum(row, ties)
    return float(np.divide(total, row.size)), ones / row.size


def _max(row: Array, ties: str) -> tuple[float, Array]:
    value = float(row.max(initial=-np.inf))
    found = row == value
    if np.isnan(value):
        return value, np.full(row.size, np.nan)
    if ties == "first":
        found = found & (np.cumsum(found) == 1)
    return value, found / (found.sum() if ties == "shared" else 1.0)


def _min(row: Array, ties: str) -> tuple[float, Array]:
    value, slope = _max(-row, ties)
    return -value, slope


def _largest(row: Array, ties: str) -> tuple[float, Array]:
    value, slope = _max(np.abs(row), ties)
    return max(value, 0.0), slope * np.sign(row)


def _prod(row: Array, ties: str) -> tuple[float, Array]:
    return _product(row), np.array([_product(np.delete(row, each)) for each in range(row.size)])


def _product(numbers: Array) -> float:
    if not np.isfinite(numbers).all():
        return float(np.prod(numbers))
    exact = math.prod(map(Fraction, numbers.tolist()), start=Fraction(1))
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def _norm(row: Array, ties: str) -> tuple[float, Array]:
    largest = float(np.abs(row).max(initial=0.0))
    unit = 2.0 ** math.frexp(largest)[1] if math.isfinite(largest) and largest else 1.0  # whose quotients are exact
    value = unit * math.sqrt(_sum((row / unit) ** 2, ties)[0])
    return value, row / value


def _logsumexp(row: Array, ties: str) -> tuple[float, Array]:
    largest = float(row.max(initial=-np.inf))
    if math.isinf(largest):
        return largest, np.full(row.size, np.nan)
    slope = dense.class_statistics_backward(row, logsumexp=np.ones(()))
    return float(dense.class_statistics(row).logsumexp), slope


_FUNCTIONS: dict[str, _Function] = {
    "sum": _sum,
    "mean": _mean,
    "max": _max,
    "min": _min,
    "prod": _prod,
    "norm": _norm,
    "norm-inf": _largest,
    "logsumexp": _logsumexp,
}
# Those that find an element, so that elements may tie, and the functions are exact.
# Of so many ranks, all orders of a sum are compared.
_FEW = 4
FINDS = ("max", "min", "norm-inf")


@np.errstate(all="ignore")
def _of(x: Array, conventions: Any, ties: str | None = None) -> tuple[Array, Array]:
    """Return the value of each row, and its derivatives."""
    function = _FUNCTIONS[conventions["computes"]]
    found = [function(row, ties or conventions["ties"]) for row in x]
    return np.array([value for value, _ in found]), np.array([slope for _, slope in found]).reshape(x.shape)


def _exact(problem: Problem) -> tuple[Array, Array]:
    values, slopes = _of(problem.row_major(problem.logits).astype(np.float64), problem.conventions)
    if problem.conventions["partial"] == "array":
        slopes = np.ones_like(slopes)
    return values.reshape(problem.rows_shape), slopes.reshape(problem.logits.shape) * problem.upstream


def _sums(problem: Problem) -> Array:
    """Return the sum of magnitudes in the value of each row."""
    x = np.abs(problem.row_major(problem.logits).astype(np.float64))
    x = np.where(np.isfinite(x), x, 0.0)
    function = problem.conventions["computes"]
    return np.asarray(x.sum(axis=-1) if function == "sum" else x.mean(axis=-1) if function == "mean" else 0 * x[:, 0])


def _sizes(book: Textbook) -> tuple[Array, Array, Array]:
    ones = np.ones(book.problem.rows)
    logsumexp = book.problem.conventions["computes"] == "logsumexp"
    return ones, np.abs(book.g) * logsumexp, np.zeros_like(book.x)


def _faults(b: Textbook) -> Faults:
    """Yield answers that reduce nothing, or another way; PyTorch's Partial and `torch.distributed.nn`, Heat, drafts."""
    conventions, right = b.problem.conventions, b.problem.row_major(b.problem.expected[1])
    name, ranks, g = conventions["computes"], b.problem.ranks, b.g[:, None]
    parts = [_of(b.x[:, b.in_shard(rank)], conventions) for rank in range(ranks)]
    own, slopes = np.stack([values for values, _ in parts]), np.concatenate([slope for _, slope in parts], axis=-1)
    if ranks > 1:
        local = f"the {name} is of each rank's own elements: it is never reduced over the ranks"
        for gradient in (right, slopes * g):
            yield local, Given((*own,), gradient)
            yield f"the ranks' values of the {name} are added", Given((own.sum(axis=0),), gradient)
        for gradient in (right, slopes * g, slopes * g / ranks):
            text = f"the ranks' values of the {name} are averaged, however many elements each rank has"
            yield text, Given((own.mean(axis=0),), gradient)
        yield _AS_A_SUM if conventions["partial"] == "term" else _PASSED, Given(None, slopes * g)
        due = b.problem.expected[0].reshape(-1)
        tied = np.concatenate([slope * (each == due)[:, None] for each, slope in parts], axis=-1)
        yield "each rank whose own element ties has the whole gradient", Given(None, tied * g)
    if name in ("sum", "mean") and b.problem.dtype.itemsize == 2:
        text = f"the ranks' values of the {name} are rounded to {b.problem.dtype}, and added up in it"
        share = np.diff(b.problem.splits)[:, None] / b.problem.classes if name == "mean" else 1.0
        for terms, divisor in ((own * share, 1), (own, ranks if name == "mean" else 1)):
            for order in permutations(terms.astype(b.problem.dtype), ranks if ranks <= _FEW else 0):
                total = reduce(np.add, order, np.zeros((), b.problem.dtype)).astype(np.float64)
                yield text, Given((total / divisor,), None)
    if name == "mean":
        lengths, stops = np.diff(b.problem.splits), b.problem.splits[1:]
        merged = reduce(lambda mean, r: mean + (own[r] - mean) * lengths[r] / stops[r], range(1, ranks), own[0])
        if lengths.all():
            yield "means are merged by their differences, and inf less inf is nan", Given((merged,), None)
        yield "the sum is not divided by the number of elements", Given((b.x.sum(axis=-1),), np.ones_like(b.x) * g)
    if name == "prod":
        yield _MULTIPLIED, Given(None, g**ranks + 0 * b.x)
        text = "the gradient is the product divided by the element: nan where that is 0"
        yield text, Given(None, b.problem.expected[0].reshape(-1, 1) / b.x * g)
    for ties, text in _TIES.items() if name in FINDS and conventions["partial"] != "array" else ():
        said = f"{text}; {meant(ties=ties)}" if ties != "each" else text
        yield said, Given(None, _of(b.x, conventions, ties)[1] * g)
    yield from _identities(b, right)


_PASSED = "the upstream gradient is passed on as it is to the function of each rank's own elements"
_AS_A_SUM = f"{_PASSED}, as if the reduction over the ranks were a sum; {meant(partial='array')}"
_MULTIPLIED = "the upstream gradients of the ranks are multiplied, as the numbers are"
_COUNTS = "a rank without elements counts as {}"
_TIES = {
    "shared": "elements that tie share the gradient",
    "first": "the first of the elements that tie has the gradient",
    "each": "each of the elements that tie has the whole gradient",
}


def _identities(b: Textbook, right: Array) -> Iterator[tuple[str, Given]]:
    """Yield what a number gives that a rank without elements puts in."""
    if (np.diff(b.problem.splits) == 0).any():
        for number in (0.0, 1.0):
            values, slopes = _of(np.pad(b.x, ((0, 0), (0, 1)), constant_values=number), b.problem.conventions)
            for gradient in (right, slopes[:, :-1] * b.g[:, None]):
                yield _COUNTS.format(int(number)), Given((values,), gradient)


def _tell(b: Textbook, name: str, got: Array) -> Told | None:
    """Name a nan that comparisons lose: all that is wrong are numbers of other ranks where nan is due (gloo, MPICH)."""
    conventions, due = b.problem.conventions, b.problem.expected[0].reshape(-1)
    function = conventions["computes"]
    if function == "prod" and not got.any() and b.x.all():
        return Told((_COUNTS.format(0),)) if (np.diff(b.problem.splits) == 0).any() else None
    if conventions["partial"] == "term" and function != "sum" and name == "gradient" and (got == b.g[:, None]).all():
        alike = function == "prod" and bool((b.g**b.problem.ranks == b.g).all())
        return Told((_AS_A_SUM, *[_MULTIPLIED] * alike))
    if function == "norm" and name == "loss" and (got == np.inf).any() and np.isfinite(b.x).all():
        return Told(("the squares of the elements overflow",))
    lost = np.isnan(due) & ~np.isnan(got) if name == "loss" else np.zeros(1, np.bool_)
    if function not in FINDS or not lost.any() or not (lost | (got == due) | np.isnan(due)).all():
        return None
    own = [_of(b.x[:, b.in_shard(rank)], conventions)[0] for rank in range(b.problem.ranks)]
    if not np.logical_or.reduce([got == each for each in own])[lost].all():
        return None
    return Told((f"a nan of one rank is lost: the loss is the {function} of others",))


@dataclass(frozen=True)
class Move:
    """The value or the gradient that is due of a move, and the numbers of known faults."""

    name: str
    due: Array
    faults: dict[str, Array]

    def wrong(self, got: Array) -> str | None:
        """Say what is wrong with numbers, None if they have the bits that are due; a nan has any."""
        if self._are(got, self.due):
            return None
        for text, faulty in self.faults.items():
            if self._are(got, faulty):
                return f"the {self.name} is {text}"
        if got.shape != self.due.shape:
            return f"the {self.name} has shape {got.shape}, where {self.due.shape} is due"
        row, element = np.argwhere(~self._alike(got, self.due))[0]
        numbers = f"{got[row, element]} where {self.due[row, element]} is right"
        return f"the {self.name} is {numbers} in row {row}, element {element} of what is due"

    def _are(self, got: Array, due: Array) -> bool:
        return got.shape == due.shape and bool(self._alike(got, due).all())

    def _alike(self, got: Array, due: Array) -> Array:
        signs = (np.signbit(got) == np.signbit(due)) | (self.name == "gradient")
        return np.asarray(np.isnan(got) & np.isnan(due) | (got == due) & signs)


def moved(problem: Problem, rank: int, ones: bool) -> tuple[Array, list[Move]]:
    """Return the upstream gradient of a rank, of ones or in eighths, and what it is due to get."""
    x, here = problem.logits, slice(*problem.splits[rank : rank + 2])
    upstream = np.ones(x.shape, x.dtype)
    if not ones:
        upstream = (np.random.default_rng(13).integers(-16, 17, x.shape) / 8.0).astype(x.dtype)
    alone = np.zeros_like(upstream)
    alone[:, here] = upstream[:, here]
    whole = "this rank's own elements: nothing is gathered"
    if problem.conventions["computes"] == "replicate":
        value, gradient, faults = Move("value", x, {whole: x[:, here]}), upstream[:, here], dict[str, Array]()
    else:
        value, gradient = Move("value", x[:, here], {"all elements: nothing is cut": x}), upstream
        upstream, faults = upstream[:, here], {f"that of {whole} from the others": alone}
    if problem.ranks > 1:
        faults |= {
            f"{problem.ranks} times too large: it is summed over the ranks once more": problem.ranks * gradient,
            f"{problem.ranks} times too small: it is divided by the number of ranks": gradient / problem.ranks,
        }
    return upstream, [value, Move("gradient", gradient, faults)]


def _fitted(problem: Problem, seed: int) -> Problem:
    """Return the problem with one element of each rank, the first, where that is a term of a partial array."""
    if problem.conventions["partial"] == "no":
        return replace(problem, gathered=problem.conventions["computes"] == "shard")
    return replace(problem, logits=problem.logits[:, problem.splits[:-1]], splits=tuple(range(problem.ranks + 1)))


CASES = Cases(procedure="placement", classes=12)


def _drawn(setting: Setting, splits: tuple[int, ...] | None = None) -> Problem:
    """Draw elements of sizes near 1 and either sign, so that products of them are such numbers too."""
    problem = random_problem(setting, splits)
    rng = np.random.default_rng([setting.seed, 11])
    elements = np.exp(rng.normal(0.0, 0.4, problem.logits.shape)) * rng.choice([-1.0, 1.0], problem.logits.shape)
    return replace(problem, logits=rounded(setting, elements))


def _firsts(problem: Problem) -> list[int]:
    """Return the first element of each rank; of one that has none, another's."""
    return [min(start, problem.classes - 1) for start in problem.splits[:-1]]


def _with(setting: Setting, numbers: Callable[[int, Problem], dict[int, float]]) -> Problem:
    """Draw elements, and put numbers in the place of the first elements of some ranks, in each row."""
    problem = _drawn(setting)
    logits = problem.logits.copy()
    for row in range(problem.rows):
        for rank, number in numbers(row, problem).items():
            logits[row, _firsts(problem)[rank % problem.ranks]] = number
    return replace(problem, logits=logits)


@CASES.case("placement/random/{dtype}")
def _random(setting: Setting) -> Problem:
    """Random elements: the gradient of a maximum that every rank takes for its own, a mean of means, a sum that is
    passed on once for each rank (`torch.distributed.nn`), and 1 for the gradient of every partial array (PyTorch).
    """
    return _drawn(setting)


@CASES.case("placement/uneven-shards", shards="array_split", classes=11)
def _uneven(setting: Setting) -> Problem:
    """Shards of several lengths: a mean of the ranks' means."""
    return _drawn(setting, uneven(setting))


@CASES.case(
    "placement/empty-shard/{name}", table("name first shards", ("first", True, "any"), ("last", False, "chunks"))
)
def _empty(setting: Setting, first: bool) -> Problem:
    """A rank without elements, in rows of one sign: a 0 in its place is the maximum of negative elements, the minimum
    of positive ones, and no factor.
    """
    if setting.ranks == 1:
        return _drawn(setting)
    splits = chunks((setting.ranks - 1) ** 2, setting.ranks)  # the last rank has none
    if first:
        splits = (0, *splits[:-1])
    problem = _drawn(setting, splits)
    signs = np.where(np.arange(problem.rows) % 2, 1, -1)[:, None].astype(problem.dtype)
    return replace(problem, logits=signs * np.abs(problem.logits))


@CASES.case("placement/upstream", gradient=Gradient.BACKWARD)
def _upstream(setting: Setting) -> Problem:
    """An upstream gradient for each row, of either sign and 0: one that is reduced as the elements are."""
    problem = _drawn(setting)
    upstream = np.random.default_rng([setting.seed, 4]).integers(-16, 17, problem.rows_shape) / 8.0
    upstream[1:2] = 0.0
    return replace(problem, dloss=rounded(setting, upstream))


@CASES.case("placement/ties")
def _ties(setting: Setting) -> Problem:
    """Elements that tie, on one rank and on several: the gradient of a maximum counts once, by whatever rule."""
    problem = random_problem(setting)
    ties = np.array(np.random.default_rng([setting.seed, 12]).integers(1, 4, problem.logits.shape))
    ties[:2] = 1
    ties[2:4, _firsts(problem)] = 4
    return replace(problem, logits=rounded(setting, ties * np.where(np.arange(problem.rows) % 2, 1, -1)[:, None]))


@CASES.case("placement/nan-on-one-rank", special=True)
def _nan(setting: Setting) -> Problem:
    """A nan that one rank alone has, another in each row: comparisons lose it, and which ranks see it depends on the
    order in which they meet (gloo, MPICH, heat, MLX, `jax.lax.pmax`).
    """
    return _with(setting, lambda row, problem: {row: np.nan} if row <= problem.ranks else {})


@CASES.case("placement/infinities", special=True)
def _infinities(setting: Setting) -> Problem:
    """An infinity of either sign on one rank, and on all: -inf less -inf, and inf times 0."""
    everywhere = dict.fromkeys(range(setting.ranks), -np.inf)
    return _with(setting, lambda row, problem: ({row: np.inf}, {row: -np.inf}, everywhere, {})[row % 4])


@CASES.case("placement/zeros", special=True)
def _zeros(setting: Setting) -> Problem:
    """Zeros of either sign: a product's gradient of y / x is nan, and with two zeros that of all others is 0."""
    return _with(setting, lambda row, problem: ({row: 0.0}, {row: 0.0, row + 1: -0.0}, {row: -0.0}, {})[row % 4])


@CASES.case("placement/large", special=True)
def _large(setting: Setting) -> Problem:
    """Elements whose squares overflow: a norm that does not divide by the largest first."""
    problem = _drawn(setting)
    limits = np.finfo(np.float16 if problem.dtype.itemsize == 2 else problem.dtype)
    large = problem.logits.astype(np.float64) * 2.0 ** (limits.maxexp * 3 // 4)
    return replace(problem, logits=rounded(setting, large))


@CASES.case("placement/arguments-unmodified", keeps_logits=True)
def _unmodified(setting: Setting) -> Problem:
    """A reduction in place, of the memory that it was given; a result that shares it."""
    return _drawn(setting)


PLACEMENT = Kind(
    noun="value",
    plural="values",
    exact=_exact,
    sizes=_sizes,
    sums=_sums,
    faults=_faults,
    told='the loss is a reduction: that is declared by @offers(kind="placement")',
    options=(),
    arrays=("array",),
    facts=("splits",),
    tell=_tell,
    fitted=_fitted,
    shared_cases=False,
    lost_has_nan=False,
    words={"class": "element", "classes": "elements", "logits": "elements", "dlogits": "gradient"},
    cases=CASES,
)

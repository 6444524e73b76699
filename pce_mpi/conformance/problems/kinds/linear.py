"""Losses, log-probabilities and entropies of logits hidden @ w: a fused head.

In cases of all kinds hidden is the identity with its rows reversed, so that products are exact, w has the logits and dw
their gradient: faults have the same formulas. The cases of these kinds alone have real products.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

import numpy as np

from pce_mpi.conformance.problems.cases import REDUCTIONS, Cases, Setting, table
from pce_mpi.conformance.problems.generators import random_problem, rounded
from pce_mpi.conformance.problems.kinds.loss import LOSS
from pce_mpi.conformance.problems.kinds.statistics import ENTROPY, LOG_PROB
from pce_mpi.conformance.problems.problem import Array, Kind, Operands, Problem, Told
from pce_mpi.conformance.problems.textbook import Faults, Textbook, all_ranks, softmax
from pce_mpi.exact.products import product

# Tiles of the vocabulary that kernels have.
_TILES = [2**power for power in range(3, 18)]
# More rows have real products, as the identity is square.
_MOST_ROWS = 2**13


def _fitted(problem: Problem, seed: int) -> Problem:
    """Return the problem with logits that are the product of the reversed identity and w."""
    if problem.operands is not None:
        return problem
    options = {name: value for name, value in problem.options.items() if name != "bias"}
    if not problem.rows:
        return _multiplied(problem, np.zeros((0, 1), problem.dtype), np.ones((1, problem.classes), problem.dtype))
    if problem.rows > _MOST_ROWS:
        return _multiplied(problem, *_factors(seed, problem, features=8))
    hidden = np.eye(problem.rows, dtype=problem.dtype)[::-1]
    operands = Operands(hidden, problem.row_major(problem.logits)[::-1], with_identity=True)
    return replace(problem, logits=problem.logits.astype(np.float64), options=options, operands=operands)


def _factors(seed: int, problem: Problem, features: int = 32) -> tuple[Array, Array]:
    rng = np.random.default_rng([seed, 10])
    hidden = rng.standard_normal((problem.rows, features))
    w = 3.0 / np.sqrt(features) * rng.standard_normal((features, problem.classes))
    return hidden.astype(problem.dtype), w.astype(problem.dtype)


def _multiplied(problem: Problem, hidden: Array, w: Array) -> Problem:
    """Return the problem with the exact logits of a product, and of the option `bias`."""
    options = dict(problem.options)
    bias = options.pop("bias", None)
    logits = product(hidden.astype(np.float64), w.astype(np.float64), hidden.shape[-1])
    if bias is not None:
        logits = logits + bias.astype(np.float64)
    operands = Operands(hidden, w, bias)
    return replace(problem, logits=logits.reshape(problem.logits.shape), options=options, operands=operands)


def _faults(b: Textbook) -> Faults:
    """unsloth#10616; heads that give logits in half precision (trl#4303)."""
    if softcap := b.problem.options.get("softcap"):
        shards = np.diff(b.problem.splits)
        for lanes in dict.fromkeys(int((-shards % tile).sum()) for tile in _TILES):
            more = np.log1p(lanes * np.exp(-softcap - b.lse))
            text = f"{lanes} padded columns count with logits of -softcap: they have to be masked after the softcap"
            yield text, all_ranks(b.but(nll=b.nll + more[:, None], p=b.p * np.exp(-more)[:, None], lse=b.lse + more))
    operands, dtype = b.problem.operands, b.problem.dtype
    if dtype.itemsize == 2 and operands is not None and not operands.with_identity:
        z = b.x.astype(dtype).astype(np.float64) * b.slope if "softcap" not in b.problem.options else b.z
        yield f"the logits are rounded to {dtype}", all_ranks(b.but(**softmax(z)))


def _tell(b: Textbook, name: str, got: Array) -> Told | None:
    """Name an infinite loss of finite logits (ml-cross-entropy#59), or what `LOSS` tells."""
    if name == "loss" and (got == np.inf).any() and np.isfinite(b.z).all() and b.nll.max(initial=0.0) < 80.0:
        text = "the loss is infinite, and all logits are finite: a padded column of -inf is taken for the target's"
        return Told((text,))
    return LOSS.tell(b, name, got)


CASES = Cases()


def _drawn(setting: Setting, features: int = 32, options: tuple[str, ...] = ()) -> Problem:
    problem = random_problem(setting, options=options)
    return _multiplied(problem, *_factors(setting.seed, problem, features))


@CASES.case("product/{dtype}", rows=7)
def _product(setting: Setting) -> Problem:
    """Random vectors and weights: dhidden that is not summed over the ranks (ml-cross-entropy before #42), or summed
    where it is partial; products of numbers that were rounded too early.
    """
    return _drawn(setting)


@CASES.case("product/4096-features", rows=7)
def _features(setting: Setting) -> Problem:
    """As many features as a model has: a kernel that takes those of one block."""
    return _drawn(setting, features=4_096)


@CASES.case("chunk-borders/rows", rows=1_037)
def _rows_of_chunks(setting: Setting) -> Problem:
    """A last chunk of rows that is not full: rows that are left out of dw, or count twice."""
    return _drawn(setting, features=4)


@CASES.case("chunk-borders/classes", rows=3, classes=2_059)
def _tiles(setting: Setting) -> Problem:
    """A last tile of the vocabulary that is not full, on each rank: columns beyond the last one count, or the number
    that stands for targets of other ranks is that of one of them (ml-cross-entropy#59).
    """
    return _drawn(replace(setting, classes=max(1, setting.classes // setting.ranks) * setting.ranks), features=8)


@CASES.case("padded-softcap/{dtype}", options=("softcap",), classes=21)
def _padded_softcap(setting: Setting) -> Problem:
    """Most logits are near -softcap: padded columns of the last tile that are masked before the softcap have finite
    logits, and count (unsloth#10616).
    """
    problem = random_problem(setting, options=("softcap",))
    hidden, w = _factors(setting.seed, problem, features=8)
    return _multiplied(problem, rounded(setting, np.abs(hidden.astype(np.float64)) + 1.0), -np.abs(w))


@CASES.case("bias/{dtype}", options=("bias",))
def _bias(setting: Setting) -> Problem:
    """A bias of each class, and dbias: a rank has those of its own classes."""
    return _drawn(setting, options=("bias",))


def _last(problem: Problem) -> Array:
    return np.arange(problem.classes) >= problem.classes - 3


def _last_shard(problem: Problem) -> Array:
    return np.arange(problem.classes) >= problem.splits[-2]


def _first_of_shards(problem: Problem) -> Array:
    return np.isin(np.arange(problem.classes), problem.splits)


@CASES.case(
    "bias/masks-{name}",
    table(
        "name which options reductions catches",
        ("padding", _last, ("bias",), REDUCTIONS, "A padded vocabulary: its probability and its gradients are 0."),
        ("a-shard", _last_shard, ("bias",), REDUCTIONS, "All classes of a rank: -inf less their maximum -inf is nan."),
        (
            *("first-classes", _first_of_shards, ("bias", "ignore_index"), ("none", *REDUCTIONS)),
            "The first class of each shard, beside ignored rows: 0 times its logit, for a row that has its target "
            "elsewhere or none, is nan (PyTorch's linear_cross_entropy with options).",
        ),
    ),
    special=True,
)
def _masking_bias(setting: Setting, which: Callable[[Problem], Array], options: tuple[str, ...]) -> Problem:
    problem = random_problem(setting, options=options)
    masked = which(problem)
    masked[: -(-masked.size // 2)] &= not masked.all()
    free = np.flatnonzero(~masked)
    targets = np.where(problem.valid, free[problem.targets % free.size], problem.targets)
    bias = rounded(setting, np.where(masked, -np.inf, problem.options["bias"]))
    problem = replace(problem, targets=targets, options=problem.options | {"bias": bias})
    return _multiplied(problem, *_factors(setting.seed, problem))


@CASES.case("temperature/{dtype}", options=("temperature",))
def _temperature(setting: Setting) -> Problem:
    """A temperature: the logits are divided by it, and all gradients have 1 / T as a factor."""
    return _drawn(setting, options=("temperature",))


_HALVES = [{"dtype": dtype, "reductions": (each,)} for dtype in ("bfloat16", "float16") for each in ("mean", "sum")]


@CASES.case("accumulated-loss/{reductions[0]}/{dtype}", _HALVES, rows=2_048, classes=132, resizable=False)
@CASES.case("accumulated-dw/{dtype}", reductions=("none", *REDUCTIONS), rows=2_048, classes=132, resizable=False)
def _accumulated(setting: Setting) -> Problem:
    """Sums over many chunks of rows that are kept in half precision: after rows of large losses, and for dw after terms
    of one sign, those of the others are too small to count (PyTorch's linear_cross_entropy with options).
    """
    # Classes are many times the features, so that heads that choose their chunks take small ones.
    problem = random_problem(setting)
    hidden, w = _factors(setting.seed, problem, features=2)
    few = np.arange(problem.rows) < 64
    # A mean of about 10, of which the others are less than 1.
    coherent = np.abs(hidden.astype(np.float64)) * np.where(few, 24.0, 2.0)[:, None]
    problem = _multiplied(problem, rounded(setting, coherent), w)
    return replace(problem, targets=np.where(few, problem.logits.argmin(axis=-1), problem.logits.argmax(axis=-1)))


def _linear(kind: Kind, name: str, negates: Kind | None = None, tell: bool = True) -> Kind:
    def faults(book: Textbook) -> Iterator[tuple[str, object]]:
        return chain(_faults(book), kind.faults(book))

    return replace(
        kind,
        arrays=("hidden", "w", *kind.arrays[1:]),
        options=(*(each for each in kind.options if each != "support"), "temperature", "bias"),
        told=kind.told.replace(f'kind="{name}"', f'kind="{f"linear_{name}" if name != "loss" else "linear"}"'),
        faults=faults,
        tell=_tell if tell else kind.tell,
        negates=negates,
        fitted=_fitted,
        cases=CASES,
        without=(
            *("axis", "masked-*", "nan", "plus-inf", "probabilities", "padded-columns/masked"),
            *("many-rows", "rows-sharded", "several-targets", "large/more-*"),
        ),
    )


LINEAR = _linear(LOSS, "loss")
LINEAR_LOG_PROB = _linear(LOG_PROB, "log_prob", negates=LINEAR)
LINEAR_ENTROPY = _linear(ENTROPY, "entropy", tell=False)

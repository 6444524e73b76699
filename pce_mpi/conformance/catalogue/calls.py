"""Cases about calls: upstream gradients, successive calls, and their side effects."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from pce_mpi.arrays import compute_dtype_of
from pce_mpi.conformance.cases import Problem, Setting, grid
from pce_mpi.conformance.catalogue.declaring import Cases
from pce_mpi.conformance.catalogue.drawing import even, random_problem, rounded
from pce_mpi.conformance.offers import Gradient

CASES = Cases()

_BACKWARD = Gradient.BACKWARD
_REDUCED = ("mean", "sum")
_BY_ROW = ("none",)


@CASES.case("upstream/scalar", gradient=_BACKWARD, reductions=_REDUCED)
def _upstream_scalar(setting: Setting) -> Problem:
    """An upstream gradient other than 1 that is not applied, or applied once more for each rank."""
    return replace(random_problem(setting), dloss=rounded(setting, -2.5))


@CASES.case("upstream/each-row", gradient=_BACKWARD, reductions=_BY_ROW)
def _upstream_by_row(setting: Setting) -> Problem:
    """An upstream gradient for each row, of either sign and 0: one that is averaged, or taken from the wrong row."""
    problem = random_problem(setting)
    # Eighths are exact in every dtype.
    upstream = np.random.default_rng([setting.seed, 4]).integers(-16, 17, problem.rows_shape) / 8.0
    upstream.reshape(-1)[1:2] = 0.0
    return replace(problem, dloss=rounded(setting, upstream))


@CASES.case("upstream/loss-scale", gradient=_BACKWARD, reductions=_REDUCED)
def _loss_scale(setting: Setting) -> Problem:
    """A loss scale of 65,536, as mixed precision multiplies the loss by: more than float16 can hold."""
    return replace(random_problem(setting), dloss=np.asarray(65_536.0, np.float32))


@CASES.case("upstream/inexact-in-halves", gradient=_BACKWARD, reductions=_BY_ROW)
def _upstream_of_tenths(setting: Setting) -> Problem:
    """Upstream gradients of tenths, which no half precision has: rounded to one, they are up to 0.4 % off."""
    problem = random_problem(setting)
    tenths = np.random.default_rng([setting.seed, 5]).integers(1, 40, problem.rows_shape) / 10.0
    return replace(problem, dloss=tenths.astype(compute_dtype_of(problem.dtype)))


@CASES.case("upstream/strided", gradient=_BACKWARD, reductions=_BY_ROW, strided=True)
def _upstream_strided(setting: Setting) -> Problem:
    """An upstream gradient with strides, as a slice of a longer one: a kernel that takes it for contiguous."""
    return replace(_upstream_by_row(setting), dloss_memory="strided")


@CASES.case("upstream/expanded", gradient=_BACKWARD, reductions=_BY_ROW, strided=True)
def _upstream_expanded(setting: Setting) -> Problem:
    """An upstream gradient with strides of 0, as the backward pass of a sum gives: memory of one element."""
    problem = random_problem(setting)
    return replace(problem, dloss=rounded(setting, np.full(problem.rows_shape, -1.25)), dloss_memory="expanded")


for name, upstream, reductions in (("scalar", _upstream_scalar, _REDUCED), ("each-row", _upstream_by_row, _BY_ROW)):
    CASES.add(
        f"backward-twice/{name}",
        upstream,
        "A second backward pass that scales, or subtracts 1 at the target, in memory where the first one did already "
        "(Megatron-LM, TransformerEngine).",
        gradient=_BACKWARD,
        reductions=reductions,
        procedure="backward-twice",
    )
CASES.add(
    "two-losses-alive/plain",
    random_problem,
    "A second loss that overwrites what the first one keeps: buffers that belong to the function, not to the call.",
    procedure="two-at-once",
)
CASES.add(
    "two-losses-alive/other-weights",
    partial(random_problem, options=("weight",)),
    "Two losses with class weights of their own: weights, or what was made of them, kept from the first call.",
    options=("weight",),
    procedure="two-at-once",
)
CASES.add(
    "inputs-unmodified",
    random_problem,
    "Logits that are overwritten, by x - max or by their gradient, where the caller still needs them (Megatron in "
    "verl, Liger).",
    keeps_logits=True,
)
CASES.add(
    "results-not-aliased",
    partial(random_problem, scale=1.0),
    "A gradient that is the memory of the logits, or a loss that is a view of something: changing one changes the "
    "other.",
    gradient=Gradient.VALUE,
    keeps_logits=True,
)
CASES.add(
    "one-after-the-other",
    random_problem,
    "Gradients that are accumulated over several calls: one that is added to what an earlier call gave is counted "
    "twice.",
    gradient=Gradient.VALUE,
    procedure="one-after-the-other",
)


def _on_a_grid(setting: Setting) -> Problem:
    """Rows that are sharded over a communicator of their own, on a grid of ranks: a mean over this rank's rows."""
    # Shards over the ranks of one row of the grid; ranks of other rows have none.
    _, shards = grid(setting.ranks)
    few = even(replace(setting, ranks=shards))
    splits = (*few, *(few[-1],) * (setting.ranks - shards))
    return random_problem(setting, splits, options=("ignore_index",))


for reduction in _REDUCED:
    CASES.add(
        f"rows-sharded/{reduction}",
        _on_a_grid,
        options=("ignore_index",),
        reductions=(reduction,),
        batch_comm=True,
        procedure="rows-sharded",
        rows=8,
        shrinkable=False,
    )
CASES.add(
    "same-bits/{dtype}",
    partial(random_problem, scale=6.0),
    "Other bits on another number of ranks: sums that depend on where the classes are split. An inference engine and a "
    "trainer that disagree in the last bit compute ratios that are not 1.",
    same_bits=True,
    shards="any",
    reductions=("none", "mean", "sum"),
    rows=16,
    classes=1_201,  # odd: a pairwise sum, as NumPy's, splits an even number where two ranks do
)
for name, axes, reductions in (("scalar", 1, _REDUCED), ("each-row", 1, _BY_ROW), ("3-D", 2, _BY_ROW)):
    CASES.add(
        f"result-form/{name}",
        partial(random_problem, axes=axes),
        "A loss of shape (1,), or flattened, and a gradient of another shape or dtype than the logits. Other cases "
        "judge the numbers all the same.",
        reductions=reductions,
        dims=axes + 1,
        form=True,
    )
CASES.add(
    "same-on-every-rank",
    partial(random_problem, scale=6.0),
    "Losses that differ in the last bit from rank to rank, as each rank reduced in another order: programs that branch "
    "on the loss then hang.",
    reductions=("none", "mean", "sum"),
    rows=64,
)
CASES.add(
    "same-in-every-run",
    partial(random_problem, scale=6.0),
    "Bits that change from run to run: atomic adds, or memory that was never written.",
    deterministic=True,
    procedure="run-twice",
    rows=64,
)

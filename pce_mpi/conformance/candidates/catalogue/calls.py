"""Cases about calls: options, upstream gradients, successive calls, and their side effects."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import numpy as np

from pce_mpi.arrays import compute_dtype_of
from pce_mpi.conformance.problems.cases import OPTIONS, Cases, Expects, Gradient, Setting, grid, table
from pce_mpi.conformance.problems.generators import even, random_problem, rounded, uneven
from pce_mpi.conformance.problems.problem import Problem
from pce_mpi.loss.options import ROWS

CASES = Cases()

_PAIR = """Options that are right alone and wrong together: a weight in the smoothing term, a divisor that one of them
changes, a factor that is left out of the other's gradient."""


def _with(setting: Setting, options: tuple[str, ...]) -> Problem:
    # A single option on equal shards, so that only the option can be wrong; several on uneven ones.
    return random_problem(setting, uneven(setting) if len(options) > 1 else None, options=options)


_ALONE = [{"option": each, "options": (each,), "catches": ROWS[each]["catches"]} for each in OPTIONS]
_PAIRS = [{"pair": "+".join(each), "options": each, "catches": _PAIR} for each in combinations(OPTIONS, 2)]
CASES.case("{option}/{dtype}", _ALONE)(_with)
CASES.case("pair/{pair}", _PAIRS)(_with)
CASES.case("all-options", [{"options": OPTIONS, "catches": "All options at once."}], rows=12)(_with)


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


@CASES.case(
    "backward-twice/{name}",
    table("name upstream reductions", ("scalar", _upstream_scalar, _REDUCED), ("each-row", _upstream_by_row, _BY_ROW)),
    gradient=_BACKWARD,
    backward_twice=True,
    expects=Expects.EITHER,
    procedure="backward-twice",
)
def _backward_twice(setting: Setting, upstream: Callable[[Setting], Problem]) -> Problem:
    """A second backward pass that scales, or subtracts 1 at the target, in memory where the first one did already
    (Megatron-LM, TransformerEngine). To be right, or refused on every rank, as torch refuses what it sees.
    """
    return upstream(setting)


@CASES.case("two-losses-alive/plain", procedure="two-at-once")
def _two_losses(setting: Setting) -> Problem:
    """A second loss that overwrites what the first one keeps: buffers that belong to the function, not to the call."""
    return random_problem(setting)


@CASES.case("two-losses-alive/other-weights", options=("weight",), procedure="two-at-once")
def _two_weights(setting: Setting) -> Problem:
    """Two losses with class weights of their own: weights, or what was made of them, kept from the first call."""
    return random_problem(setting, options=("weight",))


@CASES.case("inputs-unmodified", keeps_logits=True)
def _inputs_unmodified(setting: Setting) -> Problem:
    """Logits that are overwritten, by x - max or by their gradient, where the caller still needs them (Megatron in
    verl, Liger).
    """
    return random_problem(setting)


@CASES.case("results-not-aliased", gradient=Gradient.VALUE, keeps_logits=True)
def _results_not_aliased(setting: Setting) -> Problem:
    """A gradient that is the memory of the logits, or a loss that is a view of something: changing one changes the
    other.
    """
    return random_problem(setting, scale=1.0)


@CASES.case("one-after-the-other", gradient=Gradient.VALUE, procedure="one-after-the-other")
def _one_after_the_other(setting: Setting) -> Problem:
    """Gradients that are accumulated over several calls: one that is added to what an earlier call gave is counted
    twice.
    """
    return random_problem(setting)


@CASES.case(
    "rows-sharded/{reductions[0]}",
    table("reductions", (("mean",),), (("sum",),)),
    options=("ignore_index",),
    batch_comm=True,
    procedure="rows-sharded",
    rows=8,
    resizable=False,
)
def _on_a_grid(setting: Setting) -> Problem:
    """Rows that are sharded over a communicator of their own, on a grid of ranks: a mean over this rank's rows."""
    # Shards over the ranks of one row of the grid; ranks of other rows have none.
    _, shards = grid(setting.ranks)
    few = even(replace(setting, ranks=shards))
    splits = (*few, *(few[-1],) * (setting.ranks - shards))
    return random_problem(setting, splits, options=("ignore_index",))


@CASES.case(
    "same-bits/{dtype}",
    same_bits=True,
    shards="any",
    reductions=_BY_ROW + _REDUCED,
    rows=16,
    classes=1_201,  # odd: a pairwise sum, as NumPy's, splits an even number where two ranks do
)
def _same_bits(setting: Setting) -> Problem:
    """Other bits on another number of ranks: sums that depend on where the classes are split. An inference engine and a
    trainer that disagree in the last bit compute ratios that are not 1.
    """
    return random_problem(setting, scale=6.0)


@CASES.case(
    "result-form/{name}",
    table("name dims reductions", ("scalar", 2, _REDUCED), ("each-row", 2, _BY_ROW), ("3-D", 3, _BY_ROW)),
    form=True,
)
def _result_form(setting: Setting, dims: int) -> Problem:
    """A loss of shape (1,), or flattened, and a gradient of another shape or dtype than the logits. Other cases judge
    the numbers all the same.
    """
    return random_problem(setting, axes=dims - 1)


@CASES.case("same-on-every-rank", reductions=_BY_ROW + _REDUCED, rows=64)
def _same_on_every_rank(setting: Setting) -> Problem:
    """Losses that differ in the last bit from rank to rank, as each rank reduced in another order: programs that branch
    on the loss then hang.
    """
    return random_problem(setting, scale=6.0)


@CASES.case("same-in-every-run", deterministic=True, procedure="run-twice", rows=64)
def _same_in_every_run(setting: Setting) -> Problem:
    """Bits that change from run to run: atomic adds, or memory that was never written."""
    return random_problem(setting, scale=6.0)

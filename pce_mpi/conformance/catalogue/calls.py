"""Cases about calls: upstream gradients, successive calls, and their side effects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from pce_mpi.arrays import compute_dtype_of
from pce_mpi.conformance.cases import Case, Memory, Problem, Setting, grid
from pce_mpi.conformance.catalogue.drawing import even, random_problem, rounded
from pce_mpi.conformance.offers import DTYPES, Gradient, Needs

_VALUE, _BACKWARD = Gradient.VALUE, Gradient.BACKWARD


def families(main: str) -> Iterator[Case]:
    """Yield every case of this file."""
    yield Case(
        "upstream/scalar",
        "An upstream gradient other than 1 that is not applied, or applied once more for each rank.",
        main,
        _upstream_scalar,
        Needs(gradient=_BACKWARD, reductions=("mean", "sum")),
    )
    yield Case(
        "upstream/each-row",
        "An upstream gradient for each row, of either sign and 0: one that is averaged, or taken from the wrong row.",
        main,
        _upstream_by_row,
        Needs(gradient=_BACKWARD, reductions=("none",)),
    )
    scale = "A loss scale of 65,536, as mixed precision multiplies the loss by: more than float16 can hold."
    yield Case("upstream/loss-scale", scale, main, _loss_scale, Needs(gradient=_BACKWARD, reductions=("mean", "sum")))
    yield Case(
        "upstream/inexact-in-halves",
        "Upstream gradients of tenths, which no half precision has: rounded to one, they are up to 0.4 % off.",
        main,
        _upstream_of_tenths,
        Needs(gradient=_BACKWARD, reductions=("none",)),
    )
    for memory, catches in _UPSTREAM_MEMORY.items():
        yield Case(
            f"upstream/{memory}",
            catches,
            main,
            partial(_upstream_in_memory, memory=memory),
            Needs(gradient=_BACKWARD, reductions=("none",), strided=True),
        )
    yield Case(
        "backward-twice/scalar",
        "A second backward pass that scales, or subtracts 1 at the target, in memory where the first one did already "
        "(TransformerEngine).",
        main,
        _upstream_scalar,
        Needs(gradient=_BACKWARD, reductions=("mean", "sum")),
        procedure="backward-twice",
    )
    yield Case(
        "backward-twice/each-row",
        "A second backward pass of losses per row that scales, or subtracts 1 at the target, where the first one did "
        "already (Megatron-LM, TransformerEngine).",
        main,
        _upstream_by_row,
        Needs(gradient=_BACKWARD, reductions=("none",)),
        procedure="backward-twice",
    )
    yield Case(
        "two-losses-alive/plain",
        "A second loss that overwrites what the first one keeps: buffers that belong to the function, not to the call.",
        main,
        random_problem,
        procedure="two-at-once",
    )
    yield Case(
        "two-losses-alive/other-weights",
        "Two losses with class weights of their own: weights, or what was made of them, kept from the first call.",
        main,
        partial(random_problem, options=("weight",)),
        Needs(options=("weight",)),
        procedure="two-at-once",
    )
    yield Case(
        "inputs-unmodified",
        "Logits that are overwritten, by x - max or by their gradient, where the caller still needs them (Megatron in "
        "verl, Liger).",
        main,
        random_problem,
        Needs(keeps_logits=True),
    )
    yield Case(
        "results-not-aliased",
        "A gradient that is the memory of the logits, or a loss that is a view of something: changing one changes the "
        "other.",
        main,
        partial(random_problem, scale=1.0),
        Needs(gradient=_VALUE, keeps_logits=True),
    )
    yield Case(
        "one-after-the-other",
        "Gradients that are accumulated over several calls: one that is added to what an earlier call gave is counted "
        "twice.",
        main,
        random_problem,
        Needs(gradient=_VALUE),
        procedure="one-after-the-other",
    )
    for reduction in ("mean", "sum"):
        yield Case(
            f"rows-sharded/{reduction}",
            "Rows that are sharded over a communicator of their own, on a grid of ranks: a mean over this rank's rows.",
            main,
            _on_a_grid,
            Needs(options=("ignore_index",), reductions=(reduction,), batch_comm=True),
            procedure="rows-sharded",
            rows=8,
            shrinkable=False,
        )
    for dtype in DTYPES:
        yield Case(
            f"same-bits/{dtype}",
            "Other bits on another number of ranks: sums that depend on where the classes are split. An inference "
            "engine and a trainer that disagree in the last bit compute ratios that are not 1.",
            dtype,
            partial(random_problem, scale=6.0),
            Needs(same_bits=True, shards="any", reductions=("none", "mean", "sum")),
            procedure="on-fewer-ranks",
            rows=16,
            classes=1_200,
        )
    for name, axes, reductions in (("scalar", 1, ("mean", "sum")), ("each-row", 1, ("none",)), ("3-D", 2, ("none",))):
        yield Case(
            f"result-form/{name}",
            "A loss of shape (1,), or flattened, and a gradient of another shape or dtype than the logits. Other cases "
            "judge the numbers all the same.",
            main,
            partial(random_problem, axes=axes),
            Needs(reductions=reductions, dims=axes + 1),
            form=True,
        )
    yield Case(
        "same-on-every-rank",
        "Losses that differ in the last bit from rank to rank, as each rank reduced in another order: programs that "
        "branch on the loss then hang.",
        main,
        partial(random_problem, scale=6.0),
        Needs(reductions=("none", "mean", "sum")),
        rows=64,
    )
    yield Case(
        "same-in-every-run",
        "Bits that change from run to run: atomic adds, or memory that was never written.",
        main,
        partial(random_problem, scale=6.0),
        Needs(deterministic=True),
        procedure="run-twice",
        rows=64,
    )


def _upstream_scalar(setting: Setting) -> Problem:
    return replace(random_problem(setting), dloss=rounded(setting, -2.5))


_UPSTREAM_MEMORY: dict[Memory, str] = {
    "strided": "An upstream gradient with strides, as a slice of a longer one: a kernel that takes it for contiguous.",
    "expanded": "An upstream gradient with strides of 0, as the backward pass of a sum gives: memory of one element.",
}


def _loss_scale(setting: Setting) -> Problem:
    return replace(random_problem(setting), dloss=np.asarray(65_536.0, np.float32))


def _upstream_of_tenths(setting: Setting) -> Problem:
    problem = random_problem(setting)
    tenths = np.random.default_rng([setting.seed, 5]).integers(1, 40, problem.rows_shape) / 10.0
    return replace(problem, dloss=tenths.astype(compute_dtype_of(problem.dtype)))


def _upstream_in_memory(setting: Setting, memory: Memory) -> Problem:
    problem = _upstream_by_row(setting)
    if memory == "expanded":
        problem = replace(problem, dloss=rounded(setting, np.full(problem.rows_shape, -1.25)))
    return replace(problem, dloss_memory=memory)


def _on_a_grid(setting: Setting) -> Problem:
    """Shards over the ranks of one row of the grid; ranks of other rows have none."""
    _, shards = grid(setting.ranks)
    few = even(replace(setting, ranks=shards))
    splits = (*few, *(few[-1],) * (setting.ranks - shards))
    return random_problem(setting, splits, options=("ignore_index",))


def _upstream_by_row(setting: Setting) -> Problem:
    problem = random_problem(setting)
    # Eighths are exact in every dtype.
    upstream = np.random.default_rng([setting.seed, 4]).integers(-16, 17, problem.rows_shape) / 8.0
    upstream.reshape(-1)[1:2] = 0.0
    return replace(problem, dloss=rounded(setting, upstream))

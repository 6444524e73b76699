"""Cases about calls: upstream gradients, successive calls, and their side effects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from pce_mpi.conformance.cases import Case, Problem, Setting
from pce_mpi.conformance.catalogue.drawing import random_problem, rounded
from pce_mpi.conformance.offers import Gradient, Needs

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


def _upstream_by_row(setting: Setting) -> Problem:
    problem = random_problem(setting)
    # Eighths are exact in every dtype.
    upstream = np.random.default_rng([setting.seed, 4]).integers(-16, 17, problem.rows_shape) / 8.0
    upstream.reshape(-1)[1:2] = 0.0
    return replace(problem, dloss=rounded(setting, upstream))

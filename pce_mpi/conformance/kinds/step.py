"""The mean of a training step: what each token counts in the gradient of all ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import numpy as np

from pce_mpi import dense
from pce_mpi.conformance.cases import Cases, Setting, grid
from pce_mpi.conformance.drawing import normal_logits, random_targets, rounded
from pce_mpi.conformance.kinds.normalisation import tell, tell_losses
from pce_mpi.conformance.kinds.step_problem import Step
from pce_mpi.conformance.problems import Array, Kind, Problem
from pce_mpi.conformance.terms import Gradient
from pce_mpi.conformance.textbook import Textbook


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


def _step(setting: Setting, valid: Callable[[int, int], int], micro_batches: int = 1, context_ranks: int = 1) -> Step:
    """Draw a step with so many valid tokens in a rank's micro-batch; those at its end are ignored, 2 or 3 of them."""
    counts = [[valid(rank, number) for number in range(micro_batches)] for rank in range(setting.ranks)]
    lengths = [[count + 2 + (rank + number) % 2 for number, count in enumerate(of)] for rank, of in enumerate(counts)]
    ends = [np.arange(length) >= count for length, count in zip(chain(*lengths), chain(*counts), strict=True)]
    ignored = np.concatenate(ends)
    targets = random_targets(setting, ignored.shape, setting.classes)
    targets[ignored] = setting.ignore_index
    return Step(
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

"""Cases about options: each alone, all pairs, all at once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from pce_mpi.conformance.cases import Case, Problem, Setting
from pce_mpi.conformance.catalogue.drawing import random_problem, uneven
from pce_mpi.conformance.offers import DTYPES, OPTIONS, Needs

_CATCHES = {
    "weight": "Class weights: a rank has those of its own classes, and needs that of the target.",
    "ignore_index": "Ignored rows, a third of all: they count neither in the sum nor in the divisor of the mean.",
    "label_smoothing": "Smoothing that is spread over this rank's classes, or whose sum is not reduced over ranks "
    "(Megatron, TransformerEngine).",
    "z_loss": "z_loss * logsumexp**2, logsumexp over all ranks, and its gradient, 2 * z_loss * logsumexp * softmax.",
    "logit_scale": "A scale on the logits: the gradient has it as a factor once more.",
    "softcap": "A soft cap on the logits: the gradient has the derivative of tanh as a factor.",
}


def families(main: str) -> Iterator[Case]:
    """Yield every case of this file."""
    for option in OPTIONS:
        for dtype in DTYPES:
            yield Case(f"{option}/{dtype}", _CATCHES[option], dtype, _with(option), Needs(options=(option,)))
    for pair in combinations(OPTIONS, 2):
        yield Case(
            "pair/" + "+".join(pair),
            "Options that are right alone and wrong together: a weight in the smoothing term, a divisor that one of "
            "them changes, a factor that is left out of the other's gradient.",
            main,
            _with(*pair),
            Needs(options=pair),
        )
    yield Case("all-options", "All options at once.", main, _with(*OPTIONS), Needs(options=OPTIONS), rows=12)


def _with(*options: str) -> Any:
    def build(setting: Setting) -> Problem:
        # A single option on equal shards, so that only the option can be wrong; several on uneven ones.
        return random_problem(setting, uneven(setting) if len(options) > 1 else None, options=options)

    return build

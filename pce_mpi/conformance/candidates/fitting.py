"""A case for an offer: the first need that the offer lacks, and the problem in its conventions."""

from collections.abc import Iterable
from dataclasses import replace
from typing import get_args

import numpy as np

from pce_mpi.conformance.candidates.offers import Offer
from pce_mpi.conformance.problems.cases import CONVENTIONS, Case, Gradient, Needs, Setting, Shards, has_dtype
from pce_mpi.conformance.problems.kinds import KINDS
from pce_mpi.conformance.problems.problem import Problem


def dims_for(offer: Offer, needs: Needs) -> int | None:
    """Return the dims of the logits in a case: 3 where the case has 2, and these are not offered; None if none are."""
    if needs.dims in offer.dims:
        return needs.dims
    return 3 if needs.dims == 2 and 3 in offer.dims and not needs.any_axis else None


# The needs of cases that an offer meets or does not, in words.
_FLAGS = {
    "probabilities": "probability targets",
    "any_axis": "a class axis that is not the last",
    "strided": "logits that are not contiguous",
    "deterministic": "the same bits in every run",
    "empty": "zero rows",
    "checks_targets": "the refusal of targets that are no class",
    "num_classes": "num_classes",
    "several_targets": "several targets a row",
    "batch_comm": "rows that are sharded",
    "same_bits": "the same bits on every number of ranks",
    "backward_twice": "a second backward pass",
}


def unmet_need(offer: Offer, needs: Needs, dtype: str) -> str | None:
    """Return the first need of a case that an offer lacks, in a few words; None if there is none."""

    def beyond(name: str, words: Iterable[str]) -> bool:
        order = list(words)
        return order.index(getattr(needs, name)) > order.index(getattr(offer, name))

    options = offer.options if offer.ignore_index is None else (*offer.options, "ignore_index")
    lacks = {
        dtype: dtype not in offer.dtypes,
        f"{dtype}, which needs ml_dtypes: pip install 'pce_mpi[bf16]'": not has_dtype(dtype),
        **{option: option not in options for option in needs.options},
        "any ignore_index": needs.any_ignore_index and "ignore_index" not in offer.options,
        "reduction " + " or ".join(needs.reductions): not set(needs.reductions) & set(offer.reductions),
        f"{needs.dims}-D logits": dims_for(offer, needs) is None,
        "probabilities that do not sum to 1": needs.unnormalized and offer.normalized,
        "shards of any length" if needs.shards == "any" else "uneven shards": beyond("shards", get_args(Shards)),
        "a gradient" if needs.gradient == Gradient.VALUE else "an upstream gradient": beyond("gradient", Gradient),
        "logits left as they are": needs.keeps_logits and offer.overwrites_logits,
        "class numbers": not offer.class_numbers
        and (needs.targets or needs.checks_targets or "ignore_index" in needs.options),
        "targets": "targets" not in KINDS[offer.kind].arrays
        and (needs.targets or needs.checks_targets or needs.probabilities),
        **{what: getattr(needs, name) and not getattr(offer, name) for name, what in _FLAGS.items()},
    }
    return next((what for what, lacking in lacks.items() if lacking), None)


def problem_of(
    case: Case, offer: Offer, ranks: int, *, seed: int = 0, rows: int | None = None, classes: int | None = None
) -> Problem:
    """Build the problem of a case in the conventions of an offer; `rows` and `classes` if the case is resizable."""
    needs = case.needs
    rows = case.rows if rows is None or not case.resizable else rows
    setting = Setting(
        ranks=ranks,
        rows=rows if offer.any_rows else -(-rows // ranks) * ranks,
        classes=case.classes if classes is None or not case.resizable else classes,
        dtype=case.dtype,
        reduction=next((each for each in needs.reductions if each in offer.reductions), "mean"),
        seed=seed,
        shards=offer.shards,
        kind=KINDS[offer.kind],
        ignore_index=-100 if offer.ignore_index is None else offer.ignore_index,
        normalized=offer.normalized,
        any_rows=offer.any_rows,
        averaged=offer.averaged,
    )
    conventions = {name: getattr(offer, name) for name in CONVENTIONS}
    problem = setting.kind.fitted(replace(case.build(setting), conventions=conventions), seed)
    if not offer.class_numbers and problem.with_numbers:
        problem = _one_hot(problem)
    return problem if dims_for(offer, needs) in (problem.logits.ndim, None) else _in_two_axes(problem)


def _one_hot(problem: Problem) -> Problem:
    """Return the problem with the probability 1 for each class number; PyTorch's own loss is nan at -inf then."""
    one = np.moveaxis(problem.targets[..., None] == np.arange(problem.classes), -1, problem.axis)
    masked = np.asarray(problem.row_major(problem.logits == -np.inf).any(axis=-1))
    return replace(problem, targets=one.astype(problem.dtype), may_be_nan=masked)


def _in_two_axes(problem: Problem) -> Problem:
    """Return the problem with its rows in two axes, the second of length 2 if it can be."""
    inner = 2 if problem.rows % 2 == 0 else 1
    shape = problem.rows // inner, inner
    targets, dloss = problem.targets, problem.dloss
    return replace(
        problem,
        logits=problem.logits.reshape(*shape, problem.classes),
        targets=targets.reshape(*shape, *targets.shape[1:]),
        dloss=dloss.reshape(shape) if dloss is not None and dloss.ndim else dloss,
    )

"""Log-probabilities of each row's target, in options and faults negatives of a loss; and exact statistics of rows."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from pce_mpi import dense
from pce_mpi.conformance.kinds import support
from pce_mpi.conformance.kinds.loss import LOSS, sizes
from pce_mpi.conformance.problems import Array, Kind, Problem


def exact_statistic(name: str, problem: Problem) -> tuple[Array, Array]:
    """Return a field of `dense.class_statistics`, and its gradient."""
    arguments: dict[str, Any] = problem.exact_options | {"axis": problem.axis}
    if problem.with_numbers:
        arguments["targets"] = problem.targets
    statistics = dense.class_statistics(problem.logits, **arguments)
    arguments[name] = np.ones(()) if problem.dloss is None else problem.dloss
    return getattr(statistics, name), dense.class_statistics_backward(problem.logits, **arguments)


LOG_PROB = Kind(
    noun="log-probability",
    plural="log-probabilities",
    exact=partial(exact_statistic, "log_prob"),
    sizes=sizes,
    faults=lambda book: chain(support.faults(book), LOSS.faults(book)),
    told='the loss is of the opposite sign: a log-probability is declared by @offers(kind="log_prob")',
    options=("ignore_index", "logit_scale", "softcap", "support"),
    cases=support.CASES,
    negates=LOSS,
)

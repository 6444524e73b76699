"""The exact statistics of rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from pce_mpi import dense
from pce_mpi.conformance.problems import Problem

Array = np.ndarray[Any, Any]


def exact_statistic(name: str, problem: Problem) -> tuple[Array, Array]:
    """Return a field of `dense.class_statistics`, and its gradient."""
    arguments: dict[str, Any] = problem.exact_options | {"axis": problem.axis}
    if problem.with_numbers:
        arguments["targets"] = problem.targets
    statistics = dense.class_statistics(problem.logits, **arguments)
    arguments[name] = np.ones(()) if problem.dloss is None else problem.dloss
    return getattr(statistics, name), dense.class_statistics_backward(problem.logits, **arguments)

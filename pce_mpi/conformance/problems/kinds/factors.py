"""Numbers that are due times a number of ranks, rows or classes, for all kinds of candidates."""

from __future__ import annotations

import numpy as np

from pce_mpi.conformance.problems.textbook import Faults, Given, Textbook

_ONCE_MORE = "it is summed over the ranks once more"
_DIVIDED = "it is divided by the number of ranks"


def factors(b: Textbook) -> Faults:
    """Yield answers that have one factor; Automodel, Model-Optimizer; torch's kl_div, unless "batchmean"."""
    problem = b.problem
    loss, gradient = problem.expected[0], problem.row_major(problem.expected[1])
    for number, why in (
        (problem.ranks, {"large": _ONCE_MORE, "small": _DIVIDED}),
        (problem.rows, dict.fromkeys(("large", "small"), "the number of rows")),
    ):
        if number < 2:
            continue
        for times, side in ((float(number), "large"), (1.0 / number, "small")):
            text = f"{number} times too {side}: {why[side]}"
            yield f"the gradient is {text}", Given(None, times * gradient)
            yield f"the loss is {text}", Given((times * loss,), None)
    if problem.reduction == "mean" and problem.classes > 1:
        text = f"the mean divides by rows times classes, {problem.rows * problem.classes}, not by the rows"
        for rows in dict.fromkeys((b.divisor, float(problem.rows))):
            less = np.divide(b.divisor, rows * problem.classes)
            yield text, Given((loss * less,), gradient * less)

"""Several targets a row: their log-probabilities, and the gradient of the logits from those of these.

The states of rows hold one target at most. The logits of several come by an exchange of their own, and their
log-probabilities follow from the merged states as that of one target does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, cupy_of, is_true
from pce_mpi.kernels import converted
from pce_mpi.kernels.chosen import bits_of, nought_of
from pce_mpi.kernels.parameters import ClassWeights
from pce_mpi.kernels.softmax_state import ROW_GRADIENT, RowSoftmax, StateFields
from pce_mpi.loss.chosen import all_logits, by_row, columns_of
from pce_mpi.loss.passes import write_statistics_gradient
from pce_mpi.loss.problem import Problem
from pce_mpi.loss.support import Members

Array = Any  # numpy.ndarray or cupy.ndarray
HostArray = np.ndarray[Any, Any]


def without_targets(problem: Problem) -> Problem:
    """Return the problem of the same rows without targets."""
    every = np.ones(math.prod(problem.rows_shape), np.bool_)
    counted = None if cupy_of(problem.logits) is not None else every
    return replace(problem, targets=None, target_column=None, valid=every, all_valid=True, counted=counted)


@dataclass(eq=False)
class SeveralTargets:
    """The `classes` of the targets, (rows, targets of a row) on the host, and their `columns` in this shard's logits.

    `valid` are those that count, `absent` those of them that are outside the support, and `is_largest` those that are
    the largest class of their row.
    """

    classes: HostArray
    columns: HostArray
    valid: HostArray
    absent: HostArray | None
    is_largest: Array = field(default=None, init=False)

    @classmethod
    def of(cls, problem: Problem, members: Members | None) -> SeveralTargets:
        """Return the targets of `problem`, with their columns in the logits of `members` if there is a support."""
        classes, valid = by_row(problem.targets, problem), by_row(problem.valid, problem)
        if members is None:
            return cls(classes, columns_of(problem), valid, None)
        columns, absent = members.columns_of(classes, valid)
        return cls(classes, columns, valid, absent)

    def log_probs(self, problem: Problem, softmax: RowSoftmax, argmax: Array) -> Array:
        """Return the log-probabilities; collective over the class communicator, as `all_logits`.

        `problem` is that of the classes that the softmax is taken over, and `argmax` has their largest.
        """
        xp, chosen = problem.xp, all_logits(problem, self.columns)
        self.is_largest = xp.asarray(self.classes) == argmax[:, None]
        if self.absent is not None and is_true(self.absent.any()):
            bits_of(chosen)[xp.asarray(self.absent)] = nought_of(chosen.dtype)
        given = chosen, xp.asarray(self.valid), problem.transform, problem.options.compute_dtype
        return problem.kernel.target_log_probs(softmax.columns, *given)

    def write_gradient(
        self, array: Array, problem: Problem, softmax: RowSoftmax, fields: StateFields, upstream: Mapping[str, Array]
    ) -> None:
        """Fill `array` as `write_statistics_gradient` does; the upstream `log_prob` is (rows, targets of a row).

        With g_k the gradients of the log-probabilities, theirs is sum_k g_k ([c = t_k] - p_c). That of the largest
        class h is S (1 - p_h) - R p_h with the sums S of the g_k that are on it and R of the others: nothing cancels if
        p_h is close to 1. Other targets are written once more, each with the sum of its own g_k.
        """
        xp, kernel, axis, count = problem.xp, problem.kernel, problem.options.axis, self.columns.size
        # They are taken first, as `array` may be the logits.
        logits = kernel.taken(problem.logits, axis, self.columns).view(problem.logits.dtype).reshape(count, 1, 1)
        g = xp.where(xp.asarray(self.valid), upstream["log_prob"], 0.0)
        on_largest, on_others = (_in_order(xp.where(here, g, 0.0)) for here in (self.is_largest, ~self.is_largest))
        logsumexp = xp.asarray(converted(upstream["logsumexp"], np.float64)) - on_others
        as_one = replace(problem, target_column=softmax.argmax.view(np.int64) - problem.class_start)
        given = {"log_prob": on_largest, "entropy": upstream["entropy"], "logsumexp": logsumexp}
        rows = write_statistics_gradient(array, as_one, softmax, fields, given)
        # A row of the gradient for each target, with one logit.
        shape = *self.columns.shape, rows.shape[1]
        each = xp.broadcast_to(rows[:, None], shape).reshape(count, shape[2]).copy()
        whole, is_largest = each.view(np.int64), self.is_largest.reshape(-1)
        whole[:, ROW_GRADIENT["column"]] = xp.where(is_largest, 0, -1)
        whole[:, ROW_GRADIENT["target"]] = xp.where(is_largest, -1, 0)
        own = kernel.sums_of_equal(self.classes, g).reshape(-1)
        whole[:, ROW_GRADIENT["valid"]] |= own != 0.0
        each[:, ROW_GRADIENT["target_gradient"]] = problem.transform.scale * own
        found = xp.empty(logits.shape, array.dtype)
        call = {"weights": ClassWeights(), "transform": problem.transform, "precision": problem.precision}
        kernel.write_gradient(found, logits, each, fields, **call)
        kernel.put(array, axis, self.columns, found.reshape(self.columns.shape))


def _in_order(values: Array) -> Array:
    """Return the sum of each row, added from the first to the last."""
    total = array_namespace(values).zeros(len(values))
    for place in range(values.shape[1]):
        total = total + values[:, place]
    return total

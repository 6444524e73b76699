"""Faults of memory order: rows in another order than the logits, and strides that are ignored."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np

from pce_mpi.conformance.cases import Problem
from pce_mpi.conformance.faults.answer import Faults, Given, of_gradient
from pce_mpi.conformance.textbook import Textbook

Array = np.ndarray[Any, Any]


def memory_order(b: Textbook) -> Faults:
    """Rows in another order than the logits, a class axis that is not moved, strides."""
    problem, gradient = b.problem, b.gradient()
    shape, axes = problem.rows_shape, tuple(range(len(problem.rows_shape)))
    for order in permutations(axes):
        if order != axes:
            rows = np.arange(problem.rows).reshape(shape).transpose(order).reshape(-1)
            yield f"the gradient is transposed: its row axes are in the order {order}", of_gradient(gradient[rows])
    parts = [problem.part(problem.logits, rank) for rank in range(problem.ranks)]
    if problem.axis % problem.logits.ndim != len(shape):
        flat = _with_parts(b, parts)
        text = "the class axis is not moved to the end before rows are flattened"
        yield text, Given((flat.loss(),), _reshaped(problem, flat.gradient()))
    if problem.memory != "C":
        parts = [_memory(problem.shard(rank).logits) for rank in range(problem.ranks)]
        text = "the strides of the logits are not heeded: they are read as if they were contiguous"
        read = problem.row_major(np.concatenate(parts, axis=problem.axis)).astype(np.float64)
        yield text, b.with_x(read, problem.options.get("logit_scale", 1.0), problem.options.get("softcap"))


def _with_parts(b: Textbook, parts: list[Array]) -> Textbook:
    """Read the memory of each shard as (rows, its classes), whichever its class axis is."""
    flat = [part.reshape(b.problem.rows, width) for part, width in zip(parts, np.diff(b.problem.splits), strict=True)]
    options = b.problem.options
    x = np.concatenate(flat, axis=-1).astype(np.float64)
    return b.with_x(x, options.get("logit_scale", 1.0), options.get("softcap"))


def _reshaped(problem: Problem, gradient: Array) -> Array:
    """Return the gradient (rows, classes) if each rank reshapes its part to its logits without moving an axis."""
    parts = np.split(gradient, problem.splits[1:-1], axis=-1)
    shapes = [problem.part(problem.logits, rank).shape for rank in range(problem.ranks)]
    parts = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
    return problem.row_major(np.concatenate(parts, axis=problem.axis))


def _memory(shard: Array) -> Array:
    """Return a shard in the order of its memory, from its first element on."""
    whole = shard if shard.base is None else shard.base
    return whole.ravel(order="K")[: shard.size].reshape(shard.shape)

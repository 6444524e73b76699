"""Faults of layouts: rows that are laid out in another order than the logits, and strides."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np

from pce_mpi.conformance.cases import Problem
from pce_mpi.conformance.faults.answer import Faults, Given, of_gradient
from pce_mpi.conformance.textbook import Textbook

__all__ = ["layouts"]

Array = np.ndarray[Any, Any]


def layouts(b: Textbook) -> Faults:
    """Rows that are laid out in another order than the logits."""
    problem, gradient = b.problem, b.gradient()
    shape, axes = problem.rows_shape, tuple(range(len(problem.rows_shape)))
    for order in permutations(axes):
        if order != axes:
            rows = np.arange(problem.rows).reshape(shape).transpose(order).reshape(-1)
            yield f"the gradient is transposed: its row axes are in the order {order}", of_gradient(gradient[rows])
            text = f"the gradient has the rows of the targets in another order, axes {order}"
            yield text, of_gradient((b.but(u=b.u[rows])).gradient())
    parts = [problem.part(problem.logits, rank) for rank in range(problem.ranks)]
    if problem.axis % problem.logits.ndim != len(shape):
        flat = _with_parts(b, parts)
        text = "the class axis is not moved to the end before rows are flattened"
        yield text, Given((flat.loss(),), _relaid(problem, flat.gradient()))
        yield "the gradient is written as if the class axis were the last", of_gradient(_relaid(problem, gradient))
    if problem.memory != "C":
        parts = [_memory(problem.shard(rank).logits) for rank in range(problem.ranks)]
        text = "the strides of the logits are not heeded: they are read as if they were contiguous"
        moved = problem.row_major(np.concatenate(parts, axis=problem.axis)).astype(np.float64)
        yield text, b.with_x(moved, problem.options.get("logit_scale", 1.0), problem.options.get("softcap"))


def _with_parts(b: Textbook, parts: list[Array]) -> Textbook:
    """Each shard taken for (rows, its classes), whichever its class axis is."""
    flat = [part.reshape(b.problem.rows, width) for part, width in zip(parts, np.diff(b.problem.splits), strict=True)]
    options = b.problem.options
    x = np.concatenate(flat, axis=-1).astype(np.float64)
    return b.with_x(x, options.get("logit_scale", 1.0), options.get("softcap"))


def _relaid(problem: Problem, gradient: Array) -> Array:
    """(rows, classes) of the gradient that each rank gives the shape of its logits without moving an axis."""
    parts = np.split(gradient, problem.splits[1:-1], axis=-1)
    shapes = [problem.part(problem.logits, rank).shape for rank in range(problem.ranks)]
    parts = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
    return problem.row_major(np.concatenate(parts, axis=problem.axis))


def _memory(shard: Array) -> Array:
    """A shard as its memory lies, from its first element on."""
    whole = shard if shard.base is None else shard.base
    return whole.ravel(order="K")[: shard.size].reshape(shard.shape)

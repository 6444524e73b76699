"""Compare the bits of results on several ranks with those on one rank, and name the first place where they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import re
from typing import Any

import numpy as np

from pce_mpi.conformance.judging.outcomes import Finding
from pce_mpi.conformance.problems.problem import Array, Problem


def other_bits(
    problem: Problem, losses: Sequence[Array], shards: Sequence[Array], loss: Array, gradient: Array | None
) -> list[Finding]:
    """Return the first difference of the ranks' losses from the loss on one rank, and that of the gradients."""

    def row(place: int) -> str:
        return f" in {problem.row_name(place)}" * (problem.loss_shape != ())

    def entry(place: int) -> str:
        places = np.arange(problem.logits.size).reshape(problem.logits.shape)
        row, number = map(int, np.argwhere(problem.row_major(places) == place)[0])
        return f" in {problem.row_name(row)}, class {number} (rank {problem.rank_of(number)})"

    name = problem.kind.noun
    texts = [
        f"{name}{f' on rank {rank}' * (rank > 0)}{text}"
        for rank, each in enumerate(losses)
        if (text := difference(each, loss, row))
    ][:1]
    if shards and gradient is not None:
        shapes = [problem.part(problem.logits, rank).shape for rank in range(len(shards))]
        parts = [shard.reshape(shape) for shard, shape in zip(shards, shapes, strict=True)]
        if text := difference(np.concatenate(parts, axis=problem.axis), gradient, entry):
            texts.append(f"gradient{text}")
    return [Finding("other bits", f"the bits differ from one rank's ({text})") for text in texts]


def difference(got: Array, one: Array, where: Callable[[int], str] = lambda place: "") -> str:
    """Describe the first difference, "" if there is none; `where` names the place of a number."""
    if got.size != one.size or got.dtype != one.dtype:
        return f": {got.dtype}{got.shape} against {one.dtype}{one.shape}"
    different = np.flatnonzero((_bytes(got) != _bytes(one)).any(axis=-1))
    if not different.size:
        return ""
    first = int(different[0])
    numbers = " against ".join(_hexadecimal(array.reshape(-1)[first]) for array in (got, one))
    return f"{where(first)}: {numbers}" + f"; {different.size} of {got.size} differ" * (got.size > 1)


def _bytes(array: Array) -> Array:
    """Return the bytes of each number, with one nan for all."""
    one_nan = np.where(np.isnan(array.astype(np.float64)), np.asarray(np.nan, array.dtype), array)
    return np.frombuffer(one_nan.tobytes(), np.uint8).reshape(array.size, array.itemsize)


def _hexadecimal(number: Any) -> str:
    return re.sub(r"\.?0*p", "p", float(number).hex())

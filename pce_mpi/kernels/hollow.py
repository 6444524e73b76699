"""The loops for hollow arrays, which give shapes and dtypes; arguments are those of `definition.py`."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from pce_mpi.hollow import hollow
from pce_mpi.kernels.interface import ROW_GRADIENT, ROW_SOFTMAX, MergedStates, Pass

Array = Any  # Hollow


def valid_rows(targets: Array, _: int) -> tuple[Array, bool, int]:
    return hollow(targets.shape, np.bool_), True, 0


def fill_states(logits: Array, _: Array, how: Pass, *__: Any) -> Array:
    return hollow(logits.shape[0] * logits.shape[2], how.fields.dtype)


class HollowStates(MergedStates):
    @cached_property
    def columns(self) -> Array:
        return hollow((len(self), len(ROW_SOFTMAX)))


def row_softmax(states: Array, *_: Any) -> HollowStates:
    return HollowStates(states)


def row_losses(softmax: Array, *_: Any) -> Array:
    return hollow((2, len(softmax)))


def row_gradients(softmax: Array, *_: Any) -> Array:
    return hollow((len(softmax), len(ROW_GRADIENT)))


def row_statistics(softmax: Array, _: Any, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    return hollow((5, len(softmax)), dtype), hollow(len(softmax), np.int64)


def statistics_gradients(softmax: Array, *_: Any) -> Array:
    return hollow((len(softmax), len(ROW_GRADIENT)))


def target_log_probs(_: Array, chosen: Array, __: Any, ___: Any, dtype: np.dtype[Any]) -> Array:
    return hollow(chosen.shape, dtype)


def taken(x: Array, _: int, columns: Array, __: int = 0) -> Array:
    return hollow(columns.shape, f"u{x.dtype.itemsize}")


def put(*_: Any) -> None:
    pass


def sums_of_equal(_: Array, values: Array) -> Array:
    return values


def logsumexp_differences(held: Array, *_: Any) -> Array:
    return hollow((len(held) // 2, 3))


def divergence_sums(pair: Any) -> Array:
    return hollow((len(pair.difference), 6), np.uint64)


def row_divergences(words: Array, _: Any) -> Array:
    return hollow((3, len(words)))


def write_divergence_gradient(*_: Any) -> None:
    pass


def converted(values: Array, dtype: np.dtype[Any]) -> Array:
    return values.astype(dtype)


def write_gradient(*_: Any) -> None:
    pass


def largest_of(x: Array, k: int) -> tuple[Array, Array]:
    return hollow((len(x), k), x.dtype), hollow((len(x), k), np.int64)


def sums_of(*arrays: Array) -> Array:
    return hollow((len(arrays), 4), np.uint64)


def loss_of_rows(_: Array, __: bool, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    return hollow((), dtype), hollow(1)


def loss_of(_: Array, __: bool, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    return hollow((), dtype), hollow(1)

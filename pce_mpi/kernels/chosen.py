"""Elements of chosen columns, taken and put by their bits; sums over equal columns, for NumPy and CuPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from pce_mpi.arrays import Array, HostArray, array_namespace


def bits_of(x: Array) -> Array:
    """View floating-point numbers as unsigned integers."""
    return x.view(f"u{x.dtype.itemsize}")


def nought_of(dtype: np.dtype[Any]) -> int:
    """Return the bits of -inf, the logit of a class that is left out."""
    return int(bits_of(np.array(-np.inf, dtype)))


def taken(x: HostArray, axis: int, columns: HostArray, other: int = 0) -> HostArray:
    """Return the bits of the elements in `columns`, (rows, chosen), `other` where a row of `x` has no such one."""
    found = np.full(columns.shape, other, f"u{x.dtype.itemsize}")
    entries, elements = _places(x, axis, columns)
    found[entries] = bits_of(np.moveaxis(x, axis, -1))[elements]
    return found


def put(x: HostArray, axis: int, columns: HostArray, values: HostArray) -> None:
    """Put `values`, (rows, chosen) of the dtype of `x`, into `columns` of each row of `x`, where it has them."""
    entries, elements = _places(x, axis, columns)
    bits_of(np.moveaxis(x, axis, -1))[elements] = bits_of(values)[entries]


def _places(x: HostArray, axis: int, columns: HostArray) -> tuple[tuple[HostArray, ...], tuple[HostArray, ...]]:
    """Return the indices of the columns that `x` has: in (rows, chosen), and in `x` with the class axis last."""
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    row, place = np.nonzero((columns >= 0) & (columns < x.shape[axis]))
    return (row, place), (*(np.unravel_index(row, shape) if shape else ()), columns[row, place])


def sums_of_equal(ids: HostArray, values: Array) -> Array:
    """Return for each of `values`, (rows, chosen), the sum over those of its row with the same id, in their order."""
    xp, chosen = array_namespace(values), ids.shape[1]
    order = ids.argsort(axis=1, kind="stable")
    ordered = np.take_along_axis(ids, order, axis=1)
    start = np.zeros(ids.shape, np.int64)
    start[:, 1:] = np.where(ordered[:, 1:] != ordered[:, :-1], np.arange(1, chosen), 0)
    first = np.empty_like(order)  # the first place of the same id
    np.put_along_axis(first, order, np.take_along_axis(order, np.maximum.accumulate(start, axis=1), axis=1), axis=1)
    if (first == np.arange(chosen)).all():
        return 0.0 + values
    sums, rows, places = xp.zeros(values.shape), xp.arange(len(ids)), xp.asarray(first)
    for place in range(chosen):
        sums[rows, places[:, place]] += values[:, place]
    return xp.take_along_axis(sums, places, axis=1)

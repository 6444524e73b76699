"""Arrays as the kernels for GPUs want them: rows of consecutive classes, one pitch apart, or else copies that are.

An array is (outer, classes, inner), the class axis in the middle; its rows are the pairs (outer, inner).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pce_mpi.arrays import array_namespace
from pce_mpi.loss.kernels.grids import VECTOR

__all__ = ["Rows", "Target", "rows_of"]

Array = Any  # cupy.ndarray


class Rows(NamedTuple):
    """An array of logits, or one shaped like them, as rows of consecutive classes that lie `pitch` elements apart."""

    array: Array
    pitch: int


def rows_of(array: Array) -> Rows:
    """The array as it lies, if it has such rows, and otherwise a copy."""
    return _as_it_lies(array) or Rows(
        array_namespace(array).ascontiguousarray(_bits(array).transpose(0, 2, 1)), array.shape[1]
    )


def _as_it_lies(array: Array) -> Rows | None:
    (outer, classes, inner), (far, step, near), size = array.shape, array.strides, array.dtype.itemsize
    if classes > 1 and step != size:
        return None
    if outer > 1 and inner > 1 and far != inner * near:
        return None
    pitch = near if inner > 1 else far
    return Rows(array, pitch // size) if pitch % size == 0 else None


def _bits(array: Array) -> Array:
    """The array as unsigned integers: copies are of bits, whatever CuPy knows of the dtype."""
    return array.view(f"u{array.dtype.itemsize}")


class Target(NamedTuple):
    """What a kernel writes gradients to; `scratch` is None if that is `out` itself."""

    out: Array
    scratch: Array | None
    rows: Rows

    @classmethod
    def of(cls, out: Array) -> Target:
        rows = _as_it_lies(out)
        if rows is not None:
            return cls(out, None, rows)
        outer, classes, inner = out.shape
        scratch = array_namespace(out).empty((outer, inner, classes), out.dtype)
        return cls(out, scratch, Rows(scratch, classes))

    def lies_as(self, source: Rows, dtype: np.dtype[Any]) -> bool:
        """Whether vectors of logits of this dtype and of gradients begin at the same classes, in every row."""
        apart = int(self.rows.array.data.ptr) - int(source.array.data.ptr)
        pitches = (self.rows.pitch - source.pitch) * dtype.itemsize
        return bool(self.out.dtype == dtype) and apart % VECTOR == 0 and pitches % VECTOR == 0

    def finish(self) -> None:
        """Bring the gradient to where it is wanted."""
        if self.scratch is not None:
            _bits(self.out).transpose(0, 2, 1)[...] = _bits(self.scratch)

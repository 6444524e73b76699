"""Arrays in the memory order that the kernels need, or copies in it: rows of consecutive classes at a constant pitch.

An array is (outer, classes, inner), the class axis in the middle; its rows are the pairs (outer, inner).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pce_mpi.arrays import array_namespace
from pce_mpi.kernels.compilation import VECTOR_BYTES

Array = Any  # cupy.ndarray


class Rows(NamedTuple):
    """Logits or gradients as rows of consecutive classes that begin `pitch` elements apart."""

    array: Array
    pitch: int


def rows_of(array: Array) -> Rows:
    """Return the array itself if its strides are those of rows, otherwise a copy."""
    return _without_copy(array) or Rows(
        array_namespace(array).ascontiguousarray(_bits(array).transpose(0, 2, 1)), array.shape[1]
    )


def _without_copy(array: Array) -> Rows | None:
    (outer, classes, inner), strides, size = array.shape, array.strides, array.dtype.itemsize
    if classes > 1 and strides[1] != size:
        return None
    if outer > 1 and inner > 1 and strides[0] != inner * strides[2]:
        return None
    pitch = strides[2] if inner > 1 else strides[0]
    return Rows(array, pitch // size) if pitch % size == 0 else None


def _bits(array: Array) -> Array:
    """View the array as unsigned integers, as CuPy does not copy every dtype."""
    return array.view(f"u{array.dtype.itemsize}")


class Output(NamedTuple):
    """The array that a kernel writes gradients to; `scratch` is None if it is `out` itself."""

    out: Array
    scratch: Array | None
    rows: Rows

    @classmethod
    def of(cls, out: Array) -> Output:
        rows = _without_copy(out)
        if rows is not None:
            return cls(out, None, rows)
        outer, classes, inner = out.shape
        scratch = array_namespace(out).empty((outer, inner, classes), out.dtype)
        return cls(out, scratch, Rows(scratch, classes))

    def aligned_with(self, logits: Rows, dtype: np.dtype[Any]) -> bool:
        """Return whether aligned vectors of logits and of gradients begin at the same classes in every row."""
        distance = int(self.rows.array.data.ptr) - int(logits.array.data.ptr)
        drift = (self.rows.pitch - logits.pitch) * dtype.itemsize  # from one row to the next
        return bool(self.out.dtype == dtype) and distance % VECTOR_BYTES == 0 and drift % VECTOR_BYTES == 0

    def copy_back(self) -> None:
        """Copy the gradient to `out`, if it was written to `scratch`."""
        if self.scratch is not None:
            _bits(self.out).transpose(0, 2, 1)[...] = _bits(self.scratch)

"""Decide whether two arrays are the same or share memory, and whether one overlaps itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace

# numpy.shares_memory is exponential in the worst case; usual views take a few steps.
_OVERLAP_WORK: Any = 100_000


def same_memory(a: Any, b: Any) -> bool:
    """Return whether `a` and `b` have the same elements at the same addresses in the same order.

    Two arrays without elements share nothing, although on a GPU both have the address 0.
    """
    return a is b or (
        type(a) is type(b)
        and a.size > 0
        and a.shape == b.shape
        and a.strides == b.strides
        and a.dtype == b.dtype
        and _address(a) == _address(b)
    )


def overlaps_itself(array: Any) -> bool:
    """Return whether writing to one element of `array` may change another, as in a broadcast or a sliding window."""
    if array.size == 0:
        return False
    reach = 0  # bytes from the first to past the last element along the axes so far
    for stride, length in sorted(
        (abs(stride), length) for stride, length in zip(array.strides, array.shape, strict=True)
    ):
        if length > 1:
            if stride < max(reach, array.dtype.itemsize):
                return True
            reach = max(reach, array.dtype.itemsize) + stride * (length - 1)
    return False


def shares_memory(a: Any, b: Any) -> bool:
    """Return whether writing to `a` may change `b`."""
    if array_namespace(a) is not array_namespace(b) or a.size == 0 or b.size == 0:
        return False
    if array_namespace(a) is not np:  # cupy.shares_memory lists the addresses of all elements, on the GPU
        a, b = (np.asarray(_Addresses(array)) for array in (a, b))
    try:
        return bool(np.shares_memory(a, b, max_work=_OVERLAP_WORK))
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """An object that shows NumPy the addresses of an array on a GPU; never read from it."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (_address(array), True),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.dtype.itemsize}",
        }


def _address(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)

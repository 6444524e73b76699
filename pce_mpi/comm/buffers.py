"""Stage arrays in memory that MPI reads and writes: host memory of a dtype that MPI knows, or memory of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, cupy_of, is_half
from pce_mpi.comm.library import gpu_aware
from pce_mpi.gpu import finish_work, from_pinned, pinned, to_pinned
from pce_mpi.hollow import Hollow

Array = Any  # numpy.ndarray or cupy.ndarray


def stays_on_gpu(array: Array) -> bool:
    """Tell whether `array` is on a GPU and MPI takes it there."""
    return cupy_of(array) is not None and gpu_aware()[0]


def wire_dtype(array: Array) -> np.dtype[Any]:
    """Return the dtype in which `array` is sent, one that MPI knows."""
    return np.dtype(np.float32) if is_half(array.dtype) else array.dtype


def to_wire(array: Array, direct: bool, copy: bool = False) -> Array:
    """Return `array` as contiguous memory of its `wire_dtype`, on the host unless `direct`; a copy if `copy`.

    The GPU has finished all work that fills the memory.
    """
    dtype, xp = wire_dtype(array), array_namespace(array)
    if xp is not np and type(array) is not Hollow and not direct:
        return to_pinned(array, dtype)
    copy = copy or (xp is np and not array.flags.aligned)  # mpi4py knows no dtype of such memory
    wire = xp.array(array, dtype, order="C") if copy else xp.ascontiguousarray(array, dtype).reshape(array.shape)
    if direct:
        if not wire.size:  # mpi4py takes CuPy's empty arrays for contiguous only if they have one axis
            wire = wire.reshape(-1)
        finish_work(wire)
    return wire


def room_for(size: int, sent: Array, like: Array) -> Array:
    """Allocate `size` elements in memory like that of `sent`, which is the staged `like`."""
    if array_namespace(sent) is not array_namespace(like):
        return pinned((size,), sent.dtype)
    return array_namespace(sent).empty(size, sent.dtype)


def from_wire(received: Array, like: Array) -> Array:
    """Return `received`, which MPI has written, in the library and the dtype of `like`."""
    if array_namespace(received) is not array_namespace(like):
        return from_pinned(received, like)
    if received.dtype == like.dtype:
        return received
    with np.errstate(all="ignore"):  # a sum that overflows a half must not raise on one rank alone
        return received.astype(like.dtype)


def concatenated(blocks: Sequence[Array]) -> Array:
    """Return the elements of all blocks, one block after the other; a single block is not copied if possible."""
    flat = [block.reshape(-1) for block in blocks]
    return flat[0] if len(flat) == 1 else array_namespace(flat[0]).concatenate(flat)


def split(received: Array, shapes: Sequence[tuple[int, ...]], like: Array) -> list[Array]:
    """Split `received`, which MPI has written, into arrays of `shapes`, in the library and the dtype of `like`."""
    flat = from_wire(received, like)
    ends = list(accumulate(map(math.prod, shapes), initial=0))
    return [flat[start:end].reshape(shape) for (start, end), shape in zip(pairwise(ends), shapes, strict=True)]

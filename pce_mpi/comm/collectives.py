"""Traced collectives on arrays, and staging in memory that MPI reads and writes.

Every function is collective over its `comm`, an mpi4py intracommunicator, and works on the private duplicate of it that
`communicators.py` keeps, where waiting is bounded; `all_reduce` and `all_gather` also over a `TorchGroup`. Callers have
agreed on operation, dtype and shapes, and call inside a `tracing.cause`.

Arrays are NumPy or CuPy, of any shape and memory order, empty ones included. float16 and bfloat16, for which not every
library has a datatype and a sum, are sent as float32. A CuPy array is copied through pinned host memory and back to its
GPU, or is passed to MPI as it is if the MPI library is GPU-aware and the reduction is MPI's own. In both cases every
function waits for the current stream.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pce_mpi.arrays import Array, array_namespace, cupy_of, is_float8, is_half
from pce_mpi.comm.communicators import channel_of, has_abandoned
from pce_mpi.comm.library import gpu_aware, mpi, reduces_on_gpus, takes_large_counts
from pce_mpi.comm.rehearsed import FakeComm
from pce_mpi.comm.torch_group import TorchGroup
from pce_mpi.comm.tracing import Purpose, current_cause, record
from pce_mpi.gpu import finish_work, from_pinned, pinned, to_pinned
from pce_mpi.hollow import Hollow


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
    if is_float8(array.dtype):  # MPI has no datatype for these, and only moves them
        array = array.view(np.uint8)
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
    if is_float8(like.dtype):
        return received.view(like.dtype)
    with np.errstate(all="ignore"):  # a sum that overflows a half must not raise on one rank alone
        return received.astype(like.dtype)


def concatenated(blocks: Sequence[Array]) -> Array:
    """Return the elements of all blocks, one block after the other; one that all are in is not copied if possible."""
    flat = [block.reshape(-1) for block in blocks]
    flat = [block for block in flat if block.size] or flat[:1]
    return flat[0] if len(flat) == 1 else array_namespace(flat[0]).concatenate(flat)


def split(received: Array, shapes: Sequence[tuple[int, ...]], like: Array) -> list[Array]:
    """Split `received`, which MPI has written, into arrays of `shapes`, in the library and the dtype of `like`."""
    flat = from_wire(received, like)
    ends = list(accumulate(map(math.prod, shapes), initial=0))
    return [flat[start:end].reshape(shape) for (start, end), shape in zip(pairwise(ends), shapes, strict=True)]


if TYPE_CHECKING:
    from mpi4py import MPI

Merge = Callable[[np.ndarray[Any, Any], np.ndarray[Any, Any]], None]
ReduceOp = Literal["sum", "max", "min"] | Merge


def all_reduce(
    array: Array, comm: MPI.Intracomm, op: ReduceOp, *, overwrite: bool = False, element: np.dtype[Any] | None = None
) -> Array:
    """Reduce `array` over all ranks of `comm` with `op`; every rank returns the same bits.

    Collective: one Allreduce of the array's bytes. `op` is "sum", or "max" or "min", which propagate `nan`, or
    `merge(a, b)`, which merges a into b, associative up to rounding and commutative to the last bit, for arrays of any
    dtype, also a structured one. With `overwrite` the result may be in the memory of `array`, which saves a copy.
    `element` is the structured dtype whose fields are the last axis of `array`, for libraries without such dtypes.
    """
    return start_all_reduce(array, comm, op, overwrite=overwrite, element=element)()


def start_all_reduce(
    array: Array, comm: MPI.Intracomm, op: ReduceOp, *, overwrite: bool = False, element: np.dtype[Any] | None = None
) -> Callable[[], Array]:
    """Start an `all_reduce`, and return the function that waits for it and gives its result.

    All ranks start their collectives over `comm` in one order, and wait in one order. Neither `array` nor the arrays
    whose memory it shares may change before the wait ends.
    """
    why = current_cause()
    channel, xp = channel_of(comm, why.operation), array_namespace(array)
    # On one rank the result is the array, which need not leave the GPU; without ranks it has the array's shape.
    if isinstance(channel, FakeComm) or (channel.size == 1 and xp is not np):
        record(why, "all_reduce", Purpose.PAYLOAD, ranks=channel.size, bytes=wire_dtype(array).itemsize * array.size)
        alone = array if overwrite else array.copy()
        return lambda: alone
    in_torch = isinstance(channel, TorchGroup)
    direct = not in_torch and xp is not np and op == "sum" and stays_on_gpu(array) and reduces_on_gpus()
    sent = to_wire(array, direct)
    wire = sent if element is None else sent.view(element)
    # `sent` is our own copy already, in pinned memory.
    overwrite = overwrite or array_namespace(sent) is not xp
    received = wire if overwrite else xp.empty_like(wire)
    ours, result, handle = wire, received, op if callable(op) else _MERGES[op]
    if not in_torch:
        if wire.size > MOST_ELEMENTS:
            _check_library_counts(wire.size, why.operation)
        handle, datatype = _operator(op, wire.dtype)
        ours = mpi().IN_PLACE if overwrite else [wire, wire.size, datatype]
        result = [received, received.size, datatype]
    pending = channel.start(why, "all_reduce", sent.nbytes, channel.comm.Iallreduce, ours, result, handle)

    def finish() -> Array:
        pending.wait()
        if op == "sum" and received.dtype.kind == "f":
            _make_nan_canonical(received)
        return from_wire(received if element is None else received.view(sent.dtype), array).reshape(array.shape)

    return finish


def all_gather(array: Array, comm: MPI.Intracomm, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Return the arrays of all ranks, in rank order, on every rank; `shapes` has the shape of each.

    Collective: one Allgatherv of the array's bytes.
    """
    sent = to_wire(array, stays_on_gpu(array))
    counts = list(map(math.prod, shapes))
    received = room_for(sum(counts), sent, array)
    why = current_cause()
    channel = channel_of(comm, why.operation)
    channel.run(why, "all_gather", sent.nbytes, channel.comm.Iallgatherv, sent, [received, counts])
    return split(received, shapes, array)


def all_to_all(blocks: Sequence[Array], comm: MPI.Intracomm, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Return the block that each rank sends to this one, in rank order; `shapes` has the shape of each.

    Collective: one Alltoallv. `blocks[r]` goes to rank r; all blocks have one dtype.
    """
    flat = concatenated(blocks)
    sent = to_wire(flat, stays_on_gpu(flat))
    counts = list(map(math.prod, shapes))
    received = room_for(sum(counts), sent, flat)
    why = current_cause()
    channel = channel_of(comm, why.operation)
    leaves = (flat.size - blocks[channel.rank].size) * sent.dtype.itemsize
    ours, theirs = [sent, [block.size for block in blocks]], [received, counts]
    channel.run(why, "all_to_all", leaves, channel.comm.Ialltoallv, ours, theirs)
    return split(received, shapes, blocks[0])


def reduce_scatter(blocks: Sequence[Array], comm: MPI.Intracomm, op: ReduceOp) -> Array:
    """Reduce block `rank` over all ranks of `comm` with `op`; `blocks[r]` has the same shape on every rank.

    Collective: one Reduce_scatter of the blocks' bytes. `op` is that of `all_reduce`.
    """
    flat = concatenated(blocks)
    sent = to_wire(flat, op == "sum" and stays_on_gpu(flat) and reduces_on_gpus())
    why = current_cause()
    channel = channel_of(comm, why.operation)
    handle, datatype = (None, None) if channel is comm else _operator(op, sent.dtype)
    mine = blocks[channel.rank]
    if flat.size > MOST_ELEMENTS and channel is not comm:
        _check_library_counts(flat.size, why.operation)
    received = room_for(mine.size, sent, flat)
    ours, result = [sent, sent.size, datatype], [received, received.size, datatype]
    counts = [block.size for block in blocks]
    channel.run(why, "reduce_scatter", sent.nbytes, channel.comm.Ireduce_scatter, ours, result, counts, handle)
    return from_wire(received, mine).reshape(mine.shape)


def _check_library_counts(count: int, operation: str) -> None:
    """Raise `ValueError`, as every other rank does, if the library's reductions do not take so many elements."""
    if not takes_large_counts():
        raise ValueError(
            f"{operation}: this MPI library reduces at most {MOST_ELEMENTS:,} elements at a time, got {count:,}; shard "
            "the array over another dim, or take an MPI library of version 4 of the standard, such as MPICH"
        )


def _operator(op: ReduceOp, dtype: np.dtype[Any]) -> tuple[MPI.Op, MPI.Datatype | None]:
    """Return the MPI operator and datatype for elements of `dtype`; None leaves the datatype to mpi4py."""
    if callable(op):
        return merge_operator(op, dtype)
    if op in ("max", "min") and dtype.kind == "f":
        # With MPI's own operators the algorithm decides which rank sees a nan.
        return merge_operator(_largest if op == "max" else _smallest, dtype)
    # MPI's own operators need MPI's own datatypes; that of bool has only logical operators.
    MPI = mpi()
    largest, smallest = (MPI.LOR, MPI.LAND) if dtype.kind == "b" else (MPI.MAX, MPI.MIN)
    return {"sum": MPI.SUM, "max": largest, "min": smallest}[op], None


@np.errstate(all="ignore")
def _largest(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> None:
    _make_canonical(np.maximum(a, b, out=b))


@np.errstate(all="ignore")
def _smallest(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> None:
    _make_canonical(np.minimum(a, b, out=b))


@np.errstate(all="ignore")
def _sum(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> None:
    np.add(a, b, out=b)


def _make_canonical(values: np.ndarray[Any, Any]) -> None:
    """Give every nan the same bits, and make -0.0 to 0.0: the bits must not depend on the order of a reduction."""
    if values.dtype.kind == "f":
        values += 0.0
        values[np.isnan(values)] = np.nan


@np.errstate(all="ignore")
def _make_nan_canonical(sums: Array) -> None:
    """Give every nan the same bits: MPI's own sum leaves each rank a nan of its own."""
    xp = array_namespace(sums)
    if xp is not np or np.isnan(sums.max(initial=-math.inf)):  # otherwise there is none
        sums[xp.isnan(sums)] = math.nan


# The merges of MPI's own operators, for reductions without MPI.
_MERGES: dict[str, Merge] = {"sum": _sum, "max": _largest, "min": _smallest}


def merge_operator(merge: Merge, dtype: np.dtype[Any]) -> tuple[MPI.Op, MPI.Datatype]:
    """Return the MPI operator of a merge and the datatype of an element, made once."""
    known = _operators.pop((merge, dtype), None)
    if known is None:
        if len(_operators) == _MOST_OPERATORS:
            for handle in _operators.pop(next(iter(_operators))):
                handle.Free()
        from mpi4py import MPI

        # One element is one datatype, so that MPI may cut a message between elements but never within one.
        datatype = MPI.BYTE.Create_contiguous(dtype.itemsize).Commit()

        def combine(source: Any, target: Any, _: MPI.Datatype) -> None:
            ours, theirs = np.frombuffer(source, dtype), np.frombuffer(target, dtype)
            # An error in here ends the job, and so would that of a merge which takes more memory than there is.
            step = max(1, _MERGED_BYTES // dtype.itemsize)
            for start in range(0, len(ours), step):
                merge(ours[start : start + step], theirs[start : start + step])

        known = MPI.Op.Create(combine, commute=True), datatype
    _operators[merge, dtype] = known  # last, as the most recently used
    return known


@atexit.register
def _free_operators() -> None:
    """Free what MPI holds, before mpi4py ends it; a reduction that was given up may still call an operator."""
    if _operators and not has_abandoned() and not mpi().Is_finalized():
        while _operators:
            for handle in _operators.popitem()[1]:
                handle.Free()


_MERGED_BYTES = 2**18
# mpi4py has room for 32 operators in a process, with the caller's own.
_MOST_OPERATORS = 12
MOST_ELEMENTS = 2**31 - 1
_operators: dict[tuple[Merge, np.dtype[Any]], tuple[MPI.Op, MPI.Datatype]] = {}

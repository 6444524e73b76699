"""The only file that sends arrays: traced collectives, and the agreement that precedes them.

Every function is collective over its `comm`, an mpi4py intracommunicator, and works on the private duplicate of it that
`channel.py` keeps; its waiting is bounded as described there.

Arrays are NumPy or CuPy, of any shape and memory order, empty ones included. What MPI has no datatype for (float16,
bfloat16) travels as float32.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
import json
from typing import TYPE_CHECKING, Any
import zlib

import numpy as np

from pce_mpi.arrays import array_namespace, is_half, to_host
from pce_mpi.channel import CollectiveError, by_value, channel_of
from pce_mpi.tracing import Purpose, record

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "agree",
    "all_gather",
    "all_gather_text",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "raise_together",
    "reduce_scatter",
]

Array = Any  # numpy.ndarray or cupy.ndarray
Merge = Callable[[np.ndarray[Any, Any], np.ndarray[Any, Any]], np.ndarray[Any, Any]]

#: how many whole numbers of its own an operation may add to the header of its agreement
FACTS = 5


def agree(
    comm: MPI.Intracomm,
    operation: str,
    call: Mapping[str, Hashable],
    *,
    error: Exception | None = None,
    facts: Sequence[int] = (),
    over: str = "comm",
    ranks_named: bool = False,
) -> np.ndarray[Any, Any]:
    """Make sure that every rank of `comm` makes the same call and that all of its checks passed.

    Collective over `comm`: one Allgather of 56 bytes. `call` describes what must be the same on every rank, `error`
    is what this rank's own checks raised, if anything, and `facts` are up to 5 whole numbers for the others to know.
    `ranks_named` says that the error's text has its ranks already, from an agreement over another communicator.

    Returns the facts of all ranks, (ranks, facts), int64. If some rank has an error, every rank raises that of the
    lowest such rank, a builtin exception whose text names the ranks. If calls differ, every rank raises
    `CollectiveError`, which says who said what. The communicator stays usable.
    """
    channel = channel_of(comm, operation)
    checksum = _checksum(operation, tuple(call.items()))
    header = np.array((error is not None, checksum, *facts, *(0,) * (FACTS - len(facts))), np.int64)
    headers = np.empty((channel.size, 2 + FACTS), np.int64)
    record(
        operation,
        "all_gather",
        Purpose.AGREEMENT,
        over=over,
        ranks=channel.size,
        bytes=header.nbytes,
        reason="every rank makes the same call and its checks passed",
    )
    channel.wait(channel.comm.Iallgather(header, headers), f"{operation}: agreement", header, headers)
    # Lists of so few numbers are compared three times as fast as arrays.
    if headers[:, :2].tolist() != [[0, checksum]] * channel.size:
        if headers[:, 0].any():
            raise_together(comm, operation, error, over=over, ranks_named=ranks_named)
        said = {"operation": operation, **{name: repr(value) for name, value in call.items()}}
        raise CollectiveError(_differences(all_gather_text(json.dumps(said), comm, operation=operation, over=over)))
    return headers[:, 2 : 2 + len(facts)]


@lru_cache(maxsize=1024)
def _checksum(operation: str, call: tuple[tuple[str, Hashable], ...]) -> int:
    """A number that is the same on every rank for the same call; programs make few different ones, many times."""
    return zlib.crc32(repr((operation, call)).encode())


def raise_together(
    comm: MPI.Intracomm, operation: str, error: Exception | None, over: str = "comm", ranks_named: bool = False
) -> None:
    """Raise, on every rank of `comm`, the error of the lowest rank that has one; all ranks must call it."""
    text = "" if error is None else json.dumps([type(error).__name__, _text_of(error), ranks_named])
    texts = all_gather_text(text, comm, operation=operation, over=over)
    failed = {rank: json.loads(text) for rank, text in enumerate(texts) if text}
    kind = _RAISED.get(next(iter(failed.values()))[0], RuntimeError)
    if all(texts) and len(set(texts)) == 1 and failed[0][2]:
        raise kind(failed[0][1]) from error
    prefix = "" if over == "comm" else f"{over} "
    said = by_value({rank: message for rank, (_, message, _) in failed.items()}, prefix=prefix, between="; ")
    raise kind(said) from error


def _text_of(error: Exception) -> str:
    """`str(error)`, or its type where that raises: the other ranks are waiting for some text."""
    try:
        return str(error)
    except Exception:
        return type(error).__name__


_RAISED: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (IndexError, TypeError, ValueError, MemoryError, NotImplementedError, OverflowError, CollectiveError)
}


def all_gather_text(text: str, comm: MPI.Intracomm, *, operation: str, over: str = "comm") -> list[str]:
    """The text of every rank, in rank order, on every rank; texts may differ in length.

    Collective: an Allgather of 8 bytes and an Allgatherv. For reports and errors.
    """
    channel = channel_of(comm, operation)
    block = np.frombuffer(text.encode(), np.uint8)
    length, lengths = np.array([block.size], np.int64), np.empty(channel.size, np.int64)
    for sent in (length, block):
        record(
            operation,
            "all_gather",
            Purpose.AGREEMENT,
            over=over,
            ranks=channel.size,
            bytes=sent.nbytes,
            reason="what each rank has to say",
        )
    channel.wait(channel.comm.Iallgather(length, lengths), operation, length, lengths)
    received = np.empty(int(lengths.sum()), np.uint8)
    channel.wait(channel.comm.Iallgatherv(block, [received, lengths.tolist()]), operation, block, received)
    return [part.tobytes().decode() for part in np.split(received, np.cumsum(lengths)[:-1])]


def _differences(descriptions: list[str]) -> str:
    calls: list[dict[str, str]] = [json.loads(text) for text in descriptions]
    names = list(dict.fromkeys(name for call in calls for name in call))
    differing = []
    for name in names:
        values = {rank: call.get(name, "not given") for rank, call in enumerate(calls)}
        if len(set(values.values())) > 1:
            differing.append(f"{name}: {by_value(values)}")
        if name == "operation" and differing:
            break  # the arguments of two different functions are not worth comparing
    return "ranks disagree on " + "; ".join(differing)


# -------------------------------------------------------------------------------------------------------- collectives
#
# These trust that their callers have agreed on operation, dtype and shapes. `over` and `reason` go into the trace.


def all_reduce(
    array: Array, comm: MPI.Intracomm, op: MPI.Op | Merge, *, operation: str, over: str = "comm", reason: str
) -> Array:
    """`array` combined over all ranks of `comm` with `op`, on every rank, the same bits.

    Collective: one Allreduce of the array's bytes. `op` is one of MPI's operators, or `merge(a, b)`, associative up to
    rounding and commutative to the last bit, for arrays of any dtype, structured ones among them.
    """
    sent = _to_wire(array)
    received = np.empty_like(sent)
    handle, datatype = _operator(op, sent.dtype)
    channel = channel_of(comm, operation)
    record(operation, "all_reduce", Purpose.PAYLOAD, over=over, ranks=channel.size, bytes=sent.nbytes, reason=reason)
    request = channel.comm.Iallreduce([sent, sent.size, datatype], [received, sent.size, datatype], handle)
    channel.wait(request, operation, sent, received)
    return _from_wire(received, array)


def all_gather(
    array: Array,
    comm: MPI.Intracomm,
    shapes: Sequence[tuple[int, ...]],
    *,
    operation: str,
    over: str = "comm",
    reason: str,
) -> list[Array]:
    """The arrays of all ranks, in rank order, on every rank; `shapes` has the shape of each.

    Collective: one Allgatherv of the array's bytes.
    """
    sent = _to_wire(array)
    counts = [int(np.prod(shape)) for shape in shapes]
    received = np.empty(sum(counts), sent.dtype)
    channel = channel_of(comm, operation)
    record(operation, "all_gather", Purpose.PAYLOAD, over=over, ranks=channel.size, bytes=sent.nbytes, reason=reason)
    channel.wait(channel.comm.Iallgatherv(sent, [received, counts]), operation, sent, received)
    return _split(received, shapes, array)


def all_to_all(
    blocks: Sequence[Array],
    comm: MPI.Intracomm,
    shapes: Sequence[tuple[int, ...]],
    *,
    operation: str,
    over: str = "comm",
    reason: str,
) -> list[Array]:
    """The block that each rank has for this one, in rank order; `shapes` has the shape of each.

    Collective: one Alltoallv. `blocks[r]` goes to rank r; all blocks have one dtype.
    """
    wires = [_to_wire(block) for block in blocks]
    sent = np.concatenate([wire.ravel() for wire in wires])
    counts = [int(np.prod(shape)) for shape in shapes]
    received = np.empty(sum(counts), sent.dtype)
    channel = channel_of(comm, operation)
    kept = wires[channel.rank].nbytes
    record(
        operation, "all_to_all", Purpose.PAYLOAD, over=over, ranks=channel.size, bytes=sent.nbytes - kept, reason=reason
    )
    request = channel.comm.Ialltoallv([sent, [wire.size for wire in wires]], [received, counts])
    channel.wait(request, operation, sent, received)
    return _split(received, shapes, blocks[0])


def reduce_scatter(
    blocks: Sequence[Array],
    comm: MPI.Intracomm,
    op: MPI.Op | Merge,
    *,
    operation: str,
    over: str = "comm",
    reason: str,
) -> Array:
    """Block `rank` combined over all ranks of `comm` with `op`; `blocks[r]` has the same shape on every rank.

    Collective: one Reduce_scatter of the blocks' bytes.
    """
    wires = [_to_wire(block) for block in blocks]
    sent = np.concatenate([wire.ravel() for wire in wires])
    handle, datatype = _operator(op, sent.dtype)
    channel = channel_of(comm, operation)
    received = np.empty_like(wires[channel.rank])
    record(
        operation, "reduce_scatter", Purpose.PAYLOAD, over=over, ranks=channel.size, bytes=sent.nbytes, reason=reason
    )
    request = channel.comm.Ireduce_scatter(
        [sent, sent.size, datatype], [received, received.size, datatype], [wire.size for wire in wires], handle
    )
    channel.wait(request, operation, sent, received)
    return _from_wire(received, blocks[channel.rank])


def broadcast(
    array: Array, comm: MPI.Intracomm, root: int, *, operation: str, over: str = "comm", reason: str
) -> Array:
    """The array of rank `root`, on every rank; elsewhere `array` only says shape and dtype.

    Collective: one Bcast.
    """
    wire = _to_wire(array).copy()
    channel = channel_of(comm, operation)
    sent = wire.nbytes if channel.rank == root else 0
    record(operation, "broadcast", Purpose.PAYLOAD, over=over, ranks=channel.size, bytes=sent, reason=reason)
    channel.wait(channel.comm.Ibcast(wire, root), operation, wire)
    return _from_wire(wire, array)


def _to_wire(array: Array) -> np.ndarray[Any, Any]:
    """`array` as contiguous host memory of a dtype that MPI knows."""
    host = to_host(array)
    return np.ascontiguousarray(host, np.float32 if is_half(host.dtype) else None).reshape(host.shape)


def _from_wire(received: np.ndarray[Any, Any], like: Array) -> Array:
    """What came off the wire, in the library and the dtype of `like`."""
    return array_namespace(like).asarray(received.astype(like.dtype, copy=False))


def _split(received: np.ndarray[Any, Any], shapes: Sequence[tuple[int, ...]], like: Array) -> list[Array]:
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    blocks = np.split(received, ends)
    return [_from_wire(block.reshape(shape), like) for block, shape in zip(blocks, shapes, strict=True)]


def _operator(op: MPI.Op | Merge, dtype: np.dtype[Any]) -> tuple[MPI.Op, MPI.Datatype | None]:
    """What MPI is to combine elements of `dtype` with, and what it is to think that they are."""
    from mpi4py import MPI

    # MPI's own operators work on its own datatypes, which mpi4py finds by the dtype.
    return (op, None) if isinstance(op, MPI.Op) else _merge_operator(op, dtype)


def _merge_operator(merge: Merge, dtype: np.dtype[Any]) -> tuple[MPI.Op, MPI.Datatype]:
    from mpi4py import MPI

    known = _operators.pop((merge, dtype), None)
    if known is None:
        if len(_operators) == _MOST_OPERATORS:
            for handle in _operators.pop(next(iter(_operators))):
                handle.Free()
        # One element is one datatype, so that MPI may cut a message between elements but never within one.
        datatype = MPI.BYTE.Create_contiguous(dtype.itemsize).Commit()

        def combine(source: Any, target: Any, _: MPI.Datatype) -> None:
            b = np.frombuffer(target, dtype)
            b[...] = merge(np.frombuffer(source, dtype), b)

        known = MPI.Op.Create(combine, commute=True), datatype
    _operators[merge, dtype] = known  # the last one used stands last
    return known


# mpi4py has room for 32 operators in a process, the caller's own among them.
_MOST_OPERATORS = 12
_operators: dict[tuple[Merge, np.dtype[Any]], tuple[MPI.Op, MPI.Datatype]] = {}

"""The end of a block of `Mesh.attempt`: communicators are brought back to one place, and all ranks raise one error.

A collective that some ranks have left waiting never ends, and neither does its communicator. So the ranks that have not
begun it join it, with buffers that nobody reads: each rank reports which collectives it has left, of what sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from pce_mpi.comm.agreement import agree
from pce_mpi.comm.collectives import merge_operator
from pce_mpi.comm.communicators import Channel, all_channels
from pce_mpi.comm.errors import CollectiveError, CollectiveTimeout, described, remade
from pce_mpi.comm.library import mpi, ranks_in
from pce_mpi.comm.peers import Peers, all_peers
from pce_mpi.comm.waits import timeout_seconds

if TYPE_CHECKING:
    from mpi4py import MPI

_NAP = 0.0002
# Those of MPI's own that this package sends arrays with.
_OPERATORS = ("SUM", "MAX", "MIN", "LOR", "LAND")


def report_of(peers: Peers, error: BaseException | None) -> dict[str, Any]:
    """Return how a block ended here: its error, whether that is this rank's own, the channels, the numbers of calls."""
    is_own = error is not None and "origin" not in vars(error)
    return {
        "error": error and [*described(error, peers.over, peers.rank), is_own],
        "channels": {channel.number: [channel.position, _left(channel)] for channel in all_channels()},
        "numbers": {each.name: each.number for each in all_peers()},
    }


def end_block(peers: Peers, comm: MPI.Intracomm, block: int, error: BaseException) -> BaseException:
    """End a block that has failed on some rank, together with the other ranks, and return the error to raise.

    Collective over `comm`, whose ranks are `peers`: messages, collectives that it joins, an Allgather of 56 bytes.
    """
    peers.report(block, {**report_of(peers, error), "start": peers.starts[block]})
    reports = dict(sorted(peers.all_reports(block).items()))
    if len({report["start"] for report in reports.values()}) > 1:
        raise CollectiveError(
            "ranks have not made the same calls before a block of attempt(), and may be in other steps"
        )
    restore(peers, reports)
    names, text, _ = chosen = next(
        (each["error"] for each in reports.values() if each["error"][2]), reports[0]["error"]
    )
    index = vars(remade(names, text)).get("class_index", len(names))
    (indices,) = agree(comm, "attempt", {}, (index,), over=peers.over)
    if not isinstance(error, Exception):
        return error
    if max(indices) == 0 and reports[peers.rank]["error"][:2] == chosen[:2]:
        return error
    common = remade(names, text, first=max(indices))
    common.__cause__ = error if reports[peers.rank]["error"][2] else None
    return common


def restore(peers: Peers, reports: dict[int, Any]) -> None:
    """Complete what was left on the communicators whose ranks have all reported, and let these ranks begin anew."""
    restored = set[int]()
    for channel in sorted(all_channels(), key=lambda channel: channel.number):
        ranks = ranks_in(channel.comm, peers.comm)
        if mpi().UNDEFINED in ranks or any(channel.number not in reports[rank]["channels"] for rank in ranks):
            continue
        states = [reports[rank]["channels"][channel.number] for rank in ranks]
        first, last = channel.position + 1, max(position for position, _ in states)
        requests = [(each.request, each) for each in channel.left()]
        for position in range(first, last + 1):
            left = {
                rank: collective
                for rank, (_, collectives) in enumerate(states)
                for at, collective in collectives
                if at == position
            }
            if not left:
                raise CollectiveTimeout("a collective of other ranks that this one has not begun has ended there")
            requests.append(_joined(channel, left))
        _complete(requests, channel)
        channel.restore(last)
        restored.add(channel.number)
    for each in all_peers():
        if each.name in restored:
            each.begin_again(max(report["numbers"].get(each.name, 0) for report in reports.values()))


def _left(channel: Channel) -> list[tuple[int, list[Any]]]:
    return [(each.position, _described(each.name, each.arguments)) for each in channel.left()]


def _described(name: str, arguments: Sequence[Any]) -> list[Any]:
    """Describe a collective for ranks that have not begun it: name, dtype or size of an element, counts, operator."""
    if name == "Iallgather":
        array = arguments[0]
        return [name, array.dtype.str, array.size]
    if name == "Iallgatherv":
        array, (_, counts) = arguments
        return [name, array.dtype.str, [*counts]]
    if name == "Ialltoallv":
        (array, sent), (_, received) = arguments
        return [name, array.dtype.str, [*sent], [*received]]
    # Iallreduce and Ireduce_scatter: what is sent may be the result's memory.
    array, size, datatype = arguments[1]
    element = array.dtype.str if datatype is None else datatype.Get_size()
    counts = arguments[2] if name == "Ireduce_scatter" else [size]
    operator = next((known for known in _OPERATORS if arguments[-1] == getattr(mpi(), known)), "")
    return [name, element, [*counts], operator]


def _joined(channel: Channel, left: dict[int, list[Any]]) -> tuple[MPI.Request, Any]:
    """Begin a collective as the ranks that have left it did; return the request, and what it refers to."""
    name, element, counts, *more = next(iter(left.values()))
    rank, size = channel.rank, channel.size
    dtype = np.dtype((np.void, element)) if isinstance(element, int) else np.dtype(element)
    if name == "Iallgather":
        arguments: list[Any] = [np.zeros(counts, dtype), np.zeros(counts * size, dtype)]
    elif name == "Iallgatherv":
        arguments = [np.zeros(counts[rank], dtype), [np.zeros(sum(counts), dtype), counts]]
    elif name == "Ialltoallv":
        sent = [left[other][3][rank] if other in left else 0 for other in range(size)]
        received = [left[other][2][rank] if other in left else 0 for other in range(size)]
        arguments = [[np.zeros(sum(sent), dtype), sent], [np.zeros(sum(received), dtype), received]]
    else:
        operator, datatype = getattr(mpi(), more[0], None), None
        if isinstance(element, int):
            operator, datatype = merge_operator(_merge_nothing, dtype)
        result = np.zeros(counts[rank] if name == "Ireduce_scatter" else counts[0], dtype)
        arguments = [[np.zeros(sum(counts), dtype), sum(counts), datatype], [result, result.size, datatype]]
        arguments += [*([counts] if name == "Ireduce_scatter" else []), operator]
    return getattr(channel.comm, name)(*arguments), arguments


def _merge_nothing(ours: Any, theirs: Any) -> None: ...


def _complete(requests: Sequence[tuple[MPI.Request, Any]], channel: Channel) -> None:
    deadline = time.monotonic() + timeout_seconds()
    while not all(request.Test() for request, _ in requests):
        if time.monotonic() > deadline:
            raise CollectiveTimeout(f"waited {timeout_seconds():g} s (PCE_MPI_TIMEOUT) for collectives that were left")
        time.sleep(_NAP)

"""Measure a call: time, memory, and the messages over the communicator that it gets."""

from __future__ import annotations

from collections.abc import Callable
import ctypes
from pathlib import Path
import pickle
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

# After a call that warms up, one that measures memory and two that count messages.
_TIMED_CALLS = 3

_NAMES = (
    "allreduce allgather allgatherv alltoall alltoallv alltoallw bcast exscan gather gatherv reduce reduce_scatter "
    "reduce_scatter_block scan scatter scatterv"
).split()


class _Sent:
    """The number of collectives that one rank has started, and the bytes that it has sent in them."""

    def __init__(self) -> None:
        self.calls = self.bytes = 0


def costs_of(call: Callable[[Any], Any], comm: MPI.Intracomm | None) -> dict[str, float | None]:
    """Measure `call(comm)`; collective over `comm`.

    `seconds`: the least of three calls, on the slowest rank. `peak bytes`: memory beyond what there was before, on the
    rank that takes most. `collectives` and `bytes`: what rank 0 sends. None is what cannot be known: memory elsewhere
    than on Linux, and messages that go another way.
    """
    call(comm)
    peak = _peak_bytes(lambda: call(comm))
    sent = _Sent()
    if comm is not None:
        # A fresh one: a candidate may have cached duplicates of `comm`, which would not be counted.
        fresh = comm.Dup()
        counting = _counting(fresh, sent)
        call(counting)
        sent.calls = sent.bytes = 0  # the first use of a communicator may send more
        call(counting)
        fresh.Free()
    seconds = []
    for _ in range(_TIMED_CALLS):
        if comm is not None:
            comm.Barrier()
        start = time.perf_counter()
        call(comm)
        seconds.append(time.perf_counter() - start)
    mine = min(seconds), peak
    of_all = [mine] if comm is None else comm.allgather(mine)
    unknown = sent.calls == 0 and len(of_all) > 1
    return {
        "collectives": None if unknown else float(sent.calls),
        "bytes": None if unknown else float(sent.bytes),
        "seconds": max(taken for taken, _ in of_all),
        "peak bytes": None if any(each is None for _, each in of_all) else max(each or 0.0 for _, each in of_all),
    }


def _counting(comm: MPI.Intracomm, sent: _Sent) -> MPI.Intracomm:
    """Return `comm` with its collectives counted in `sent`, and those of its duplicates."""
    from mpi4py import MPI

    class Counting(MPI.Intracomm):
        pass

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def count(self: Any, *arguments: Any, **options: Any) -> Any:
            sent.calls += 1
            sent.bytes += _bytes(name, [*arguments, *options.values()])
            return method(self, *arguments, **options)

        return count

    for lower in _NAMES:
        for name in (lower, lower.capitalize(), f"I{lower}"):
            if hasattr(MPI.Intracomm, name):
                setattr(Counting, name, counted(name, getattr(MPI.Intracomm, name)))
    return Counting(comm)


def _bytes(name: str, arguments: list[Any]) -> int:
    """Return the bytes that this rank sends: the first buffer, or the second if MPI works in place, or pickled."""
    from mpi4py import MPI

    if not arguments:
        return 0
    if name[0].islower():
        return len(pickle.dumps(arguments[0]))
    buffer: Any = arguments[1] if arguments[0] is MPI.IN_PLACE and len(arguments) > 1 else arguments[0]
    if isinstance(buffer, list | tuple):
        array, *rest = buffer
        if len(rest) == 2 and isinstance(rest[0], int) and isinstance(rest[1], MPI.Datatype):
            return rest[0] * rest[1].Get_size()
        buffer = array
    if buffer is None:
        return 0
    size = getattr(buffer, "nbytes", None)
    return int(memoryview(buffer).nbytes if size is None else size)


def _peak_bytes(call: Callable[[], Any]) -> float | None:
    """Measure how far `call` raises the memory of this process, as Linux counts it; None on other systems."""
    try:
        # Memory that was freed and cached would hide new memory.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        call()
        return max(0.0, _status("VmHWM") - before)
    except (OSError, AttributeError):
        call()
        return None


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024.0 * float(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}")

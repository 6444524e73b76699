"""Private communicators, and waiting that ends.

Each communicator of the caller's is duplicated once, so that its messages never meet ours, and the duplicate is cached
with it. Waiting for a collective on it is a yielding poll. After `PCE_MPI_TIMEOUT` seconds (600 unless set) the ranks
that wait tell each other so, point to point, and every one of them raises a `CollectiveTimeout` that names the ranks
which are silent; the communicator is not used again.

A call of MPI before `MPI.Init` or after `MPI.Finalize` ends the process: `check_mpi` raises before it comes to that.

Arrays on a GPU go through host memory, unless MPI is `gpu_aware`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
import ctypes
from functools import cache
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "Channel",
    "CollectiveError",
    "CollectiveTimeout",
    "channel_of",
    "check_comm",
    "check_mpi",
    "gpu_aware",
    "is_comm",
    "out_of_communicators",
    "prefix_of",
    "reduces_on_gpus",
    "same_ranks",
    "text_by_rank",
]

# A yielding poll answers in microseconds; one that sleeps leaves the core to others. Change over after about 10 ms.
_YIELDS = 10_000
_NAP = 0.0002
# How long ranks that wait in vain listen for each other.
_ROLL_CALL_SECONDS = 1.0
_ROLL_CALL_TAG = 1
_ROLL_CALL_BYTES = 160


class CollectiveError(RuntimeError):
    """Ranks made calls that do not belong together; raised alike on every rank, before anything was written."""


class CollectiveTimeout(CollectiveError):
    """A collective waited `PCE_MPI_TIMEOUT` seconds; its communicator cannot be used any more."""


class Channel:
    """A communicator on which only this package sends, and the bounded wait for what is sent on it."""

    def __init__(self, comm: MPI.Intracomm, tag: int, *, owns_comm: bool = False):
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._owns_comm = owns_comm
        self._tag = tag
        self._broken: str | None = None
        self._timeout = _timeout_seconds()

    def __del__(self) -> None:
        # When the caller's communicator is freed, which holds the channel. A delete function of its keyval would do
        # the same, but mpi4py asks for that communicator's topology first, and MPICH may then read freed memory.
        if self._owns_comm and self._broken is None and not _states_of_mpi()[1]():
            self.comm.Free()

    def wait(self, request: MPI.Request, operation: str, *buffers: object) -> None:
        """Return when `request`, which reads and writes `buffers`, is complete, or raise `CollectiveTimeout`."""
        try:
            self._poll(request, operation)
        except BaseException as error:
            # MPI may still write to the buffers, whenever the others arrive: they must outlive the process's interest.
            _abandoned.append((request, buffers, self))
            self._broken = self._broken or f"{operation} was left waiting by {type(error).__name__}"
            raise

    def _poll(self, request: MPI.Request, operation: str) -> None:
        test, give_way = request.Test, os.sched_yield
        for _ in range(_YIELDS):
            if test():
                return
            give_way()
        from mpi4py import MPI

        deadline = time.monotonic() + self._timeout
        while not test():
            late = time.monotonic() > deadline
            if late or self.comm.Iprobe(MPI.ANY_SOURCE, self._tag):
                self._say_that_it_waits(operation, late)
                self._broken = self._roll_call(operation)
                raise CollectiveTimeout(self._broken)
            time.sleep(_NAP)

    def raise_if_broken(self) -> None:
        """A communicator with a collective still under way on it would pair old messages with new ones."""
        if self._broken is not None:
            raise CollectiveTimeout(f"this communicator is not usable any more: {self._broken}")

    def _say_that_it_waits(self, operation: str, late: bool) -> None:
        """Write one line to stderr: after a network has failed, the process may die in the roll call."""
        if sys.stderr is None:
            return
        waits = f"has waited {self._timeout:g} s (PCE_MPI_TIMEOUT)" if late else "hears that others gave up, and waits"
        rank = f"rank {self.rank} of {self.size}"
        with suppress(OSError, ValueError):  # a stream that is closed must not hide the timeout
            print(f"pce_mpi: {rank} {waits} in {operation}; ranks now tell where they are", file=sys.stderr, flush=True)

    def _roll_call(self, operation: str) -> str:
        """Who else waits, and where: each rank that waits tells all others, and hears whom it hears for a second."""
        from mpi4py import MPI

        mine = operation.encode()[:_ROLL_CALL_BYTES]
        waiting = {self.rank: operation}
        peers = [peer for peer in range(self.size) if peer != self.rank]
        sent = [self.comm.Isend([mine, MPI.BYTE], peer, self._tag) for peer in peers]
        deadline = time.monotonic() + _ROLL_CALL_SECONDS
        status = MPI.Status()
        while len(waiting) < self.size and time.monotonic() < deadline:
            if not self.comm.Iprobe(MPI.ANY_SOURCE, self._tag, status):
                time.sleep(0.001)
                continue
            theirs = bytearray(status.Get_count(MPI.BYTE))
            self.comm.Recv([theirs, MPI.BYTE], status.source, self._tag)
            waiting[status.source] = theirs.decode(errors="replace")
        MPI.Request.Testall(sent)
        silent = [rank for rank in range(self.size) if rank not in waiting]
        where = text_by_rank({rank: waiting[rank] for rank in sorted(waiting)})
        return (
            f"waited {self._timeout:g} s (PCE_MPI_TIMEOUT) in {where}; "
            f"silent: {_ranks_text(silent) if silent else 'no rank, they wait for each other in different calls'}"
        )


#: what MPI may still read and write although nobody waits for it any more
_abandoned: list[tuple[MPI.Request, tuple[object, ...], Channel]] = []


def _timeout_seconds() -> float:
    text = os.environ.get("PCE_MPI_TIMEOUT", "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ValueError(f"PCE_MPI_TIMEOUT must be a positive number of seconds, got {text!r}")
    return seconds


@cache
def _channel_key() -> int:
    from mpi4py import MPI

    return MPI.Comm.Create_keyval()


def channel_of(comm: MPI.Intracomm, operation: str) -> Channel:
    """The cached private duplicate of `comm`; collective the first time."""
    check_mpi()
    channel: Any = comm.Get_attr(_channel_key())
    if channel is None:
        channel = _new_channel(comm, operation)
        comm.Set_attr(_channel_key(), channel)
    assert isinstance(channel, Channel)
    channel.raise_if_broken()
    return channel


def _new_channel(comm: MPI.Intracomm, operation: str) -> Channel:
    """A channel on a new duplicate of `comm`, which keeps a broken channel if the other ranks do not come."""
    from mpi4py import MPI

    # There is no private communicator to call the roll on before this one exists. The caller's own serves, with the
    # highest tag there is, and only once the program is lost anyway.
    highest: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    waiting = Channel(comm, highest)
    try:
        duplicate, request = comm.Idup()
        waiting.wait(request, f"{operation} (its first use of the communicator)", duplicate)
    except MPI.Exception as error:
        raise out_of_communicators(operation, error) from error
    except BaseException:
        comm.Set_attr(_channel_key(), waiting)
        raise
    return Channel(duplicate, _ROLL_CALL_TAG, owns_comm=True)


def out_of_communicators(operation: str, error: MPI.Exception) -> RuntimeError:
    """The error of ranks to which MPI gave no communicator: MPICH gives one to all ranks or to none."""
    reason = str(error).strip().rpartition(": ")[2]
    return RuntimeError(
        f"{operation}: MPI could not make another communicator ({reason}). It has some 2,000, and takes two for each "
        "that is used here. Free() those that are no longer needed, keep no mesh that is not, and make those that are "
        "needed once"
    )


def gpu_aware() -> tuple[bool, str]:
    """Whether MPI may be handed memory of a GPU, and who says so.

    `PCE_MPI_GPU_AWARE` does, if it is 1 or 0, and otherwise the loaded library.
    """
    told = os.environ.get("PCE_MPI_GPU_AWARE", "")
    if told not in ("", "0", "1"):
        raise ValueError(f"PCE_MPI_GPU_AWARE must be 0 or 1, got {told!r}")
    return (told == "1", f"PCE_MPI_GPU_AWARE={told}") if told else _asked_of_the_library()


@cache
def _asked_of_the_library() -> tuple[bool, str]:
    from mpi4py import MPI

    try:
        # mpi4py's extension has no such function, but it is linked to the library that may have.
        query = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return False, "the library cannot be asked: it has no MPIX_Query_cuda_support"
    return bool(query()), "MPIX_Query_cuda_support"


@cache
def reduces_on_gpus() -> bool:
    """Whether a GPU-aware library takes memory of a GPU in non-blocking reductions too; Open MPI does not."""
    from mpi4py import MPI

    return MPI.get_vendor()[0] != "Open MPI"


def check_mpi() -> None:
    """Raise `RuntimeError` unless MPI is running."""
    is_initialized, is_finalized = _states_of_mpi()
    if not is_initialized():
        raise RuntimeError("MPI has not been initialized: call MPI.Init() first, or leave mpi4py.rc.initialize True")
    if is_finalized():
        raise RuntimeError("MPI has been finalized: do all that communicates before MPI.Finalize()")


@cache
def _states_of_mpi() -> tuple[Callable[[], bool], Callable[[], bool]]:
    from mpi4py import MPI

    return MPI.Is_initialized, MPI.Is_finalized


def is_comm(comm: Any) -> bool:
    """Whether `comm` is an intracommunicator of mpi4py's that this process belongs to; `RuntimeError` without MPI."""
    from mpi4py import MPI

    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        return False
    check_mpi()
    return True


def same_ranks(a: MPI.Intracomm, b: MPI.Intracomm) -> bool:
    """Whether two communicators have the same processes in the same order; asks nobody."""
    from mpi4py import MPI

    return MPI.Comm.Compare(a, b) in (MPI.IDENT, MPI.CONGRUENT)


def check_comm(comm: Any, name: str) -> None:
    """Raise `TypeError` unless `is_comm(comm)`."""
    if not is_comm(comm):
        raise TypeError(f"{name} must be an mpi4py intracommunicator or None, got {comm!r}")


def text_by_rank(values: Mapping[int, str], prefix: str = "", between: str = ", ") -> str:
    """`values` of ranks as text, equal ones together: 'a (ranks 0, 2), b (rank 1)'; `prefix` stands before 'rank'."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return between.join(f"{value} ({prefix}{_ranks_text(who)})" for value, who in ranks.items())


def prefix_of(over: str) -> str:
    """What stands before the 'rank' of the communicator that errors and the trace call `over`: nothing for "comm"."""
    return "" if over == "comm" else f"{over} "


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

"""Private communicators: made, waited on for a bounded time, and freed.

Each communicator of the caller is duplicated once, so that its messages never meet ours, and the duplicate is cached
with it. A wait for a collective is a yielding poll. After `PCE_MPI_TIMEOUT` seconds (600 unless set) the waiting ranks
tell each other so, point to point, and each of them raises a `CollectiveTimeout` that names the silent ranks. The
communicator is not used again. A rank that waits hears of errors of other ranks, too: `peers.py` says how.

Freeing a communicator is collective, and MPI allows no call within a reduction operator. But Python may run a finalizer
anywhere, also in a reduction operator written in Python, and at a different moment on each rank. So finalizers only
note which communicators are garbage (`drop`). When the ranks of a communicator make another one together, `give_back`
frees garbage: the ranks tell each other theirs, and free, in one order, each communicator that is garbage on all of its
ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
import os
import secrets
from threading import Lock
import time
from typing import TYPE_CHECKING, Any, NamedTuple
import warnings
import weakref
from zlib import crc32

import numpy as np

from pce_mpi.comm.errors import CollectiveTimeout, ranks_text, text_by_rank
from pce_mpi.comm.launcher import why_apart
from pce_mpi.comm.library import check_mpi, is_comm, is_running, out_of_communicators
from pce_mpi.comm.peers import Peers, open_blocks, tell_peers
from pce_mpi.comm.rehearsed import FakeComm
from pce_mpi.comm.torch_group import TorchGroup, is_process_group
from pce_mpi.comm.tracing import Purpose, Start, cause, open_traces, record
from pce_mpi.comm.uncaught import install
from pce_mpi.comm.waits import notice_seconds, say, timeout_seconds
from pce_mpi.hollow import open_ledger

if TYPE_CHECKING:
    from mpi4py import MPI

# Ranks that arrive together do so within a few microseconds: the poll keeps the core for so long, as getting it back
# takes longer. After that, a poll that yields answers in microseconds, and one that sleeps leaves the core to others:
# it begins to sleep after about 10 ms.
_SPINS = 20
_YIELDS = 10_000
# It listens for errors of other ranks each time that it has yielded so often.
_LISTENS = 500
_NAP = 0.0002
# How long ranks that wait in vain listen for each other.
_ROLL_CALL_SECONDS = 1.0
_ROLL_CALL_TAG = 1
_ROLL_CALL_BYTES = 160
_TWO_THREADS = "two threads were in calls over it at once: give each thread a communicator of its own, by comm.Dup()"


class Channel:
    """A communicator on which only this package sends, and the bounded wait for what is sent on it.

    `number` is the name by which all ranks know the communicator; 0 if it is the caller's, which has no `peers`: the
    ranks that make calls over it, perhaps over other communicators too. `near` has the ranks on the same host.
    `position` counts the collectives that this rank has started.
    """

    def __init__(self, comm: MPI.Intracomm, tag: int, number: int = 0, near: Sequence[int] = ()):
        self.comm, self.number = comm, number
        self.rank, self.size = comm.rank, comm.size
        self.peers: Peers | None = None
        self.over = "comm"
        self.position = 0
        self.started: dict[int, Left] = {}
        self.asked = -1, 0.0  # the collective in which the others were asked who waits, and after how many seconds
        self.noticed: set[str] = set()  # the operations of which a line was written
        self._tag = tag
        self.broken: str | None = None
        self._is_waited_on = False
        self._timeout, self.notice = timeout_seconds(), notice_seconds()
        install()
        if number:
            self.share(Peers(comm, number, near))
            _channels.add(self)

    def share(self, peers: Peers, over: MPI.Intracomm | None = None) -> None:
        """Take the ranks that make calls over this communicator; those of a mesh are told errors `over` one."""
        self._kept = over
        self.peers = peers
        peers.channels[self.number] = self

    def __del__(self) -> None:
        # The caller's communicator held the channel and was freed. A delete function of the keyval could note this
        # too, but mpi4py asks for that communicator's topology first, and MPICH may then read freed memory.
        if self.number and self.broken is None:
            own = self.peers if self.peers is not None and self.peers.comm is self.comm else None
            drop(self.number, self.comm, own)

    def run(
        self, why: cause, collective: str, size: int, start: Start, *arguments: Any, purpose: Purpose = Purpose.PAYLOAD
    ) -> None:
        """Record a collective of `size` bytes from this rank, start it and wait for it."""
        if open_traces():
            record(why, collective, purpose, ranks=self.size, bytes=size)
        request = start(*arguments)  # which may find that there is no memory
        self.position += 1
        self.wait(request, why.operation, purpose, start.__name__, arguments)

    def start(self, why: cause, collective: str, size: int, start: Start, *arguments: Any) -> Pending:
        """Record a collective of `size` bytes from this rank and start it."""
        if open_traces():
            record(why, collective, Purpose.PAYLOAD, ranks=self.size, bytes=size)
        request = start(*arguments)
        self.position += 1
        self.started[self.position] = Left(self.number, self.position, request, start.__name__, arguments, self.comm)
        return Pending(self, why.operation)

    def wait(
        self,
        request: MPI.Request,
        operation: str,
        purpose: Purpose = Purpose.PAYLOAD,
        name: str = "",
        arguments: Sequence[Any] = (),
        position: int = 0,
    ) -> None:
        """Return when `request`, of the collective `name` with these arguments, is complete.

        Raises `CollectiveTimeout`, or the error of a rank that will not come.
        """
        test, give_way = request.Test, os.sched_yield
        try:
            if self._is_waited_on:  # by another thread: other ranks may have the two calls in another order
                self.broken = self.broken or _TWO_THREADS
            self._is_waited_on = True
            for tests in range(_YIELDS):
                if self.broken or test():
                    break
                if tests >= _SPINS:
                    give_way()
                    if tests % _LISTENS == 0:
                        self._look(operation)
            else:
                self._wait_longer(request, operation if purpose is Purpose.PAYLOAD else f"{operation}: {purpose.value}")
            if self.broken:
                raise CollectiveTimeout(f"this communicator is not usable any more: {self.broken}")
        except BaseException as error:
            why = f"{operation} was left waiting by {type(error).__name__}"
            self.abandon(Left(self.number, position or self.position, request, name, arguments, self.comm), why)
            raise
        finally:
            self._is_waited_on = False

    def abandon(self, collective: Left, why: str) -> None:
        """Give up a collective that has not ended, and with it the communicator, unless a block restores it."""
        # MPI may still write to the buffers when the other ranks arrive: they must stay allocated.
        _abandoned.append(collective)
        self.broken = self.broken or why

    def leave(self, position: int, operation: str = "") -> None:
        """Give up the collective that was started at `position`, unless somebody has waited for it."""
        call = self.started.pop(position, None)
        if call is not None:
            self.abandon(call, f"{operation or call.name} was left waiting")

    def left(self) -> list[Left]:
        """Return the collectives that this rank has left, in order; those that it has started, too.

        After an error a traceback may hold these for long.
        """
        for position in [*self.started]:
            self.leave(position)
        return sorted((each for each in _abandoned if each.number == self.number), key=lambda each: each.position)

    def restore(self, position: int) -> None:
        """Note that all ranks have ended what they left, and are at one position."""
        _abandoned[:] = [each for each in _abandoned if each.number != self.number]
        self.position, self.broken = position, None

    def _look(self, operation: str) -> None:
        if self.peers is not None:
            self.peers.look(self, operation)
        else:  # the first use of a communicator
            for peers in open_blocks():
                peers.look_for_blocks()

    def _wait_longer(self, request: MPI.Request, operation: str) -> None:
        from mpi4py import MPI

        start = time.monotonic()
        deadline, said_so = start + self._timeout, False
        while not (self.broken or request.Test()):
            late = time.monotonic() > deadline
            if late or self.comm.Iprobe(MPI.ANY_SOURCE, self._tag):
                self._say_that_it_waits(operation, late)
                self.broken = self._roll_call(operation)
                raise CollectiveTimeout(self.broken)
            self._look(operation)
            if self.peers is not None:
                self.peers.say_who_waits(self, operation, start)
            elif not said_so and time.monotonic() > start + self.notice:
                said_so = True
                where = f"rank {self.rank} of {self.size} has waited {self.notice:g} s in {operation}"
                limit = f"the wait ends after {self._timeout:g} s, PCE_MPI_TIMEOUT"
                say(f"{where}. Every rank has to make this call, with this communicator; {limit}")
            time.sleep(_NAP)

    def _say_that_it_waits(self, operation: str, late: bool) -> None:
        """Write one line to stderr: after a network has failed, the process may die in the roll call."""
        waits = f"has waited {self._timeout:g} s (PCE_MPI_TIMEOUT)" if late else "hears that others gave up, and waits"
        say(f"rank {self.rank} of {self.size} {waits} in {operation}; ranks now tell where they are")

    def _roll_call(self, operation: str) -> str:
        """Tell all other ranks that this one waits in `operation`, listen to them for a second, and say who waits."""
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
        over = self.over
        where = text_by_rank({rank: waiting[rank] for rank in sorted(waiting)}, over)
        return (
            f"waited {self._timeout:g} s (PCE_MPI_TIMEOUT) in {where}; "
            f"silent: {ranks_text(silent, over) if silent else 'no rank, they wait for each other in different calls'}"
        )


class Left(NamedTuple):
    """A collective that this rank has left waiting: the number of its channel, its position there, and its call."""

    number: int
    position: int
    request: MPI.Request
    name: str
    arguments: Sequence[Any]
    comm: MPI.Intracomm


class Pending:
    """A collective that was started; if it is dropped before its end, its communicator is given up."""

    def __init__(self, channel: Channel, operation: str) -> None:
        self._channel, self._operation, self._position = channel, operation, channel.position

    def wait(self) -> None:
        """Return when the collective is complete, or raise `CollectiveTimeout`."""
        call = self._channel.started.pop(self._position, None)
        if call is None:
            raise CollectiveTimeout(f"{self._operation} was given up by a block of attempt() that failed meanwhile")
        self._channel.wait(
            call.request, self._operation, Purpose.PAYLOAD, call.name, call.arguments, position=call.position
        )

    def __del__(self) -> None:
        if self._position in self._channel.started:
            self._channel.leave(self._position, self._operation)


#: requests that nobody waits for any more, with the memory that MPI may still read and write
_abandoned: list[Left] = []
_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def all_channels() -> list[Channel]:
    """Return the channels of this process."""
    return list(_channels)


def has_abandoned() -> bool:
    """Return whether MPI may still be at work for this package, in a collective that was given up."""
    return bool(_abandoned)


def tell(error: BaseException, comms: Iterable[Any], operation: str) -> None:
    """Tell the ranks of some communicators an error that leaves a public call over them on this rank.

    The ranks of a process group of torch cannot be told. One that is no `Exception` has left a call in the middle.
    """
    install()
    channels = []
    for comm in comms:
        if isinstance(comm, TorchGroup) or is_process_group(comm):
            if not isinstance(error, Exception):
                TorchGroup.give_up(comm, f"{operation} was left by {type(error).__name__}")
        elif comm is not None and not isinstance(comm, FakeComm) and is_running() and is_comm(comm):
            channels.append(comm.Get_attr(_channel_key()))
    tell_peers(error, [channel.peers for channel in channels if channel is not None])


@cache
def _channel_key() -> int:
    from mpi4py import MPI

    return MPI.Comm.Create_keyval()


def channel_of(comm: MPI.Intracomm | FakeComm | TorchGroup, operation: str) -> Any:
    """Return the `Channel` on the cached duplicate of `comm`, collective the first time; the others are their own."""
    if isinstance(comm, FakeComm):
        return comm
    if open_ledger() is not None:
        raise RuntimeError(f"{operation}: nothing is sent in a rehearsal, and this communicator has ranks")
    if isinstance(comm, TorchGroup):
        return comm
    check_mpi()
    channel: Any = comm.Get_attr(_channel_key())
    if channel is None:
        channel = open_channel(comm, operation)
    assert isinstance(channel, Channel)
    peers = channel.peers
    if peers is not None and (peers.own or peers.closed is not None):
        peers.meet(operation)
    if channel.broken is not None:  # a new collective would receive messages of the one that timed out
        raise CollectiveTimeout(f"this communicator is not usable any more: {channel.broken}")
    return channel


def open_channel(comm: MPI.Intracomm, operation: str) -> Channel:
    """Return a channel on a new duplicate of `comm`, which keeps it, broken if the other ranks do not come.

    Collective: an Allgather of 24 bytes and the duplication, and what `give_back` sends. The trace shows none of it.
    """
    from mpi4py import MPI

    if comm.size == 1:
        _warn_of_ranks_apart()
    # Before this private communicator exists, the roll call uses the caller's, with the highest tag there is, and only
    # after a timeout, when the program is lost anyway.
    highest: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    waiting = Channel(comm, highest)
    first_use = f"{operation} (its first use of the communicator)"
    try:
        header = np.array([new_number(), garbage_count(), crc32(MPI.Get_processor_name().encode())], np.int64)
        headers = _gathered(waiting, header, [3] * waiting.size, first_use).reshape(-1, 3)
        if headers[:, 1].any():  # before the duplication, as all other communicators may be in use
            give_back(waiting, first_use)
        duplicate, request = comm.Idup()
        waiting.wait(request, first_use, arguments=(duplicate,))
    except MPI.Exception as error:
        raise out_of_communicators(operation, error) from error
    except BaseException as error:
        waiting.broken = waiting.broken or f"{first_use} ended with {type(error).__name__}"
        comm.Set_attr(_channel_key(), waiting)
        raise
    near = np.flatnonzero(headers[:, 2] == header[2]).tolist()
    channel = Channel(duplicate, _ROLL_CALL_TAG, int(headers[0, 0]), near)
    comm.Set_attr(_channel_key(), channel)
    return channel


@cache
def _warn_of_ranks_apart() -> None:
    from mpi4py import MPI

    if apart := why_apart(MPI.COMM_WORLD):
        warnings.warn(apart, RuntimeWarning, stacklevel=3)


def _gathered(
    channel: Channel, numbers: np.ndarray[Any, Any], counts: list[int], operation: str
) -> np.ndarray[Any, Any]:
    received = np.empty(sum(counts), np.int64)
    request = channel.comm.Iallgatherv(numbers, [received, counts])
    channel.wait(request, operation, arguments=(numbers, received, counts))
    return received


# Communicators that this rank does not refer to any more, each with its number, which is the same on all of its ranks.
# Finalizers append to the queue, at any time.
_dropped: deque[tuple[int, MPI.Comm, Peers | None]] = deque()
_garbage: dict[int, tuple[MPI.Comm, Peers | None]] = {}
_taking = Lock()


def new_number() -> int:
    """Return a number that no other communicator has; its first rank's number names it on all of its ranks."""
    return secrets.randbits(62)


def made(make: Callable[[], MPI.Cartcomm], number: int, operation: str) -> MPI.Cartcomm:
    """Return the communicator `number`, which is dropped when nothing refers to it any more."""
    from mpi4py import MPI

    try:
        comm = _kept_type()(make())
    except MPI.Exception as error:
        raise out_of_communicators(operation, error) from error
    # The other object has the same handle.
    comm.finalizer = weakref.finalize(comm, drop, number, MPI.Cartcomm(comm))
    comm.finalizer.atexit = False
    return comm


@cache
def _kept_type() -> Any:
    from mpi4py import MPI

    class MeshComm(MPI.Cartcomm):
        """A communicator of a mesh; once the user has freed it, the mesh does not free it again."""

        finalizer: weakref.finalize[Any, Any] | None = None
        refused: Callable[[], None]

        def Free(self) -> None:
            if self.finalizer is not None:
                self.finalizer.detach()
            super().Free()

    return MeshComm


def drop(number: int, comm: MPI.Comm, peers: Peers | None = None) -> None:
    """Note that this rank does not refer to `comm` any more; calls no MPI, so that a finalizer may call it."""
    _dropped.append((number, comm, peers))


def garbage_count() -> int:
    """Return how many communicators this rank has dropped and not freed."""
    return len(_dropped) + len(_garbage)


def give_back(channel: Channel, operation: str) -> None:
    """Free the communicators that all of their ranks have dropped, if all of these are ranks of `channel`.

    Collective: an Allgather of 8 bytes and an Allgatherv. All ranks free them in one order, after they have received
    what was told over them: MPI may give the messages of a freed communicator to another one.
    """
    # Another thread may do the same over another communicator: each thread takes those that it may free. A communicator
    # is freed if all of its ranks have taken it for this call.
    with _taking:
        while _dropped:
            number, comm, peers = _dropped.popleft()
            _garbage[number] = comm, peers
        taken = dict(_garbage)
        _garbage.clear()
    try:
        told = [(number, peers.sent if peers else 0) for number, (_, peers) in sorted(taken.items())]
        mine = np.array(told, np.int64).reshape(-1)
        counts = _gathered(channel, np.array([mine.size], np.int64), [1] * channel.size, operation).tolist()
        taken_by: Counter[int] = Counter()
        sent_on: Counter[int] = Counter()
        for number, broadcasts in _gathered(channel, mine, counts, operation).reshape(-1, 2).tolist():
            taken_by[number] += 1
            sent_on[number] += broadcasts
        for number, broadcasts in told:
            comm, peers = taken[number]
            if taken_by[number] == comm.size:
                if peers is not None:
                    peers.receive(sent_on[number] - broadcasts)
                taken.pop(number)[0].Free()
    finally:
        with _taking:
            _garbage.update(taken)

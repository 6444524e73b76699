"""Ranks that share their calls, and what they tell each other of errors, point to point.

An error that the ranks of a call have not agreed on revokes the communicators of that call: each rank of these raises
it, in the collective in which it waits or that it begins next, and they are closed. Nothing is sent while nothing is
wrong; a rank that has waited for a millisecond looks for messages.

All ranks of a mesh make the same calls over it. Each rank counts them, so that ranks which raise by themselves in the
same call know that: it revokes nothing. The count also is a part of each agreement.

A block of `Mesh.attempt` ends on all ranks together. If it failed on some, each rank reports how it ended and where its
communicators are; they are restored (`restoring.py`), and all leave the block by one error.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
import json
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar
import weakref

from pce_mpi.comm.errors import CollectiveError, CollectiveTimeout, described, ranks_text, remade
from pce_mpi.comm.library import is_running, mpi, ranks_in
from pce_mpi.comm.waits import current_line, say, timeout_seconds

if TYPE_CHECKING:
    from mpi4py import MPI

# Open MPI sends the messages of Create_group under the tag that it is given: one that nobody listens for.
Error = TypeVar("Error", bound=BaseException)

_TAG = 2
_NAP = 0.0002
# A rank that waits for one that has ended listens so long for others that have.
_LISTENING_SECONDS = 0.2
# Ranks that wait for long listen so long for each other, before one of them says who waits.
_ANSWER_SECONDS = 0.5
# The time in which a rank prints its last words.
_LAST_WORDS_SECONDS = 1.0
# The numbers of calls in a block are so many above those before it, so that calls of two blocks have different ones.
_CALLS_OF_BLOCK = 1 << 20


class Peers:
    """The ranks that share calls: those of a mesh, over all of its communicators, or those of another communicator.

    `number` is that of the last public call over the mesh, `operation` its name while this rank is in it. `channels`
    has the communicators by the names that all ranks know. After a revocation `closed` has the error.
    """

    closed: BaseException | None = None
    operation = ""
    over = "comm"
    number = 0
    is_mesh = False
    restart: Callable[[], object] = int  # is called where the ranks begin anew after an error

    def __init__(self, comm: MPI.Intracomm | Any, name: int = 0, near: Sequence[int] = ()) -> None:
        self.comm, self.name, self.near = comm, name, near
        self.rank, self.size = (comm.rank, comm.size) if comm else (0, 1)
        self.channels: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.blocks: list[int] = []
        self.reports: dict[int, dict[int, Any]] = {}
        self.sent = 0
        self._epoch = self._received = self._closed_in = self._begun = 0
        self.starts: dict[int, int] = {}
        self._closed_at: dict[int, int] = {}  # positions of the ranks that have closed the communicators
        self._has_raised = False
        self._left: set[int] = set()  # the ranks that have left a block for good
        self.own: list[int] = []
        self._errors: dict[int, list[list[Any]]] = {}
        self._waiting: dict[int, list[Any]] = {}
        self._ended: dict[int, dict[int, int]] = {}
        self._early: list[list[Any]] = []
        self._requests: list[tuple[MPI.Request, bytes]] = []
        if self.size > 1:
            _everyone.add(self)
            _let_others_know_of_the_end()

    # Errors.

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks an error that leaves a call on this rank, and that they may not raise themselves."""
        if self.size == 1 or self.closed is not None:
            self._has_raised = True
            return
        # A collective that was left never ends, so that no rank can go on.
        if isinstance(error, CollectiveTimeout) or any(channel.broken for channel in self.channels.values()):
            return self._close(error)
        number = self._place
        if not self.own:
            self._count_error()
        self.own.append(number)
        self._send("error", number, self._positions(), *described(error, self.over, self.rank))
        self._listen()  # so that nothing piles up where no call waits

    @property
    def _place(self) -> int:
        """The number of this call, or of the last collective."""
        return self.number if self.is_mesh else self.channels[self.name].position

    def revoke(self, error: Error) -> Error:
        """Close the communicators, let the other ranks do so, and return the error."""
        self._close(error)
        self._has_raised = True
        return error

    def revoke_block(self, error: BaseException) -> None:
        """Close the communicators as this rank leaves a block without the others, which need not wait for it."""
        self._close(error)
        if self.size > 1:
            self._send("left")

    def _close(self, error: BaseException, number: int | None = None) -> None:
        if self.closed is None and self.size > 1:
            if not self.own:
                self._count_error()
            # Without its traceback, whose frames refer to the communicators.
            names, text = described(error, self.over, self.rank)
            self._words = names, text, vars(error).get("origin")
            self.closed = remade(*self._words)
            self._has_raised = "origin" not in vars(error) or bool(self.own)
            self._closed_in = self._place if number is None else number
            self._send("revoked", self._closed_in, self._positions(), names, text)

    def _count_error(self) -> None:
        """Count an error over a mesh, outside a block, as a call over all other meshes: the program may skip some.

        Ranks that have had it and ranks that have not then differ in their next agreement.
        """
        for peers in all_peers() if self.is_mesh and not self.blocks else ():
            if peers.is_mesh and peers is not self:
                peers.number += 1

    def refusal(self) -> Exception:
        """Return the error of a call over communicators that are closed: at first the error that closed them."""
        if not self._has_raised:  # here, so far
            self._has_raised = True
            return remade(*self._words)
        what, way = ("mesh", "make a new Mesh on every rank") if self.is_mesh else ("communicator", "take comm.Dup()")
        kind = CollectiveTimeout if isinstance(self.closed, CollectiveTimeout) else CollectiveError
        error = f"{type(self.closed).__name__}: {self.closed}"
        steps = ", or make each step in a block `with mesh.attempt():`" * self.is_mesh
        return kind(f"this {what} is closed since an error, and not usable any more: {error}. To go on, {way}{steps}")

    def refuse(self) -> None:
        """Raise at the beginning of a call, unless it comes before that of the error: the others have made it."""
        if self._closed_in <= self.number + 1:
            raise self.refusal()

    def meet(self, operation: str) -> None:
        """Before a collective, wait until all ranks have raised in the calls in which this one has, if in any.

        Otherwise the others may be in a call that this rank has left.
        """
        start = time.monotonic()
        while self.own and self.closed is None:
            self._listen()
            count, others = len(self.own), [self._errors.get(rank, []) for rank in self._others()]
            for number, *_, names, text in (error for errors in others for error in errors[:count]):
                if number not in self.own:
                    self._close(remade(names, text))
            if self.closed is None and all([error[0] for error in errors[:count]] == self.own for errors in others):
                self.own.clear()
                for errors in others:
                    del errors[:count]
                return
            self._look_for_the_end({channel: channel.position + 1 for channel in self.channels.values()}, operation)
            self.look_for_blocks()
            self._wait(operation, start, [rank for rank in self._others() if len(self._errors.get(rank, [])) < count])
        if self.closed is not None and self._closed_in <= self._place + (not self.is_mesh):
            raise self.refusal()

    def look(self, channel: Any, operation: str) -> None:
        """Listen, while this rank waits in a collective, and raise the error of a rank that will not come."""
        self._listen()
        for rank, errors in self._errors.items():
            for number, positions, names, text in errors:
                is_earlier = self.is_mesh and number < self.number
                is_missed = positions.get(channel.number, channel.position) < channel.position
                if (is_earlier or is_missed) and number not in self.own:
                    self._close(self._remade(names, text, rank))
                    raise self.refusal()  # this rank may have raised one of its own
        # In an earlier call than that of the error all have begun this collective, unless this rank has left out calls.
        if self.closed is not None and (
            self._closed_in <= self._place or self._closed_at.get(channel.number, channel.position) < channel.position
        ):
            raise self.refusal()
        for rank, report in ((rank, report) for reports in self.reports.values() for rank, report in reports.items()):
            if report["channels"].get(channel.number, [channel.position])[0] < channel.position:
                self.look_for_blocks()
                ended = f"{ranks_text([rank], self.over)} has ended a block of attempt() that this rank is not in"
                raise self.revoke(CollectiveError(ended))
        for peers in {self, *open_blocks()}:
            peers.look_for_blocks()
            # A rank that has swallowed an error over this mesh may have gone on over another one. (Ranks that have
            # begun this collective may have closed this mesh in a later step.)
            if peers is not self and peers.is_mesh and peers.closed is not None:
                raise peers.refusal()
        self._look_for_the_end({channel: channel.position}, operation)

    # Blocks that all ranks end together.

    def begin(self) -> int:
        """Begin a block; return its number."""
        self.number += _CALLS_OF_BLOCK  # ranks that have counted differently still do
        self._begun += 2
        self.blocks.append(self._begun)
        self.starts[self._begun] = self.number - _CALLS_OF_BLOCK // 2
        open_blocks().append(self)
        return self._begun

    def leave(self, block: int) -> None:
        """Note that this rank is in the block no more."""
        open_blocks().remove(self)
        self.blocks.remove(block)
        self.reports.pop(block, None)
        del self.starts[block]

    def report(self, block: int, report: dict[str, Any]) -> None:
        """Tell the other ranks how a block ended here, in which they may be waiting."""
        self.reports.setdefault(block, {})[self.rank] = report
        sent = {**report, "channels": list(report["channels"].items()), "numbers": list(report["numbers"].items())}
        self._send("block", block, sent)

    def all_reports(self, block: int) -> dict[int, Any]:
        """Wait until all ranks have reported of a block; raise the error of an outer block, which all have to end."""
        start, reports = time.monotonic(), self.reports[block]
        while len(reports) < self.size:
            # The others may not have begun a block that this rank began as the communicators were closed.
            if self.closed is not None and block in self.blocks and self._closed_in < self.starts[block]:
                raise self.refusal()
            missing = [rank for rank in self._others() if rank not in reports]
            if self._left & {*missing} and self.closed is not None:
                raise remade(*self._words)
            if block in self.blocks and any(other < block and other not in self.blocks for other in self.reports):
                raise CollectiveError("ranks end different blocks of attempt()")
            self.look_for_blocks(outer_of=block)
            self._look_for_the_end({}, "attempt", missing)
            self._wait("attempt", start, missing)
            self._listen()
        return reports

    def begin_again(self, number: int) -> None:
        """Forget what was told, where all ranks are at one place of the program; `number` is the highest of a rank."""
        self.number = (number // _CALLS_OF_BLOCK + 1) * _CALLS_OF_BLOCK
        self.closed = None
        self.own.clear()
        self._errors.clear()
        self._waiting.clear()
        self._left.clear()
        self._closed_at.clear()
        self.reports.clear()
        self._epoch += 1
        self.restart()
        early, self._early = self._early, []
        for message in early:
            self._take(*message)

    def outer_has_ended(self, block: int) -> bool:
        """Return whether another rank has ended a block that encloses this one."""
        return any(self.reports.get(outer) for outer in self.blocks[: self.blocks.index(block)])

    @property
    def has_errors(self) -> bool:
        """True if the ranks may know differently of errors."""
        self._listen()
        return self.closed is not None or bool(self.own) or any(self._errors.values())

    def look_for_blocks(self, outer_of: int | None = None) -> None:
        """Listen, and raise the error of a block that has ended on another rank."""
        self._listen()
        for block in self.blocks:
            if block == outer_of:
                return
            for rank, report in self.reports.get(block, {}).items():
                if rank != self.rank and report["error"]:
                    names, text, _ = report["error"]
                    raise self._remade(names, text, rank)

    # The end of programs, and long waits.

    def end(self) -> None:
        """Tell some ranks of the same host that this one ends: over a network MPI warns of messages nobody takes."""
        here, count = self.near.index(self.rank), len(self.near)
        distances = [sign * 2**bit for bit in range((count - 1).bit_length()) for sign in (1, -1)]
        self._send("ends", self._positions(), to={self.near[(here + distance) % count] for distance in distances})

    def _look_for_the_end(
        self, started: dict[Any, int], operation: str, missing: Collection[int] | None = None
    ) -> None:
        """Raise if ranks have ended that this one waits for: in collectives of some channels, or because they miss."""

        def late() -> list[int]:
            return [
                rank
                for rank, positions in self._ended.items()
                if (missing is not None and rank in missing)
                or any(positions.get(channel.number, position) < position for channel, position in started.items())
            ]

        if late():
            deadline = time.monotonic() + _LISTENING_SECONDS
            while time.monotonic() < deadline:
                self._listen()
                time.sleep(_NAP)
            ended = late()
            where = f"{self.operation or operation}" + (f" at {line}" if (line := current_line()) else "")
            raise CollectiveTimeout(
                f"{ranks_text([self.rank], self.over)} waits in {where} for {ranks_text(ended, self.over)}, whose "
                f"program{'s have' if len(ended) > 1 else ' has'} ended. Every rank has to make this call"
            )

    def _wait(self, operation: str, start: float, missing: Sequence[int]) -> None:
        if time.monotonic() > start + timeout_seconds():
            waited = f"waited {timeout_seconds():g} s (PCE_MPI_TIMEOUT) in {operation} after an error"
            raise CollectiveTimeout(f"{waited}; silent: {ranks_text(missing, self.over)}")
        time.sleep(_NAP)

    def say_who_waits(self, channel: Any, operation: str, start: float) -> None:
        """Write a line, if this rank is the lowest of those that have waited in `operation` for long."""
        seconds = time.monotonic() - start
        if seconds < channel.notice or operation in channel.noticed:
            return
        if channel.asked[0] != channel.position:
            channel.asked = channel.position, seconds
            self._send("waits", channel.number, channel.position)
        elif seconds > channel.asked[1] + _ANSWER_SECONDS:
            channel.noticed.add(operation)
            place = [channel.number, channel.position]
            waiting = sorted({self.rank, *(rank for rank, other in self._waiting.items() if other == place)})
            if self.rank == waiting[0]:
                inner = operation.partition(":")[0]
                name = self.operation or inner
                name = name if name == inner else f"{name} ({inner})"
                absent = sorted(set(ranks_in(channel.comm, self.comm)) - set(waiting))
                waits = f"{ranks_text(waiting, self.over)} {'have' if len(waiting) > 1 else 'has'} waited"
                absence = f"{ranks_text(absent, self.over)} {'have' if len(absent) > 1 else 'has'} not come"
                limit = f"the wait ends after {timeout_seconds():g} s, PCE_MPI_TIMEOUT"
                say(f"{waits} {seconds:.0f} s in {name}; {absence}. Every rank has to make this call; {limit}")

    # Messages.

    def _remade(self, names: Sequence[str], text: str, rank: int) -> Exception:
        return remade(names, text, ranks_in(self.comm, mpi().COMM_WORLD)[rank])

    def receive(self, messages: int) -> None:
        """Receive as many messages as the other ranks have sent in all."""
        while self._received < messages:
            self._listen(is_over=True)

    def _others(self) -> Iterator[int]:
        return (rank for rank in range(self.size) if rank != self.rank)

    def _positions(self) -> list[tuple[int, int]]:
        return [(number, channel.position) for number, channel in self.channels.items()]

    def _send(self, what: str, *content: Any, to: Collection[int] | None = None) -> None:
        message = json.dumps([what, self._epoch, *content]).encode()
        self._requests = [(request, kept) for request, kept in self._requests if not request.Test()]
        self.sent += 1
        for rank in self._others():
            if to is None or rank in to:
                self._requests.append((self.comm.Isend([message, mpi().BYTE], rank, _TAG), message))

    def _listen(self, is_over: bool = False) -> None:
        if self.comm is None:
            return
        status = mpi().Status()
        while self.comm.Iprobe(mpi().ANY_SOURCE, _TAG, status):
            message = bytearray(status.Get_count(mpi().BYTE))
            self.comm.Recv([message, mpi().BYTE], status.source, _TAG)
            self._received += 1
            if not is_over:
                self._take(status.source, *json.loads(message))

    def _take(self, rank: int, what: str, epoch: int, *content: Any) -> None:
        if what == "ends":
            self._ended[rank] = dict(content[0])
        elif epoch > self._epoch:
            self._early.append([rank, what, epoch, *content])
        elif epoch == self._epoch:
            if what == "error":
                number, positions, *error = content
                self._errors.setdefault(rank, []).append([number, dict(positions), *error])
            elif what == "revoked":
                number, positions, names, text = content
                for channel, position in positions:
                    self._closed_at[channel] = min(position, self._closed_at.get(channel, position))
                self._close(self._remade(names, text, rank), number)
            elif what == "left":
                self._left.add(rank)
            elif what == "waits":
                self._waiting[rank] = [*content]
            else:
                block, report = content
                report |= {name: dict(report[name]) for name in ("channels", "numbers")}
                self.reports.setdefault(block, {})[rank] = report


_everyone: weakref.WeakSet[Peers] = weakref.WeakSet()
_of_thread = threading.local()


def open_blocks() -> list[Peers]:
    """Return those whose blocks this thread is in."""
    return vars(_of_thread).setdefault("blocks", [])


def all_peers() -> list[Peers]:
    """Return all that have several ranks and are in use."""
    return [peers for peers in _everyone if peers.name in peers.channels]


def tell_peers(error: BaseException, all_of_call: Iterable[Peers | None]) -> None:
    """Tell an error that leaves a public call on this rank, unless it is in another call, or all raise it together."""
    if several := {peers for peers in all_of_call if peers is not None and not peers.operation}:
        agreed = vars(error).pop("agreed", {})  # if it is raised once more, then by this rank alone
        for peers in several:
            if agreed.get(peers, 0) < peers.size and is_running():
                with suppress(Exception):  # the error must not be lost
                    peers.tell(error)


def tell_the_end(error: BaseException) -> None:
    """Tell all ranks an error that ends the program."""
    for peers in all_peers():
        peers.operation = ""
    tell_peers(error, all_peers())


@cache
def _let_others_know_of_the_end() -> None:
    @atexit.register
    def end() -> None:
        if is_running():
            for peers in all_peers():
                with suppress(Exception):
                    peers.end()
            # Once some ranks have ended, a launcher may end one that is about to print the error that nobody catches.
            if any("origin" in vars(peers.closed) for peers in all_peers() if peers.closed is not None):
                time.sleep(_LAST_WORDS_SECONDS)

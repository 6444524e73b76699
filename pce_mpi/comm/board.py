"""Ranks tell each other of errors, point to point and without waiting, and find together again.

A rank that raises leaves the others in a collective that it never joins. So whoever lets an error out of a public
function (`telling`), or ends by one, tells the ranks of each communicator; nothing is sent while nothing is wrong. A
rank that has waited for some milliseconds looks for such messages.

Every rank raises equally often: each counts its errors, and one that waits for a rank with more of them raises the next
one of that rank, with its words. Errors that several ranks raise at once are one. After an error, the ranks come
together before their next collective over a communicator. Each waits there until all have raised as often as itself.
If a collective was left behind, which never ends, they take another communicator. So a loop that catches the errors
of its steps goes on with one step on all ranks, however often and wherever one of them raises.

Ranks that are not in the same pass of a loop would take each other's numbers, so that each doubt is an error, and the
communicator is not used again: ranks that go on at different lines; one that hears of an error at a place that does not
come after that of the error in the code; two that raise errors of their own, one after more calls but earlier in the
code. `Mesh.attempt` leaves no doubt: errors raised and heard in one block of it belong together.

A rank that waits for long, or for one whose program has ended, says so on standard error, once for each operation.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cache
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn
import weakref

from pce_mpi.comm.errors import (
    CollectiveTimeout,
    error_of,
    kind_of,
    named,
    names_ranks,
    ranks_text,
    text_by_rank,
    text_of,
)
from pce_mpi.comm.library import is_running, mpi, out_of_communicators
from pce_mpi.comm.program import Place, is_before, lines_of, place, program

if TYPE_CHECKING:
    from mpi4py import MPI


# Open MPI sends the messages of Create_group under the tag that it is given: one that nobody listens for.
_TAG, _GROUP_TAG = 2, 3
_NAP = 0.0002
# How long ranks that wait listen for each other, before one of them says who waits.
_LISTENING_SECONDS = 0.5
# Longer messages might not be sent without waiting.
_MOST_CHARACTERS = 1000


class Board:
    """All that the ranks of a private communicator have told each other since they last were in one place.

    `position` counts the collectives that this rank has started, and `marks` are the numbers of calls before the last
    two. `errors` counts the errors of this rank since it was in one place with the others, and `past` those of which it
    does not matter where they were. If one rank has left a collective behind, another communicator takes the place of
    `comm`.
    """

    def __init__(self, comm: MPI.Intracomm, near: Sequence[int]) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self._near = near
        self.position = 0
        self.marks = program.count, program.count
        self.errors = self.past = 0
        self.listener: Callable[[], object] = int  # is called where the ranks come together
        self.over = "comm"
        self.has_left = False
        self.why_left: Exception | None = None  # until it is told
        self.thread = program.thread  # the last that has used it
        self._round = 0
        self._raised_in: list[int] = []  # the numbers of calls: the last collective's, and those of the errors
        self._raised: list[list[Any]] = []  # the errors as they were told
        self._heard: dict[tuple[int, str], dict[int, list[Any]]] = {}
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self.broadcasts = self._received = 0
        self._ended: set[int] = set()
        self._asked = (-1, 0.0)
        self._told_of: set[str] = set()
        _boards.add(self)
        _notice_the_end()

    def tell(self, error: BaseException, at: Place) -> None:
        """Tell all other ranks that this one has raised `error`, in a call at a place of the program."""
        if self.size > 1:
            self._raised_in = self._raised_in or [self.marks[not self.has_left]]
            calls = program.count - self._raised_in[-1]
            self._raised_in.append(program.count)
            origin = vars(error).get("origin", [program.block, at])
            text = names_ranks(error), kind_of(error), text_of(error)[:_MOST_CHARACTERS]
            self._raised.append([self.position, *text, calls, program.block, at, origin])
            self._send(f"error {self.errors}", *self._raised[-1])
            self.errors += 1
            self.why_left = None

    def receive(self, messages: int) -> None:
        """Receive as many messages as the other ranks have sent in all."""
        while self._received < messages:
            self._listen()

    def end(self) -> None:
        """Tell some ranks of the same host that this one ends: over a network MPI warns of messages nobody takes."""
        here, count = self._near.index(self.rank), len(self._near)
        distances = [sign * 2**bit for bit in range((count - 1).bit_length()) for sign in (1, -1)]
        self._send("ends", to={self._near[(here + each) % count] for each in distances})

    def leave(self) -> bool:
        """Note that this rank leaves a collective; return False unless an error says so to the others."""
        self.has_left = self.has_left or self.errors > 0
        return self.has_left

    def look(self, operation: str) -> None:
        """Listen, while this rank waits in `operation`, and raise the error of a rank that will not come."""
        self._listen()
        told = self._said(f"error {self.errors}")
        if errors := {rank: said for rank, said in told.items() if said[0] < self.position}:
            self.has_left = True
            raise self._error_of(errors)

    def _error_of(self, errors: dict[int, list[Any]]) -> Exception:
        rank = min(errors)
        _, is_named, kind, text, *_, origin = errors[rank]
        error = named(error_of(kind, text if is_named else text_by_rank({rank: text}, self.over)))
        vars(error)["origin"] = origin
        return error

    def say_who_waits(self, operation: str, start: float) -> None:
        """Write a line, if this rank is the lowest of those that have waited in `operation` for long."""
        now = time.monotonic()
        if operation in self._told_of:
            return
        if self._asked[0] != self.position:
            if self._ended or now > start + notice_seconds():
                self._asked = self.position, now
                self._send("waits", self.position, operation)
        elif now > self._asked[1] + _LISTENING_SECONDS:
            self._told_of.add(operation)
            here = [self.position, operation]
            waiting = {self.rank, *(rank for rank, said in self._said("waits").items() if said == here)}
            if self.rank == min(waiting):
                inner = operation.partition(":")[0]
                where = program.name or inner
                ended = self._ended - waiting
                absent = set(range(self.size)) - waiting - ended
                told = [
                    f"{ranks_text(sorted(ranks), self.over)} {'have' if len(ranks) > 1 else 'has'} {what}"
                    for ranks, what in (
                        (waiting, f"waited {now - start:.0f} s in {where if inner == where else f'{where} ({inner})'}"),
                        (absent, "not come"),
                        (ended, "ended"),
                    )
                    if ranks
                ]
                limit = f"the wait ends after {timeout_seconds():g} s, PCE_MPI_TIMEOUT"
                say(f"{'; '.join(told)}. Every rank has to make this call; {limit}")

    def settle(self, operation: str) -> None:
        """Come together with the other ranks, before this one begins `operation`."""
        here: list[Any] = [program.count - self._raised_in[-2], program.block, place(), self.position, self.has_left]
        arrived = {**self._wait_for(self._send(f"arrives {self.errors}", *here), operation), self.rank: here}
        self._check_passes(arrived)
        have_left = any(left for *_, left in arrived.values())
        if have_left or len({position for *_, position, _ in arrived.values()}) > 1:
            group = self.comm.group
            try:
                self.comm = self.comm.Create_group(group, _GROUP_TAG)  # no collective, as one cannot go on
            except mpi().Exception as error:
                raise CollectiveTimeout(str(out_of_communicators(operation, error))) from error
            group.Free()
            self.position = self.broadcasts = self._received = 0
        self._heard = {key: said for key, said in self._heard.items() if key[0] > self._round}
        self._round += 1
        self._asked = (-1, 0.0)
        self.errors = 0
        self._raised_in, self._raised, self.past = [], [], 0
        self.has_left = False
        self.listener()
        _, block, at, *_ = here
        if any(each[1] != block or (have_left and lines_of(each[2]) != lines_of(at)) for each in arrived.values()):
            self._apart("ranks go on at different lines after an error", [each[2] for each in arrived.values()])

    def _check_passes(self, arrived: dict[int, list[Any]]) -> None:
        """Raise `CollectiveTimeout` unless all have raised each error in the same pass of each loop."""
        raised: dict[int, list[Any]] = {}
        for number, own in enumerate(self._raised):
            if number < self.past:
                continue
            raised = {rank: each[-4:] for rank, each in [(self.rank, own), *self._said(f"error {number}").items()]}
            for calls, block, at, (its_block, origin) in raised.values():
                if block == its_block > 0 or not (at and origin):
                    continue  # one block leaves no doubt, and of an unknown place there is nothing to say
                if lines_of(at) != lines_of(origin) and not is_before(origin, at):
                    self._apart("ranks hear of an error in another pass of a loop than it was raised in", [origin, at])
                for fewer, other_block, other, _ in raised.values():
                    if fewer < calls and is_before(at, other) and not block == other_block > 0:
                        self._apart("ranks have raised errors in different passes of a loop", [other, at])
        for rank, (calls_made, _, here, *_) in arrived.items() if raised else ():
            fewer, _, own_place, _ = raised[rank]
            for calls, block, at, (its_block, origin) in raised.values():
                if not block == its_block > 0 and origin and lines_of(here) == lines_of(at):
                    if fewer < calls_made <= calls:
                        self._apart("a rank has gone on to where others hear of its error", [own_place, at])

    def _apart(self, why: str, places: Sequence[Place]) -> NoReturn:
        steps = list(zip(*map(lines_of, places), strict=False))
        depth = next((depth for depth, each in enumerate(steps) if any(one != each[0] for one in each)), -1)
        lines = " and ".join(dict.fromkeys(f"{at[depth][0]}:{at[depth][2]}" for at in places if at))
        raise CollectiveTimeout(f"{why}: {lines}. Make each step within `with mesh.attempt():`")

    def _wait_for(self, what: str, operation: str) -> dict[int, list[Any]]:
        """Return what all other ranks say, or raise the next error of one."""
        timeout = timeout_seconds()
        start = time.monotonic()
        while True:
            self._listen()
            if errors := self._said(f"error {self.errors}"):
                raise self._error_of(errors)
            if len(said := self._said(what)) == self.size - 1:
                return said
            if time.monotonic() > start + timeout:
                silent = [rank for rank in range(self.size) if rank != self.rank and rank not in said]
                waited = f"waited {timeout:g} s (PCE_MPI_TIMEOUT) in {operation} after an error"
                raise CollectiveTimeout(f"{waited}; silent: {ranks_text(silent, self.over)}")
            self.say_who_waits(operation, start)
            time.sleep(_NAP)

    def _said(self, what: str) -> dict[int, list[Any]]:
        return self._heard.get((self._round, what), {})

    def _send(self, what: str, *more: Any, to: Collection[int] | None = None) -> str:
        message = json.dumps([what, self._round, *more]).encode()
        self._sent = [(request, kept) for request, kept in self._sent if not request.Test()]
        self.broadcasts += 1
        for peer in range(self.size) if to is None else to:
            if peer != self.rank:
                self._sent.append((self.comm.Isend([message, mpi().BYTE], peer, _TAG), message))
        return what

    def _listen(self) -> None:
        status = mpi().Status()
        while self.comm.Iprobe(mpi().ANY_SOURCE, _TAG, status):
            message = bytearray(status.Get_count(mpi().BYTE))
            self.comm.Recv([message, mpi().BYTE], status.source, _TAG)
            what, number, *more = json.loads(message)
            self._received += 1
            if what == "ends":
                self._ended.add(status.source)
            self._heard.setdefault((number, what), {})[status.source] = more


def world_ranks(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks in COMM_WORLD of the ranks of `comm`."""
    group, world = comm.group, mpi().COMM_WORLD.group
    ranks: list[int] = group.Translate_ranks(None, world)
    group.Free()
    world.Free()
    return ranks


_boards: weakref.WeakSet[Board] = weakref.WeakSet()


def _boards_of_thread() -> list[Board]:
    return [board for board in _boards if board.thread == program.thread]


def tell(error: BaseException, at: Place | None = None, *, final: bool = False) -> None:
    """Tell the ranks of all communicators of this thread about its error, also those that raise it as well.

    An error is told once, also if it passes several who tell it. Its place is this call's, unless another one is given,
    an empty one if it is not known. `final` is of one that ends the program: it is told to the ranks of all threads.
    """
    # What all ranks raise together needs no telling.
    if isinstance(error, CollectiveTimeout) or not is_running() or vars(error).get("ranks") == mpi().COMM_WORLD.size:
        return
    is_told = vars(error).get("told_in") == program.count
    vars(error)["told_in"] = program.count
    program.errors += not is_told
    at = place() if at is None else at
    for board in list(_boards):
        if not is_told if board.thread == program.thread else final:
            with suppress(Exception):  # the error that is told must not be lost
                board.tell(error, at)


def tell_once(error: Exception) -> None:
    """Tell an error of the program, unless the function that raised it has told it."""
    if "told_in" not in vars(error):
        tell(error)


def count_errors(errors: int) -> None:
    """Count as many errors for this thread as another rank has told, which are not raised here any more.

    All ranks call it at one place of the program, so that it does not matter where they have heard of them.
    """
    while program.errors < errors:
        program.errors += 1
        for board in _boards_of_thread():
            board.tell(RuntimeError("of another rank"), [])
    for board in _boards_of_thread():
        board.past = board.errors


def timeout_seconds() -> float:
    """Return how long a collective may wait, from `PCE_MPI_TIMEOUT`; `ValueError` if that is no positive number."""
    return _seconds("PCE_MPI_TIMEOUT", "600")


def notice_seconds() -> float:
    """Return how long a collective waits in silence, from `PCE_MPI_NOTICE`; `ValueError` as for the timeout."""
    return _seconds("PCE_MPI_NOTICE", "10")


def _seconds(variable: str, default: str) -> float:
    text = os.environ.get(variable, default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ValueError(f"{variable} must be a positive number of seconds, got {text!r}")
    return seconds


def say(what: str) -> None:
    """Write a line to standard error, which may be closed."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(f"pce_mpi: {what}", file=sys.stderr, flush=True)


@cache
def _notice_the_end() -> None:
    """Let other ranks hear of the end of this one."""

    def end() -> None:
        if is_running():
            for board in list(_boards):
                with suppress(Exception):
                    board.end()

    atexit.register(end)

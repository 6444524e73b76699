"""Ranks tell each other of errors, point to point and without waiting, and find together again.

A rank that raises leaves the others in a collective that it never joins. So whoever lets an error out of a public
function (`telling`), or ends by one, tells the ranks of each communicator; nothing is sent while nothing is wrong. A
rank that has waited for some milliseconds looks for such messages. It raises the error of another rank, with its words,
if that rank raised before it joined the collective in question.

An error that is caught does no harm. Before a rank begins its next collective over a communicator after an error, the
ranks tell each other where they are. If all of them have made the same calls and are at one line of the program, as
where all have caught an error, or one alone has caught one that left nobody waiting, they go on. (A rank that waits
there already gives the other `_GRACE_SECONDS` to come.) Otherwise a collective was left behind that never ends, and
they take another communicator. Ranks that go on at different lines would take each other's numbers: that is an error,
and the communicator is not used again.

A rank that waits for long, or for one whose program has ended, says so on standard error, once for each operation.
"""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cache, wraps
from inspect import isfunction
import json
import os
import sys
from threading import get_ident, local
import time
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast
import weakref
from zlib import crc32

from pce_mpi.comm.errors import CollectiveTimeout, error_of, kind_of, named, names_ranks, text_of
from pce_mpi.comm.library import is_running, mpi
from pce_mpi.comm.rank_texts import ranks_text, text_by_rank

if TYPE_CHECKING:
    from mpi4py import MPI

Function = TypeVar("Function", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TAG = 2
_NAP = 0.0002
# How long a rank that has raised in an earlier call may take to come, after another has found that it waits for it.
_GRACE_SECONDS = 0.5
# What a rank does where it is.
_BEGINS, _WAITS, _HAS_LEFT = range(3)
# How long ranks that wait listen for each other, before one of them says who waits.
_LISTENING_SECONDS = 0.5
# Longer messages might not be sent without waiting.
_MOST_CHARACTERS = 1000
# The time that a launcher has to pass on the text of an uncaught error, before that error ends the job.
_LAST_WORDS_SECONDS = 0.5


class Board:
    """All that the ranks of a private communicator have told each other since they last were in one place.

    `position` counts the collectives that this rank has started, and `marks` are the numbers of calls
    before the last two.
    `is_open` says that this rank has raised since it was in one place with the others. If one of them has left a
    collective behind, another communicator takes the place of `comm`.
    """

    def __init__(self, comm: MPI.Intracomm, near: Sequence[int]) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self._near = near
        self.position = 0
        self.marks = 0, 0
        self.is_open = False
        self.listener: Callable[[], object] = int  # is called where the ranks come together
        self.over = "comm"
        self._has_left = False
        self._heard_of_error = 0.0
        self.thread = get_ident()  # the last that has used it
        self._round = 0
        self._heard: dict[tuple[int, str], dict[int, list[Any]]] = {}
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self.broadcasts = self._received = 0
        self._ended: set[int] = set()
        self._asked = (0, 0.0)
        self._told_of: set[str] = set()
        _boards.add(self)
        _notice_the_end()

    def tell(self, error: BaseException, *, final: bool = False) -> None:
        """Tell all other ranks that this one has raised `error`; `final` if nothing catches it any more."""
        if self.size > 1 and (final or not self.is_open):
            self.is_open = True
            text = text_of(error)[:_MOST_CHARACTERS]
            self._send("error", self.position, self._calls(), final, names_ranks(error), kind_of(error), text)

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
        self._has_left = self._has_left or self.is_open
        return self.is_open

    def look(self, operation: str) -> None:
        """Listen, while this rank waits in `operation`, and raise the error of a rank that will not come."""
        self._listen()
        errors = {rank: said for rank, said in self._said("error").items() if said[0] < self.position}
        if not errors:
            self._heard_of_error = 0.0
            return
        now = time.monotonic()
        self._heard_of_error = self._heard_of_error or now
        arrived = self._said("arrives")
        place = program.calls(*self.marks)
        here = [self.position - 1, place, *_line_of_program()]
        is_patient = now < self._heard_of_error + _GRACE_SECONDS
        is_coming = [
            arrived[rank] == [*here, _BEGINS]
            if rank in arrived
            else is_patient and calls != place and not final  # it has raised in an earlier call
            for rank, (_, calls, final, *_) in errors.items()
        ]
        if not all(is_coming):
            self.is_open = self._has_left = True
        elif errors.keys() - arrived.keys() or self._meet(operation, *here, _WAITS):
            return
        rank = min(errors)
        *_, is_named, kind, text = errors[rank]
        error = error_of(kind, text if is_named else text_by_rank({rank: text}, self.over))
        raise named(error)

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
                where = next(reversed(program.names), inner)
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
        state = _HAS_LEFT if self._has_left else _BEGINS
        self._meet(operation, self.position, self._calls(), *_line_of_program(), state)

    def _meet(self, operation: str, *here: Any) -> bool:
        """Tell the others where this rank is, wait until all have told, and return whether they are in one place."""
        self._send("arrives", *here)
        timeout = timeout_seconds()
        deadline = time.monotonic() + timeout
        while len(arrived := self._said("arrives")) < self.size - 1:
            if time.monotonic() > deadline:
                silent = [rank for rank in range(self.size) if rank != self.rank and rank not in arrived]
                waited = f"waited {timeout:g} s (PCE_MPI_TIMEOUT) in {operation} after an error"
                raise CollectiveTimeout(f"{waited}; silent: {ranks_text(silent, self.over)}")
            time.sleep(_NAP)
            self._listen()
        lines = {rank: each[-2] for rank, each in sorted({**arrived, self.rank: list(here)}.items())}
        places = [*arrived.values(), list(here)]
        states = {each.pop() for each in places}
        is_one_place = _HAS_LEFT not in states and all(each == places[0] for each in places)
        if not is_one_place and states != {_BEGINS}:
            group = self.comm.group
            self.comm = self.comm.Create_group(group, _TAG)  # no collective of a communicator that cannot go on
            group.Free()
            self.position = self.broadcasts = self._received = 0
        self._heard = {key: said for key, said in self._heard.items() if key[0] > self._round}
        self._round += 1
        self._heard_of_error = 0.0
        self.is_open = self._has_left = False
        self.listener()
        if _HAS_LEFT in states and _WAITS not in states and len({each[-2] for each in places}) > 1:
            raise CollectiveTimeout(f"ranks go on at different lines after an error: {text_by_rank(lines, self.over)}")
        return is_one_place

    def _calls(self) -> int:
        return program.calls(self.marks[1], program.count)

    def _said(self, what: str) -> dict[int, list[Any]]:
        return self._heard.get((self._round, what), {})

    def _send(self, what: str, *more: Any, to: Collection[int] | None = None) -> None:
        message = json.dumps([what, self._round, *more]).encode()
        self._sent = [(request, kept) for request, kept in self._sent if not request.Test()]
        self.broadcasts += 1
        for peer in range(self.size) if to is None else to:
            if peer != self.rank:
                self._sent.append((self.comm.Isend([message, mpi().BYTE], peer, _TAG), message))

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


class _Program(local):
    """The place of this thread in the program: the names of the public functions that it has called."""

    def __init__(self) -> None:
        # Whoever notes a call does it in two lines: a function would be one more that each operation enters.
        self.count = 0
        self.names: deque[str] = deque(maxlen=256)

    def calls(self, first: int, last: int) -> int:
        """Return a checksum of the names of the calls from number `first` to `last`."""
        oldest = self.count - len(self.names)
        return crc32("\n".join(list(self.names)[max(0, first - oldest) : max(0, last - oldest)]).encode())


program = _Program()


def _line_of_program() -> tuple[int, str]:
    """Return a checksum of the lines of the program that led to this call, and the last of them."""
    frame: FrameType | None = sys._getframe(1)
    lines: list[str] = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            lines.clear()
        else:
            lines.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
        frame = frame.f_back
    return crc32("\n".join(lines).encode()), lines[0] if lines else ""


def telling(function: Function) -> Function:
    """Make `function`, which users call, tell its errors to the other ranks."""

    name = function.__name__

    @wraps(function)
    def told(*arguments: Any, **options: Any) -> Any:
        program.count += 1
        program.names.append(name)
        try:
            return function(*arguments, **options)
        except Exception as error:
            tell_from_here(error)
            raise

    return cast(Function, told)


def telling_functions(names: dict[str, Any], *wings: str) -> None:
    """Make the public functions of a module tell their errors, of those that are defined in `wings`."""
    for name in names["__all__"]:
        if isfunction(value := names[name]) and value.__module__.startswith(wings):
            names[name] = told = telling(value)
            told.__module__ = names["__name__"]  # where it is found to be pickled


def telling_methods(kind: Kind, but: Collection[str] = ()) -> Kind:
    """Make the methods of the class `kind` that users call, and its operators, tell their errors, but for some."""
    for name, value in list(vars(kind).items()):
        if isfunction(value) and (not name.startswith("_") or name.endswith("__")) and value.__name__ not in but:
            setattr(kind, name, telling(value))
    return kind


def tell_from_here(error: Exception) -> None:
    """Tell the other ranks about an error, unless the function that calls this was called from within itself.

    Such functions are doors: where the package itself goes through one of them, it may catch the error.
    """
    door = sys._getframe(1)
    frame = door.f_back
    while frame is not None:
        if frame.f_code is door.f_code:
            return
        frame = frame.f_back
    tell(error)


def tell(error: BaseException, *, final: bool = False) -> None:
    """Tell the ranks of all communicators of this thread about its error, also those that raise it as well."""
    if isinstance(error, CollectiveTimeout) or not is_running():
        return
    for board in list(_boards):
        if final or board.thread == get_ident():
            with suppress(Exception):  # the error that is told must not be lost
                board.tell(error, final=final)


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
    """Let other ranks hear of the end, and of an error that nobody catches, which is shown before it ends the job."""
    show = sys.excepthook

    def last_words(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        with suppress(Exception):
            tell(error, final=True)
        show(kind, error, traceback)
        if any(board.size > 1 for board in _boards):
            time.sleep(_LAST_WORDS_SECONDS)

    def end() -> None:
        if is_running():
            for board in list(_boards):
                with suppress(Exception):
                    board.end()

    sys.excepthook = last_words
    atexit.register(end)

"""An error that nobody catches ends the program: one rank prints it, with the lines of the user alone.

Ranks that end by errors announce them to each other, over COMM_WORLD, without waiting for each other. Alike are errors
with the same text, those of one type at one line of the program, and one that a rank has raised as another rank told
it. Of errors that are alike one is printed: that of the lowest rank, of those that were not told by another one if
there are any.

A receive of any tag in the program might take a message. So announcements go to higher ranks alone, as a master that
listens to its workers is mostly rank 0. A rank that receives one is about to end as well, and answers.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
import os
import sys
import time
from traceback import TracebackException
from types import TracebackType
from typing import Any, NamedTuple

from pce_mpi.comm.errors import text_by_rank
from pce_mpi.comm.library import is_running, mpi
from pce_mpi.comm.peers import tell_the_end
from pce_mpi.comm.waits import say
from pce_mpi.text import bounded

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_RUNNERS = ("<frozen runpy>", f"{os.sep}runpy.py", f"mpi4py{os.sep}run.py", f"mpi4py{os.sep}__main__.py")
# Longer messages might not be sent without waiting.
_MOST_CHARACTERS = 1000
# The time in which a rank hears of errors like its own; the least, also if no rank can come first, in which it hears
# that a late one has none to print; and the time in which a launcher passes on what is printed.
_LISTENING_SECONDS, _AT_LEAST_SECONDS, _LAST_WORDS_SECONDS = 0.5, 0.05, 0.5
# After the last announcement of an error like its own, a rank that prints nothing lives longer than one that prints.
_SILENT_SECONDS = _LISTENING_SECONDS + 1.5 * _LAST_WORDS_SECONDS
_NAP = 0.002


class _Words(NamedTuple):
    """What a rank says of its error; `origin` is the rank in COMM_WORLD that raised it first, if that has told it."""

    text: str
    place: tuple[Any, ...]
    origin: int | None
    is_printed: bool = False
    is_answer: bool = False

    def has_text_of(self, other: _Words) -> bool:
        return self.text in other.text or other.text in self.text


class _Ranks:
    """The errors of this rank and of those that it has heard."""

    def __init__(self, words: _Words) -> None:
        self._words, self._comm = words, mpi().COMM_WORLD
        self._rank, self._tag = self._comm.rank, self._comm.Get_attr(mpi().TAG_UB) - 1
        self._alike: dict[int, _Words] = {}
        self._heard: set[int] = set()
        self._start = self._last = time.monotonic()
        peers = {*range(self._rank + 1, self._comm.size), self._rank if words.origin is None else words.origin}
        self._sent = [self._comm.isend(tuple(words), peer, self._tag) for peer in peers - {self._rank}]

    def _listen(self, seconds: float = _NAP) -> None:
        end, status, own = time.monotonic() + seconds, mpi().Status(), self._words
        while time.monotonic() < end:
            time.sleep(_NAP)
            while self._comm.iprobe(tag=self._tag, status=status):
                rank = status.source
                words = _Words(*self._comm.recv(source=rank, tag=self._tag))
                self._heard.add(rank)
                if not words.is_answer:
                    self._sent.append(self._comm.isend(tuple(own._replace(is_answer=True)), rank, self._tag))
                is_told = self._rank == words.origin or (own.origin is not None and own.origin in (rank, words.origin))
                if is_told or own.place == words.place or own.has_text_of(words):
                    self._alike[rank] = words
                    self._last = time.monotonic()

    def prints(self) -> bool:
        """Listen until a rank is heard that prints an error like this one, or none can be."""
        own = self._words.origin is not None, self._rank
        while (seconds := time.monotonic() - self._start) < _LISTENING_SECONDS:
            self._listen()
            if any(words.is_printed or (words.origin is not None, rank) < own for rank, words in self._alike.items()):
                return False
            if seconds > _AT_LEAST_SECONDS and not own[0] and self._heard >= {*range(self._rank)}:
                break
        self._words = self._words._replace(is_printed=True)
        return True

    def end(self) -> None:
        """Answer other ranks until a launcher has passed on what this one, or another one, prints."""
        if self._words.is_printed:
            self._listen(_AT_LEAST_SECONDS)
            others = {rank: each for rank, each in sorted(self._alike.items()) if not each.has_text_of(self._words)}
            if texts := {rank: words.text.partition("\n")[0] for rank, words in others.items()}:
                say(f"at the same line: {bounded(text_by_rank(texts), 300)}")
            self._listen(_LAST_WORDS_SECONDS)
        while not self._words.is_printed and time.monotonic() < self._last + _SILENT_SECONDS:
            self._listen()


def _shorten(error: TracebackException) -> None:
    """Leave out frames of this package and of runners, and a cause whose text an error that it raises repeats."""
    for name in ("__cause__", "__context__") if error.stack and error.stack[-1].filename.startswith(_PACKAGE) else ():
        if (other := getattr(error, name)) and _text(other) in _text(error):
            setattr(error, name, None)
    own = [frame for frame in error.stack if not frame.filename.startswith(_PACKAGE)]
    error.stack[:] = [frame for frame in own if not frame.filename.endswith(_RUNNERS)]
    for other in filter(None, (error.__cause__, error.__context__, *(error.exceptions or ()))):
        _shorten(other)


def _text(error: TracebackException) -> str:
    line = "".join(error.format_exception_only()).strip()
    return line.partition(": ")[2] or line


@cache
def install() -> None:
    """Let `sys.excepthook` tell the other ranks of an error that nobody catches, and print it on one rank, in short.

    With `PCE_MPI_TRACEBACK=full` each rank prints all of its own. A hook that a program has set prints as it does.
    """
    show = sys.excepthook

    def last_words(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        with suppress(Exception):
            tell_the_end(error)
        ranks, text, prints = None, "", True
        several = "mpi4py.MPI" in sys.modules and is_running() and mpi().COMM_WORLD.size > 1
        with suppress(Exception):
            short = TracebackException(kind, error, traceback, compact=True)
            outer = next((frame.filename for frame in short.stack if not frame.filename.endswith(_RUNNERS)), "")
            # A command of this package, as a program, is debugged by whoever works on it.
            if os.environ.get("PCE_MPI_TRACEBACK") != "full" and not outer.startswith(_PACKAGE):
                _shorten(short)
                text = "".join(short.format())
                if several:
                    place = kind.__name__, [(frame.filename, frame.lineno) for frame in short.stack[-1:]]
                    only = "".join(short.format_exception_only())[:_MOST_CHARACTERS].strip()
                    origin = vars(error).get("origin")
                    ranks = _Ranks(_Words(only, place, origin if isinstance(origin, int) else None))
                    prints = ranks.prints()
        if prints and (not text or show is not sys.__excepthook__):
            show(kind, error, traceback)
        elif prints and sys.stderr is not None:
            with suppress(OSError, ValueError):
                print(text, end="", file=sys.stderr, flush=True)
        with suppress(Exception):
            if ranks is not None:
                ranks.end()
            elif several:
                time.sleep(_LAST_WORDS_SECONDS)

    sys.excepthook = last_words

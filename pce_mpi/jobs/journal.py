"""The events that the ranks of one job report to the process that started them, in a file for each rank.

They are files because they must be readable when a rank hangs or has died. Each line is one JSON object: the event's
name in `event`, and its fields. The first is `began`: the process runs; `pid`, and the files of the memory that it
shares with other ranks, `shared`. What runs on the ranks can damage their files: a line that is no event is read as the
event `damaged`.
"""

from __future__ import annotations

from collections.abc import Iterator
import faulthandler
import json
import os
from os import O_APPEND, O_CREAT, O_WRONLY, close, getpid
from pathlib import Path
import signal
import sys
from typing import Any

from pce_mpi.jobs.mpiexec import memory_shared_by

_NAME = "rank-{rank}.jsonl"

# As they are at import: what a rank runs may patch the modules that have them, and its events are still written.
_open, _write, _exit, _json = os.open, os.write, os._exit, json.JSONEncoder(default=str).encode


class Journal:
    """Writes the events of one rank, each before `write` returns."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._process = str(_path(folder, rank)), getpid()

    def write(self, event: str, **what: Any) -> None:
        """Append `event` and its fields, as a whole; `OSError` if that cannot be, as on a full disk."""
        if getpid() != self._process:  # the rank has forked, and its child goes on as if it were the rank
            _exit(1)
        line = (_json({"event": event, **what}) + "\n").encode()
        # Opened each time: what the rank runs may close descriptors that are not its own.
        file = _open(self._path, O_WRONLY | O_APPEND | O_CREAT, 0o600)
        try:
            while line:
                line = line[_write(file, line) :]
        finally:
            close(file)


def begin(folder: Path, rank: int) -> Journal:
    """Let this process be a rank of a `Job`: its output, that of C code included, goes to a file, line by line.

    The job asks for the stack with a signal, as a rank inside C code cannot run Python code.
    """
    journal = Journal(folder, rank)
    journal.write("began", pid=os.getpid(), shared=sorted(map(str, memory_shared_by(os.getpid()))))
    file = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a text file
    faulthandler.register(signal.SIGUSR1, file=open(folder / f"stack-{rank}", "w"), all_threads=False)
    return journal


class Follower:
    """Reads the events of all ranks, as they come."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder, self._unread = folder, [0] * ranks

    def news(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield rank and event of each complete new line.

        The file of rank 0 is read last and yielded first: an event that other ranks waited for comes before theirs.
        """
        unread = [self._unread_lines(rank) for rank in reversed(range(len(self._unread)))]
        for rank, lines in enumerate(reversed(unread)):
            for line in lines:
                yield rank, _event(line)

    def _unread_lines(self, rank: int) -> list[bytes]:
        path = _path(self._folder, rank)
        if not path.exists() or path.stat().st_size == self._unread[rank]:
            return []
        with path.open("rb") as file:
            file.seek(self._unread[rank])
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._unread[rank] += len(complete)
        return complete.splitlines()


def beginnings(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the first event of each rank that has begun, whether or not a `Follower` has yielded it."""
    found = {}
    for path in folder.glob(_NAME.format(rank="*")):
        with path.open("rb") as file:
            first = file.readline()
        if first.endswith(b"\n") and isinstance((event := _event(first)).get("pid"), int):
            found[int(path.stem.removeprefix("rank-"))] = event
    return found


def _event(line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        event = None
    return event if isinstance(event, dict) and "event" in event else {"event": "damaged"}


def _path(folder: Path, rank: int) -> Path:
    return folder / _NAME.format(rank=rank)

"""The events that the ranks of one launch report to the process that started them, in a file for each rank.

They are files because they must be readable when a rank hangs or has died. Each line is one JSON object:

============  =====  ==================================================================================================
event         ranks  meaning, and the fields beside it
============  =====  ==================================================================================================
`began`       all    the process runs; `pid`, and the files of the memory that it shares with other ranks, `shared`
`apart`       any    MPI does not see all ranks that were started, and this one ends; `text`
`unusable`    any    the candidate could not be loaded or started; `text`
`ready`       0      the candidate is loaded and started; `offer`, `versions`
`started`     all    a task begins; `task` is its number, `printed` how many bytes this rank had printed by then
`called`      all    the candidate is called, or the backward function that it returned
`returned`    all    ... and has returned
`raised`      all    ... or has raised; `error`, in a line that says where
`outcome`     0      the task has ended; `outcome`
`torn`        0      some ranks raised and others did not, so this launch ends here
`done`        0      all tasks have ended
============  =====  ==================================================================================================

A candidate can damage the files of its ranks: a line that is no such event is read as the event `damaged`.
"""

from __future__ import annotations

from collections.abc import Iterator
import json
import os
from pathlib import Path
from typing import Any

_NAME = "rank-{rank}.jsonl"


class Journal:
    """Writes the events of one rank, each before `write` returns."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._process = _path(folder, rank), os.getpid()

    def write(self, event: str, **what: Any) -> None:
        """Append `event` and its fields."""
        if os.getpid() != self._process:  # the candidate has forked, and its child goes on as if it were the rank
            os._exit(1)
        # Opened each time: a candidate may close descriptors that are not its own.
        with open(self._path, "ab", buffering=0) as file:
            file.write((json.dumps({"event": event, **what}) + "\n").encode())


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
        first, complete, _ = path.read_bytes().partition(b"\n")
        if complete and isinstance((event := _event(first)).get("pid"), int):
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

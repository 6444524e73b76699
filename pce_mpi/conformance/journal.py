"""What the ranks of one launch tell the process that started them: a file of events for each, followed as it grows.

Files and not MPI, as they must still be readable when a rank hangs or has died. Each line is one JSON object:

============  =====  ==================================================================================================
event         ranks  meaning, and what comes with it
============  =====  ==================================================================================================
`began`       all    the process runs; `pid`, and the files of the memory that it shares with other ranks, `shared`
`apart`       any    MPI does not see all ranks that were started, and this one ends; `text`
`unusable`    any    the candidate could not be loaded or started; `text`
`ready`       0      the candidate is loaded and started; `offer`, `versions`
`started`     all    a task begins; `task` is its number, `printed` how many bytes this rank had printed by then
`called`      all    the candidate is called, or the backward function that it returned
`returned`    all    ... and has returned
`raised`      all    ... or has raised; `error`, in a line that says where
`outcome`     0      the task has ended; `outcome`, or null where no small shape shows what a task is to reproduce
`torn`        0      some ranks raised and others did not, so this launch ends here
`done`        0      all tasks have ended
============  =====  ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
import json
import os
from pathlib import Path
from typing import Any

__all__ = ["Follower", "Journal", "beginnings", "ranks_by_pid"]

_NAME = "rank-{rank}.jsonl"


class Journal:
    """The events of one rank, each in its file before `write` returns."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = os.open(_path(folder, rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, event: str, **what: Any) -> None:
        """Append `event` and what belongs to it."""
        os.write(self._file, (json.dumps({"event": event, **what}) + "\n").encode())


class Follower:
    """The events of all ranks, as they come."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder, self._unread = folder, [0] * ranks

    def news(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Rank and event of each complete line that was not seen before.

        What rank 0 wrote before another rank did something that waited for it comes before that: its file is read last
        and told of first.
        """
        unread = [self._unread_lines(rank) for rank in reversed(range(len(self._unread)))]
        for rank, lines in enumerate(reversed(unread)):
            for line in lines:
                yield rank, json.loads(line)

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


def beginnings(folder: Path) -> str:
    """The first event of every rank, as it is written, of ranks that have ended."""
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in folder.glob(_NAME.format(rank="*")))
    return "\n".join(text.partition("\n")[0] for text in texts)


def ranks_by_pid(folder: Path, ranks: int) -> dict[int, int]:
    """The rank of each process that has begun, whether or not a `Follower` has told of it."""
    found = {}
    for rank in range(ranks):
        path = _path(folder, rank)
        first, ended, _ = path.read_bytes().partition(b"\n") if path.exists() else (b"", b"", b"")
        if ended:
            found[json.loads(first)["pid"]] = rank
    return found


def _path(folder: Path, rank: int) -> Path:
    return folder / _NAME.format(rank=rank)

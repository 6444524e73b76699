"""Standard output and standard error of a command, which may be on a full disk or in a pipe that nobody reads."""

from __future__ import annotations

from collections.abc import Callable
import os
import signal
import sys
from typing import Any, TextIO


class Unwritten(SystemExit):
    """Ends a command whose output cannot be written; being no `OSError`, it is not taken for one of the work."""


class Stream:
    """Writes to `stream`; a write that fails raises `Unwritten`, but for lines of progress on a full disk.

    A lost line of progress is worth no report.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._has_results = stream, stream is sys.stdout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text`, and return its length."""
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Write what is in the buffer."""
        self._try(self._stream.flush)

    def _try(self, work: Callable[..., object], *arguments: str) -> None:
        try:
            work(*arguments)
        except OSError as error:
            with open(os.devnull, "w") as devnull:  # for what is left in the buffer, which Python writes at the end
                os.dup2(devnull.fileno(), self._stream.fileno())
            if isinstance(error, BrokenPipeError):
                raise Unwritten(128 + signal.SIGPIPE) from error
            if self._has_results:
                print(f"error: standard output: {error.strerror}", file=sys.stderr)
                raise Unwritten(2) from error

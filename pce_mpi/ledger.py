"""The ledger: the bytes that hollow arrays would take, by what they are for, now and at most.

While a ledger is open, each new hollow array has a `Block`, which its views share, as arrays share memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import finalize

#: the purposes of the bytes that a ledger counts; "tape" is all that the tape holds beside the parameters
PURPOSES = ("parameters", "gradients", "optimizer state", "tape")


class Block:
    """The memory of a hollow array and of its views; `held` counts the nodes of the tape that hold it."""

    __slots__ = ("bytes", "held", "ledger", "purpose")

    def __init__(self, ledger: Ledger, size: int) -> None:
        self.ledger, self.bytes, self.purpose, self.held = ledger, size, "", 0

    def enter(self, purpose: str) -> None:
        """Count this block for `purpose` from now on, until nothing refers to it."""
        self.leave()
        self.purpose = purpose
        self.ledger.add(purpose, self.bytes)

    def leave(self) -> None:
        """Count this block for nothing any more."""
        if self.purpose:
            self.ledger.add(self.purpose, -self.bytes)

    __del__ = leave


class Ledger:
    """The bytes for each of `PURPOSES`: `now`, and the `most` that there ever were."""

    def __init__(self) -> None:
        self.now = dict.fromkeys(PURPOSES, 0)
        self.most = dict(self.now)

    def add(self, purpose: str, size: int) -> None:
        """Count `size` bytes more."""
        self.now[purpose] += size
        self.most[purpose] = max(self.most[purpose], self.now[purpose])

    def hold(self, blocks: Iterable[Block], holder: Any) -> None:
        """Count blocks for the tape, each once, while `holder` lives; parameters are counted as such."""
        taken = [block for block in set(blocks) if block.purpose != "parameters"]
        for block in taken:
            self._held(block, 1)
        finalize(holder, self._release, taken).atexit = False

    def _release(self, blocks: list[Block]) -> None:
        for block in blocks:
            self._held(block, -1)

    def _held(self, block: Block, change: int) -> None:
        before = block.held
        block.held += change
        self.add("tape", block.bytes * ((block.held > 0) - (before > 0)))


_open: ContextVar[Ledger | None] = ContextVar("open_ledger", default=None)
# This runs without entering a Python function, for every operation.
open_ledger = _open.get


@contextmanager
def keeping() -> Iterator[Ledger]:
    """Open a ledger for a block."""
    ledger = Ledger()
    token = _open.set(ledger)
    try:
        yield ledger
    finally:
        _open.reset(token)

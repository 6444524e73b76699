"""Programs without ranks: the communicator that they run over, and the trace of a rehearsal.

The trace says what each part of a program sends, what a rank keeps, and how long sending would take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import math
from typing import Any, NamedTuple, NoReturn

import numpy as np

from pce_mpi.comm.tracing import Event, Purpose, Start, Trace, cause, open_traces, record
from pce_mpi.text import aligned


class Link(NamedTuple):
    """The links of the ranks along a dim: seconds until a small collective ends, and bytes a second from a rank."""

    latency: float
    bandwidth: float

    def seconds(self, event: Event) -> float:
        """Estimate the time of a collective, by the bytes that a rank sends in the well-known algorithms."""
        others = event.ranks - 1
        sent = {
            "all_reduce": 2 * event.bytes * others / event.ranks,
            "reduce_scatter": event.bytes * others / event.ranks,
            "all_gather": event.bytes * others,
            "all_to_all": event.bytes,
        }
        return self.latency + sent[event.collective] / self.bandwidth if others else 0.0


class Rehearsal(Trace):
    """A rehearsal shows what a program would send and keep on a mesh; `rehearse` makes one.

    It is a `Trace` whose events have the bytes of the rank that puts in most. `print` shows a table by phase, cause and
    dim, and the memory of a rank.

    Attributes
    ----------
    mesh : dict of str to int
        The sizes of the dims.
    memory : dict of str to int
        The bytes, at most, of "parameters", "gradients", "optimizer state" and "tape" on the rank that keeps most. The
        tape holds what backward needs beside the parameters. Arrays of the program's own do not count.
    links : dict of str to Link
        The latency and the bandwidth along each dim, if they were given.
    """

    def __init__(
        self, mesh: Mapping[str, int], events: Iterable[Event], memory: Mapping[str, int], links: Mapping[str, Link]
    ) -> None:
        super().__init__()
        self.mesh, self.memory, self.links = dict(mesh), dict(memory), dict(links)
        self.events.extend(events)

    @property
    def seconds(self) -> float | None:
        """The estimated time of all collectives, one after the other; None without links."""
        return sum(map(self._seconds_of, self.events)) if self.links else None

    def _seconds_of(self, event: Event) -> float:
        """Estimate by the slowest link of the dims; a communicator that has another name may be over all of them."""
        links = [link for dim, link in self.links.items() if dim in event.over.split(", ")] or self.links.values()
        return max(link.seconds(event) for link in links)

    def rows(self) -> list[tuple[str | int | float, ...]]:
        """Return the table by phase, cause and dim, with its head: payload first, agreements together."""
        parts: dict[tuple[str, ...], list[Event]] = {}
        for event in sorted(self.events, key=lambda event: event.purpose == Purpose.AGREEMENT):
            cause = "agreement of ranks" if event.purpose == Purpose.AGREEMENT else event.operation
            parts.setdefault((event.phase, cause, event.over, event.collective), []).append(event)
        head = ("phase", "cause", "over", "collective", "calls", "bytes", *["seconds"][: len(self.links)])
        rows: list[tuple[str | int | float, ...]] = [head]
        for part, events in parts.items():
            seconds = [sum(map(self._seconds_of, events))] if self.links else []
            rows.append((*part, len(events), sum(event.bytes for event in events), *seconds))
        return rows

    def __str__(self) -> str:
        sizes = ", ".join(f"{dim}={size}" for dim, size in self.mesh.items())
        sent = [[_text(cell) for cell in row] for row in self.rows()]
        kept = [("kept by a rank, at most", "bytes"), *((what, _text(size)) for what, size in self.memory.items())]
        parts = [f"on {sizes}, each rank at most:", aligned(sent, {4, 5, 6}), aligned(kept, {1})]
        if self.links:
            parts.append(f"estimated seconds of all collectives, one after the other: {self.seconds:.3g}")
        return "\n\n".join(parts)


def _text(cell: str | int | float) -> str:
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.3g}" if isinstance(cell, float) else cell


class FakeComm:
    """The rank at `coordinates` of a grid of ranks that do not exist.

    In an agreement every other rank repeats this rank's message. Arrays are hollow: nothing is received.
    """

    peers = None  # its ranks tell each other of errors in agreements alone

    def __init__(self, sizes: Sequence[int], coordinates: Sequence[int]) -> None:
        self.sizes, self.coordinates = tuple(sizes), tuple(coordinates)
        self.size = math.prod(self.sizes)
        self.rank = self.Get_cart_rank(self.coordinates)
        self.comm = self  # it is its own channel

    def Get_cart_rank(self, coordinates: Sequence[int]) -> int:
        """Return the rank at `coordinates`."""
        return int(np.ravel_multi_index(tuple(coordinates), self.sizes)) if self.sizes else 0

    def Sub(self, remaining: Sequence[bool]) -> FakeComm:
        """Return the communicator of the ranks that differ along the remaining dims alone."""
        sizes, here = (
            [n for n, kept in zip(each, remaining, strict=True) if kept] for each in (self.sizes, self.coordinates)
        )
        return FakeComm(sizes, here)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a communicator without ranks has no {name}: nothing is sent by MPI in a rehearsal")

    def run(
        self, why: cause, collective: str, size: int, start: Start, *arguments: Any, purpose: Purpose = Purpose.PAYLOAD
    ) -> None:
        """Record a collective of `size` bytes from this rank."""
        if open_traces():
            record(why, collective, purpose, ranks=self.size, bytes=size)
        start(*arguments)

    @staticmethod
    def Iallgather(mine: Any, everyones: Any) -> None:
        """Fill in this rank's message for every rank."""
        everyones[...] = mine

    @staticmethod
    def Iallgatherv(mine: Any, everyones: tuple[Any, Sequence[int]]) -> None:
        """Fill in this rank's message for every rank; hollow arrays have no memory for it."""
        received, counts = everyones
        if type(received) is np.ndarray:
            received.reshape(len(counts), -1)[...] = mine.reshape(-1)

    @staticmethod
    def Ialltoallv(*_: Any) -> None:
        """Do nothing."""

    Ireduce_scatter = Ialltoallv

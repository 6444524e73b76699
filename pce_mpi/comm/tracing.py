"""The trace: every collective, with its operation and its reason.

Every collective appends one event. Its cause and its phase are those of the enclosing `cause` and `phase` blocks.
Nothing is kept unless a `trace()` is open, so without one a collective only reads an empty tuple. The trace does not
show how private communicators are made and freed.

A trace may list fingerprints of results as well, and functions may listen to the results themselves. Who makes results
asks `listeners` and gives them to `announce_result` of `fingerprint.py`; this file knows no arrays.

The picture of a trace: one bar for each collective, in order; its height is the bytes that this rank put in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from html import escape
from itertools import groupby
import json
from typing import TYPE_CHECKING, Any, Self

from pce_mpi.svg import new_figure, svg_or_none
from pce_mpi.text import aligned
from pce_mpi.validation import flag

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Purpose(StrEnum):
    """The content of a collective: the caller's numbers, or the ranks' agreement on the call itself."""

    PAYLOAD = "payload"
    AGREEMENT = "agreement"


@dataclass(frozen=True)
class Event:
    """One collective on one rank.

    This rank put in `bytes` bytes, and `ranks` ranks took part. `before` and `after` are the placements of the array
    before and after the collective, as text, or "".
    """

    phase: str
    operation: str
    collective: str
    purpose: Purpose
    over: str
    ranks: int
    bytes: int
    before: str = field(default="", kw_only=True)
    after: str = field(default="", kw_only=True)
    reason: str


@dataclass(frozen=True)
class Result:
    """The fingerprint of the global array that an operation returned, or of a gradient that reached a made array.

    No field depends on the mesh. `str` shows the first 16 of the 64 digits.
    """

    phase: str
    operation: str
    dtype: str
    shape: tuple[int, ...]
    fingerprint: str
    scope: str

    def __str__(self) -> str:
        line = f"{self.phase:8} {self.operation} {self.dtype} {self.shape} {self.fingerprint[:16]} {self.scope}"
        return line.rstrip()


class Trace:
    """The collectives of one rank, in order; `trace` makes one.

    `print` shows them as a table, with equal events on one line. `events` is a list of them, each with the fields
    `phase`, `operation`, `collective`, `purpose`, `over`, `ranks`, `bytes`, `before`, `after` and `reason`.

    `results` is a list of the results of operations, if the trace takes fingerprints. Each has the fields `phase`,
    `operation` ("gradient" for one that reached a made array), `dtype`, `shape`, `fingerprint` and `scope`, and prints
    as a line.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.results: list[Result] = []

    def select(
        self,
        collective: str | None = None,
        *,
        operation: str | None = None,
        phase: str | None = None,
        over: str | None = None,
        purpose: Purpose | None = Purpose.PAYLOAD,
    ) -> list[Event]:
        """Return the events that match every argument.

        Parameters
        ----------
        collective : str, optional
            "all_reduce", "all_gather", "all_to_all" or "reduce_scatter".
        operation : str, optional
            The operation that sent, such as "matmul".
        phase : str, optional
            "forward", "backward" or "step".
        over : str, optional
            The name of the communicator: "comm", "batch_comm", or the dims of a mesh such as "data, model".
        purpose : Purpose, optional
            "payload" unless given; "agreement"; None for both.

        Returns
        -------
        list of Event
            The events, in order.
        """
        wanted = {"collective": collective, "operation": operation, "phase": phase, "over": over, "purpose": purpose}
        return [
            event
            for event in self.events
            if all(value is None or getattr(event, name) == value for name, value in wanted.items())
        ]

    def count(self, collective: str | None = None, **where: Any) -> int:
        """Return the number of collectives that match; see `pce_mpi.Trace.select`."""
        return len(self.select(collective, **where))

    def bytes(self, collective: str | None = None, **where: Any) -> int:
        """Return the bytes that this rank put into the collectives that match; see `pce_mpi.Trace.select`."""
        events = self.select(collective, **where)
        return sum(event.bytes for event in events)

    def to_json(self) -> str:
        """Return the events as a JSON list of objects."""
        return json.dumps([asdict(event) for event in self.events], indent=1)

    def plot(self) -> Figure:
        """Draw a bar for each collective, in order: its height is the bytes that this rank put in.

        Neighbours are named after their operation; if names have no room, those of most bytes are there. The title
        counts payload, as `count` does, and agreements apart.

        Returns
        -------
        matplotlib.figure.Figure
            A new figure; `figure.savefig("trace.png")` writes it to a file.

        Raises
        ------
        ImportError
            If matplotlib is not installed.

        Notes
        -----
        Communicates nothing.
        """
        figure = new_figure(*size_of_timeline(self.events))
        draw_timeline(figure, self.events)
        return figure

    def _repr_html_(self) -> str | None:
        size = size_of_timeline(self.events)
        picture = svg_or_none(lambda figure: draw_timeline(figure, self.events), *size, name="trace")
        return picture and f"{picture}<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        grouped: dict[Event, int] = {}
        for event in self.events:
            grouped[event] = grouped.get(event, 0) + 1
        names = [column.name for column in fields(Event)]
        names.insert(names.index("bytes"), "calls")
        if not any(event.before or event.after for event in grouped):
            names = [name for name in names if name not in ("before", "after")]
        rows = [names]
        for event, calls in grouped.items():
            values = asdict(event) | {"calls": calls, "bytes": calls * event.bytes}
            rows.append([str(values[name]) for name in names])
        return aligned(rows)


Listener = Callable[[str, Any], object]
Start = Callable[..., Any]  # of a communicator, which starts a collective
_open: ContextVar[tuple[Trace, ...]] = ContextVar("open_traces", default=())
# Traces, which take the fingerprint of each result, and functions, which take its operation and the array.
_listeners: ContextVar[tuple[Trace | Listener, ...]] = ContextVar("listeners", default=())
_phase: ContextVar[str] = ContextVar("phase", default="forward")
_scope: ContextVar[str] = ContextVar("scope", default="")


@contextmanager
def trace(*, fingerprints: bool = False) -> Iterator[Trace]:
    """Record every collective of this rank while the block runs.

    Traces nest: an inner one does not hide events from an outer one.

    Parameters
    ----------
    fingerprints : bool, optional
        Also list the fingerprint of every operation's result, forward and backward, and of each gradient that reaches a
        made array, in `results`. The list is the same on any mesh on which the results have the same bits.

    Yields
    ------
    Trace
        The events so far.

    Notes
    -----
    Communicates nothing without `fingerprints`. With them every operation on distributed arrays is collective over its
    mesh, as `fingerprint` is: every rank opens such a trace, or none. No trace shows the collectives of fingerprints.
    Replicas that differ raise `ValueError` on every rank; if only some ranks take fingerprints, every rank raises
    `CollectiveError`. `layer_norm` and `rms_norm` over a sharded axis are listed as the operations that compute them
    there.

    Examples
    --------
    >>> with trace() as events:
    ...     pass
    >>> events.count()
    0
    """
    fingerprints, opened = flag(fingerprints, "fingerprints"), Trace()
    token = _open.set((*_open.get(), opened))
    try:
        with listening(opened) if fingerprints else nullcontext():
            yield opened
    finally:
        _open.reset(token)


@contextmanager
def listening(listener: Trace | Listener) -> Iterator[None]:
    """Give every result of the block to `listener`: of operations, and "gradient" for one that reaches a made array."""
    token = _listeners.set((*_listeners.get(), listener))
    try:
        yield
    finally:
        _listeners.reset(token)


@contextmanager
def untraced() -> Iterator[None]:
    """Hide the collectives of the block from every trace."""
    token = _open.set(())
    try:
        yield
    finally:
        _open.reset(token)


@contextmanager
def named_scope(name: str) -> Iterator[None]:
    """Name a part of the program, such as a layer, in the results that a trace lists.

    Parameters
    ----------
    name : str
        The name. Scopes nest: "layer 3" in "encoder" is "encoder/layer 3".

    Notes
    -----
    Communicates nothing. Results of the backward pass have the scope of their operation in the forward pass.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> x = pce.distribute(np.ones((2, 3)), pce.Mesh(MPI.COMM_SELF, data=1))
    >>> with pce.trace(fingerprints=True) as trace, pce.named_scope("layer 3"):
    ...     y = x * 2
    >>> print(trace.results[0])
    forward  multiply float64 (2, 3) a75aefaaba5d1a29 layer 3
    """
    outer = _scope.get()
    _scope.set(f"{outer}/{name}" if outer else name)
    try:
        yield
    finally:
        _scope.set(outer)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Give the events of the block the phase `name`, "backward" or "step"; outside such blocks it is "forward".

    The backward pass sets the scope of each node; after the block, the scope is what it was before.
    """
    token, scope = _phase.set(name), _scope.get()
    try:
        yield
    finally:
        _phase.reset(token)
        _scope.set(scope)


class cause:
    """Give the collectives of the block their operation, the name of their communicator, and the reason.

    `over` is the name of the communicator in messages and in the trace. `before` and `after` are the placements of the
    array before and after a collective. A collective needs an enclosing cause.
    """

    __slots__ = ("_token", "after", "before", "operation", "over", "reason")

    def __init__(self, operation: str, over: str = "comm", reason: str = "", before: str = "", after: str = "") -> None:
        self.operation = operation
        self.over = over
        self.reason = reason
        self.before = before
        self.after = after

    def __enter__(self) -> Self:
        self._token = _cause.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _cause.reset(self._token)


_cause: ContextVar[cause] = ContextVar("cause")
# These run without entering a Python function, in every collective.
current_cause = _cause.get
open_traces = _open.get
# These two run so in every operation.
listeners = _listeners.get
current_phase, current_scope, set_scope = _phase.get, _scope.get, _scope.set


def record(why: cause, collective: str, purpose: Purpose, *, ranks: int, bytes: int) -> None:
    """Append one event to every open trace."""
    where = _phase.get(), why.operation, collective, purpose, why.over
    event = Event(*where, ranks, bytes, why.reason, before=why.before, after=why.after)
    for opened in open_traces():
        opened.events.append(event)


def record_result(operation: str, dtype: str, shape: tuple[int, ...], fingerprint: str) -> None:
    """Append one result to every open trace that takes fingerprints."""
    result = Result(_phase.get(), operation, dtype, shape, fingerprint, _scope.get())
    for each in listeners():
        if isinstance(each, Trace):
            each.results.append(result)


if TYPE_CHECKING:
    from matplotlib.figure import Figure

# In inches: the picture without the names of operations, and a letter of those.
_WIDTH, _HEIGHT, _LETTER = 8.0, 2.8, 0.075
# With more names in a row than these, they would overlap.
_NAMED = 40
# More marks between operations than these are a band, and take seconds to draw.
_TICKS = 200
_COLORS = {"all_reduce": "C0", "all_gather": "C1", "reduce_scatter": "C2", "all_to_all": "C3"}
_GREY = "#9a9a9a"
# The darkness of the ground behind the bars of a phase.
_SHADES = {"backward": 0.15, "step": 0.35}


def size_of_timeline(events: Sequence[Any]) -> tuple[float, float]:
    """Return the width and height of the picture of a trace, in inches."""
    return _WIDTH, _HEIGHT + _LETTER * max((len(name) for name in operations(events).values()), default=0)


def operations(events: Sequence[Any]) -> dict[float, str]:
    """Return names of operations by the middle of their bars: those of most bytes, where not all have room."""
    found: dict[float, str] = {}
    runs = _runs(events, "phase", "operation")
    for start, run in sorted(runs, key=lambda each: -max(event.bytes for event in each[1])):
        middle = start + (len(run) - 1) / 2
        if all(abs(middle - other) >= len(events) / _NAMED for other in found):
            found[middle] = run[0].operation
    return dict(sorted(found.items()))


def _runs(events: Sequence[Any], *names: str) -> Iterator[tuple[int, list[Any]]]:
    """Yield neighbours that are equal in the fields `names`, and the place of the first of them."""
    start = 0
    for _, members in groupby(events, key=lambda event: [getattr(event, name) for name in names]):
        run = list(members)
        yield start, run
        start += len(run)


def draw_timeline(figure: Figure, events: Sequence[Any]) -> None:
    """Draw the events of a trace; agreements, which carry none of the caller's numbers, are grey."""
    from matplotlib.ticker import EngFormatter

    axes = figure.subplots()
    kinds = {event: "agreement" if event.purpose == "agreement" else event.collective for event in events}
    for kind in dict.fromkeys(kinds.values()):
        places = [index for index, event in enumerate(events) if kinds[event] == kind]
        heights = [events[index].bytes for index in places]
        color = _COLORS.get(kind, _GREY)
        axes.bar(places, heights, width=1.0, color=color, label=kind, edgecolor="white", linewidth=0.3)
    seen = set()
    for start, run in _runs(events, "phase"):
        phase, ends = run[0].phase, (start - 0.5, start + len(run) - 0.5)
        shade = _GREY, _SHADES.get(phase, 0.0)
        label = "_" * (phase in seen) + phase  # a legend leaves out what begins so
        axes.axvspan(*ends, facecolor=shade, edgecolor=_GREY, linewidth=0.5, zorder=0, label=label)
        seen.add(phase)
    named, highest = operations(events), max((event.bytes for event in events), default=0)
    axes.set_xticks([*named], [*named.values()], rotation="vertical", fontsize="small")
    axes.tick_params(axis="x", length=0)
    starts = [start - 0.5 for start, _ in _runs(events, "phase", "operation")]
    axes.set_xticks(starts if len(starts) <= _TICKS else [], minor=True)
    axes.set(xlim=(-0.6, max(len(events), 8) - 0.4), xlabel="collectives, in order", ylabel="bytes of this rank")
    axes.set_yscale("symlog", linthresh=10)
    axes.set_yticks([0, *(10**digits for digits in range(1, len(str(highest)) + 1))])
    axes.set_ylim(0, 3 * max(highest, 10))
    axes.yaxis.set_major_formatter(EngFormatter("B"))
    payload = [event.bytes for event in events if event.purpose != "agreement"]
    title = f"{len(payload)} collective{'s' * (len(payload) != 1)}, {sum(payload):,} bytes of payload"
    if agreements := len(events) - len(payload):
        title += f"; {agreements} agreement{'s' * (agreements != 1)} of ranks"
    figure.suptitle(title, fontsize="medium")
    if events:
        figure.legend(loc="outside right upper", frameon=False)

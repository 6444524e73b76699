"""The trace: what was sent, by which operation, and why.

Every collective appends one event. Its cause and its phase are those of the enclosing `cause` and `phase` blocks.
Nothing is kept unless a `trace()` is open, so the cost without one is a look at an empty tuple. The trace does not show
how private communicators are made and freed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from html import escape
import json
from typing import TYPE_CHECKING, Any, Self

from pce_mpi.comm import timeline
from pce_mpi.pictures import new_figure, svg_or_none

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Purpose(StrEnum):
    """The content of a collective: the caller's numbers, or the ranks' agreement on the call itself."""

    PAYLOAD = "payload"
    AGREEMENT = "agreement"


@dataclass(frozen=True)
class Event:
    """One collective, as one rank saw it.

    This rank put in `bytes`, and `ranks` took part. `before` and `after` are the placements of the array that was
    moved, as text, or "".
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


class Trace:
    """The collectives of one rank, in order; `trace` makes one.

    `print` shows them as a table, with equal events on one line. `events` is a list of them, each with the fields
    `phase`, `operation`, `collective`, `purpose`, `over`, `ranks`, `bytes`, `before`, `after` and `reason`.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

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
            "all_reduce", "all_gather", "all_to_all", "reduce_scatter" or "broadcast".
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
        wanted = {
            "collective": collective,
            "operation": operation,
            "phase": phase,
            "over": over,
            "purpose": purpose,
        }
        return [
            event
            for event in self.events
            if all(value is None or getattr(event, name) == value for name, value in wanted.items())
        ]

    def count(self, collective: str | None = None, **where: Any) -> int:
        """Return the number of collectives that match.

        Parameters
        ----------
        collective : str, optional
            As for `select`.
        **where
            The other arguments of `select`.

        Returns
        -------
        int
            The number of events.
        """
        return len(self.select(collective, **where))

    def bytes(self, collective: str | None = None, **where: Any) -> int:
        """Return the number of bytes that this rank put into the collectives that match.

        Parameters
        ----------
        collective : str, optional
            As for `select`.
        **where
            The other arguments of `select`.

        Returns
        -------
        int
            The sum over the events.
        """
        events = self.select(collective, **where)
        return sum(event.bytes for event in events)

    def to_json(self) -> str:
        """Return the events as a JSON list of objects."""
        return json.dumps([asdict(event) for event in self.events], indent=1)

    def plot(self) -> Figure:
        """Draw a bar for each collective, in order: its height is the bytes that this rank put in.

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
        figure = new_figure(*timeline.SIZE)
        timeline.draw_timeline(figure, self.events)
        return figure

    def _repr_html_(self) -> str | None:
        picture = svg_or_none(lambda figure: timeline.draw_timeline(figure, self.events), *timeline.SIZE, name="trace")
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
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )


_open: ContextVar[tuple[Trace, ...]] = ContextVar("open_traces", default=())
_phase: ContextVar[str] = ContextVar("phase", default="forward")


@contextmanager
def trace() -> Iterator[Trace]:
    """Record every collective of this rank while the block runs.

    Traces nest: an inner one does not hide events from an outer one.

    Yields
    ------
    Trace
        The events so far.

    Notes
    -----
    Communicates nothing.

    Examples
    --------
    >>> with trace() as events:
    ...     pass
    >>> events.count()
    0
    """
    opened = Trace()
    token = _open.set((*_open.get(), opened))
    try:
        yield opened
    finally:
        _open.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Let the events of the block belong to the phase `name`: "backward" or "step"; outside it is "forward"."""
    token = _phase.set(name)
    try:
        yield
    finally:
        _phase.reset(token)


class cause:
    """Let the collectives of the block say which operation sends, over what, and why.

    `over` is the name that messages and the trace have for the communicator. `before` and `after` are the placements of
    the array that is moved. A collective needs an enclosing cause.
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


def record(why: cause, collective: str, purpose: Purpose, *, ranks: int, bytes: int) -> None:
    """Append one event to every open trace."""
    event = Event(
        _phase.get(),
        why.operation,
        collective,
        purpose,
        why.over,
        ranks,
        bytes,
        why.reason,
        before=why.before,
        after=why.after,
    )
    for opened in open_traces():
        opened.events.append(event)

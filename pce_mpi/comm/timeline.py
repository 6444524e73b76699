"""The picture of a trace: one bar for each collective, in order; its height is the bytes that this rank put in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# In inches: the picture without the names of operations, and a letter of those.
_WIDTH, _HEIGHT, _LETTER = 8.0, 2.8, 0.075
# With more names in a row than these, they would overlap.
_NAMED = 40
# More marks between operations than these are a band, and take seconds to draw.
_TICKS = 200
_COLORS = {
    "all_reduce": "C0",
    "all_gather": "C1",
    "reduce_scatter": "C2",
    "all_to_all": "C3",
}
_GREY = "#9a9a9a"
# The darkness of the ground behind the bars of a phase.
_SHADES = {"backward": 0.15, "step": 0.35}


def size(events: Sequence[Any]) -> tuple[float, float]:
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

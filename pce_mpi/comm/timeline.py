"""The picture of a trace: one bar for each collective, in order; its height is the bytes that this rank put in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = 8.0, 3.2  # inches
_COLORS = {
    "all_reduce": "C0",
    "all_gather": "C1",
    "reduce_scatter": "C2",
    "all_to_all": "C3",
}


def draw_timeline(figure: Figure, events: Sequence[Any]) -> None:
    """Draw the events of a trace; agreements, which carry none of the caller's numbers, are grey."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes = figure.subplots()
    kinds = {event: "agreement" if event.purpose == "agreement" else event.collective for event in events}
    for kind in dict.fromkeys(kinds.values()):
        places = [index for index, event in enumerate(events) if kinds[event] == kind]
        heights = [events[index].bytes for index in places]
        color = _COLORS.get(kind, "#9a9a9a")
        axes.bar(places, heights, width=1.0, color=color, label=kind, edgecolor="white", linewidth=0.3)
    start = 0
    for phase, members in groupby(events, key=lambda event: event.phase):
        stop = start + len(list(members))
        if start:
            axes.axvline(start - 0.5, color="#9a9a9a", linestyle=(0, (4, 2)), linewidth=1)
        axes.text((start + stop - 1) / 2, 1.0, phase, transform=axes.get_xaxis_transform(), ha="center", va="bottom")
        start = stop
    axes.set(xlabel="collectives, in order", ylabel="bytes of this rank", xlim=(-0.6, max(len(events), 1) - 0.4))
    axes.set_yscale("symlog", linthresh=8)
    axes.yaxis.set_major_formatter(EngFormatter("B"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    total = sum(event.bytes for event in events if event.purpose != "agreement")
    figure.suptitle(
        f"{len(events)} collective{'s' * (len(events) != 1)}, {total:,} bytes of payload", fontsize="medium"
    )
    if events:
        figure.legend(loc="outside right upper", frameon=False)

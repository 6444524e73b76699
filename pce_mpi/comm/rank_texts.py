"""Ranks in messages and in the trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def text_by_rank(values: Mapping[int, str], prefix: str = "", between: str = ", ") -> str:
    """Write `values` by rank, equal values together: 'a (ranks 0, 2), b (rank 1)'; `prefix` stands before 'rank'."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return between.join(f"{value} ({prefix}{ranks_text(who)})" for value, who in ranks.items())


def prefix_of(over: str) -> str:
    """Return what stands before the 'rank' of the communicator that messages call `over`: nothing for "comm"."""
    return "" if over == "comm" else f"{over} "


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

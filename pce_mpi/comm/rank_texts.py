"""Ranks in messages and in the trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def text_by_rank(values: Mapping[int, str], over: str = "comm", between: str = ", ") -> str:
    """Return `values` by rank of the communicator `over` as text, equal ones together: 'a (ranks 0, 2), b (rank 1)'."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return between.join(f"{value} ({ranks_text(who, over)})" for value, who in ranks.items())


def ranks_text(ranks: Sequence[int], over: str = "comm") -> str:
    """Name `ranks`: 'ranks 0, 2', 'rank 1 of batch_comm', or 'rank 1 along data' of the ranks along dims of a mesh."""
    where = {"comm": "", "batch_comm": " of batch_comm"}.get(over, f" along {over}")
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}{where}"

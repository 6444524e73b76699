"""Ranks in messages and in the trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence


class RanksAlong(str):
    """The dims of a mesh as the name of a communicator, with the number in COMM_WORLD of each of its ranks."""

    __slots__ = ("world_rank",)

    def __new__(cls, dims: str, world_rank: Callable[[int], int]) -> RanksAlong:
        """Make the name of the communicator along `dims`."""
        over = super().__new__(cls, dims)
        over.world_rank = world_rank
        return over

    world_rank: Callable[[int], int]

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """A copy is the text alone."""
        return str, (str(self),)


def text_by_rank(values: Mapping[int, str], over: str = "comm", between: str = ", ") -> str:
    """Return `values` by rank of the communicator `over` as text, equal ones together: 'a (ranks 0, 2), b (rank 1)'."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return between.join(f"{value} ({ranks_text(who, over)})" for value, who in ranks.items())


def ranks_text(ranks: Sequence[int], over: str = "comm") -> str:
    """Name `ranks` of `over`: 'ranks 0, 2', 'rank 1 of batch_comm', or as ranks of COMM_WORLD 'rank 3 along data'."""
    where = {"comm": "", "batch_comm": " of batch_comm"}.get(over, f" along {over}")
    names: Iterable[int] = map(over.world_rank, ranks) if isinstance(over, RanksAlong) else ranks
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, names))}{where}"

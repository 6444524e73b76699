"""A communicator without other ranks: a program that runs over it only notes what it sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import math
from typing import Any, NoReturn

import numpy as np

from pce_mpi.comm.tracing import Purpose, cause, open_traces, record


class NoRanks:
    """The rank at `coordinates` of a grid of ranks that do not exist.

    In an agreement every other rank repeats this rank's message. Arrays are hollow: nothing is received.
    """

    def __init__(self, sizes: Sequence[int], coordinates: Sequence[int]) -> None:
        self.sizes, self.coordinates = tuple(sizes), tuple(coordinates)
        self.size = math.prod(self.sizes)
        self.rank = self.Get_cart_rank(self.coordinates)
        self.comm = self  # it is its own channel

    def Get_cart_rank(self, coordinates: Sequence[int]) -> int:
        """Return the rank at `coordinates`."""
        return int(np.ravel_multi_index(tuple(coordinates), self.sizes)) if self.sizes else 0

    def Sub(self, remaining: Sequence[bool]) -> NoRanks:
        """Return the communicator of the ranks that differ along the remaining dims alone."""
        sizes, here = (
            [n for n, kept in zip(each, remaining, strict=True) if kept] for each in (self.sizes, self.coordinates)
        )
        return NoRanks(sizes, here)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a communicator without ranks has no {name}: nothing is sent by MPI in a rehearsal")

    def run(
        self,
        why: cause,
        collective: str,
        size: int,
        start: Callable[..., None],
        *arguments: Any,
        purpose: Purpose = Purpose.PAYLOAD,
        waiting_in: str = "",
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

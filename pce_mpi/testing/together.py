"""Ranks that assert together: one that has a failure makes all of them raise it, and none is left waiting."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
import pickle
from typing import Any, NoReturn

import numpy as np

from pce_mpi.arrays import to_host
from pce_mpi.comm.agreement import agree, all_gather_text
from pce_mpi.comm.errors import agreed, named, ranks_text
from pce_mpi.comm.library import comm_text, is_comm
from pce_mpi.comm.tracing import cause, untraced
from pce_mpi.distributed.array import DistArray, redistribute

Array = np.ndarray[Any, Any]

# pytest leaves the frames of this file out of the text of a failure.
__tracebackhide__ = True
Place = tuple[slice, ...]

# The number of elements that a failure shows, and of failures of many ranks.
_MOST_SHOWN, _MOST_FAILURES = 3, 4


@dataclass(frozen=True)
class Together:
    """The ranks that make an assertion; this one alone if `comm` is None."""

    operation: str
    comm: Any
    over: str = "comm"

    @staticmethod
    def of(operation: str, comm: Any, *values: Any) -> Together:
        """Return the ranks of `comm`, or those of the largest mesh of the distributed arrays among `values`."""
        meshes = [x.mesh for x in values if isinstance(x, DistArray)]
        if any(mesh.is_hollow for mesh in meshes):
            raise TypeError(f"{operation} compares elements, which the arrays of a mesh without ranks do not have")
        if comm is not None and not is_comm(comm):
            raise TypeError(f"comm must be an mpi4py intracommunicator or None, got {comm_text(comm)}")
        if comm is not None or not meshes:
            return Together(operation, comm)
        largest = max(meshes, key=lambda mesh: mesh.size)
        return Together(operation, *largest.along(largest.dims))

    def agree(self, error: Exception | None, **arguments: Any) -> None:
        """Raise the error of a rank on all of them, or go on with equal arguments."""
        if self.comm is not None:
            agree(self.comm, self.operation, arguments, error=error, over=self.over)
        elif error is not None:
            raise error

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, pickled and back."""
        if self.comm is None:
            return [value]
        text = b64encode(pickle.dumps(value)).decode()
        texts = all_gather_text(text, self.comm, operation=self.operation, over=self.over)
        return [pickle.loads(b64decode(each)) for each in texts]

    def fail(self, failure: str, number: int = 0) -> None:
        """Raise `AssertionError` if ranks have a failure: those of the least `number`, equal ones once."""
        found = self.gather((number, failure))
        least = min((number for number, failure in found if failure), default=-1)
        ranks: dict[str, list[int]] = {}
        for rank, (number, failure) in enumerate(found):
            if failure and number == least:
                ranks.setdefault(failure, []).append(rank)
        if ranks and self.comm is None:
            raise AssertionError(*ranks)
        if ranks:
            self.raise_together([f"{ranks_text(who, self.over)}: {failure}" for failure, who in ranks.items()])

    def raise_together(self, failures: Sequence[str]) -> NoReturn:
        """Raise `AssertionError`, as all ranks do, with the first of `failures`."""
        more = [f"and {len(failures) - _MOST_FAILURES} more"] if len(failures) > _MOST_FAILURES else []
        raise agreed(named(AssertionError("\n".join([*failures[:_MOST_FAILURES], *more]))), self.comm.size)


def held_by(x: DistArray) -> tuple[Array, Place]:
    """Return the elements of the global array that this rank holds, on the host, and their place; collective."""
    natural = x.sharding.natural
    with untraced(), cause("testing", reason="elements are compared"):
        return to_host(redistribute(x, natural).local), natural.slices(x.mesh.coordinates)


def part_of(whole: Array, place: Place) -> Array:
    """Return the elements at `place`, all for (), as an array also where there is one alone."""
    index: Any = (*place, ...)
    return whole[index]


def elements_off(
    title: str, off: Array, describe: Callable[..., str], *, place: Place = (), distance: Array | None = None
) -> str:
    """Say how many elements are `off`, and describe the furthest ones, or the first ones; "" if none is.

    They are those of a global array from `place` on.
    """
    places = np.argwhere(off)
    if not len(places):
        return ""
    order = np.arange(len(places)) if distance is None else np.argsort(-distance[off], kind="stable")
    lines = [f"{title}: {len(places)} of {off.size} elements"]
    for index in map(tuple, places[order[:_MOST_SHOWN]].tolist()):
        at = tuple(first + part.start for first, part in zip(index, place, strict=True)) if place else index
        lines.append(f"  at {at}: {describe(index)}")
    return "\n".join(lines)

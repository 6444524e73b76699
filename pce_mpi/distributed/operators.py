"""Operations on distributed arrays by name, and the operators that call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pce_mpi.comm.doors import door, tell_from_here
from pce_mpi.comm.program import program

X = TypeVar("X")

#: the operations on distributed arrays by name; `operation` enters them
OPERATIONS: dict[str, Callable[..., Any]] = {}


def operators(name: str) -> tuple[Callable[[X, Any], X], Callable[[X, Any], X]]:
    """Make two operators of the operation `name`: for a `DistArray` on the left, and for one on the right."""

    @door
    def left(self: X, other: Any) -> X:
        program.count += 1
        program.name = name
        try:
            return OPERATIONS[name](self, other)
        except Exception as error:
            tell_from_here(error)
            raise

    @door
    def right(self: X, other: Any) -> X:
        program.count += 1
        program.name = name
        try:
            return OPERATIONS[name](other, self)
        except Exception as error:
            tell_from_here(error)
            raise

    return left, right

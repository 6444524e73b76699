"""The hollow arrays that a node of the tape holds, wherever its residuals keep them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.mesh import Mesh
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.hollow import Hollow
from pce_mpi.ledger import Block


def blocks_of(value: Any) -> set[Block]:
    """Return the memory of all hollow arrays that `value` refers to, through containers and our own objects."""
    found, seen, waiting = set[Block](), set[int](), [value]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if not isinstance(each, Hollow):
            waiting.extend(_parts(each))
        elif each.block is not None:
            found.add(each.block)
    return found


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, DistArray):
        yield value.local
    elif isinstance(value, tuple | list):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif type(value).__module__.startswith("pce_mpi.") and not isinstance(value, Mesh | Sharding):
        yield from getattr(value, "__dict__", {}).values()
        yield from (getattr(value, name, None) for name in getattr(type(value), "__slots__", ()))

"""Distributed arrays without data or ranks: what stands for them where only placements are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pce_mpi.arrays import is_floating
from pce_mpi.distributed.dist_array import DistArray
from pce_mpi.distributed.mesh import Mesh, over_text
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.distributed.transitions import Step, sent_bytes

__all__ = ["Abstract", "AbstractMesh", "Sent", "sent_by"]


@dataclass(frozen=True)
class Sent:
    """One collective: what this rank puts into it is `bytes`, payload only."""

    collective: str
    over: str
    bytes: int
    before: str = ""
    after: str = ""


class Abstract:
    """Stands for the local array where only placements are asked for."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype


class AbstractMesh(Mesh):
    """Dims without ranks; keeps what would be sent, and how each operand had to lie when it was first needed."""

    def __init__(self, dims: Mapping[str, int]) -> None:
        self.dims = dims
        self.layout = tuple(dims.items())
        self.coordinates = dict.fromkeys(dims, 0)
        self.sent: list[Sent] = []
        self.needed: dict[int, Sharding] = {}

    def note(self, checksum: int, what: str, in_full: str) -> None:
        """There are no other ranks to compare with."""


def sent_by(step: Step, x: DistArray) -> Sent:
    itemsize = max(4, x.dtype.itemsize) if is_floating(x.dtype) else x.dtype.itemsize  # halves travel as float32
    size = sent_bytes(step, x.mesh.coordinates, itemsize)
    return Sent(step.verb, over_text(step.dims), size, step.placement_before, step.placement_after)

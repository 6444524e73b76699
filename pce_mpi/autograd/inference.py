"""Infer what an operation would do with its operands, without data, MPI or other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pce_mpi.autograd.apply import moves
from pce_mpi.comm.tracing import Event, trace, untraced
from pce_mpi.distributed.array import OPERATIONS, DistArray
from pce_mpi.distributed.mesh import Mesh
from pce_mpi.distributed.placements import Placement
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.hollow import hollow
from pce_mpi.scalars import integers


@dataclass(frozen=True)
class Inference:
    """The placements and collectives of an operation; `infer_placements` makes one.

    Attributes
    ----------
    operands : tuple of dict of str to placement
        The placements in which the operation needs its operands.
    result : dict of str to placement
        The placements of the result.
    collectives : tuple of Event
        The collectives that a trace records on the rank at the origin of the mesh, whose shards are the longest.
    """

    operands: tuple[dict[str, Placement], ...]
    result: dict[str, Placement]
    collectives: tuple[Event, ...]

    @property
    def bytes(self) -> int:
        """The sum of the bytes over the collectives."""
        return sum(event.bytes for event in self.collectives)


def infer_placements(
    name: str,
    shapes: Sequence[Sequence[int]],
    placements: Sequence[Mapping[str, Placement]],
    *,
    mesh: Mesh | Mapping[str, int],
    dtypes: Any = np.float32,
    **parameters: Any,
) -> Inference:
    """Infer what an operation would do with operands of these global shapes and placements.

    The operation itself runs, on arrays without elements; inside `reproducible` it runs in that arithmetic.

    Parameters
    ----------
    name : str
        The operation, such as "matmul".
    shapes : sequence of sequence of int
        The global shape of each operand.
    placements : sequence of mapping of str to placement
        The placements of each operand by dim. Dims that are not named are Replicate.
    mesh : Mesh or mapping of str to int
        The mesh, or the sizes of its dims by name.
    dtypes : dtype or sequence of dtype, optional
        One for all operands, or one for each.
    **parameters
        The parameters of the operation, such as `index` of "slice".

    Returns
    -------
    Inference
        The placements, and what is sent.

    Raises
    ------
    ValueError
        If the operation does not exist, or the arguments do not belong together.
    TypeError
        If the placements or collectives depend on the elements of an operand, as those of an index by a mask do.
    Exception
        The error that the operation raises for its arguments.

    Notes
    -----
    Communicates nothing, and needs no MPI.

    Examples
    --------
    >>> from pce_mpi import Replicate, Shard, infer_placements
    >>> shapes, mesh = [(16, 784), (784, 10)], {"model": 2}
    >>> inferred = infer_placements("matmul", shapes, [{"model": Shard(1)}, {"model": Shard(0)}], mesh=mesh)
    >>> inferred.result, inferred.bytes
    ({'model': Partial('sum')}, 0)
    """
    if not isinstance(name, str) or name not in OPERATIONS or name.startswith("_"):
        raise ValueError(f"there is no operation {name!r}")
    for what, given in (("shapes", shapes), ("placements", placements)):
        if not isinstance(given, Sequence):
            raise TypeError(f"{what} must be a sequence, one for each operand, got {given!r}")
    of_each = list(dtypes) if isinstance(dtypes, Sequence) and not isinstance(dtypes, str) else [dtypes] * len(shapes)
    try:
        of_each = [np.dtype(each) for each in of_each]
    except (TypeError, ValueError):
        raise TypeError(f"dtypes must be a dtype, or one for each operand, got {dtypes!r}") from None
    if not len(shapes) == len(placements) == len(of_each):
        raise ValueError(f"{len(shapes)} shapes, {len(placements)} placements and {len(of_each)} dtypes")
    checked = [tuple(integers(shape, "a shape")) for shape in shapes]
    if any(length < 0 for shape in checked for length in shape):
        raise ValueError(f"a shape has no negative lengths, got {', '.join(map(str, checked))}")
    for each in (mesh, *placements):
        if not isinstance(each, Mapping) and not (each is mesh and isinstance(each, Mesh)):
            raise TypeError(f"mesh and placements are given by dim, such as data=2, got {each!r}")
    here = Mesh.without_ranks(**(mesh.dims if isinstance(mesh, Mesh) else mesh))
    operands = []
    for shape, placed, dtype in zip(checked, placements, of_each, strict=True):
        sharding = Sharding.of(here.dim_sizes, shape, placed)
        operands.append(DistArray(hollow(sharding.local_shape(here.coordinates), dtype), here, sharding))
    arguments: list[Any] = [operands] if name in ("concatenate", "stack") else list(operands)
    moved: dict[int, Sharding] = {}
    token = moves.set(moved)
    try:
        with untraced(), trace() as noted:
            result = OPERATIONS[name](*arguments, **parameters)
    finally:
        moves.reset(token)
    first = result[0] if isinstance(result, list | tuple) else result
    return Inference(
        tuple(dict(moved.get(id(operand), operand.sharding).by_dim) for operand in operands),
        first.placements,
        tuple(noted.select()),
    )

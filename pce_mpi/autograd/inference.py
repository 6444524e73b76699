"""Infer what an operation would do with its operands, without data, MPI or other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pce_mpi.arrays import is_floating
from pce_mpi.distributed.array import OPERATIONS, DistArray
from pce_mpi.distributed.mesh import Mesh, checked_dims, text_of_dims
from pce_mpi.distributed.placements import Placement
from pce_mpi.distributed.redistribution import Step, sent_bytes, steps
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.exact.mode import reproducible
from pce_mpi.scalars import integers


@dataclass(frozen=True)
class Sent:
    """One collective that an operation would run.

    Parameters
    ----------
    collective : str
        "all_reduce", "all_gather", "all_to_all" or "reduce_scatter".
    over : str
        The dims of the mesh, such as "data, model".
    bytes : int
        The bytes that this rank would put in, without the agreement.
    before, after : str
        The placements of the array that would be moved, as text.
    """

    collective: str
    over: str
    bytes: int
    before: str = ""
    after: str = ""


class AbstractMesh(Mesh):
    """Dims without ranks; keeps what would be sent, and the sharding in which each operand was first needed.

    The local arrays over it have a dtype and no elements.
    """

    def __init__(self, dims: Mapping[str, int]) -> None:
        self.dims = dims
        self.dim_sizes = tuple(dims.items())
        self.coordinates = dict.fromkeys(dims, 0)
        self.sent: list[Sent] = []
        self.needed: dict[int, Sharding] = {}

    def note(self, checksum: int, what: str, in_full: str) -> None:
        """Do nothing: there are no other ranks to compare with."""

    def agree(self, *_: Any, **__: Any) -> list[int]:
        """Do nothing: there are no other ranks to agree with."""
        return []

    def need(self, operands: Sequence[DistArray], shardings: Sequence[Sharding]) -> None:
        """Note the sharding in which each operand is needed, unless one was noted before."""
        for x, sharding in zip(operands, shardings, strict=True):
            self.needed.setdefault(id(x), sharding)

    def redistribute(self, x: DistArray, destination: Sharding) -> DistArray:
        """Return `x` in another sharding, and note what that sends."""
        taken = steps(x.sharding, destination)
        self.sent += [_sent_by(step, x) for step in taken if step.sends]
        return DistArray(x.local, self, destination, computed=x.computed or any(step.copies for step in taken))


def _sent_by(step: Step, x: DistArray) -> Sent:
    itemsize = max(4, x.dtype.itemsize) if is_floating(x.dtype) else x.dtype.itemsize  # halves travel as float32
    size = sent_bytes(step, x.mesh.coordinates, itemsize)
    return Sent(step.verb, text_of_dims(step.dims), size, step.placement_before, step.placement_after)


@dataclass(frozen=True)
class Inference:
    """The placements and collectives of an operation; `infer_placements` makes one.

    Attributes
    ----------
    operands : tuple of dict of str to placement
        The placements in which it needs its operands.
    result : dict of str to placement
        The placements of its result.
    collectives : tuple of Sent
        The collectives, with the bytes of the rank at the origin of the mesh, whose shards are the longest.
    """

    operands: tuple[dict[str, Placement], ...]
    result: dict[str, Placement]
    collectives: tuple[Sent, ...]

    @property
    def bytes(self) -> int:
        """The sum of the bytes over the collectives."""
        return sum(sent.bytes for sent in self.collectives)


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

    The answer comes from the same rules that run the operation.

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
        Those of the operation, such as `index` of "slice".

    Returns
    -------
    Inference
        The placements, and what is sent.

    Raises
    ------
    ValueError
        If the operation does not exist, or the arguments do not belong together.
    Exception
        As the operation raises for its arguments.

    Notes
    -----
    Communicates nothing. The answer is that for outside `reproducible`.

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
    abstract = AbstractMesh(checked_dims(mesh.dims if isinstance(mesh, Mesh) else mesh))
    operands = [
        DistArray(np.empty(0, dtype), abstract, Sharding.of(abstract.dim_sizes, shape, placed))
        for shape, placed, dtype in zip(checked, placements, of_each, strict=True)
    ]
    arguments: list[Any] = [operands] if name in ("concatenate", "stack") else list(operands)
    with reproducible(False):
        result = OPERATIONS[name](*arguments, **parameters)
    needed = [abstract.needed.get(id(operand), operand.sharding) for operand in operands]
    results = result[0] if isinstance(result, list | tuple) else result
    return Inference(
        tuple(dict(sharding.by_dim) for sharding in needed), dict(results.sharding.by_dim), tuple(abstract.sent)
    )

"""Arrays taken apart: this rank's piece of a plain array for each cut, and of a global array for any sharding."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pce_mpi.arrays import as_array
from pce_mpi.comm.library import comm_text, is_comm, mpi
from pce_mpi.distributed.mesh import Mesh
from pce_mpi.distributed.placements import Partial, Placement, Replicate, Shard, shard_range
from pce_mpi.distributed.sharding import Coordinates, Sharding
from pce_mpi.validation import integer

if TYPE_CHECKING:
    from mpi4py import MPI

Array = Any  # numpy.ndarray or cupy.ndarray


class Piece(NamedTuple):
    """This rank's piece of a global array; `shards_of` makes them.

    Attributes
    ----------
    name : str
        The cut, such as "balanced".
    local : numpy.ndarray or cupy.ndarray
        The piece, in memory of its own.
    offset : tuple of int
        The index of its first element in the global array, as `assert_close` takes it.
    """

    name: str
    local: Array
    offset: tuple[int, ...]


def shards_of(array: Any, comm: MPI.Intracomm, *, axis: int = -1) -> Iterator[Piece]:
    """Yield this rank's piece of an array for every way to cut an axis that has found faults.

    The cuts are "balanced" (`shard_range`); "uneven", where rank r of P has r + 1 of P (P + 1) / 2 parts; "rank 0
    empty" and "rank P-1 empty"; "reversed", balanced blocks of which rank 0 has the last; "all on rank 0" and "all on
    rank P-1". One that gives all ranks the same blocks as an earlier one is left out: one rank has a single cut.

    Parameters
    ----------
    array : array_like
        The global array, which every rank passes.
    comm : mpi4py.MPI.Intracomm
        The ranks.
    axis : int, optional
        The axis that is cut.

    Yields
    ------
    Piece
        The name of the cut, the piece and its offset, in the same order on every rank.

    Raises
    ------
    TypeError
        If `comm` is no communicator, `array` is no array or `axis` no integer.
    ValueError
        If the array has no such axis.

    Notes
    -----
    Communicates nothing, and so raises on the rank that fails.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np
    >>> from pce_mpi.testing.placing import shards_of
    >>> for cut in shards_of(np.arange(3.0), MPI.COMM_SELF):
    ...     print(cut.name, cut.local, cut.offset)
    balanced [0. 1. 2.] (0,)
    """
    if not is_comm(comm):
        raise TypeError(f"comm must be an mpi4py intracommunicator, got {comm_text(comm)}")
    whole, axis = as_array(array, "array"), integer(axis, "axis")
    if not -whole.ndim <= axis < whole.ndim:
        raise ValueError(f"axis = {axis} is out of bounds for an array of {whole.ndim} dimensions")
    axis %= whole.ndim
    blocks = [(name, blocks[comm.rank]) for name, blocks in _cuts(whole.shape[axis], comm.size)]
    return (
        Piece(
            name,
            whole[(slice(None),) * axis + (slice(start, stop),)].copy(),
            tuple(start if each == axis else 0 for each in range(whole.ndim)),
        )
        for name, (start, stop) in blocks
    )


def _cuts(length: int, ranks: int) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield each cut of an axis once: its name, and the block of each rank."""
    balanced, last = [shard_range(length, ranks, rank) for rank in range(ranks)], ranks - 1
    uneven = [length * rank * (rank + 1) // (ranks * (ranks + 1)) for rank in range(ranks + 1)]
    fewer = [shard_range(length, max(last, 1), rank) for rank in range(last)]
    cuts = {
        "balanced": balanced,
        "uneven": list(pairwise(uneven)),
        "rank 0 empty": [(0, 0), *fewer],
        f"rank {last} empty": [*fewer, (length, length)],
        "reversed": balanced[::-1],
        "all on rank 0": [(0, length), *[(length, length)] * last],
        f"all on rank {last}": [*[(0, 0)] * last, (0, length)],
    }
    seen = list[list[tuple[int, int]]]()
    for name, blocks in cuts.items():
        whole = sum(stop - start for start, stop in blocks) == length  # the only rank cannot be empty
        if whole and blocks not in seen:
            seen.append(blocks)
            yield name, blocks


# On a mesh


@cache
def alone(*dims: str) -> Mesh:
    """Return a mesh of this process with these dims, made once: MPI has some 2,000 communicators to give."""
    return Mesh(mpi().COMM_SELF, **dict.fromkeys(dims, 1))


def placements_of(ndim: int, *operators: Any) -> list[Placement]:
    """Return Shard of each axis, Replicate, and Partial with each of `operators`."""
    return [*(Shard(axis) for axis in range(ndim)), Replicate(), *(Partial(operator) for operator in operators)]


def local_of(whole: Array, sharding: Sharding, coordinates: Coordinates, seed: Any = 0) -> Array:
    """Return the part of `whole` of the rank at `coordinates`; terms of a sum are small whole numbers: it is exact."""
    terms = _terms(whole, sharding, seed)
    term = terms[tuple(coordinates[dim] for dim in sharding.partial_dims)]
    return np.array(term[sharding.slices(coordinates)])


def _terms(whole: Array, sharding: Sharding, seed: Any) -> dict[tuple[int, ...], Array]:
    """Return a term for each coordinate along the partial dims; together they are `whole`."""
    dims = sharding.partial_dims
    places = list(product(*(range(sharding.sizes[dim]) for dim in dims)))
    operators = operators_of(sharding)
    rng = np.random.default_rng(seed)
    if not dims:
        return {(): whole}
    if operators <= {"sum", "avg"}:
        draws = [rng.integers(0, 3, whole.shape).astype(whole.dtype) for _ in places[1:]]
        if whole.dtype.kind == "u":  # few terms of an element, so that the rest of it is not below 0
            index = np.arange(whole.size).reshape(whole.shape)
            draws = [draw * ((index + number) % 4 == 0) for number, draw in enumerate(draws)]
        draws.insert(int(rng.integers(len(places))), whole - sum(draws, start=np.zeros_like(whole)))
        terms = [(draw * averaged(sharding)).astype(whole.dtype) for draw in draws]
    else:
        # Each element is attained somewhere, and nowhere exceeded. Booleans are turned off, and on for the smallest.
        attained = rng.integers(0, len(places), whole.shape)
        largest = operators == {"max"}
        terms = []
        for number in range(len(places)):
            away = rng.integers(0, 2, whole.shape).astype(whole.dtype)
            if whole.dtype.kind == "b":
                other = whole & away if largest else whole | away
            else:
                other = whole - away if largest else whole + away
            terms.append(np.where(attained == number, whole, other))
    return dict(zip(places, terms, strict=True))


def operators_of(sharding: Sharding) -> set[str]:
    """Return the reduce operators of the Partial placements."""
    return {placement.operator for placement in sharding.placements if isinstance(placement, Partial)}


def averaged(sharding: Sharding) -> int:
    """Return the number of ranks that are averaged over."""
    return prod(sharding.sizes[dim] for dim in sharding.partial_dims if sharding.by_dim[dim] == Partial("avg"))

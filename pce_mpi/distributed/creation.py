"""Make distributed arrays from a global array, or from the local arrays that the ranks hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
from typing import Any
import zlib

from pce_mpi.arrays import array_namespace, as_array, dtype_named, library_named
from pce_mpi.comm.agreement import all_gather_text, local_checks
from pce_mpi.comm.collectives import all_to_all
from pce_mpi.comm.rank_texts import text_by_rank
from pce_mpi.comm.tracing import cause
from pce_mpi.distributed.array import DistArray, checked_dtype, owned
from pce_mpi.distributed.mesh import Mesh, check_mesh
from pce_mpi.distributed.placements import Placement
from pce_mpi.distributed.redistribution import run_step
from pce_mpi.distributed.sharding import Sharding, steps
from pce_mpi.hollow import hollow
from pce_mpi.scalars import flag, integer, integers

Array = Any  # numpy.ndarray or cupy.ndarray


def distribute(
    array: Any,
    mesh: Mesh,
    /,
    *,
    requires_grad: bool = False,
    src_rank: int | None = None,
    **placements: Placement,
) -> DistArray:
    """Make a distributed array from a global array, which every rank passes.

    Parameters
    ----------
    array : array_like
        The global array, of bool, integers or real numbers: whatever NumPy takes as an array, or a CuPy array. Its
        memory is not shared.
    mesh : Mesh
        The ranks.
    requires_grad : bool, optional
        `backward` finds the gradient of this array.
    src_rank : int, optional
        The only rank of the mesh whose `array` counts; the others may pass None.
    **placements : Shard, Replicate or Partial
        The placement of each dim by name, such as `data=Shard(0)`. Dims that are not named are Replicate.

    Returns
    -------
    DistArray
        The array; its shards are balanced, see `shard_range`.

    Raises
    ------
    TypeError
        If `array` is no array, or its dtype has no meaning for a placement or a gradient.
    ValueError
        If a dim, an axis or a rank does not exist.

    Notes
    -----
    Communicates nothing, and so raises on the rank that fails. Ranks must pass equal arrays, which is not checked; see
    `check_replicas`.

    With `src_rank` it is collective over the mesh: one Allgather of 56 bytes, one of the shape, and one Alltoallv of
    the parts. Then every rank raises the same error.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1, model=1)
    >>> distribute(np.zeros((4, 2)), mesh, data=pce.Shard(0)).placements
    {'data': Shard(0), 'model': Replicate()}
    """
    check_mesh(mesh)
    if src_rank is not None:
        return _sent_from(array, mesh, src_rank, requires_grad, placements)
    requires_grad = flag(requires_grad, "requires_grad")
    taken = checked_dtype(as_array(array, "array"), placements, requires_grad)
    taken = hollow(taken.shape, taken.dtype) if mesh.is_hollow else taken
    destination = Sharding.of(mesh.dim_sizes, taken.shape, placements)
    said = f"distribute an array of shape {taken.shape} as {taken.dtype.name}, {destination}"
    mesh.note(zlib.crc32(said.encode()), said, said)
    local = taken
    for step in steps(destination.replicated, destination):
        local = run_step(step, local, mesh)
    return DistArray(owned(local, taken), mesh, destination, requires_grad=requires_grad)


def _sent_from(
    array: Any, mesh: Mesh, src_rank: int, requires_grad: bool, placements: Mapping[str, Placement]
) -> DistArray:
    comm, over = mesh.along(mesh.dims)
    said = ""
    taken: Array = None
    called: dict[str, Any] = {}
    with local_checks() as checks:
        src_rank, requires_grad = integer(src_rank, "src_rank"), flag(requires_grad, "requires_grad")
        if not 0 <= src_rank < mesh.size:
            raise ValueError(f"src_rank = {src_rank} is outside [0, {mesh.size})")
        if mesh.rank == src_rank:
            taken = checked_dtype(as_array(array, "array"), placements, requires_grad)
            Sharding.of(mesh.dim_sizes, taken.shape, placements)
            said = json.dumps([taken.shape, taken.dtype.name, array_namespace(taken).__name__])
        called = {"src_rank": src_rank, "placements": repr(placements), "requires_grad": requires_grad}
    mesh.agree(mesh.dims, "distribute", called, checks.error)
    texts = all_gather_text(said, comm, operation="distribute", over=over)
    shape, dtype, library = json.loads(texts[src_rank])
    destination = Sharding.of(mesh.dim_sizes, tuple(shape), placements)
    whole = destination.replicated
    here = library_named(library).empty(0, dtype_named(dtype)) if taken is None else taken
    # A Partial array is sent as shards; each rank then builds its partial from what it holds.
    sharded = destination.natural
    blocks, sizes = [here.reshape(-1)[:0]] * mesh.size, [(0,)] * mesh.size
    if taken is not None:
        members = whole.members(tuple(mesh.dims), mesh.coordinates)
        blocks = [taken[sharded.slices(member)] for member in members]
    shapes: list[tuple[int, ...]] = list(sizes)
    shapes[src_rank] = sharded.local_shape(mesh.coordinates)
    with cause("distribute", over, f"rank {src_rank} has the array"):
        local = all_to_all(blocks, comm, shapes)[src_rank]
    for step in steps(sharded, destination):
        local = run_step(step, local, mesh)
    return DistArray(owned(local, here), mesh, destination, requires_grad=requires_grad)


def from_local(
    local: Any,
    mesh: Mesh,
    /,
    *,
    shape: Sequence[int] | None = None,
    requires_grad: bool = False,
    **placements: Placement,
) -> DistArray:
    """Make a distributed array from the arrays that the ranks hold.

    Parameters
    ----------
    local : array_like
        This rank's shard, replica or partial. Shards may be uneven and empty. The array keeps `local` itself, or a copy
        if it requires a gradient, as a step of SGD writes to it.
    mesh : Mesh
        The ranks.
    shape : sequence of int, optional
        The global shape that the shards must have together.
    requires_grad : bool, optional
        `backward` finds the gradient of this array.
    **placements : Shard, Replicate or Partial
        The placement of each dim by name, such as `data=Shard(0)`. Dims that are not named are Replicate.

    Returns
    -------
    DistArray
        The array, with the split points of these shards.

    Raises
    ------
    TypeError
        If `local` is no array, or its dtype has no meaning for a placement or a gradient.
    ValueError
        If shards do not fit each other or `shape`, or a dim or an axis does not exist.
    CollectiveError
        If ranks pass different placements, dtypes, shapes or numbers of axes.

    Notes
    -----
    Collective over the mesh: one Allgather of 56 bytes, and one of the local shapes. Every rank raises the same error.
    Replicas must be equal, which is not checked; see `check_replicas`.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> from_local(np.ones((3, 2)), mesh, data=pce.Shard(0)).shape
    (3, 2)
    """
    check_mesh(mesh)
    comm, over = mesh.along(mesh.dims)
    taken: Array = None
    called: dict[str, Any] = {}
    with local_checks() as checks:
        requires_grad = flag(requires_grad, "requires_grad")
        taken = checked_dtype(as_array(local, "local"), placements, requires_grad)
        Sharding.of(mesh.dim_sizes, taken.shape, placements)  # for its errors
        called = {
            "dimensions": taken.ndim,
            "dtype": taken.dtype.name,
            "placements": repr(placements),
            "shape": None if shape is None else tuple(integers(shape, "shape")),
            "requires_grad": requires_grad,
        }
    mesh.agree(mesh.dims, "from_local", called, checks.error)
    texts = all_gather_text(json.dumps(taken.shape), comm, operation="from_local", over=over)
    if mesh.is_hollow:
        destination, taken = _balanced(taken.shape, mesh, placements, called["shape"]), hollow(taken.shape, taken.dtype)
    else:
        destination = _assembled([tuple(json.loads(text)) for text in texts], mesh, placements, called["shape"])
    return DistArray(owned(taken, taken) if requires_grad else taken, mesh, destination, requires_grad=requires_grad)


def _balanced(
    here: tuple[int, ...], mesh: Mesh, placements: Mapping[str, Placement], given: tuple[int, ...] | None
) -> Sharding:
    """Return the sharding of balanced shards in which this rank holds an array of shape `here`.

    Without other ranks their shards are not known.
    """
    found = Sharding.of(mesh.dim_sizes, here if given is None else given, placements)
    if given is None and any(map(found.dims_of, range(len(here)))):
        raise ValueError("shape must be given on a mesh without ranks, as the shards of other ranks are not known")
    if found.local_shape(mesh.coordinates) != here:
        raise ValueError(
            f"shape = {given}: this rank's balanced shard of it has shape {found.local_shape(mesh.coordinates)}, "
            f"got {here}; on a mesh without ranks shards must be balanced"
        )
    return found


def _assembled(
    shapes: list[tuple[int, ...]], mesh: Mesh, placements: Mapping[str, Placement], given: tuple[int, ...] | None
) -> Sharding:
    """Return the sharding in which rank r holds an array of `shapes[r]`, or raise the same error on every rank."""
    # The dims that shard an axis do not depend on its length.
    pattern = Sharding.of(mesh.dim_sizes, shapes[0], placements)
    coordinates = list(pattern.members(tuple(mesh.dims), mesh.coordinates))
    lengths, splits = [], {}
    for axis in range(len(shapes[0])):
        dims = pattern.dims_of(axis)
        blocks: dict[tuple[int, ...], dict[int, str]] = {}
        for rank, where in enumerate(coordinates):
            blocks.setdefault(tuple(where[dim] for dim in dims), {})[rank] = str(shapes[rank][axis])
        for block in blocks.values():
            if len(set(block.values())) > 1:
                raise ValueError(
                    f"axis {axis} must have one length on ranks that hold the same part of it: {text_by_rank(block)}"
                )
        ends = [0]
        for index in sorted(blocks):
            ends.append(ends[-1] + int(next(iter(blocks[index].values()))))
        lengths.append(ends[-1])
        if dims:
            splits[axis] = tuple(ends)
    if given is not None and given != tuple(lengths):
        raise ValueError(f"shape = {given}, but the local arrays make up {tuple(lengths)}")
    return Sharding.of(mesh.dim_sizes, tuple(lengths), placements, splits)

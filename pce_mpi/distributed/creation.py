"""Make distributed arrays: from a global array, from local arrays that the ranks hold, or of random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import json
import math
from typing import Any
import zlib

import numpy as np

from pce_mpi.arrays import (
    Array,
    array_namespace,
    as_array,
    checksum_of,
    dtype_named,
    is_floating,
    is_half,
    library_named,
    owned,
)
from pce_mpi.comm.agreement import all_gather_text, local_checks
from pce_mpi.comm.collectives import all_to_all
from pce_mpi.comm.errors import text_by_rank
from pce_mpi.comm.tracing import cause
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.mesh import Mesh, check_mesh
from pce_mpi.distributed.placements import Placement, Placements
from pce_mpi.distributed.redistribution import checked_dtype, run_step
from pce_mpi.distributed.sharding import Sharding, steps
from pce_mpi.exact import philox
from pce_mpi.exact.functions import BLOCK, BLOCK_ON_GPU
from pce_mpi.hollow import Hollow, hollow
from pce_mpi.validation import flag, integer, integers, real


def normal(
    shape: int | Sequence[int],
    mesh: Mesh,
    /,
    *,
    seed: int | Sequence[int],
    loc: float = 0.0,
    scale: float = 1.0,
    dtype: Any = np.float32,
    requires_grad: bool = False,
    xp: Any = np,
    **placements: Placement,
) -> DistArray:
    """Make a distributed array of normal numbers, of which each rank computes its shard alone.

    Element i of the global array, counted in C order, is loc + scale sqrt(-2 log u) cos(2 pi v) (Box and Muller, 1958),
    where u and v are the 128 bits that Philox4x32-10 gives for the counter i.

    Parameters
    ----------
    shape : int or sequence of int
        The global shape.
    mesh : Mesh
        The ranks.
    seed : int or sequence of int
        Numbers that are not negative. Arrays with one seed have the same numbers: give each its own, as in
        `seed=(0, 3)` for the third array of run 0.
    loc, scale : float, optional
        Mean and standard deviation, finite, as in NumPy.
    dtype : dtype, default float32
        A floating dtype. The numbers are computed in float64 and rounded, for halves by way of float32.
    requires_grad : bool, optional
        `backward` finds the gradient of this array.
    xp : module, default numpy
        The library of the local arrays: `numpy` or `cupy`.
    **placements : Shard or Replicate
        The placement of each dim by name, such as `classes=Shard(1)`. Dims that are not named are Replicate.

    Returns
    -------
    DistArray
        The array; its shards are balanced.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong.

    Notes
    -----
    Communicates nothing, and so raises on the rank that fails. No rank holds more than its shard.

    The bits depend on the seed, the shape, `loc`, `scale` and the dtype alone: not on the mesh, the placements, the
    number of ranks, the library, the processor or NumPy's version. NumPy's own generators give other numbers.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, classes=1)
    >>> w = normal((128, 500), mesh, seed=(0, 1), scale=0.02, requires_grad=True, classes=pce.Shard(1))
    >>> w.shape, round(float(w.local.std()), 3)
    ((128, 500), 0.02)
    """
    said = {"normal": shape, "seed": seed, "loc": _finite(loc, "loc"), "scale": _finite(scale, "scale")}
    if scale < 0:
        raise ValueError(f"scale must not be negative, got {scale}")
    return _drawn(philox.normal, said, mesh, float(loc), float(scale), dtype, requires_grad, xp, placements)


def uniform(
    shape: int | Sequence[int],
    mesh: Mesh,
    /,
    *,
    seed: int | Sequence[int],
    low: float = 0.0,
    high: float = 1.0,
    dtype: Any = np.float32,
    requires_grad: bool = False,
    xp: Any = np,
    **placements: Placement,
) -> DistArray:
    """Make a distributed array of numbers between two bounds, of which each rank computes its shard alone.

    Element i of the global array, counted in C order, is low + (high - low) u, where u in [0, 1) is a multiple of
    2^-53, from the first of the bits that Philox4x32-10 gives for the counter i.

    Parameters
    ----------
    shape, mesh, seed
        Those of `normal`.
    low, high : float, optional
        The bounds, finite, `low` not above `high`. As in NumPy, rounding may give `high` itself.
    dtype, requires_grad, xp, **placements
        Those of `normal`.

    Returns
    -------
    DistArray
        The array; its shards are balanced.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong.

    Notes
    -----
    Communicates nothing, and so raises on the rank that fails. The bits depend on the seed, the shape, `low`, `high`
    and the dtype alone, as those of `normal` do.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> uniform(3, mesh, seed=7, low=-1.0).local
    array([0.6745905 , 0.68335   , 0.05274792], dtype=float32)
    """
    said = {"uniform": shape, "seed": seed, "low": _finite(low, "low"), "high": _finite(high, "high")}
    width = float(high) - float(low)
    if not 0.0 <= width < math.inf:
        raise ValueError(f"low must not be above high, by a finite difference, got {low} and {high}")
    return _drawn(philox.uniform, said, mesh, float(low), width, dtype, requires_grad, xp, placements)


def _drawn(
    draw: Callable[[Array, Sequence[int]], Array],
    said: dict[str, Any],
    mesh: Mesh,
    offset: float,
    factor: float,
    dtype: Any,
    requires_grad: bool,
    xp: Any,
    placements: Placements,
) -> DistArray:
    """Return `offset + factor * draw(index)`; `said` has the operation with the shape, the seed and the numbers."""
    operation = next(iter(said))
    check_mesh(mesh)
    shape, seed = (_not_negative(said[key], name) for key, name in ((operation, "shape"), ("seed", "seed")))
    dtype, requires_grad = _floating(dtype), flag(requires_grad, "requires_grad")
    destination = Sharding.of(mesh.dim_sizes, shape, placements)
    if destination.partial_dims:
        raise ValueError(f"random numbers cannot be Partial, got {dict(destination.by_dim)}")
    text = f"{operation} {said | {'seed': seed, operation: shape}} as {dtype.name}, {destination}"
    text += ", requires_grad=True" if requires_grad else ""
    mesh.note(zlib.crc32(text.encode()), text, text)
    if mesh.is_hollow:
        made = hollow(destination.local_shape(mesh.coordinates), dtype)
        return DistArray(made, mesh, destination, requires_grad=requires_grad)
    local, stream = xp.empty(destination.local_shape(mesh.coordinates), dtype), philox.stream_of(seed)
    flat, size = local.reshape(-1), BLOCK if xp is np else BLOCK_ON_GPU
    for start in range(0, local.size, size):
        # The place of each element in the global array, counted in C order.
        rest = xp.arange(start, min(start + size, local.size), dtype=np.uint64)
        index, stride = rest & 0, 1
        for axis in reversed(range(len(shape))):
            first, stop = destination.block(axis, mesh.coordinates)
            whole = rest // (stop - first)
            index += (rest - whole * (stop - first) + first) * stride
            rest, stride = whole, stride * shape[axis]
        numbers = draw(index, stream)
        numbers *= factor
        numbers += offset
        flat[start : start + size] = numbers.astype(np.float32) if is_half(dtype) else numbers
    return DistArray(local, mesh, destination, requires_grad=requires_grad)


def _not_negative(value: Any, name: str) -> tuple[int, ...]:
    """Return one integer that is not negative, or a sequence of them, as a tuple."""
    numbers = tuple(integers(value, name))
    if min(numbers, default=0) < 0:
        raise ValueError(f"{name} must have no negative numbers, got {value!r}")
    return numbers


def _floating(value: Any) -> np.dtype[Any]:
    try:
        dtype = np.dtype(value)
    except (TypeError, ValueError):
        raise TypeError(f"dtype must be a floating-point dtype, got {value!r}") from None
    if not is_floating(dtype):
        raise TypeError(f"dtype must be a floating-point dtype, got {dtype}")
    return dtype


def _finite(value: Any, name: str) -> float:
    number = real(value, name)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return number


def distribute(
    array: Any, mesh: Mesh, /, *, requires_grad: bool = False, src_rank: int | None = None, **placements: Placement
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
    Communicates nothing, and so raises on the rank that fails. Ranks must pass equal arrays. They compare a checksum of
    it when they next agree on a call, before the next step of an optimizer at the latest, unless every dim of several
    ranks shards the array. Arrays that differ, such as random ones without a seed, are a `CollectiveError` then.

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
    said += ", requires_grad=True" if requires_grad else ""
    passed = []
    if destination.unsharded_dims and not isinstance(taken, Hollow):
        # Of an array on a GPU too, for which this waits: few programs distribute one in each step.
        passed = [(f"of shape {taken.shape} to distribute", checksum_of(taken))]
    mesh.note(zlib.crc32(said.encode()), said, said, passed)
    local = taken
    for step in steps(destination.replicated, destination):
        local = run_step(step, local, mesh)
    return DistArray(owned(local, taken), mesh, destination, requires_grad=requires_grad)


def _sent_from(array: Any, mesh: Mesh, src_rank: int, requires_grad: bool, placements: Placements) -> DistArray:
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


def _balanced(here: tuple[int, ...], mesh: Mesh, placements: Placements, given: tuple[int, ...] | None) -> Sharding:
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
    shapes: list[tuple[int, ...]], mesh: Mesh, placements: Placements, given: tuple[int, ...] | None
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

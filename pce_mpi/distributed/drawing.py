"""Make distributed arrays of random numbers, of which each rank computes its shard alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any
import zlib

import numpy as np

from pce_mpi.arrays import is_floating, is_half
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.mesh import Mesh, check_mesh
from pce_mpi.distributed.placements import Placement
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.exact import draws
from pce_mpi.exact.functions import BLOCK, BLOCK_ON_GPU
from pce_mpi.hollow import hollow
from pce_mpi.scalars import flag, integers, real

Array = Any  # numpy.ndarray or cupy.ndarray


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
    return _drawn(draws.normal, said, mesh, float(loc), float(scale), dtype, requires_grad, xp, placements)


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
    return _drawn(draws.uniform, said, mesh, float(low), width, dtype, requires_grad, xp, placements)


def _drawn(
    draw: Callable[[Array, Sequence[int]], Array],
    said: dict[str, Any],
    mesh: Mesh,
    offset: float,
    factor: float,
    dtype: Any,
    requires_grad: bool,
    xp: Any,
    placements: Mapping[str, Placement],
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
    mesh.note(zlib.crc32(text.encode()), text, text)
    if mesh.is_hollow:
        made = hollow(destination.local_shape(mesh.coordinates), dtype)
        return DistArray(made, mesh, destination, requires_grad=requires_grad)
    local, stream = xp.empty(destination.local_shape(mesh.coordinates), dtype), draws.stream_of(seed)
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

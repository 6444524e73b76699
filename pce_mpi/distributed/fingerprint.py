"""Fingerprints: a number for the bits of global arrays, whatever their placement; comparison of replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import hashlib
import json
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import Array, array_namespace, to_host
from pce_mpi.comm.agreement import all_gather_text, local_checks
from pce_mpi.comm.collectives import all_reduce
from pce_mpi.comm.errors import text_by_rank
from pce_mpi.comm.tracing import Trace, cause, current_phase, listeners, record_result, untraced
from pce_mpi.distributed.array import DistArray, redistribute
from pce_mpi.distributed.mesh import Mesh, text_of_dims
from pce_mpi.distributed.placements import Replicate


def check_replicas(x: DistArray) -> None:
    """Check that ranks which should hold the same bits of an array do so.

    Parameters
    ----------
    x : DistArray
        The array. The ranks along the dims over which it is Replicate should hold the same bits.

    Raises
    ------
    TypeError
        If `x` is no `DistArray`, on this rank alone.
    ValueError
        On every rank, if replicas differ. The text names the ranks in the mesh that do.

    Notes
    -----
    Collective over the mesh: one Allgather of 56 bytes, and one of a checksum of 32 bytes.
    """
    if not isinstance(x, DistArray):
        raise TypeError(f"check_replicas takes a DistArray, got {type(x).__name__}")
    mesh = x.mesh
    comm, over = mesh.along(mesh.dims)
    mesh.agree(mesh.dims, "check_replicas", {"sharding": str(x.sharding), "shape": x.shape, "dtype": x.dtype.name})
    host = np.ascontiguousarray(to_host(x.local))
    digest = hashlib.blake2b(host.view(np.uint8).data if host.size else b"", digest_size=16).hexdigest()
    digests = all_gather_text(digest, comm, operation="check_replicas", over=over)
    groups: dict[tuple[int, ...], dict[int, str]] = {}
    for rank, where in enumerate(x.sharding.members(tuple(mesh.dims), mesh.coordinates)):
        key = tuple(where[dim] for dim, placed in x.sharding.by_dim.items() if placed != Replicate())
        groups.setdefault(key, {})[rank] = f"checksum {digests[rank][:8]}"
    differing = [text_by_rank(group) for group in groups.values() if len(set(group.values())) > 1]
    if differing:
        raise ValueError(f"replicas differ: {'; '.join(differing)}")


_MODULUS = 1 << 128
# Stands for the bits of every nan, which depend on the processor, and in a sum on the order of two nans.
_NAN = (1 << 64) - 1
# The number of elements that are hashed at a time: each takes several hashes of 8 bytes.
_ELEMENTS = 1 << 18


def fingerprint(arrays: DistArray | Mapping[str, DistArray] | Iterable[DistArray]) -> str:
    """Compute a number that is equal for arrays with equal bits, on any mesh and in any placement.

    Each element is hashed with its place in the global array, and the hashes are added modulo 2**128, so that neither
    split nor order matter. The result is the SHA-256 digest of these sums with names, dtypes and shapes.

    Parameters
    ----------
    arrays : DistArray, mapping of str to DistArray, or iterable of DistArray
        Arrays on one mesh. The fingerprint depends on names, not on their order; arrays without names are numbered.

    Returns
    -------
    str
        64 hexadecimal digits, the same on every rank.

    Raises
    ------
    TypeError
        If one of `arrays` is no distributed array.
    ValueError
        If replicas differ, if arrays are on several meshes, or if there are none.
    CollectiveError
        If ranks pass different arrays.

    Notes
    -----
    Collective over the mesh: one Allgather of 56 bytes, and one Allreduce of 64 bytes an array. A Partial array is
    reduced first. Every rank raises the same error.

    All nan count as equal: their bits differ between processors, and between ranks that reduce the same array.

    Fingerprints find accidents, not forgery: one can construct different arrays with equal fingerprints.

    The hash of an element is the finalizer of SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number
    Generators, 2014), applied to its place and then to its bits.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> w = pce.distribute(np.arange(6.0), mesh)
    >>> pce.fingerprint(w) == pce.fingerprint(w.redistribute(data=pce.Shard(0)))
    True
    """
    named = _named(arrays)
    mesh = next((x.mesh for x in named.values() if isinstance(x, DistArray)), None)
    if mesh is None:
        raise TypeError(f"fingerprint takes distributed arrays, got {list(named.values())!r}")
    described: tuple[str, ...] = ()
    with local_checks() as checks:
        _check(named, mesh)
        described = tuple(f"{name}: {x.dtype} {x.shape}, {x.sharding}" for name, x in named.items())
    mesh.agree(mesh.dims, "fingerprint", {"arrays": described}, checks.error)
    sums = np.zeros((len(named), 2, 4), np.uint64)
    with cause("fingerprint", text_of_dims(mesh.dims), "sums of the hashes of all elements"):
        whole = {name: redistribute(x, x.sharding.natural) for name, x in named.items()}
        for (once, weighted), x in zip(sums, whole.values(), strict=True):
            replica, total = _replica(x), _sum_of_hashes(x)
            once[:] = _lanes(total if replica == 0 else 0)
            # A second sum, with a factor for each replica, has the expected value if all replicas are equal.
            weighted[:] = _lanes(total * _factor(replica))
        sums = all_reduce(sums, mesh.comm(*mesh.dims), "sum")
    found = []
    for (name, x), (once, weighted) in zip(whole.items(), sums.tolist(), strict=True):
        total = _number(once)
        replicas = math.prod(x.sharding.sizes[dim] for dim in _replicated_dims(x))
        if _number(weighted) != total * sum(map(_factor, range(replicas))) % _MODULUS:
            check_replicas(x)  # names the ranks
        found.append([name, x.dtype.name, x.shape, f"{total:032x}"])
    return hashlib.sha256(json.dumps(sorted(found)).encode()).hexdigest()


def announce_result(operation: str, x: DistArray) -> None:
    """Give a result of `operation` to functions that listen, and its fingerprint to traces, which is collective."""
    functions = [each for each in listeners() if not isinstance(each, Trace)]
    for listen in functions:
        listen(operation, x)
    if len(functions) == len(listeners()):
        return
    try:
        with untraced():
            found = fingerprint(x)
    except Exception as error:
        error.add_note(f"in the fingerprint of the result of {operation}, {current_phase()}")
        raise
    record_result(operation, x.dtype.name, x.shape, found)


def _named(arrays: Any) -> dict[str, Any]:
    if isinstance(arrays, Mapping):
        return dict(arrays)
    if isinstance(arrays, DistArray):
        arrays = [arrays]
    if not isinstance(arrays, Iterable) or getattr(arrays, "ndim", 1) == 0:
        raise TypeError(f"fingerprint takes distributed arrays, got {type(arrays).__name__}")
    return {str(index): x for index, x in enumerate(arrays)}


def _check(named: Mapping[str, Any], mesh: Mesh) -> None:
    for name, x in named.items():
        if not isinstance(x, DistArray):
            raise TypeError(f"fingerprint takes distributed arrays, but {name!r} is {x!r}")
        if x.mesh is not mesh:
            raise ValueError(f"fingerprint takes arrays on one mesh, but {name!r} is on another one")


def _replica(x: DistArray) -> int:
    """Return the number of the replica that this rank holds a part of."""
    number = 0
    for dim in _replicated_dims(x):
        number = number * x.sharding.sizes[dim] + x.mesh.coordinates[dim]
    return number


def _replicated_dims(x: DistArray) -> list[str]:
    return [dim for dim, placement in x.sharding.by_dim.items() if placement == Replicate()]


def _factor(replica: int) -> int:
    return int.from_bytes(hashlib.blake2b(b"%d" % replica, digest_size=16).digest()) | 1


def _sum_of_hashes(x: DistArray) -> int:
    """Return the sum modulo 2**128 of the hashes of the elements that this rank holds."""
    xp = array_namespace(x.local)
    flat = xp.ascontiguousarray(x.local).reshape(-1)
    low = high = 0
    for start, places in _places(x, xp):
        part = flat[start : start + places.size]
        bits = part.view(f"u{x.dtype.itemsize}").astype(np.uint64)
        element = xp.where(part == part, bits, _whole(_NAN, xp))
        for shift, salt in ((0, 0x243F6A8885A308D3), (64, 0x13198A2E03707344)):
            hashes = _mixed(element ^ _mixed(places ^ _whole(salt, xp)))
            low += int(to_host((hashes & 0xFFFFFFFF).sum())) << shift
            high += int(to_host((hashes >> 32).sum())) << (shift + 32)
    return (low + high) % _MODULUS


def _places(x: DistArray, xp: Any) -> Iterator[tuple[int, Array]]:
    """Yield, for blocks of this rank's elements, the first one's number and the places of all in the global array."""
    blocks = [x.sharding.block(axis, x.mesh.coordinates) for axis in range(x.ndim)]
    for start in range(0, x.local.size, _ELEMENTS):
        left = xp.arange(start, min(start + _ELEMENTS, x.local.size), dtype=np.uint64)
        places, stride = xp.zeros_like(left), 1
        for (first, stop), length in zip(reversed(blocks), reversed(x.shape), strict=True):
            left, within = xp.divmod(left, stop - first)
            places += (within + first) * stride
            stride *= length
        yield start, places


def _mixed(x: Array) -> Array:
    """Apply the finalizer of SplitMix64, a bijection of 64 bits."""
    xp = array_namespace(x)
    x = (x ^ (x >> 30)) * _whole(0xBF58476D1CE4E5B9, xp)
    x = (x ^ (x >> 27)) * _whole(0x94D049BB133111EB, xp)
    return x ^ (x >> 31)


def _whole(number: int, xp: Any) -> Array:
    """Return a number above int64, for which a Python int will not do, as an array without axes."""
    return xp.full((), number, np.uint64)


def _lanes(number: int) -> list[int]:
    """Return four lanes of 32 bits, lowest first: sums of 2**32 ranks fit 64."""
    return [number % _MODULUS >> shift & 0xFFFFFFFF for shift in range(0, 128, 32)]


def _number(lanes: list[int]) -> int:
    return sum(lane << 32 * index for index, lane in enumerate(lanes)) % _MODULUS

"""Comparison of replicas: ranks that should hold the same bits of an array may not do so."""

from __future__ import annotations

import hashlib

import numpy as np

from pce_mpi.arrays import to_host
from pce_mpi.comm.agreement import all_gather_text
from pce_mpi.comm.rank_texts import text_by_rank
from pce_mpi.distributed.array import DistArray
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

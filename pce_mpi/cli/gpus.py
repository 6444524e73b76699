"""Choose the GPU of a rank: only programs do that, never the package."""

from __future__ import annotations

from collections.abc import Sequence
import socket
from typing import TYPE_CHECKING

from pce_mpi.comm.agreement import all_gather_text
from pce_mpi.gpu import gpus, take_gpu

if TYPE_CHECKING:
    from mpi4py import MPI


def gpu_of(rank: int, hosts: Sequence[str], seen: int) -> int:
    """Number the ranks on each host, modulo the number of GPUs `seen` there; `hosts` are those of all ranks."""
    return hosts[:rank].count(hosts[rank]) % seen


def take_gpu_of_rank(comm: MPI.Intracomm | None) -> int:
    """Make the GPU of this rank CuPy's current device, and return its number.

    Collective over `comm`. Raises `RuntimeError` if CuPy sees no GPU.
    """
    host = socket.gethostname()
    hosts = [host] if comm is None else all_gather_text(host, comm, operation="take a GPU")
    number = gpu_of(0 if comm is None else comm.rank, hosts, len(gpus()))
    take_gpu(number)
    return number

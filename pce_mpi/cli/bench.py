"""bench: time the loss and its gradient beside the floor that the machine sets."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
import json
from pathlib import Path
import statistics
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np

from pce_mpi.arrays import compute_dtype_of
from pce_mpi.cli.progress import progress
from pce_mpi.comm.agreement import agree
from pce_mpi.comm.collectives import all_reduce
from pce_mpi.comm.tracing import Purpose, cause, trace
from pce_mpi.conformance.reports.tables import table
from pce_mpi.distributed.placements import shard_range
from pce_mpi.loss import (
    softmax_cross_entropy_backward,
    softmax_cross_entropy_forward,
    softmax_cross_entropy_value_and_grad,
)

if TYPE_CHECKING:
    from mpi4py import MPI

# The floors work in pieces of this many elements, which fit a second-level cache.
_PIECE = 2**17
_AGREEMENTS = 200


@dataclass(frozen=True)
class Measurement:
    """One function at one size; times are the slowest rank's median, counts are one rank's."""

    function: str
    classes: int
    seconds: float
    ns_per_element: float
    gigabytes_per_second: float
    times_floor: float
    peak_mebibytes: float
    payload_calls: int
    payload_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = """\
Each rank takes memory for about three arrays of rows x classes / ranks elements. Start it with mpiexec to measure that
number of ranks; for reproducible times, ranks times BLAS threads should not exceed the cores (OMP_NUM_THREADS).
Exit status: 0, or 2 if something that was asked for is not installed or is not there."""
    parser.add_argument("--rows", type=_positive, default=2048, metavar="R", help="rows of the logits")
    parser.add_argument(
        "--classes",
        type=_positive,
        nargs="+",
        default=[32000],
        metavar="C",
        help="classes of all shards together, one or more sizes",
    )
    parser.add_argument(
        "--dtype", choices=["float16", "bfloat16", "float32", "float64"], default="float32", help="of the logits"
    )
    parser.add_argument(
        "--repeat", type=_positive, default=7, metavar="N", help="timed repetitions, of which the median counts"
    )
    parser.add_argument("--json", action="store_true", help="print JSON rather than a table")
    parser.add_argument(
        "--plot", type=_picture, metavar="FILE.png", help="draw ns per element against classes (needs matplotlib)"
    )


def run(options: argparse.Namespace, comm: MPI.Intracomm | None) -> int:
    """Measure every size and show the results; return 2 if something that was asked for is not installed."""
    try:
        dtype = _dtype(options.dtype)
        if options.plot:
            import matplotlib  # noqa: F401  # fail before the measurements
    except ImportError as error:
        extra = "bf16" if error.name == "ml_dtypes" else "examples"
        print(f"{error}: pip install 'pce_mpi[{extra}]'")
        return 2
    size = 1 if comm is None else comm.size
    measured: list[Measurement] = []
    names = [f"{classes} classes" for classes in options.classes]
    for classes, _ in zip(options.classes, progress("bench", names, comm), strict=True):
        measured += _measure(options.rows, classes, dtype, options.repeat, comm)
    agreement = None if comm is None else _slowest(comm, _agreement_seconds(comm))
    if options.plot and (comm is None or comm.rank == 0):
        _plot(measured, options, size)
    if options.json:
        report = {
            "ranks": size,
            "rows": options.rows,
            "dtype": options.dtype,
            "agreement_seconds": agreement,
            "measurements": [asdict(one) for one in measured],
        }
        print(json.dumps(report, indent=1))
        return 0
    print(f"{size} rank{'s' * (size > 1)}, {options.rows} rows, {options.dtype}, median of {options.repeat}\n")
    head = ("classes", "function", "ms", "ns/element", "GB/s", "x floor", "peak MiB", "calls", "bytes sent")
    rows = [
        (
            one.classes,
            one.function,
            1e3 * one.seconds,
            one.ns_per_element,
            one.gigabytes_per_second,
            one.times_floor,
            f"{one.peak_mebibytes:.1f}",
            one.payload_calls,
            one.payload_bytes,
        )
        for one in measured
    ]
    print(table([head, *rows]))
    print(
        "\nns and GB/s: of one shard; the floor: one np.exp pass and the copies that cannot be avoided;"
        "\ncalls and bytes: payload; small sizes are mostly the cost of calling"
    )
    if agreement is not None:
        print(f"agreement: {1e6 * agreement:.1f} us a call")
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, got {text!r}")
    return int(text)


def _picture(text: str) -> Path:
    """Check before the measurements that a plot can be written to this file."""
    path = Path(text)
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise argparse.ArgumentTypeError(f"expected a name that ends in .png, .pdf or .svg, got {text!r}")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}")
    return path


def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _measure(
    rows: int, classes: int, dtype: np.dtype[Any], repeat: int, comm: MPI.Intracomm | None
) -> list[Measurement]:
    size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
    start, stop = shard_range(classes, size, rank)
    rng = np.random.default_rng(rank)
    logits = rng.standard_normal((rows, stop - start), np.float32).astype(dtype)
    targets = np.random.default_rng(size).integers(0, classes, rows)
    out = np.zeros_like(logits)
    _, residuals = softmax_cross_entropy_forward(logits, targets, comm=comm)
    floors = _Floors(logits, out)
    # (name, call, floor, how often the shard's bytes must pass)
    functions: list[tuple[str, Callable[[], object], Callable[[], object], int]] = [
        (
            "forward",
            lambda: softmax_cross_entropy_forward(logits, targets, comm=comm),
            floors.read_exp,
            1,
        ),
        ("backward", lambda: softmax_cross_entropy_backward(1.0, residuals, out=out), floors.exp_to_out, 2),
        (
            "value_and_grad",
            lambda: softmax_cross_entropy_value_and_grad(logits, targets, comm=comm, out=out),
            floors.exp_to_out_and_rescale,
            4,
        ),
    ]
    measured = []
    for name, call, floor, passes in functions:
        times: dict[Callable[[], object], list[float]] = {call: [], floor: []}
        for repetition in range(repeat + 1):
            for work, seconds in times.items():
                elapsed = _seconds(work, comm)
                if repetition:  # the first one warms up
                    seconds.append(elapsed)
        taken, least = (_slowest(comm, statistics.median(times[work])) for work in (call, floor))
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
                times_floor=taken / least,
                peak_mebibytes=peak / 2**20,
                payload_calls=sent.count(purpose=Purpose.PAYLOAD),
                payload_bytes=sent.bytes(purpose=Purpose.PAYLOAD),
            )
        )
    return measured


class _Floors:
    """The least work of each function: np.exp and the unavoidable copies, on the same arrays."""

    def __init__(self, logits: Any, out: Any):
        self._logits, self._out = logits.reshape(-1), out.reshape(-1)
        self._compute = compute_dtype_of(logits.dtype)
        self._scratch = np.empty(_PIECE, self._compute)

    def read_exp(self) -> None:
        """Read the logits and write their exponentials to cache."""
        for first in range(0, self._logits.size, _PIECE):
            self._exp(self._logits[first : first + _PIECE])

    def exp_to_out(self) -> None:
        """Read the logits and write their exponentials to memory."""
        for first in range(0, self._logits.size, _PIECE):
            self._out[first : first + _PIECE] = self._exp(self._logits[first : first + _PIECE])

    def exp_to_out_and_rescale(self) -> None:
        """Write the exponentials, then scale them: the factors are known only once all ranks have answered."""
        self.exp_to_out()
        np.multiply(self._out, self._out.dtype.type(0.5), out=self._out)

    def _exp(self, piece: Any) -> Any:
        scratch = self._scratch[: piece.size]
        if piece.dtype == self._compute:
            return np.exp(piece, out=scratch)
        scratch[...] = piece
        return np.exp(scratch, out=scratch)


def _seconds(work: Callable[[], object], comm: MPI.Intracomm | None) -> float:
    if comm is not None:
        agree(comm, "bench", {})  # all ranks start together
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _agreement_seconds(comm: MPI.Intracomm) -> float:
    agree(comm, "bench", {})
    times = []
    for _ in range(_AGREEMENTS):
        start = time.perf_counter()
        agree(comm, "bench", {})
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _slowest(comm: MPI.Intracomm | None, seconds: float) -> float:
    if comm is None:
        return seconds
    with cause("bench", reason="the slowest rank's time"):
        return float(all_reduce(np.array(seconds), comm, "max"))


def _plot(measured: list[Measurement], options: argparse.Namespace, size: int) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for function in dict.fromkeys(one.function for one in measured):
        points = sorted((one for one in measured if one.function == function), key=lambda one: one.classes)
        x = [one.classes for one in points]
        (line,) = axes.plot(x, [one.ns_per_element for one in points], "o-", linewidth=2, label=function)
        floor = [one.ns_per_element / one.times_floor for one in points]
        axes.plot(x, floor, "v:", linewidth=2, color=line.get_color(), alpha=0.6, label=f"floor of {function}")
    axes.set(
        xlabel="classes of all shards together",
        ylabel="time (ns per element of a shard)",
        title=f"Loss and gradient: {size} rank{'s' * (size > 1)}, {options.rows:,} rows, {options.dtype}, "
        f"median of {options.repeat}",
        ylim=(0, None),
    )
    if len(options.classes) > 1:
        axes.set_xscale("log")
    axes.set_xticks(options.classes, [f"{classes:,}" for classes in options.classes], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(options.plot, dpi=150)

"""bench: time the loss and its gradient, with any options, beside a copy of the same bytes."""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
import json
import os
import statistics
import sys
import time
import tracemalloc
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np

from pce_mpi import loss
from pce_mpi.arrays import dtype_named
from pce_mpi.cli.arguments import mesh_sizes, positive
from pce_mpi.cli.output import Comm, progress
from pce_mpi.comm.agreement import agree, local_checks
from pce_mpi.comm.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from pce_mpi.comm.rehearsed import Link
from pce_mpi.comm.tracing import Purpose, cause, trace
from pce_mpi.distributed.mesh import Mesh
from pce_mpi.distributed.placements import shard_range
from pce_mpi.kernels import kernel_text
from pce_mpi.loss.options import CrossEntropyOptions, Options, checked_numbers
from pce_mpi.text import Cell, table

Array = np.ndarray[Any, Any]

_AGREEMENTS = 200

# The options of the loss that are real numbers.
_REAL = [name for name, kind in get_type_hints(CrossEntropyOptions).items() if float in (kind, *get_args(kind))]
# The calls that `--options` times; a value that is a string names an array.
_EACH: list[dict[str, Any]] = [
    {"z_loss": 1e-4},
    {"weight": "random"},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.1, "weight": "random"},
    {"logit_scale": 0.5},
    {"logit_scale": 0.7},  # no float32
    {"softcap": 30.0},
    {"margin": (1.0, 0.5, 0.0)},
    {"targets": "probabilities"},
]


# One function at one size; times are the slowest rank's median, counts are one rank's.
Measurement = dict[str, Any]


class _Work(NamedTuple):
    function: str
    options: str
    call: Callable[[], object]
    passes: int  # the number of times that the bytes of the shard must pass


# The head and the cells of each column of the table.
_COLUMNS: dict[str, Callable[[Measurement], Cell]] = {
    "classes": lambda one: one["classes"],
    "function": lambda one: one["function"],
    "options": lambda one: one["options"],
    "ms": lambda one: 1e3 * one["seconds"],
    "ns/element": lambda one: one["ns_per_element"],
    "GB/s": lambda one: one["gigabytes_per_second"],
    "x copy": lambda one: one["times_copy"],
    "x plain": lambda one: one["times_plain"],
    "peak MiB": lambda one: f"{one['peak_mebibytes']:.1f}",
    "calls": lambda one: one["payload_calls"],
    "bytes sent": lambda one: one["payload_bytes"],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
Each rank takes memory for about three arrays of rows x classes / ranks elements, or four with --options. Start it with
mpiexec to measure that number of ranks; for reproducible times, ranks times BLAS threads should not exceed the cores
(OMP_NUM_THREADS). The plain loss, which has no options, is always measured too.
Exit status: 0; 1 if the arrays do not fit the memory; 2 if something that was asked for is not installed, or if an
option of the loss is out of its range."""
    add = parser.add_argument
    add("--rows", type=positive, default=2048, metavar="R", help="rows of the logits")
    sizes = "classes of all shards together, one or more sizes"
    add("--classes", type=positive, nargs="+", default=[32000], metavar="C", help=sizes)
    add("--dtype", choices=["float16", "bfloat16", "float32", "float64"], default="float32", help="of the logits")
    add("--repeat", type=positive, default=7, metavar="N", help="timed repetitions, of which the median counts")
    for name in _REAL:
        option = f"--{name.replace('_', '-')}"
        add(option, type=float, default=getattr(Options, name), metavar="X", help="option of the loss")
    add("--weight", action="store_const", const="random", help="random weights of the classes")
    add("--beta", type=float, metavar="X", help="time the divergence too, with this weight of the teacher in the mean")
    add("--options", action="store_true", help="time each option by itself too, and the other functions of logits")
    collectives = "measure latency and bandwidth of collectives along each dim of --mesh instead, for `rehearse --link`"
    add("--collectives", action="store_true", help=collectives)
    add("--mesh", type=mesh_sizes, metavar="DIM=N,...", help="with --collectives: dims, such as data=2,model=2")
    add("--json", action="store_true", help="print JSON rather than a table")


def run(options: argparse.Namespace, comm: Comm) -> int:
    """Measure every size and show the results; return 1 if that fails, 2 if it cannot be measured as asked."""
    if options.collectives and options.options:
        print("error: --collectives times no loss, and --options says which: give one of them", file=sys.stderr)
        return 2
    if options.collectives:
        return _run_links(options, comm)
    if options.mesh:
        print("error: --mesh is that of --collectives, which is missing", file=sys.stderr)
        return 2
    given = {name: getattr(options, name) for name in (*_REAL, "weight")}
    chosen = {name: value for name, value in given.items() if value != getattr(Options, name)}
    try:
        dtype = dtype_named(options.dtype)
        beta = {} if options.beta is None else {"beta": options.beta}
        checked_numbers(Options(operation="bench", **chosen, **beta), 2, np.dtype(dtype))
    except ImportError as error:
        print(f"{error}: pip install 'pce_mpi[bf16]'")
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sets = [{}, *([chosen] if chosen else []), *(_EACH if options.options else [])]
    size = 1 if comm is None else comm.size
    measured: list[Measurement] = []
    names = [f"{classes} classes" for classes in options.classes]
    try:
        for classes, _ in zip(options.classes, progress("bench", names, comm), strict=True):
            measured += _measure(options, classes, dtype, sets, comm)
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
            "measurements": measured,
        }
        print(json.dumps(report, indent=1))
        return
    print(f"{size} rank{'s' * (size > 1)}, {options.rows} rows, {options.dtype}, median of {options.repeat}")
    print(f"kernel: {kernel_text()}\n")
    print(table([list(_COLUMNS), *([cell(one) for cell in _COLUMNS.values()] for one in measured)]))
    print(
        "\nns and GB/s: of one shard; x copy: beside a copy of the logits to where the gradient goes;"
        "\nx plain: beside value_and_grad without options; calls and bytes: payload;"
        "\nsmall sizes are mostly the cost of calling"
    )
    if agreement is not None:
        print(f"agreement: {1e6 * agreement:.1f} us a call")


def _measure(
    options: argparse.Namespace, classes: int, dtype: np.dtype[Any], sets: list[dict[str, Any]], comm: Comm
) -> list[Measurement]:
    size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
    arrays: Any = None
    with local_checks() as checks:
        arrays = _arrays(options, classes, dtype, size, rank)
    if comm is not None:
        agree(comm, "bench", {}, error=checks.error)
    elif checks.error is not None:
        raise checks.error
    works = [work for each in sets for work in _losses(arrays, each, comm)]
    if options.beta is not None:
        works += _divergence(arrays, options.beta, comm)
    if options.options:
        works += _others(arrays, min(10, classes), comm)
    copy = partial(np.copyto, arrays["out"], arrays["logits"])
    calls: list[Callable[[], object]] = [copy, *(work.call for work in works)]
    times: list[list[float]] = [[] for _ in calls]
    for repetition in range(options.repeat + 1):
        for call, seconds in zip(calls, times, strict=True):
            elapsed = _seconds(call, comm)
            if repetition:  # the first one warms up
                seconds.append(elapsed)
    of_copy, *of_works = (_slowest(comm, statistics.median(seconds)) for seconds in times)
    of_plain = next(taken for work, taken in zip(works, of_works, strict=True) if work.function == "value_and_grad")
    measured = []
    for work, taken in zip(works, of_works, strict=True):
        with trace() as sent:
            tracemalloc.start()
            work.call()
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        elements = max(1, options.rows * -(-classes // size))
        measured.append(
            {
                "function": work.function,
                "options": work.options,
                "classes": classes,
                "seconds": taken,
                "ns_per_element": 1e9 * taken / elements,
                "gigabytes_per_second": 1e-9 * work.passes * elements * dtype.itemsize / taken,
                "times_copy": taken / of_copy,
                "times_plain": taken / of_plain,
                "peak_mebibytes": peak / 2**20,
                "payload_calls": sent.count(purpose=Purpose.PAYLOAD),
                "payload_bytes": sent.bytes(purpose=Purpose.PAYLOAD),
            }
        )
    return measured


def _losses(arrays: dict[str, Array], options: dict[str, Any], comm: Comm) -> Iterator[_Work]:
    """Yield the functions of the loss with these options; the plain loss comes first."""
    logits, out = arrays["logits"], arrays["out"]
    given = {"targets": "targets", **options}
    given = {name: arrays[value] if isinstance(value, str) else value for name, value in given.items()}
    text = ", ".join(f"{name}={value}" for name, value in options.items())
    _, residuals = loss.softmax_cross_entropy_forward(logits, comm=comm, **given)
    reads = 2 if "targets" in options else 1
    yield _Work("forward", text, lambda: loss.softmax_cross_entropy_forward(logits, comm=comm, **given), reads)
    yield _Work("backward", text, lambda: loss.softmax_cross_entropy_backward(1.0, residuals, out=out), reads + 1)
    both = partial(loss.softmax_cross_entropy_value_and_grad, logits, comm=comm, out=out, **given)
    yield _Work("value_and_grad", text, both, 2 * reads + 1)


def _divergence(arrays: dict[str, Array], beta: float, comm: Comm) -> Iterator[_Work]:
    """Yield the functions of the divergence from a teacher, which has the rows in another order."""
    pair, text = (arrays["logits"], arrays["logits"][::-1]), f"beta={beta}"
    given: dict[str, Any] = {"direction": "jensen-shannon", "beta": beta, "comm": comm}
    yield _Work("kl_divergence", text, partial(loss.kl_divergence, *pair, **given), 4)
    both = partial(loss.kl_divergence_value_and_grad, *pair, **given, out=arrays["out"])
    yield _Work("kl_divergence_value_and_grad", text, both, 7)


def _others(arrays: dict[str, Array], k: int, comm: Comm) -> Iterator[_Work]:
    """Yield the other functions of logits."""
    logits, targets, out = (arrays[name] for name in ("logits", "targets", "out"))
    _, residuals = loss.class_statistics_forward(logits, targets, comm=comm)
    upstream = np.ones(len(logits))
    back = partial(loss.class_statistics_backward, residuals, log_prob=upstream, entropy=upstream, out=out)
    yield _Work("class_statistics", "", lambda: loss.class_statistics_forward(logits, targets, comm=comm), 1)
    yield _Work("class_statistics_backward", "", back, 2)
    yield _Work(f"top_k of {k}", "", lambda: loss.top_k(logits, k, comm=comm), 1)
    yield _Work("argmax", "", lambda: loss.argmax(logits, comm=comm), 1)


def _arrays(options: argparse.Namespace, classes: int, dtype: np.dtype[Any], size: int, rank: int) -> dict[str, Array]:
    """Return the arrays of this rank by name; `MemoryError` before the machine has no memory left."""
    rows, shards = options.rows, 4 if options.options else 3
    start, stop = shard_range(classes, size, rank)
    needed = shards * rows * (stop - start) * dtype.itemsize + 8 * (rows + stop - start)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    too_large = f"--rows {rows} and --classes {classes} take {needed / 2**30:,.1f} GiB on each rank"
    if needed > there:
        raise MemoryError(f"{too_large}; this machine has {there / 2**30:,.1f} GiB")
    try:
        logits = np.random.default_rng(rank).standard_normal((rows, stop - start), np.float32).astype(dtype)
        arrays = {
            "logits": logits,
            "targets": np.random.default_rng(size).integers(0, classes, rows),
            "out": np.zeros_like(logits),
            "random": np.random.default_rng(rank).random(stop - start),
        }
        if options.options:
            arrays["probabilities"] = np.full_like(logits, 1 / classes)
        return arrays
    except MemoryError:
        raise MemoryError(f"{too_large}, which cannot be had") from None


def _seconds(work: Callable[[], object], comm: Comm) -> float:
    if comm is not None:
        agree(comm, "bench", {})  # all ranks start together
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _slowest(comm: Comm, seconds: float) -> float:
    if comm is None:
        return seconds
    with cause("bench", reason="the slowest rank's time"):
        return float(all_reduce(np.array(seconds), comm, "max"))


# Elements of 4 bytes from each rank: few, of which latency is all, and many.
_FEW, _MANY = 16, 2**22
# A step has many collectives one after the other, so one of many is timed.
_CALLS = 100


def _run_links(options: argparse.Namespace, comm: Comm) -> int:
    """Measure and print the links of the dims with several ranks; return 2 if there is no such mesh."""
    try:
        if comm is None:
            raise ValueError("collectives need MPI")
        mesh = Mesh(comm, **(options.mesh or {"ranks": comm.size}))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    links = {dim: measured_link(mesh.comm(dim), options.repeat) for dim, size in mesh.dims.items() if size > 1}
    if options.json:
        print(json.dumps({"mesh": dict(mesh.dims), "links": {dim: link._asdict() for dim, link in links.items()}}))
        return 0
    rows = [(dim, mesh.dims[dim], 1e6 * link.latency, 1e-9 * link.bandwidth) for dim, link in links.items()]
    print(table([("dim", "ranks", "us", "GB/s"), *rows]))
    text = " ".join(f"--link {dim}={link.latency:.3g},{link.bandwidth:.3g}" for dim, link in links.items())
    print(f"\nfor `rehearse`: {text}")
    return 0


def measured_link(comm: Any, repeat: int) -> Link:
    """Return the link of the ranks of `comm`, the same on each of them: medians over `repeat` times."""
    few, many = np.ones(_FEW, np.float32), np.ones(_MANY, np.float32)
    latency = _seconds_of_one(comm, lambda: all_reduce(few, comm, "sum"), _CALLS, repeat)
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
    seconds = sum(_seconds_of_one(comm, call, 1, repeat) for call in calls) - len(calls) * latency
    return Link(latency, in_all / max(seconds, 1e-9))


def _seconds_of_one(comm: Any, call: Callable[[], object], calls: int, repeat: int) -> float:
    """Return the time of one of `calls` calls that follow each other, on the slowest rank."""

    def work() -> None:
        with cause("bench"):
            for _ in range(calls):
                call()

    times = [_seconds(work, comm) / calls for _ in range(repeat + 1)]
    return _slowest(comm, statistics.median(times[1:]))  # the first one warms up

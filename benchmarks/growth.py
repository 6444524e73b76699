"""Fit how the time of the loss grows with rows, classes and ranks, and predict sizes that the fit has not seen.

    python benchmarks/growth.py --plot docs/growth.svg

The program starts the ranks itself and pins each to a core, which Linux alone can. Where there are more ranks than
cores, m of them share one, which does the work of all m. While one of them works, each of the others waits for it: it
looks again and again whether the results of others have come, and sleeps after so many looks. So the time of a call on
P ranks is

    m (a + b rows + c rows classes / P + d rows log2(P) + e (m - 1))

The fit has the least squares of relative errors, over the least times, as other work on the machine only adds to them.
The exit status is 1 if a prediction is off by more than 15 %. c is one number only as long as gradients are written
past the caches on each number of ranks, or on none: this begins at shards of 4 MiB with rows of 8 KiB. The sizes take
2 GiB of memory.

Bytes are those that a rank puts into collectives: ours as the trace counts them, its shard where logits are gathered,
and three float32 numbers a row in the three all-reduces of Megatron-LM.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import itertools
import json
from math import isqrt
import os
import subprocess
import sys
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import pce_mpi as pce
from pce_mpi.cli.arguments import positive, writable_file
from pce_mpi.cli.output import progress
from pce_mpi.comm.launcher import why_apart
from pce_mpi.jobs.mpiexec import mpiexec, number_of_cores, settings
from pce_mpi.kernels import kernel_text
from pce_mpi.loss.options import LossOptions
from pce_mpi.svg import new_figure
from pce_mpi.text import Cell, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALLOWED = 0.15
CALLS = 3  # in a row: ranks that leave a barrier at different times count less
SCHEMES = ("ours", "Megatron-LM", "gathered logits")


class Size(NamedTuple):
    """A size of the logits, on a number of ranks."""

    ranks: int
    rows: int
    classes: int


class Measured(NamedTuple):
    """Seconds of a call, by function, and the bytes that a rank puts in."""

    seconds: dict[str, float]
    sent: int


def features(size: Size) -> np.ndarray[Any, Any]:
    """Return what each of the coefficients a to e is multiplied by."""
    ranks, rows, classes = size
    m = -(-ranks // number_of_cores())
    return m * np.array([1.0, rows, rows * classes / ranks, rows * np.log2(ranks), m - 1])


class Model(NamedTuple):
    """The coefficients of the time, a to e."""

    coefficients: np.ndarray[Any, Any]

    def seconds(self, size: Size) -> float:
        """Predict the time of a call."""
        return float(features(size) @ self.coefficients)


def fitted(seconds: dict[Size, float]) -> Model:
    """Return the model with the least squares of relative errors, of those without a negative coefficient."""
    relative = np.array([features(size) / taken for size, taken in seconds.items()])
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1  # log2(1)

    def with_some(some: list[bool]) -> tuple[float, np.ndarray[Any, Any]]:
        found = np.zeros(len(some))
        found[some] = np.linalg.lstsq((relative / scale)[:, some], np.ones(len(relative)), rcond=None)[0]
        error = float(np.square(relative / scale @ found - 1).sum())
        return error if (found >= 0).all() else np.inf, found / scale

    choices = [list(some) for some in itertools.product([False, True], repeat=5)]
    return Model(min(map(with_some, choices), key=lambda each: each[0])[1])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--ranks", type=positive, nargs="+", default=[1, 2, 4, 8, 16], help="one job for each")
    parser.add_argument("--rows", type=positive, nargs="+", default=[512, 2048], help="of the sizes of the fit")
    parser.add_argument(
        "--classes", type=positive, nargs="+", default=[32768, 131072], help="of these sizes, and of all shards"
    )
    parser.add_argument(
        "--repeat", type=positive, default=7, help=f"blocks of {CALLS} calls, of which the least counts"
    )
    parser.add_argument("--plot", type=writable_file, metavar="FILE", help="draw the picture, with matplotlib")
    parser.add_argument("--pin", type=int, nargs="+", help=argparse.SUPPRESS)  # cores; given to the ranks alone
    options = parser.parse_args()
    seen = [(rows, classes) for rows in options.rows for classes in options.classes]
    between = tuple(isqrt(min(each) * max(each)) for each in (options.rows, options.classes))
    unseen = [between, (2 * max(options.rows), max(options.classes) // 2)]
    if options.pin:
        measure([*seen, *unseen], options)
        return 0
    figure = new_figure(10, 4) if options.plot else None  # fails before the measurements
    found: dict[Size, Measured] = {}
    for ranks, _ in zip(options.ranks, progress("growth", [f"{n} ranks" for n in options.ranks], None), strict=True):
        found |= launched(ranks)
    models = {
        name: fitted({size: one.seconds[name] for size, one in found.items() if size[1:] in seen})
        for name in next(iter(found.values())).seconds
    }
    off = report(found, models, unseen, options.repeat)
    if figure is not None:
        draw(figure, found, models["value_and_grad"], unseen)
        figure.savefig(options.plot)
    return int(off)


def report(found: dict[Size, Measured], models: dict[str, Model], unseen: Sequence[Any], repeat: int) -> bool:
    """Print the models, predictions and bytes; return True if a prediction is off."""
    print(f"{number_of_cores()} cores; kernel: {kernel_text()}; least of {repeat}\n")
    lines: list[Sequence[Cell]] = []
    off, worst = False, dict.fromkeys(models, 0.0)
    for name, model in models.items():
        for size, one in found.items():
            ratio = one.seconds[name] / model.seconds(size)
            if size[1:] in unseen:
                is_off = abs(ratio - 1) > ALLOWED
                lines.append((name, *size, 1e3 * one.seconds[name], ratio, "OFF" if is_off else ""))
                off |= is_off
            else:
                worst[name] = max(worst[name], abs(ratio - 1))
    coefficients = [
        (name, *(model.coefficients * [1e6, 1e9, 1e9, 1e9, 1e6]), 100 * worst[name]) for name, model in models.items()
    ]
    print(table([("of the fit", "a, us", "b, ns", "c, ns", "d, ns", "e, us", "worst error, %"), *coefficients]))
    print(f"\n{table([('predicted', *Size._fields, 'ms', 'measured / predicted', ''), *lines])}")
    sent = [(*size, *bytes_put_in(size, one.sent)) for size, one in found.items() if size[1:] in unseen]
    print(f"\n{table([(*Size._fields, *(f'{scheme}, bytes' for scheme in SCHEMES)), *sent])}")
    return off


def bytes_put_in(size: Size, ours: int) -> tuple[int, int, int]:
    """Return the bytes of each of the `SCHEMES` for float32."""
    return ours, 3 * 4 * size.rows, 4 * size.rows * -(-size.classes // size.ranks)


def launched(ranks: int) -> dict[Size, Measured]:
    """Measure all sizes on so many ranks."""
    cores = map(str, sorted(os.sched_getaffinity(0)))
    command = [*mpiexec(), "-n", str(ranks), sys.executable, "-m", "mpi4py", *sys.argv, "--ranks", str(ranks)]
    environment = os.environ | settings(max(ranks, number_of_cores()))  # one thread a rank
    done = subprocess.run([*command, "--pin", *cores], env=environment, check=True, text=True, stdout=subprocess.PIPE)
    lines = map(json.loads, done.stdout.splitlines())
    return {Size(ranks, rows, classes): Measured(seconds, sent) for rows, classes, seconds, sent in lines}


def measure(sizes: list[tuple[int, ...]], options: argparse.Namespace) -> None:
    """Time calls on the ranks of this job; rank 0 prints each size in a line."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if apart := why_apart(comm, options.ranks[0]):
        sys.exit(f"error: {apart}")
    os.sched_setaffinity(0, {options.pin[comm.rank % len(options.pin)]})
    most = max(rows * -(-classes // comm.size) for rows, classes in sizes)
    memory, place = np.random.default_rng(comm.rank).standard_normal(most, np.float32), np.zeros(most, np.float32)

    def calls_of(rows: int, classes: int) -> dict[str, Any]:
        start, stop = pce.shard_range(classes, comm.size, comm.rank)
        logits, out = (each[: rows * (stop - start)].reshape(rows, -1) for each in (memory, place))
        targets = np.random.default_rng(0).integers(0, classes, rows)
        given: LossOptions = {"comm": comm, "num_classes": classes}
        return {
            "forward": lambda: pce.softmax_cross_entropy_forward(logits, targets, **given),
            "value_and_grad": lambda: pce.softmax_cross_entropy_value_and_grad(logits, targets, out=out, **given),
        }

    calls = {size: calls_of(*size) for size in sizes}
    blocks: dict[Any, list[float]] = {(size, name): [] for size in sizes for name in calls[size]}
    for block in range(options.repeat + 1):
        for (size, name), taken in blocks.items():
            comm.Barrier()
            begin = perf_counter()
            for _ in range(CALLS):
                calls[size][name]()
            slowest = comm.allreduce((perf_counter() - begin) / CALLS, MPI.MAX)
            if block:  # the first one warms up
                taken.append(slowest)
    for size in sizes:
        with pce.trace() as trace:
            calls[size]["value_and_grad"]()
        seconds = {name: min(blocks[size, name]) for name in calls[size]}
        if comm.rank == 0:
            print(json.dumps([*size, seconds, trace.bytes()]), flush=True)


def draw(figure: Figure, found: dict[Size, Measured], model: Model, unseen: Sequence[Any]) -> None:
    """Draw times with the model, and bytes, over the number of ranks."""
    times, sent = figure.subplots(1, 2)
    ranks = sorted({size.ranks for size in found})
    for number, (rows, classes) in enumerate(dict.fromkeys(size[1:] for size in found)):
        sizes = [Size(n, rows, classes) for n in ranks]
        line, marks, note = ("--", "s", ", predicted") if (rows, classes) in unseen else ("-", "o", "")
        times.plot(ranks, [1e3 * model.seconds(size) for size in sizes], line, color=f"C{number}", linewidth=1)
        measured = [1e3 * found[size].seconds["value_and_grad"] for size in sizes]
        times.plot(ranks, measured, marks, color=f"C{number}", label=f"{rows:,} x {classes:,}{note}", markersize=4)
    times.set(title=f"Loss and gradient on {number_of_cores()} cores", ylabel="ms a call; lines: the model")
    rows, classes = unseen[-1]
    sizes = [Size(n, rows, classes) for n in ranks]
    put_in = zip(*(bytes_put_in(size, found[size].sent) for size in sizes), strict=True)
    for scheme, each in zip(SCHEMES, put_in, strict=True):
        sent.plot(ranks, each, "o-", label=scheme, markersize=4, linewidth=1)
    sent.set(title=f"{rows:,} rows x {classes:,} classes", ylabel="bytes that a rank puts into collectives")
    for axes in (times, sent):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlabel="ranks", xticks=ranks, xticklabels=ranks)
        axes.legend(fontsize=7)


if __name__ == "__main__":
    sys.exit(main())

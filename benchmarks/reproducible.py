"""Compare a training step and matrix products inside `reproducible` with the same outside, the two taking turns.

    mpiexec -n 2 python -m mpi4py benchmarks/reproducible.py

The model is that of examples/transformer.py. Figures are those of rank 0: medians of milliseconds of processor time,
which other programs change little, the bytes that it puts into collectives in a step, and the most memory that Python
holds during a step beyond what it held before.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
import statistics
import sys
import time
import tracemalloc
from typing import Any

from mpi4py import MPI
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import pce_mpi as pce
from pce_mpi.cli.arguments import positive
from pce_mpi.exact.products import product
from pce_mpi.text import table
from transformer import GPT, step

COMM = MPI.COMM_WORLD
Array = np.ndarray[Any, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, default, what in (
        ("layers", 2, "layers"),
        ("heads", 8, "attention heads"),
        ("width", 256, "length of the vector of a token"),
        ("length", 32, "tokens of a sequence"),
        ("classes", 500, "tokens of the vocabulary"),
        ("batch", 16, "sequences of a step"),
        ("model", 1, "ranks that share heads, hidden units and classes; the others share the batch"),
        ("repeat", 15, "timed repetitions"),
    ):
        parser.add_argument(f"--{name}", type=positive, default=default, help=what)
    parser.set_defaults(seed=0, rate=0.01, decay=0.1, max_norm=1.0, steps=1000, sequence_parallel=False)
    args = parser.parse_args()
    lines = [("", "inside", "outside", "ratio"), *steps(args)]
    if COMM.rank == 0:
        rows, width = args.batch * args.length, args.width
        shapes = [(rows, width, 4 * width), (rows, 4 * width, width), (width, rows, 4 * width)]
        lines += [line for shape in shapes for line in products(*shape, args.repeat)]
        size = f"width {width}, {args.layers} layers, {args.batch} x {args.length} tokens, {args.classes} classes"
        print(f"{COMM.size} ranks, {size}, median of {args.repeat}\n")
        print(table(lines))


def steps(args: argparse.Namespace) -> list[tuple[Any, ...]]:
    rng = np.random.default_rng(1)
    rows = rng.integers(0, args.classes, (1000, args.length + 1))
    mesh = pce.Mesh(COMM, data=COMM.size // args.model, context=1, model=args.model)
    models = [GPT(mesh, np.full(args.classes, -np.log(args.classes)), args) for _ in range(2)]
    taken = iter(range(1, 10**6))

    def run(model: GPT, inside: bool) -> None:
        with pce.reproducible(inside):
            step(model, rows, next(taken), args)

    inside, outside = (
        lambda model=model, on=on: run(model, on) for model, on in zip(models, (True, False), strict=True)
    )
    found = [compared("a step, ms", inside, outside, args.repeat, COMM)]
    sent, held = zip(*map(cost, (inside, outside)), strict=True)
    found.append(("bytes sent in it", *sent, sent[0] / sent[1] if sent[1] else float("nan")))
    found.append(("memory of it, MB", *(each / 1e6 for each in held), held[0] / held[1]))
    return found


def cost(call: Callable[[], None]) -> tuple[int, int]:
    """The bytes sent and the memory taken by a call."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    with pce.trace() as trace:
        call()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return trace.bytes(), most - before


def products(m: int, k: int, n: int, repeat: int) -> list[tuple[Any, ...]]:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    exact = a.astype(np.longdouble) @ b.astype(np.longdouble) if m * k * n < 1e7 else a.astype(float) @ b.astype(float)
    scale = np.abs(a).astype(float) @ np.abs(b).astype(float) * 2.0**-24
    errors = [float(np.max(np.abs(found - exact) / scale)) for found in (product(a, b, k), a @ b)]
    what = f"{m} x {k} by {k} x {n}"
    return [
        compared(f"{what}, ms", lambda: product(a, b, k), lambda: a @ b, repeat, MPI.COMM_SELF),
        (f"{what}, error / (2^-24 |a| |b|)", *errors, errors[0] / errors[1]),
    ]


def compared(
    what: str, inside: Callable[[], object], outside: Callable[[], object], repeat: int, comm: MPI.Intracomm
) -> tuple[Any, ...]:
    pairs = [(seconds(inside, comm), seconds(outside, comm)) for _ in range(repeat + 2)][2:]  # the first ones warm up
    ours, plain = (1e3 * statistics.median(each) for each in zip(*pairs, strict=True))
    return what, ours, plain, statistics.median(a / b for a, b in pairs)


def seconds(call: Callable[[], object], comm: MPI.Intracomm) -> float:
    comm.Barrier()
    start = time.process_time()
    call()
    taken = time.process_time() - start
    comm.Barrier()
    return taken


if __name__ == "__main__":
    main()

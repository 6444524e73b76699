"""Time each option of the loss, and what else is computed of the logits, beside the plain loss and gradient.

    mpiexec -n 2 python -m mpi4py benchmarks/options.py

The classes are sharded over the ranks. The calls take turns; each figure is the median, the slowest rank's, in parts of
the plain `softmax_cross_entropy_value_and_grad`. Gradients go to memory that is there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter
from typing import Any

from mpi4py import MPI
import numpy as np

import pce_mpi as pce
from pce_mpi.cli.arguments import positive

COMM = MPI.COMM_WORLD
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "z_loss": {"z_loss": 1e-4},
    "logit_scale 0.5": {"logit_scale": 0.5},
    "logit_scale 0.7": {"logit_scale": 0.7},
    "label_smoothing": {"label_smoothing": 0.1},
    "softcap 30": {"softcap": 30.0},
}


def calls_of(rows: int, classes: int, dtype: Any) -> dict[str, Callable[[], Any]]:
    """Return what is timed, by name, with this rank's shard of random logits."""
    rng = np.random.default_rng(0)
    start, stop = pce.shard_range(classes, COMM.size, COMM.rank)
    logits = np.random.default_rng(COMM.rank + 1).normal(0.0, 3.0, (rows, stop - start)).astype(dtype)
    targets, weight = rng.integers(0, classes, rows), rng.random(classes)[start:stop]
    probabilities = np.abs(logits) / np.asarray(classes, dtype)
    out, upstream = np.empty_like(logits), np.ones(rows)

    def loss(given: Any = targets, **options: Any) -> Callable[[], Any]:
        return lambda: pce.softmax_cross_entropy_value_and_grad(logits, given, comm=COMM, out=out, **options)

    def statistics(**gradients: Any) -> None:
        _, residuals = pce.class_statistics_forward(logits, targets, comm=COMM)
        if gradients:
            pce.class_statistics_backward(residuals, out=out, **gradients)

    return {
        **{name: loss(**options) for name, options in OPTIONS.items()},
        "weight": loss(weight=weight),
        "label_smoothing and weight": loss(label_smoothing=0.1, weight=weight),
        "probabilities as targets": loss(probabilities),
        "loss alone": lambda: pce.softmax_cross_entropy(logits, targets, comm=COMM),
        "class_statistics": statistics,
        "class_statistics, then its gradient": lambda: statistics(log_prob=upstream, entropy=upstream),
        "top_k of 10": lambda: pce.top_k(logits, 10, comm=COMM),
        "argmax": lambda: pce.argmax(logits, comm=COMM),
        "a copy of the logits": lambda: np.copyto(out, logits),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=positive, default=2048, help="2048 unless given")
    parser.add_argument("--classes", type=positive, default=32000, help="of all shards together; 32000 unless given")
    parser.add_argument("--dtype", default=["float32"], nargs="+", help="of the logits; float32 unless given")
    parser.add_argument("--repeat", type=positive, default=7, help="7 unless given")
    chosen = parser.parse_args()
    medians: dict[str, list[float]] = {}
    for name in chosen.dtype:
        if name == "bfloat16":
            import ml_dtypes

            dtype: Any = ml_dtypes.bfloat16
        else:
            dtype = np.dtype(name)
        calls = calls_of(chosen.rows, chosen.classes, dtype)
        seconds: dict[str, list[float]] = {each: [] for each in calls}
        for turn in range(chosen.repeat + 1):
            for each, call in calls.items():
                COMM.Barrier()
                begin = perf_counter()
                call()
                if turn:  # the first one warms up
                    seconds[each].append(COMM.allreduce(perf_counter() - begin, MPI.MAX))
        for each, taken in seconds.items():
            medians.setdefault(each, []).append(float(np.median(taken)))
    if COMM.rank == 0:
        print(f"{'of the plain loss and gradient':36}" + "".join(f"{name:>10}" for name in chosen.dtype))
        for each, taken in medians.items():
            parts = [one / plain for one, plain in zip(taken, medians["plain"], strict=True)]
            print(f"{each:36}" + "".join(f"{part:10.2f}" for part in parts))
        print(f"{'plain, ms':36}" + "".join(f"{each * 1e3:10.1f}" for each in medians["plain"]))


if __name__ == "__main__":
    main()

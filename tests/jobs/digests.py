"""Print a digest of the bits of each of a fixed set of results, as JSON; for any number of ranks.

The classes are cut unevenly, with empty shards among them. All inputs are whole numbers times a power of two.
"""

import hashlib
import json
from typing import Any

import ml_dtypes
from mpi4py import MPI
import numpy as np

import pce_mpi as pce

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float64": np.float64}
ROWS, CLASSES = 6, 1009
WEIGHT = (np.arange(CLASSES) % 7 + 1) / 4
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "weight": {"weight": WEIGHT, "label_smoothing": 0.25, "z_loss": 0.01},
    "scale": {"logit_scale": 0.7},
    "softcap": {"softcap": 30.0},
    "wide": {"compute_dtype": np.float64},
}


def bits(array: Any) -> bytes:
    """The bytes of an array, with one nan of the many."""
    array = np.asarray(array)
    return np.where(np.isnan(array), array.dtype.type(np.nan), array).tobytes()


def ends_of(ranks: int) -> list[int]:
    """The ends of the shards of the ranks: every third is empty, and no two others are of one length."""
    lengths = np.array([0 if rank % 3 == 1 else 1 + rank * rank for rank in range(ranks)])
    ends = np.round(np.cumsum(lengths) * CLASSES / lengths.sum()).astype(int)
    return [0, *ends.tolist()]


def digest(dtype: Any, options: dict[str, Any], kind: str) -> str:
    comm = MPI.COMM_WORLD
    rng = np.random.default_rng(7)
    logits = (rng.integers(-(2**12), 2**12, (ROWS, CLASSES)) / 2**9).astype(dtype)
    targets = rng.integers(0, CLASSES, ROWS)
    if kind == "special":
        logits[0] += 2048
        logits[1, targets[1]] = 24
        logits[2, ::3], logits[2, targets[2]] = -np.inf, 0
        logits[3], targets[4] = logits[3] * 256, -100
    probabilities = (rng.integers(0, 9, logits.shape) / 2**16).astype(np.float32)
    start, stop = ends_of(comm.size)[comm.rank : comm.rank + 2]
    options = dict(options, comm=comm, class_start=start)
    if "weight" in options:
        options["weight"] = WEIGHT[start:stop]
    mine = logits[:, start:stop].copy()
    given = probabilities[:, start:stop] if kind == "probabilities" else targets
    results = [pce.softmax_cross_entropy(mine, given, **options)]
    gradient = results[0]
    if options.get("reduction") != "none":
        loss, gradient = pce.softmax_cross_entropy_value_and_grad(mine, given, **options)
        results += [loss, np.concatenate(comm.allgather(gradient.astype(np.float64)), axis=1)]
    if kind == "index":
        wanted = {name: options[name] for name in ("logit_scale", "softcap", "compute_dtype") if name in options}
        statistics = pce.class_statistics(mine, targets, comm=comm, class_start=start, **wanted)
        results += [values for name, values in statistics._asdict().items() if name != "argmax"]
    return hashlib.sha256(b"".join(map(bits, results))).hexdigest()[:16]


def main() -> None:
    digests = {
        f"{dtype} {name} {kind}": digest(DTYPES[dtype], options, kind)
        for dtype in DTYPES
        for name, options in OPTIONS.items()
        for kind in ("index", "special", "probabilities")
    }
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(digests, indent=1))


if __name__ == "__main__":
    main()

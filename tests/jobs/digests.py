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
    if array.dtype.kind == "i":
        return array.tobytes()
    return np.where(np.isnan(array), array.dtype.type(np.nan), array).tobytes()


def ends_of(ranks: int) -> list[int]:
    """The ends of the shards of the ranks: every third is empty, and no two others are of one length."""
    lengths = np.array([0 if rank % 3 == 1 else 1 + rank * rank for rank in range(ranks)])
    ends = np.round(np.cumsum(lengths) * CLASSES / lengths.sum()).astype(int)
    return [0, *ends.tolist()]


def digest_of(*results: Any) -> str:
    return hashlib.sha256(b"".join(map(bits, results))).hexdigest()[:16]


def drawn(dtype: Any, kind: str) -> tuple[Any, Any, Any]:
    """The whole problem: logits, class numbers and probabilities."""
    rng = np.random.default_rng(7)
    logits = (rng.integers(-(2**12), 2**12, (ROWS, CLASSES)) / 2**9).astype(dtype)
    targets = rng.integers(0, CLASSES, ROWS)
    if kind == "special":
        logits[0] += 2048
        logits[1, targets[1]] = 24
        logits[2, ::3], logits[2, targets[2]] = -np.inf, 0
        logits[3], targets[4] = logits[3] * 256, -100
    return logits, targets, (rng.integers(0, 9, logits.shape) / 2**16).astype(np.float32)


def digest(dtype: Any, options: dict[str, Any], kind: str) -> str:
    comm = MPI.COMM_WORLD
    logits, targets, probabilities = drawn(dtype, kind)
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
    return digest_of(*results)


def rows_digest(dtype: Any, kind: str) -> str:
    """The largest class of each row, of which some have two in a dtype of few bits, and the gradient of all losses."""
    comm = MPI.COMM_WORLD
    logits, targets, _ = drawn(dtype, kind)
    start, stop = ends_of(comm.size)[comm.rank : comm.rank + 2]
    given: Any = {"comm": comm, "class_start": start}
    mine = logits[:, start:stop].copy()
    gradient = pce.softmax_cross_entropy_value_and_grad(mine, targets, reduction="none", **given)[1]
    whole = np.concatenate(comm.allgather(gradient.astype(np.float64)), axis=1)
    return digest_of(pce.class_statistics(mine, targets, **given).argmax, whole)


def batch_digest(dtype: Any, kind: str) -> str:
    """Losses of rows that are sharded too: in two parts if the number of ranks is even, otherwise over all ranks."""
    comm = MPI.COMM_WORLD
    parts = 2 if comm.size % 2 == 0 else comm.size
    over_classes: Any = comm.Split(comm.rank % parts)
    over_rows: Any = comm.Split(comm.rank // parts)
    logits, targets, _ = drawn(dtype, kind)
    start, stop = ends_of(over_classes.size)[over_classes.rank : over_classes.rank + 2]
    rows = slice(ROWS * over_rows.rank**2 // parts**2, ROWS * (over_rows.rank + 1) ** 2 // parts**2)
    results = []
    for reduction in ("mean", "sum"):
        loss, gradient = pce.softmax_cross_entropy_value_and_grad(
            logits[rows, start:stop].copy(),
            targets[rows],
            comm=over_classes,
            batch_comm=over_rows,
            class_start=start,
            weight=WEIGHT[start:stop],
            reduction=reduction,
        )
        columns = np.concatenate(over_classes.allgather(gradient.astype(np.float64)), axis=1)
        results += [loss, np.concatenate(over_rows.allgather(columns))]
    over_classes.Free()
    over_rows.Free()
    return digest_of(*results)


def divergence_digest(dtype: Any, kind: str) -> str:
    """The divergences in each direction from a teacher that is near, and both gradients."""
    comm = MPI.COMM_WORLD
    student, targets, probabilities = drawn(dtype, kind)
    teacher = (student.astype(np.float64) + probabilities * 2.0**10).astype(np.float32)
    start, stop = ends_of(comm.size)[comm.rank : comm.rank + 2]
    results: list[Any] = []
    for direction, temperature in (("forward", 1.0), ("reverse", 0.7), ("jensen-shannon", 2.0)):
        options: Any = {"direction": direction, "temperature": temperature, "rows": targets >= 0, "reduction": "none"}
        shards = student[:, start:stop].copy(), teacher[:, start:stop].copy()
        divergence, residuals = pce.kl_divergence_forward(*shards, comm=comm, class_start=start, **options)
        gradients = [pce.kl_divergence_backward(1.0, residuals, of=of).astype(float) for of in ("student", "teacher")]
        results += [divergence, *(np.concatenate(comm.allgather(gradient), axis=1) for gradient in gradients)]
    return digest_of(*results)


def tape_digest(dtype: Any, kind: str) -> str:
    """Operations on distributed arrays whose class axis is sharded."""
    mesh = pce.Mesh(MPI.COMM_WORLD, classes=MPI.COMM_WORLD.size)
    logits, targets, _ = drawn(dtype, kind)
    x = pce.distribute(logits, mesh, classes=pce.Shard(1), requires_grad=True)
    loss = pce.cross_entropy(x, targets)
    loss.backward()
    assert x.grad is not None
    values = loss, x.grad, pce.softmax(x), pce.log_softmax(x), pce.logsumexp(x, axis=1)
    return digest_of(*(value.full() for value in values))


def main() -> None:
    digests = {
        f"{dtype} {name} {kind}": digest(DTYPES[dtype], options, kind)
        for dtype in DTYPES
        for name, options in OPTIONS.items()
        for kind in ("index", "special", "probabilities")
    }
    others = {"rows": rows_digest, "batch_comm": batch_digest, "tape": tape_digest, "divergences": divergence_digest}
    for name, more in others.items():
        digests |= {
            f"{dtype} {name} {kind}": more(DTYPES[dtype], kind) for dtype in DTYPES for kind in ("index", "special")
        }
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(digests, indent=1))


if __name__ == "__main__":
    main()

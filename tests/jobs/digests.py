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


def margin_digest(dtype: Any, kind: str) -> str:
    """Losses and gradients of cosines, with margins; special targets are at an end, beyond it, masked, or ignored."""
    comm = MPI.COMM_WORLD
    logits, targets, _ = drawn(dtype, "index")
    logits = (logits.astype(np.float64) / 8).astype(dtype)
    if kind == "special":
        logits[range(4), targets[:4]] = 1, -1, 1.0625, -np.inf
        targets[4] = -100
    start, stop = ends_of(comm.size)[comm.rank : comm.rank + 2]
    results = []
    for margin, scale in (((1, 0.5, 0), 64.0), ((1, 0, 0.375), 64.0), ((1.375, 0.25, 0.125), 7.0), ((4, 0, 0), 0.75)):
        given: Any = {"margin": margin, "logit_scale": scale, "comm": comm, "class_start": start}
        mine = logits[:, start:stop].copy()
        loss, gradient = pce.softmax_cross_entropy_value_and_grad(mine, targets, reduction="none", **given)
        results += [loss, np.concatenate(comm.allgather(gradient.astype(np.float64)), axis=1)]
    return digest_of(*results)


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


def chosen_digest(dtype: Any, kind: str) -> str:
    """Chosen logits, log-probabilities of several targets, and statistics over a support, with their gradients."""
    comm = MPI.COMM_WORLD
    logits, targets, _ = drawn(dtype, kind)
    start, stop = ends_of(comm.size)[comm.rank : comm.rank + 2]
    given: Any = {"comm": comm, "class_start": start}
    mine = logits[:, start:stop].copy()
    several = np.stack([targets % CLASSES, targets[::-1] % CLASSES, logits.astype(np.float64).argmax(1)], 1)
    several[:, 1:2] = several[:, :1]  # twice
    support = np.arange(ROWS * 100) % 100 * 9 + np.repeat(np.arange(ROWS), 100), np.arange(0, ROWS * 100 + 1, 100)
    upstream = np.arange(1.0, 3 * ROWS + 1).reshape(ROWS, 3) / 8
    chosen, of_chosen = pce.take_classes_forward(mine, several, **given)
    results, gradients = [chosen], [pce.take_classes_backward(upstream, of_chosen)]
    for over, outside in ((None, "raise"), (support, "-inf"), (support, "add")):
        more: Any = {"support": over, "outside": outside, **given}
        statistics, residuals = pce.class_statistics_forward(mine, several, **more)
        results += statistics
        gradients.append(pce.class_statistics_backward(residuals, log_prob=upstream, entropy=0.5, logsumexp=-0.25))
    results += [np.concatenate(comm.allgather(each.astype(np.float64)), axis=1) for each in gradients]
    return digest_of(*results)


def divergence_digest(dtype: Any, kind: str) -> str:
    """The divergences in each direction from a teacher that is near, and both gradients."""
    comm = MPI.COMM_WORLD
    student, targets, probabilities = drawn(dtype, kind)
    teacher = (student.astype(np.float64) + probabilities * 2.0**10).astype(np.float32)
    start, stop = ends_of(comm.size)[comm.rank : comm.rank + 2]
    results: list[Any] = []
    for direction, scale in (("forward", 1.0), ("reverse", 1 / 0.7), ("jensen-shannon", 0.5)):
        options: Any = {"direction": direction, "logit_scale": scale, "rows": targets >= 0, "reduction": "none"}
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


def linear_digest(dtype: Any, kind: str) -> str:
    """Statistics of a product of distributed arrays and their gradients, in reproducible arithmetic."""
    mesh = pce.Mesh(MPI.COMM_WORLD, classes=MPI.COMM_WORLD.size)
    rng, (_, targets, _) = np.random.default_rng(8), drawn(dtype, kind)
    hidden, w = ((rng.integers(-(2**7), 2**7, shape) / 2**5).astype(dtype) for shape in ((ROWS, 5), (5, CLASSES)))
    x = pce.distribute(hidden, mesh, requires_grad=True)
    y = pce.distribute(w, mesh, classes=pce.Shard(1), requires_grad=True)
    with pce.reproducible():
        found = pce.linear_class_statistics(x, y, targets, logit_scale=0.7, chunk=2)
        pce.sum(found.log_prob + found.entropy * 0.5).backward()
    arrays: list[Any] = [*found, x.grad, y.grad]
    return digest_of(*(each.full() for each in arrays))


def nucleus_digest(dtype: Any, kind: str) -> str:
    """The classes that limits leave, and their masses."""
    comm = MPI.COMM_WORLD
    logits, _, _ = drawn(dtype, kind)
    start, stop = ends_of(comm.size)[comm.rank : comm.rank + 2]
    mine = logits[:, start:stop].copy()
    limits: list[dict[str, Any]] = [
        {"top_k": 40},
        {"top_p": 0.9, "logit_scale": 1 / 0.7},
        {"top_k": 300, "top_p": 0.5, "min_p": 0.01},
    ]
    return digest_of(*(each for given in limits for each in pce.nucleus(mine, comm=comm, class_start=start, **given)))


# Digests of integers and of special values, in each dtype.
MORE = {
    "rows": rows_digest,
    "margin": margin_digest,
    "batch_comm": batch_digest,
    "chosen": chosen_digest,
    "divergences": divergence_digest,
    "tape": tape_digest,
    "linear": linear_digest,
    "nucleus": nucleus_digest,
}


def main() -> None:
    digests = {
        f"{dtype} {name} {kind}": digest(DTYPES[dtype], options, kind)
        for dtype in DTYPES
        for name, options in OPTIONS.items()
        for kind in ("index", "special", "probabilities")
    }
    for name, more in MORE.items():
        digests |= {
            f"{dtype} {name} {kind}": more(DTYPES[dtype], kind) for dtype in DTYPES for kind in ("index", "special")
        }
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(digests, indent=1))


if __name__ == "__main__":
    main()

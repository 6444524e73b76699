"""check: hold this installation, at this number of ranks, against the dense float64 oracle."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pce_mpi import dense
from pce_mpi.comm.collectives import all_gather, all_reduce
from pce_mpi.comm.tracing import trace
from pce_mpi.conformance.reports.tables import Cell, table
from pce_mpi.distributed.placements import shard_range
from pce_mpi.loss import (
    class_statistics,
    softmax_cross_entropy_backward,
    softmax_cross_entropy_forward,
    softmax_cross_entropy_value_and_grad,
)

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["add_arguments", "run"]

# Loss in ulps of itself, gradient in ulps of its row's largest entry: 4 for a plain loss, and 1 more for what options
# add to it, a product and a sum each.
_LIMIT = 5.0


@dataclass(frozen=True)
class _Case:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    shape: tuple[int, ...] = (23, 101)
    axis: int = -1
    probabilities: bool = False
    weighted: bool = False
    uneven: bool = False


_CASES = [
    _Case("index targets"),
    _Case("probability targets", probabilities=True),
    _Case("reduction sum", {"reduction": "sum"}),
    _Case("reduction none", {"reduction": "none"}),
    _Case("weight", weighted=True),
    _Case("ignore_index inside the range", {"ignore_index": 5}),
    _Case("label_smoothing", {"label_smoothing": 0.1}),
    _Case("label_smoothing, weight", {"label_smoothing": 0.1}, weighted=True),
    _Case("z_loss", {"z_loss": 1e-3}),
    _Case("logit_scale", {"logit_scale": 0.125}),
    _Case("softcap", {"softcap": 15.0}),
    _Case("all options", {"label_smoothing": 0.2, "z_loss": 1e-3, "logit_scale": 0.5, "softcap": 15.0}, weighted=True),
    _Case("num_classes", {"num_classes": 101}),
    _Case("class_start, uneven shards, the last first", uneven=True),
    _Case("compute_dtype float64", {"compute_dtype": np.float64}),
    _Case("many classes", shape=(7, 5003)),
    _Case("class axis in the middle", shape=(5, 31, 7), axis=1),
    _Case("class axis first", shape=(31, 5, 7), axis=0),
    _Case("one row", shape=(101,)),
    _Case("no rows", {"reduction": "sum"}, shape=(0, 101)),
    _Case("fewer classes than ranks", shape=(23, 1)),
    _Case("float64", dtype="float64"),
    _Case("float16", dtype="float16"),
    _Case("bfloat16", dtype="bfloat16"),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`check` has only a seed to choose."""
    parser.epilog = """\
It takes a few seconds. Start it with mpiexec to check that number of ranks.
Exit status: 0 if everything is as it should be, 1 if something is OFF."""
    parser.add_argument("--seed", type=int, default=0, metavar="K", help="seed of the random logits")


def run(options: argparse.Namespace, comm: MPI.Intracomm | None) -> int:
    """Print one line per case; status 1 if anything is off."""
    rows: list[list[Cell]] = []
    for case in _CASES:
        try:
            dtype = _dtype(case.dtype)
        except ImportError:
            rows.append([case.name, "", "", "", "not run: pip install 'pce_mpi[bf16]'"])
            continue
        worst = _worst(comm, list(_errors(case, dtype, options.seed, comm)))
        verdict = "ok" if all(error <= _LIMIT for error in worst) else "OFF"
        rows.append([case.name, *(f"{error:.2f}" for error in worst), verdict])
    alone = {"one payload collective forward, none backward", "an error on one rank is raised on all"}
    for name, passed in (
        ("class_statistics", _statistics_match(options.seed, comm)),
        ("batch_comm: rows sharded, one mean", _rows_may_be_sharded(options.seed, comm)),
        ("out=logits, and dloss for each row", _gradient_goes_where_it_is_told(options.seed, comm)),
        ("one payload collective forward, none backward", _sends_once(comm)),
        ("the same loss on every rank, bit for bit", _same_loss(options.seed, comm)),
        ("an error on one rank is raised on all", _raises_together(comm)),
    ):
        passed_everywhere = _worst(comm, [0.0 if passed else 1.0])[0] == 0.0
        verdict = "ok" if passed_everywhere else "OFF"
        rows.append([name, "", "", "", "not run: needs MPI" if comm is None and name in alone else verdict])
    size = 1 if comm is None else comm.size
    off = sum(row[-1] == "OFF" for row in rows)
    print(f"pce_mpi on {size} rank{'s' * (size > 1)}: errors in ulps, at most {_LIMIT:g} allowed\n")
    print(table([("case", "loss", "gradient", "two passes", "verdict"), *rows]))
    not_run = sum(str(row[-1]).startswith("not run") for row in rows)
    counts = f"\n{len(rows) - off - not_run} of {len(rows)} as they should be"
    print(counts + (f", {off} OFF" if off else "") + (f", {not_run} not run" if not_run else ""))
    return int(off > 0)


def _dtype(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def _problem(case: _Case, dtype: np.dtype[Any], seed: int) -> tuple[Any, Any, Any]:
    """Logits, targets and weight of the whole problem, the same on every rank."""
    rng = np.random.default_rng(seed)
    logits = (4.0 * rng.standard_normal(case.shape)).astype(dtype)
    axis = case.axis % logits.ndim
    classes = case.shape[axis]
    weight = rng.uniform(0.5, 2.0, classes) if case.weighted else None
    if case.probabilities:
        probabilities = rng.random(case.shape).astype(np.float32)
        return logits, probabilities / probabilities.sum(axis, keepdims=True), weight
    targets = rng.integers(0, classes, case.shape[:axis] + case.shape[axis + 1 :])
    if targets.size > 3:
        targets.flat[::4] = case.options.get("ignore_index", -100)
    return logits, targets, weight


def _shard(array: Any, axis: int, comm: MPI.Intracomm | None, uneven: bool = False) -> Any:
    index = [slice(None)] * array.ndim
    index[axis] = slice(*_range(array.shape[axis], comm, uneven))
    return array[tuple(index)]


def _range(length: int, comm: MPI.Intracomm | None, uneven: bool) -> tuple[int, int]:
    """What is this rank's: a balanced block, or blocks in the reverse order of ranks, of which the last is longest."""
    size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
    if not uneven:
        return shard_range(length, size, rank)
    place = size - 1 - rank
    return place * (length // (2 * size)), length if rank == 0 else (place + 1) * (length // (2 * size))


def _errors(case: _Case, dtype: np.dtype[Any], seed: int, comm: MPI.Intracomm | None) -> Iterator[float]:
    """Ulps of the loss, of the gradient in one pass and of the gradient in two."""
    logits, targets, weight = _problem(case, dtype, seed)
    options = {**case.options, "axis": case.axis}
    loss, gradient = dense.softmax_cross_entropy_value_and_grad(logits, targets, weight=weight, **options)
    options["weight"] = None if weight is None else _shard(weight, 0, comm)
    if case.uneven:
        options["class_start"] = _range(logits.shape[case.axis], comm, case.uneven)[0]
    mine = _shard(logits, case.axis, comm, case.uneven)
    if case.probabilities:
        targets = _shard(targets, case.axis, comm)
    got_loss, fused = softmax_cross_entropy_value_and_grad(mine, targets, comm=comm, **options)
    _, residuals = softmax_cross_entropy_forward(mine, targets, comm=comm, **options)
    two_passes = softmax_cross_entropy_backward(1.0, residuals)
    yield _ulps(got_loss, loss, np.abs(loss), got_loss.dtype)
    largest = np.broadcast_to(np.abs(gradient).max(axis=case.axis, keepdims=True), gradient.shape)
    for got in (fused, two_passes):
        exact, scale = (_shard(array, case.axis, comm, case.uneven) for array in (gradient, largest))
        yield _ulps(got, exact, scale, dtype)


def _ulps(got: Any, exact: Any, scale: Any, dtype: np.dtype[Any]) -> float:
    """The largest error, in units of the last place of `scale` in `dtype`."""
    if got.size == 0:
        return 0.0
    wide = np.maximum(np.asarray(scale, np.float64), float(_tiny(dtype)))
    spacing = np.exp2(np.floor(np.log2(wide))) * _epsilon(dtype)
    error = np.abs(got.astype(np.float64) - exact) / spacing
    return float(np.where(np.isnan(error), np.inf, error).max())


def _epsilon(dtype: np.dtype[Any]) -> float:
    return 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)


def _tiny(dtype: np.dtype[Any]) -> float:
    return 2.0**-126 if dtype.name == "bfloat16" else float(np.finfo(dtype).tiny)


def _worst(comm: MPI.Intracomm | None, errors: list[float]) -> list[float]:
    """The largest of all ranks, of each."""
    if comm is None:
        return errors
    worst = all_reduce(np.array(errors), comm, "max", operation="check", reason="the largest error of all ranks")
    return [float(error) for error in worst]


def _statistics_match(seed: int, comm: MPI.Intracomm | None) -> bool:
    logits, targets, _ = _problem(_Case("statistics"), np.dtype(np.float32), seed)
    expected = dense.class_statistics(logits, targets)
    got = class_statistics(_shard(logits, -1, comm), targets, comm=comm)
    return all(
        np.array_equal(getattr(got, name), value)
        if name == "argmax"
        else _ulps(getattr(got, name), value, np.abs(value), np.dtype(np.float32)) <= _LIMIT
        for name, value in expected._asdict().items()
    )


def _rows_may_be_sharded(seed: int, comm: MPI.Intracomm | None) -> bool:
    logits, targets, _ = _problem(_Case("rows"), np.dtype(np.float32), seed)
    loss, gradient = dense.softmax_cross_entropy_value_and_grad(logits, targets)
    rows = slice(*_range(len(logits), comm, uneven=True))
    got_loss, got = softmax_cross_entropy_value_and_grad(logits[rows], targets[rows], batch_comm=comm)
    scale = np.abs(gradient).max(axis=-1, keepdims=True) + np.zeros_like(gradient)
    errors = _ulps(got_loss, loss, np.abs(loss), got_loss.dtype), _ulps(got, gradient[rows], scale[rows], got.dtype)
    return max(errors) <= _LIMIT


def _gradient_goes_where_it_is_told(seed: int, comm: MPI.Intracomm | None) -> bool:
    logits, targets, _ = _problem(_Case("out"), np.dtype(np.float32), seed)
    dloss = np.random.default_rng(seed).uniform(1.0, 2.0, targets.shape)
    _, gradient = dense.softmax_cross_entropy_value_and_grad(logits, targets, reduction="none")
    expected = _shard(gradient * dloss[:, None], -1, comm)
    scale = np.broadcast_to(np.abs(gradient * dloss[:, None]).max(axis=-1, keepdims=True), expected.shape)
    mine = _shard(logits, -1, comm).copy()
    _, residuals = softmax_cross_entropy_forward(mine, targets, comm=comm, reduction="none")
    got = softmax_cross_entropy_backward(dloss, residuals, out=mine)
    return got is mine and _ulps(got, expected, scale, got.dtype) <= _LIMIT


def _sends_once(comm: MPI.Intracomm | None) -> bool:
    with trace() as forward:
        _, residuals = softmax_cross_entropy_forward(np.zeros((2, 3)), [0, 0], comm=comm)
    with trace() as backward:
        softmax_cross_entropy_backward(1.0, residuals)
    return forward.count() == (comm is not None) and not backward.events


def _same_loss(seed: int, comm: MPI.Intracomm | None) -> bool:
    logits, targets, _ = _problem(_Case("same"), np.dtype(np.float32), seed)
    loss, _ = softmax_cross_entropy_forward(_shard(logits, -1, comm), targets, comm=comm)
    if comm is None:
        return bool(np.isfinite(loss))
    losses = all_gather(loss, comm, [()] * comm.size, operation="check", reason="compare the ranks' losses")
    return all(other.tobytes() == loss.tobytes() for other in losses)


def _raises_together(comm: MPI.Intracomm | None) -> bool:
    last = comm is None or comm.rank == comm.size - 1
    logits = np.zeros((2, 3), np.int64 if last else np.float32)
    try:
        softmax_cross_entropy_forward(logits, [0, 0], comm=comm)
    except TypeError:
        return True
    return False

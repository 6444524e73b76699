"""Export problems with the bits of their results; `docs/the-bits.md` specifies the arithmetic that gives them.

All logits are integers times powers of two, so that no generator of another version draws others.
"""

from __future__ import annotations

from collections.abc import Iterator
import os
from pathlib import Path
from typing import Any

import numpy as np

from pce_mpi import loss
from pce_mpi.arrays import dtype_named
from pce_mpi.conformance.offline.vectors import Entry, write
from pce_mpi.conformance.problems.cases import Expects
from pce_mpi.conformance.problems.problem import Array

_DTYPES = "float32", "bfloat16", "float16", "float64"
_ROWS, _CLASSES, _SPLITS = 6, 37, (0, 5, 5, 21, 37)
# The gradients of the statistics from which `dstatistics` follows.
_UPSTREAM = {"log_prob": 1.0, "entropy": 0.5, "logsumexp": 0.25}
# Options by name; statistics have those that are functions of the logits.
_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "half-scale": {"reduction": "none", "logit_scale": 0.5},
    "scale": {"reduction": "sum", "logit_scale": 0.7},
    "softcap": {"reduction": "none", "softcap": 30.0},
    "weight": {"weight": True},
    "z_loss": {"reduction": "none", "z_loss": 0.01},
    "smoothing": {"reduction": "none", "label_smoothing": 0.1},
    "everything": {"weight": True, "label_smoothing": 0.25, "z_loss": 0.125, "logit_scale": 1.5},
    "double": {"reduction": "none", "compute_dtype": "float64"},
}
_OF_LOGITS = {"logit_scale", "softcap", "compute_dtype", "ignore_index"}
_KINDS = ("ordinary", "peaked", "offset", "sizes", "huge", "special", "ties", "halfway")


def export(folder: str | os.PathLike[str]) -> int:
    """Write the vectors to `folder`, and return how many there are. Needs safetensors."""
    return write(Path(folder), vectors())


def vectors() -> Iterator[tuple[Entry, dict[str, Array]]]:
    """Yield each vector, with its tensors: the problem, and its results."""
    for dtype in _DTYPES:
        for name, options in _OPTIONS.items():
            for kind in _KINDS:
                if (dtype, kind) == ("float16", "huge") or (dtype, name) == ("float64", "double"):
                    continue  # its logits cannot be huge; its arithmetic is double anyway
                chosen = {"reduction": "mean", **options}
                more = {"weight": _weight()} if chosen.pop("weight", False) else {}
                yield _vector(f"{dtype}/{name}/{kind}", chosen, *drawn(dtype, kind), **more)
    for called, options, problem in _edges():
        yield _vector(called, options, **problem)


def _vector(
    called: str, options: dict[str, Any], logits: Array, targets: Array, **more: Array
) -> tuple[Entry, dict[str, Array]]:
    problem = {"logits": logits, "targets": targets, **more}
    results = _results_of(options, **problem)
    entry = Entry(
        name=called,
        file=f"{called}.safetensors",
        catches="other bits",
        expects=Expects.ANSWER,
        gradient=True,
        dtype=logits.dtype.name,
        axis=1,
        splits=_SPLITS,
        reduction=options["reduction"],
        options={name: value for name, value in options.items() if name != "reduction"},
        bits=tuple(results),
    )
    return entry, problem | {f"expected_{name}": array for name, array in results.items()}


def _weight() -> Array:
    return (np.arange(_CLASSES) % 7 + 1) / 4


def _results_of(
    options: dict[str, Any], logits: Array, targets: Array, weight: Array | None = None, dloss: Any = 1.0
) -> dict[str, Array]:
    """Return the results of a problem by name, in one process."""
    value, residuals = loss.softmax_cross_entropy_forward(logits, targets, weight=weight, **options)
    results = {"loss": value, "dlogits": loss.softmax_cross_entropy_backward(dloss, residuals)}
    if weight is None and not options.keys() - _OF_LOGITS - {"reduction"}:
        of_logits: Any = {name: options[name] for name in _OF_LOGITS & options.keys()}
        statistics, of_statistics = loss.class_statistics_forward(logits, targets, **of_logits)
        results |= {name: np.asarray(getattr(statistics, name)) for name in _UPSTREAM}
        results["dstatistics"] = loss.class_statistics_backward(of_statistics, **_UPSTREAM)
        if "ignore_index" in options:
            results["dlog_prob"] = loss.class_statistics_backward(of_statistics, log_prob=1.0)
    return results


def _edges() -> Iterator[tuple[str, dict[str, Any], dict[str, Array]]]:
    """Yield the name, the options and the tensors of problems at the edges of what the page says."""
    none, smoothing = {"reduction": "none"}, {"label_smoothing": 0.125}
    small, large = drawn("float32", "ordinary")[0], drawn("float64", "ordinary")[0]

    x, ignoring = small.copy(), {"ignore_index": 9, **none}
    x[0, 5], x[1, 6], x[2:4], x[4, 7] = np.nan, np.inf, -np.inf, np.nan
    problem = {"logits": x, "targets": np.array([0, 1, 2, 9, 9, 3])}
    yield "float32/edges/no-upstream", ignoring, problem
    yield "float32/edges/no-softmax", ignoring, problem | {"weight": np.where(np.arange(_CLASSES) < 3, 0.0, 1.5)}

    x = large.copy()
    x[:, ::5] = -np.inf
    problem = {"logits": x, "targets": np.array([1, 2, 3, 4, 6, 7]), "weight": np.arange(_CLASSES) % 2 / 1.0}
    problem["dloss"] = np.array([-0.0, -1.5, 0.0, 2.0, -0.0, np.inf])
    yield "float64/edges/zero-factor", none, problem

    x, weight = large.copy(), _weight()
    x[2, 8:], x[3, 20:], x[4, 1], x[5, 3] = -np.inf, -np.inf, np.nan, -np.inf
    weight[3] = np.inf
    problem = {"logits": x, "targets": np.array([3, 1, 2, 3, 4, 5]), "weight": weight}
    yield "float64/edges/infinite-weight", smoothing | none, problem

    x, weight = small.copy(), _weight()
    x[0, 8], x[1, 10], x[2, 8:], x[3, 9], x[4, [4, 8]], x[5, 8] = [-np.inf] * 6
    weight[8:10] = -1.0, 0.0
    problem = {"logits": x, "targets": np.array([1, 1, 2, 3, 4, 8]), "weight": weight}
    yield "float32/edges/masked-weight", smoothing | none, problem

    x, most = large.copy(), 1.75 * 2.0**1023
    x[0, 3], x[1, 4], x[2, 5], x[3, [6, 7]], x[4, [7, 8]], x[5, 9] = most, most, -most, most, [most, most / 1.5], -most
    problem = {"logits": x, "targets": np.array([0, 4, 1, 6, 8, 9])}
    yield "float64/edges/overflow", none | {"logit_scale": 64.0}, problem
    yield "float64/edges/smooth-overflow", none | smoothing | {"logit_scale": 64.0}, problem

    weight = _weight()
    weight[1:3] = 1.0, -1.0
    problem = {"logits": small, "targets": np.array([1, 2, 1, 2, -100, -100]), "weight": weight}
    yield "float32/edges/no-weight", {"reduction": "mean", **smoothing}, problem | {"dloss": np.array(2.0)}


def drawn(dtype: str, kind: str) -> tuple[Array, Array]:
    """Return logits and targets."""
    rng = np.random.default_rng(_KINDS.index(kind))
    x: Array = rng.integers(-(2**12), 2**12, (_ROWS, _CLASSES)) / 2.0**9
    targets = rng.integers(0, _CLASSES, _ROWS)
    rows, most = np.arange(_ROWS), 2.0 ** {"float16": 14, "float64": 900}.get(dtype, 120)
    if kind == "peaked":
        x[rows, targets] += 2.0 ** np.arange(2, 8)
        x[0, targets[0]] = -300.0
    elif kind == "offset":
        x += np.array([2040.0, -2048.0, 3000.0, -30000.0, 512.0, 50.0])[:, None]
        x[4] *= 4.0
    elif kind == "sizes":
        x *= 2.0 ** rng.integers(-30, 12, x.shape)
    elif kind == "huge":
        x *= 2.0 ** rng.integers(15, 60, x.shape)
        x[0, :3] = most, most, -most
        x[1, 7], x[1, targets[1]] = 2.0**61, -(2.0**61)
        x[2] = -most
        x[3], x[3, targets[3]] = x[3] / 2.0**50, most
    elif kind == "special":
        x[0, ::3], x[0, targets[0]] = -np.inf, 0.0
        x[1, targets[1]], x[2] = -np.inf, -np.inf
        x[3, 5], x[4, 6], targets[5] = np.inf, np.nan, -100
    elif kind == "ties":
        x = np.sign(x)
    elif kind == "halfway":  # between two n, which float32 and float64 round apart
        x[:] = (rng.integers(2800, 2950, x.shape) + 0.5) * 0.6931471805599453
    with np.errstate(over="ignore"):
        return x.astype(dtype_named(dtype)), targets

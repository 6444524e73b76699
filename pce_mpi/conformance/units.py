"""The units of errors, and how many of them pass; `judging` states the rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pce_mpi.arrays import compute_dtype_of
from pce_mpi.conformance.cases import Problem

Array = np.ndarray[Any, Any]

# Bits of the fraction, and the exponent of the smallest normal number.
_FORMATS = {"float16": (10, -14), "bfloat16": (7, -126), "float32": (23, -126), "float64": (52, -1022)}

_ALLOWED = {"float64": 32.0, "float32": 8.0, "float16": 2.0, "bfloat16": 2.0}
# Our own functions stay below these; in float64 `dense` errs as well.
_STRICT = {"float64": 8.0, "float32": 5.0, "float16": 1.0, "bfloat16": 1.0}


@dataclass(frozen=True)
class Tolerance:
    """The allowed error of an answer.

    Parameters
    ----------
    strict : bool
        Allow 8, 5 and 1 ulp of float64, float32 and the halves, without a floor, in place of 32, 8 and 2.
    factor : float
        Multiplies what is allowed.
    """

    strict: bool = False
    factor: float = 1.0

    def allowed(self, dtype: str) -> float:
        """Return how many ulps pass.

        Parameters
        ----------
        dtype : str
            The dtype of the ulps.

        Returns
        -------
        float
            The number of ulps.
        """
        return self.factor * (_STRICT if self.strict else _ALLOWED)[dtype]


def ulp(values: Any, dtype: str) -> Array:
    """Return the distance of neighbours in `dtype` around `values`, as float64; the least for subnormals and nan."""
    fraction, least = _FORMATS[dtype]
    values = np.nan_to_num(np.asarray(values, np.float64), posinf=0.0, neginf=0.0)
    exponent = np.where(values == 0, least, np.frexp(values)[1] - 1)
    return np.ldexp(1.0, np.maximum(exponent, least) - fraction)


def coarsest(*dtypes: str) -> str:
    """Return the dtype with the fewest bits in its fraction."""
    return min(dtypes, key=lambda dtype: _FORMATS[dtype][0])


def finest(*dtypes: str) -> str:
    """Return the dtype with the most bits in its fraction."""
    return max(dtypes, key=lambda dtype: _FORMATS[dtype][0])


class Units(NamedTuple):
    """The size of one ulp.

    loss       shaped as the loss
    gradient   (rows, classes)
    at_target  (rows, classes) the entries that are measured by their own size
    sums       shaped as the loss, in the dtype of the arithmetic
    """

    loss: Array
    gradient: Array
    at_target: Array
    sums: Array

    @classmethod
    @np.errstate(all="ignore")
    def of(cls, problem: Problem, loss_dtype: str, strict: bool) -> Units:
        """Return the units for a loss that was returned in `loss_dtype`."""
        arithmetic = compute_dtype_of(problem.dtype).name
        sizes = _Sizes.of(problem)
        loss, gradient = problem.expected
        exact = np.abs(problem.row_major(gradient))
        at_target = np.zeros(exact.shape, np.bool_)
        if not problem.with_probabilities and problem.kind != "entropy":
            counted = np.flatnonzero(problem.valid)
            at_target[counted, problem.targets.reshape(-1)[counted]] = True
        size = np.maximum(exact, sizes.opposed)
        others = np.where(np.isfinite(size) & ~at_target, size, 0.0)
        size = np.where(at_target, size, others.max(axis=-1, keepdims=True, initial=0.0))
        floor = 0.0 if strict else ulp(1.0, arithmetic)
        by_row = sizes.upstream.reshape(problem.rows_shape) if problem.reduction == "none" else sizes.upstream.sum()
        return cls(
            loss=np.maximum(ulp(loss, coarsest(loss_dtype, arithmetic)), floor * np.nan_to_num(by_row)),
            gradient=np.maximum(ulp(size, problem.dtype.name), floor * np.nan_to_num(sizes.slope)[:, None]),
            at_target=at_target,
            sums=ulp(loss, arithmetic),
        )


class _Sizes(NamedTuple):
    """Approximate sizes of the summands of a loss and its gradient.

    upstream   (rows,) sum_c u_c and 2 z_loss |logsumexp|, after the reduction: the factor of -log p in the loss
    slope      (rows,) the same for the gradient: times dloss and logit_scale
    opposed    (rows, classes) the largest of an entry's summands that may cancel against each other
    """

    upstream: Array
    slope: Array
    opposed: Array

    @classmethod
    def of(cls, problem: Problem) -> _Sizes:
        options = problem.exact_options
        x = problem.row_major(problem.logits).astype(np.float64)
        rows, classes = x.shape
        scale, softcap = options.get("logit_scale", 1.0), options.get("softcap")
        z = scale * x if softcap is None else softcap * np.tanh(scale * x / softcap)
        top = z.max(axis=-1, keepdims=True, initial=-np.inf)
        e = np.exp(z - top)
        p = e / e.sum(axis=-1, keepdims=True)
        logsumexp = (top + np.log(e.sum(axis=-1, keepdims=True)))[:, 0]
        if problem.kind == "entropy":
            dloss = np.ones(()) if problem.dloss is None else np.abs(problem.dloss.astype(np.float64)).reshape(-1)
            slope = np.broadcast_to(dloss * abs(scale), (rows,))
            of_class = np.where(p == 0.0, 0.0, p * (logsumexp[:, None] - z))
            opposed = slope[:, None] * np.maximum(of_class, p * of_class.sum(axis=-1, keepdims=True))
            return cls(upstream=np.ones(rows), slope=slope, opposed=opposed)
        w = np.asarray(options.get("weight", np.ones(classes))).astype(np.float64)
        smoothing = options.get("label_smoothing", 0.0)
        u = smoothing / max(1, classes) * w + np.zeros_like(x)  # without the target's part
        if problem.with_probabilities:
            q = problem.row_major(problem.targets).astype(np.float64)
            u = np.abs(w * q * (1.0 - smoothing) + u)
            at_target, divisor = np.zeros(rows), float(rows)
        else:
            t = np.where(problem.valid, problem.targets.reshape(-1), 0)
            at_target = np.where(problem.valid, (1.0 - smoothing) * w[t], 0.0)
            divisor = float(np.where(problem.valid, w[t], 0.0).sum())
        factor = problem.valid / (divisor or 1.0) if problem.reduction == "mean" else problem.valid.astype(np.float64)
        z_loss = abs(options.get("z_loss", 0.0))
        z_term = 2.0 * z_loss * np.abs(logsumexp) if z_loss else np.zeros(rows)
        others = u.sum(axis=-1)
        dloss = np.ones(()) if problem.dloss is None else np.abs(problem.dloss.astype(np.float64)).reshape(-1)
        slope = factor * dloss * abs(scale)
        return cls(
            upstream=factor * (at_target + others + z_term),
            slope=slope * (at_target + others + z_term),
            opposed=slope[:, None] * np.maximum((others + z_term)[:, None] * p, u),
        )

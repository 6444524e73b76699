"""The softmax of a row by the textbook, with one class held apart.

One class h of each row is held apart from the sum over the others: the target, or the largest logit if targets are
probabilities. With a = sum_{c != h} exp(z_c - z_h), the loss log1p(a) and the gradient -a / (1 + a) keep all their bits
when p_h is close to 1; `log(1 + a)` and `p - 1` lose theirs. Sums over classes are taken in longdouble, if the platform
has it, and rounded.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Array = np.ndarray[Any, Any]


def softmax(x: Array, z: Array, held: Array, scale: float | None) -> tuple[Array, Array, Array, Array]:
    """Return p, p - [class is held], -log p and logsumexp of z = scale x (or of z, without a scale)."""
    source, factor = (z, 1.0) if scale is None else (x, scale)
    others = source.copy()
    put(others, held, -np.inf)
    h, m = at(source, held)[..., None], others.max(axis=-1, keepdims=True)
    h = np.where(h == np.inf, np.nan, h)
    m = np.where((m == -np.inf) & (h > -np.inf), h, m)  # all other classes are masked
    e = _exp_difference(others, m, factor)
    # over the others, relative to m; in longdouble, as float64 rounds thousands of equal terms in one direction
    total = e.sum(axis=-1, keepdims=True, dtype=np.longdouble).astype(np.float64)
    a = total * _exp_difference(m, h, factor)  # relative to h
    p = e / (total + _exp_difference(h, m, factor))
    p_held = 1.0 / (1.0 + a)
    # logsumexp(z) - z_c: two steps that cannot cancel, from z_c up to the larger of m and h, and from there
    nll_held = np.where(h >= m, np.log1p(a), np.log(total + np.exp(factor * (h - m))) + factor * (m - h))
    above = np.where(h >= m, np.log1p(a), np.log(total + np.exp(factor * (h - m))))
    nll = above + factor * (np.maximum(h, m) - source)
    logsumexp = factor * np.maximum(h, m) + above
    p_minus_held = p.copy()
    put(p, held, p_held[..., 0])
    put(p_minus_held, held, np.where(a == np.inf, -1.0, -a / (1.0 + a))[..., 0])
    put(nll, held, nll_held[..., 0])
    return p, p_minus_held, nll, logsumexp[..., 0]


def _exp_difference(a: Array, b: Array, factor: float) -> Array:
    """Return exp(factor (a - b)), corrected for the rounding error of a - b (Knuth's TwoSum)."""
    difference = a - b
    virtual = difference - a
    error = (a - (difference - virtual)) - (b + virtual)
    # The error is large, infinite or nan only if exp overflows or underflows anyway.
    e = np.exp(factor * difference)
    return np.where((np.abs(error) < 1.0) & (e < np.inf), e + e * (factor * error), e)


def transform(x: Array, scale: float, softcap: float | None) -> tuple[Array, Array]:
    """Return z and dz/dx."""
    if softcap is None:
        return scale * x, np.full_like(x, scale)
    u = scale * x / softcap
    z = np.where(np.isinf(x), x, softcap * np.tanh(u))
    return z, scale / np.cosh(u) ** 2


def held_targets(targets: Array, ignore_index: int, classes: int) -> tuple[Array, Array]:
    """Return (rows,) bools of the rows that count, and the targets, with class 0 in the other rows."""
    valid = targets != ignore_index
    if ((targets[valid] < 0) | (targets[valid] >= classes)).any():
        raise IndexError(f"a target is outside [0, {classes})")
    return valid, np.where(valid, targets, 0)


def by_row(upstream: ArrayLike, x: Array) -> Array:
    """Return an upstream gradient as (rows, 1)."""
    return np.broadcast_to(np.asarray(upstream).astype(np.float64), x.shape[:-1])[..., None]


def at(array: Array, index: Array) -> Array:
    return np.take_along_axis(array, index[..., None], axis=-1)[..., 0]


def put(array: Array, index: Array, values: Any) -> None:
    np.put_along_axis(array, index[..., None], np.broadcast_to(values, index.shape)[..., None], axis=-1)


def add_at(array: Array, index: Array, values: Array) -> None:
    put(array, index, at(array, index) + values)

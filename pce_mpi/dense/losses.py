"""The losses of logits by the textbook.

One class h of each row is held apart from the sum over the others: the target, or the largest logit if targets are
probabilities. With a = sum_{c != h} exp(z_c - z_h), the loss log1p(a) and the gradient -a / (1 + a) keep all their bits
when p_h is close to 1; `log(1 + a)` and `p - 1` lose theirs. Sums over classes are taken in longdouble, if the platform
has it, and rounded.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

Array = np.ndarray[Any, Any]


def with_margin(x: Array, scale: float, margin: tuple[float, float, float]) -> tuple[Array, Array]:
    """Return z = scale (cos(m1 arccos x + m2) - m3) of targets x, and dz/dx.

    A cosine beyond [-1, 1] counts as -1 or 1. There dz/dx is its limit, or 0 if that is infinite.
    """
    m1, m2, m3 = margin
    if m1 == 1.0 and m2 == 0.0:
        return scale * (x - m3), np.full_like(x, scale)
    c = np.clip(x, -1.0, 1.0)
    sine = np.sqrt((1.0 - c) * (1.0 + c))
    angle, sign = m1 * np.arctan2(sine, c) + m2, np.ones_like(c)
    if m1 == np.rint(m1):  # near pi the angle is the distance from pi, which has all digits
        angle = np.where(c < 0.0, m2 - m1 * np.arctan2(sine, -c), angle)
        sign = np.where(c < 0.0, np.cos(np.pi * (m1 % 2.0)), 1.0)
    cosine, of_angle = sign * np.cos(angle), sign * np.sin(angle)
    has_limit = (m2 == 0.0) & ((c > 0.0) | (m1 == np.rint(m1)))
    slope = np.where(sine > 0.0, m1 * of_angle / sine, np.where(has_limit, m1 * m1 * cosine * c, 0.0))
    return np.where(np.isinf(x), x, scale * (cosine - m3)), scale * slope


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
    rest = without(e, others.argmax(axis=-1)).sum(axis=-1, keepdims=True, dtype=np.longdouble).astype(
        np.float64
    ) + np.exp(factor * (h - m))
    above = np.where(h >= m, np.log1p(a), np.where(np.isfinite(m), np.log1p(rest), np.nan))
    nll_held = np.where(h >= m, above, above + factor * (m - h))
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


def without(array: Array, index: Array) -> Array:
    """Return a copy with 0 at `index`."""
    copy = array.copy()
    put(copy, index, 0.0)
    return copy


def add_at(array: Array, index: Array, values: Array) -> None:
    put(array, index, at(array, index) + values)


def softmax_cross_entropy(logits: ArrayLike, targets: ArrayLike, **options: Any) -> Array:
    """Compute the softmax cross entropy in float64.

    Parameters
    ----------
    logits, targets : array_like
        Those of `softmax_cross_entropy_value_and_grad`, which has the formula.
    **options
        Those of `softmax_cross_entropy_value_and_grad`.

    Returns
    -------
    array of float64
        The loss: 0-d, or one number per row for `reduction="none"`.

    Examples
    --------
    >>> float(softmax_cross_entropy([[0.0, 0.0]], [0]))  # log 2
    0.6931471805599453
    """
    return softmax_cross_entropy_value_and_grad(logits, targets, **options)[0]


def softmax_cross_entropy_value_and_grad(
    logits: ArrayLike,
    targets: ArrayLike,
    *,
    axis: int = -1,
    weight: ArrayLike | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    margin: tuple[float, float, float] | None = None,
    reduction: str = "mean",
    num_classes: int | None = None,
    compute_dtype: DTypeLike | None = None,
) -> tuple[Array, Array]:
    """Compute the softmax cross entropy and its gradient with respect to the logits, in float64.

    The loss of a row is the sum over the classes c of u_c (-log p_c), plus z_loss logsumexp(z)**2. With s =
    label_smoothing, w = weight and C classes, u = (1 - s) w_t [c = t] + s w_c / C for a class number t, and
    u = w_c (q_c (1 - s) + s / C) for probabilities q. A class whose u is 0 or infinite contributes u, whatever its
    logit is.

    Parameters
    ----------
    logits : array_like
        Any shape that has a class axis.
    targets : array_like
        Class numbers, with the logits' shape without the class axis, or probabilities, shaped as the logits.
    axis : int, default -1
        The class axis of `logits`.
    weight : array_like, shape (classes,), optional
        The weights of the classes.
    ignore_index : int, default -100
        A row with this target counts for nothing and has a zero gradient.
    label_smoothing : float, default 0.0
        In [0, 1].
    z_loss : float, default 0.0
        The factor of logsumexp(z)**2.
    logit_scale : float, default 1.0
        The loss is taken of z = logit_scale x, x being the logits.
    softcap : float, optional
        The loss is taken of z = softcap tanh(logit_scale x / softcap).
    margin : tuple of three floats, optional
        With (m1, m2, m3), z of the target is logit_scale (cos(m1 arccos x + m2) - m3).
    reduction : {"mean", "sum", "none"}, default "mean"
        `"mean"` divides by the sum of w_t over the rows that are not ignored, or by the number of rows for
        probabilities.
    num_classes : int, optional
        The number of classes, to be checked.
    compute_dtype : dtype, optional
        float64.

    Returns
    -------
    loss : array of float64
        0-d, or one number per row for `reduction="none"`.
    gradient : array of float64
        The gradient of the loss, or of the sum of the rows' losses, in the shape of the logits.

    Raises
    ------
    IndexError
        For a target out of range.
    ValueError
        For an unknown reduction, for a `num_classes` or a `compute_dtype` other than the actual one, and for a `margin`
        with probabilities or a softcap.

    Examples
    --------
    >>> softmax_cross_entropy_value_and_grad([[0.0, 0.0]], [0])[1]
    array([[-0.5,  0.5]])
    """
    if compute_dtype is not None and np.dtype(compute_dtype) != np.float64:
        raise ValueError(f"dense computes in float64, not in {np.dtype(compute_dtype)}")
    x = np.moveaxis(np.asarray(logits).astype(np.float64), axis, -1)
    rows, classes = x.shape[:-1], x.shape[-1]
    if num_classes is not None and num_classes != classes:
        raise ValueError(f"num_classes = {num_classes}, but there are {classes} classes")
    targets = np.asarray(targets)
    index_targets = targets.dtype.kind in "iu"
    w = np.ones(classes) if weight is None else np.asarray(weight).astype(np.float64)
    with np.errstate(all="ignore"):
        z, dz_dx = transform(x, logit_scale, softcap)
        if margin is not None and (softcap is not None or not index_targets):
            raise ValueError("a margin needs class numbers as targets, and no softcap")
        if index_targets:
            valid, held = held_targets(targets, ignore_index, classes)
            if margin is not None:
                for array, values in zip((z, dz_dx), with_margin(at(x, held), logit_scale, margin), strict=True):
                    put(array, held, values)
            u = np.zeros_like(x)
            if label_smoothing:  # without it, a nan among the weights of other classes must not count
                u += label_smoothing / classes * w
            add_at(u, held, (1.0 - label_smoothing) * w[held])
            divisor = w[held][valid].sum()
        else:
            valid = np.ones(rows, bool)
            held = z.argmax(axis=-1)
            q = np.moveaxis(targets.astype(np.float64), axis, -1)
            u = w * (q * (1.0 - label_smoothing) + label_smoothing / classes)
            divisor = valid.sum()
        factor = logit_scale if softcap is None and margin is None else None
        p, p_minus_held, nll, logsumexp = softmax(x, z, held, factor)
        loss = np.where((u == 0.0) | np.isinf(u), u, u * nll).sum(axis=-1) + z_loss * logsumexp * logsumexp
        # sum_c u_c (p - [class is c]), at two classes with u_c (p - 1) apart: the target and the likely class
        u_held, likely = at(u, held)[..., None], z.argmax(axis=-1)
        dz = u_held * p_minus_held + without(u, held).sum(-1, keepdims=True) * p - without(u, held)
        at_likely = at(softmax(x, z, likely, factor)[1], likely) * at(u, likely)
        put(dz, likely, without(u, likely).sum(-1) * at(p, likely) + at_likely)
        total = u.sum(-1, keepdims=True)
        dz = np.where(np.isfinite(total), dz, total * p - u)
        dz += (2.0 * z_loss * logsumexp)[..., None] * p
        loss = np.where(valid, loss, 0.0)
        if reduction == "mean":
            loss = loss.sum() / divisor if divisor != 0 else np.asarray(np.nan)
            dz = dz / divisor if divisor != 0 else np.full_like(dz, np.nan)
        elif reduction == "sum":
            loss = loss.sum()
        elif reduction != "none":
            raise ValueError(f"reduction must be 'none', 'sum' or 'mean', got {reduction!r}")
        gradient = np.where(valid[..., None], dz * dz_dx, 0.0)
    return loss, np.moveaxis(gradient, -1, axis)

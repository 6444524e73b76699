"""The oracle: softmax cross entropy in one process, unsharded, in float64, from the textbook.

This file imports nothing of the package: the code that is compared with it cannot share its mistakes. Options and
conventions are those of `pce_mpi.softmax_cross_entropy` without `comm`, `batch_comm` and `class_start`; `compute_dtype`
can only be float64. Sums over classes are taken in longdouble, if the platform has it, and rounded.

Unlike the textbook it holds one class h of each row apart from the sum over the others: the target, or the largest
logit if targets are probabilities. With a = sum_{c != h} exp(z_c - z_h), the loss log1p(a) and the gradient
-a / (1 + a) keep all their bits when p_h is close to 1; `log(1 + a)` and `p - 1` lose theirs.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

__all__ = [
    "LinearValueAndGrad",
    "Statistics",
    "class_statistics",
    "class_statistics_backward",
    "linear_cross_entropy_value_and_grad",
    "softmax_cross_entropy",
    "softmax_cross_entropy_value_and_grad",
]

Array = np.ndarray[Any, Any]


class Statistics(NamedTuple):
    """The statistics of each row, shaped as the logits without the class axis; z and p are those of `class_statistics`.

    Attributes
    ----------
    max : array of float64
        The largest z.
    sum_exp : array of float64
        sum_c exp(z_c - max).
    logsumexp : array of float64
        log sum_c exp(z_c).
    log_prob : array of float64 or None
        log p of the target; 0 in rows with the target `ignore_index`. None without targets.
    entropy : array of float64
        -sum_c p_c log p_c.
    argmax : array of int64
        The class with the largest logit, the lowest on ties.
    """

    max: Array
    sum_exp: Array
    logsumexp: Array
    log_prob: Array | None
    entropy: Array
    argmax: Array


class LinearValueAndGrad(NamedTuple):
    """The linear loss and its gradients, in float64.

    Attributes
    ----------
    loss : array
        0-d, or one number per row for `reduction="none"`.
    dhidden, dw : array
        The gradients of `hidden` and `w`.
    dbias : array or None
        The gradient of `bias`, if there is one.
    """

    loss: Array
    dhidden: Array
    dw: Array
    dbias: Array | None


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
    reduction: str = "mean",
    num_classes: int | None = None,
    compute_dtype: DTypeLike | None = None,
) -> tuple[Array, Array]:
    """Compute the softmax cross entropy and its gradient with respect to the logits, in float64.

    The loss of a row is the sum over the classes c of u_c (-log p_c), plus z_loss logsumexp(z)**2. With s =
    label_smoothing, w = weight and C classes, u = (1 - s) w_t [c = t] + s w_c / C for a class number t, and
    u = w_c (q_c (1 - s) + s / C) for probabilities q. A class with u = 0 contributes 0, whatever its logit is.

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
        For an unknown reduction, and for a `num_classes` or a `compute_dtype` other than the actual one.

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
        z, dz_dx = _transform(x, logit_scale, softcap)
        if index_targets:
            valid, held = _held_targets(targets, ignore_index, classes)
            u = np.zeros_like(x)
            if label_smoothing:  # without it, a nan among the weights of other classes must not count
                u += label_smoothing / classes * w
            _add_at(u, held, (1.0 - label_smoothing) * w[held])
            divisor = w[held][valid].sum()
        else:
            valid = np.ones(rows, bool)
            held = z.argmax(axis=-1)
            q = np.moveaxis(targets.astype(np.float64), axis, -1)
            u = w * (q * (1.0 - label_smoothing) + label_smoothing / classes)
            divisor = valid.sum()
        p, p_minus_held, nll, logsumexp = _softmax(x, z, held, logit_scale if softcap is None else None)
        loss = np.where(u == 0.0, 0.0, u * nll).sum(axis=-1) + z_loss * logsumexp * logsumexp
        # sum_c u_c (p - [class is c]), the part of the class held apart written as u_h (p - [class is h])
        u_held = _at(u, held)[..., None]
        others = u.copy()
        _put(others, held, 0.0)
        dz = u_held * p_minus_held + others.sum(-1, keepdims=True) * p - others
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


def linear_cross_entropy_value_and_grad(
    hidden: ArrayLike, w: ArrayLike, targets: ArrayLike, *, bias: ArrayLike | None = None, **options: Any
) -> LinearValueAndGrad:
    """Compute the softmax cross entropy of the logits `hidden @ w + bias`, and its gradients, in float64.

    Parameters
    ----------
    hidden : array_like, shape (..., features)
        One vector for each row.
    w : array_like, shape (features, classes)
        The weights of the product.
    targets : array_like of integers, shape (...)
        Class numbers.
    bias : array_like, shape (classes,), optional
        One number for each class.
    **options
        Those of `softmax_cross_entropy_value_and_grad` but `axis`. A row with the target `ignore_index` counts for
        nothing, whatever it holds.

    Returns
    -------
    LinearValueAndGrad
        `loss`, `dhidden`, `dw` and `dbias`.

    Examples
    --------
    >>> linear_cross_entropy_value_and_grad([[1.0]], [[0.0, 0.0]], [0], bias=[0.0, 0.0]).dbias
    array([-0.5,  0.5])
    """
    counts = np.asarray(targets) != options.get("ignore_index", -100)
    x = np.where(counts[..., None], np.asarray(hidden).astype(np.float64), 0.0)
    columns = np.asarray(w).astype(np.float64)
    logits = x @ columns if bias is None else x @ columns + np.asarray(bias).astype(np.float64)
    loss, dlogits = softmax_cross_entropy_value_and_grad(logits, targets, **options)
    dhidden = np.where(counts[..., None], dlogits @ columns.T, 0.0)
    rows = dlogits.reshape(counts.size, columns.shape[1])
    dw = x.reshape(counts.size, columns.shape[0]).T @ rows
    return LinearValueAndGrad(loss, dhidden, dw, None if bias is None else rows.sum(axis=0))


def class_statistics(
    logits: ArrayLike,
    targets: ArrayLike | None = None,
    *,
    axis: int = -1,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Statistics:
    """Compute the statistics of each row's softmax p of z, in float64.

    Parameters
    ----------
    logits : array_like
        Any shape that has a class axis.
    targets : array_like of integers, optional
        Class numbers, for `log_prob`.
    axis, ignore_index, logit_scale, softcap : optional
        Those of `softmax_cross_entropy_value_and_grad`, which has the formula of z. A row with the target
        `ignore_index` has a `log_prob` of 0.

    Returns
    -------
    Statistics
        `max`, `sum_exp`, `logsumexp`, `log_prob`, `entropy` and `argmax` of each row.

    Raises
    ------
    IndexError
        For a target out of range.

    Examples
    --------
    >>> float(class_statistics([[0.0, 0.0]]).entropy[0])  # log 2
    0.6931471805599453
    """
    x = np.moveaxis(np.asarray(logits).astype(np.float64), axis, -1)
    scale = logit_scale if softcap is None else None
    with np.errstate(all="ignore"):
        z, _ = _transform(x, logit_scale, softcap)
        top = x.argmax(axis=-1)  # z grows with x, but a rounded softcap may not
        p, _, nll, logsumexp = _softmax(x, z, top, scale)
        log_prob = None
        if targets is not None:
            valid, held = _held_targets(np.asarray(targets), ignore_index, x.shape[-1])
            log_prob = np.where(valid, -_at(_softmax(x, z, held, scale)[2], held), 0.0)
        entropy = np.where(p == 0.0, 0.0, p * nll).sum(-1)
        return Statistics(_at(z, top), 1.0 / _at(p, top), logsumexp, log_prob, entropy, top)


def class_statistics_backward(
    logits: ArrayLike,
    targets: ArrayLike | None = None,
    *,
    log_prob: ArrayLike | None = None,
    entropy: ArrayLike | None = None,
    logsumexp: ArrayLike | None = None,
    axis: int = -1,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Array:
    """Compute the gradient of class statistics with respect to the logits, in float64.

    The derivatives by z_c are [c = t] - p_c of log p_t, -p_c (log p_c + entropy) of the entropy, and p_c of logsumexp.

    Parameters
    ----------
    logits, targets : array_like
        Those of `class_statistics`.
    log_prob, entropy, logsumexp : array_like, optional
        The upstream gradient of each, a scalar or one number per row. That of `log_prob` counts for nothing in a row
        with the target `ignore_index`.
    axis, ignore_index, logit_scale, softcap : optional
        Those of `class_statistics`.

    Returns
    -------
    array of float64
        The gradient, in the shape of the logits.

    Raises
    ------
    IndexError
        For a target out of range.
    ValueError
        For an upstream gradient of `log_prob` without targets.

    Examples
    --------
    >>> class_statistics_backward([[0.0, 0.0]], [0], log_prob=1.0)
    array([[ 0.5, -0.5]])
    """
    if log_prob is not None and targets is None:
        raise ValueError("the gradient of log_prob needs targets")
    x = np.moveaxis(np.asarray(logits).astype(np.float64), axis, -1)
    scale = logit_scale if softcap is None else None
    gradient = np.zeros_like(x)
    with np.errstate(all="ignore"):
        z, dz_dx = _transform(x, logit_scale, softcap)
        p, _, nll, _ = _softmax(x, z, x.argmax(axis=-1), scale)
        if log_prob is not None:
            valid, held = _held_targets(np.asarray(targets), ignore_index, x.shape[-1])
            p_minus_held = _softmax(x, z, held, scale)[1]
            gradient -= np.where(valid[..., None], _by_row(log_prob, x) * p_minus_held, 0.0)
        if entropy is not None:
            of_class = np.where(p == 0.0, 0.0, p * nll)
            gradient += _by_row(entropy, x) * (of_class - p * of_class.sum(axis=-1, keepdims=True))
        if logsumexp is not None:
            gradient += _by_row(logsumexp, x) * p
        return np.moveaxis(gradient * dz_dx, -1, axis)


def _by_row(upstream: ArrayLike, x: Array) -> Array:
    """Return an upstream gradient as (rows, 1)."""
    return np.broadcast_to(np.asarray(upstream).astype(np.float64), x.shape[:-1])[..., None]


def _held_targets(targets: Array, ignore_index: int, classes: int) -> tuple[Array, Array]:
    """Return (rows,) bools of the rows that count, and the targets, with class 0 in the other rows."""
    valid = targets != ignore_index
    if ((targets[valid] < 0) | (targets[valid] >= classes)).any():
        raise IndexError(f"a target is outside [0, {classes})")
    return valid, np.where(valid, targets, 0)


def _transform(x: Array, scale: float, softcap: float | None) -> tuple[Array, Array]:
    """Return z and dz/dx."""
    if softcap is None:
        return scale * x, np.full_like(x, scale)
    u = scale * x / softcap
    z = np.where(np.isinf(x), x, softcap * np.tanh(u))
    return z, scale / np.cosh(u) ** 2


def _softmax(x: Array, z: Array, held: Array, scale: float | None) -> tuple[Array, Array, Array, Array]:
    """Return p, p - [class is held], -log p and logsumexp of z = scale x (or of z, without a scale)."""
    source, factor = (z, 1.0) if scale is None else (x, scale)
    others = source.copy()
    _put(others, held, -np.inf)
    h, m = _at(source, held)[..., None], others.max(axis=-1, keepdims=True)
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
    _put(p, held, p_held[..., 0])
    _put(p_minus_held, held, np.where(a == np.inf, -1.0, -a / (1.0 + a))[..., 0])
    _put(nll, held, nll_held[..., 0])
    return p, p_minus_held, nll, logsumexp[..., 0]


def _exp_difference(a: Array, b: Array, factor: float) -> Array:
    """Return exp(factor (a - b)), corrected for the rounding error of a - b (Knuth's TwoSum)."""
    difference = a - b
    virtual = difference - a
    error = (a - (difference - virtual)) - (b + virtual)
    # The error is large, infinite or nan only if exp overflows or underflows anyway.
    e = np.exp(factor * difference)
    return np.where((np.abs(error) < 1.0) & (e < np.inf), e + e * (factor * error), e)


def _at(array: Array, index: Array) -> Array:
    return np.take_along_axis(array, index[..., None], axis=-1)[..., 0]


def _put(array: Array, index: Array, values: Any) -> None:
    np.put_along_axis(array, index[..., None], np.broadcast_to(values, index.shape)[..., None], axis=-1)


def _add_at(array: Array, index: Array, values: Array) -> None:
    _put(array, index, _at(array, index) + values)

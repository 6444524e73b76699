"""Statistics of the softmax, and their gradients."""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pce_mpi.dense.losses import at, by_row, held_targets, put, softmax, transform

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
        log p of the target; 0 for the target `ignore_index`. None without targets. With several targets a row it has
        the shape of these.
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


def class_statistics(
    logits: ArrayLike,
    targets: ArrayLike | None = None,
    *,
    axis: int = -1,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    support: tuple[ArrayLike, ArrayLike] | None = None,
    outside: str = "raise",
) -> Statistics:
    """Compute the statistics of each row's softmax p of z, in float64.

    Parameters
    ----------
    logits : array_like
        Any shape that has a class axis.
    targets : array_like of integers, optional
        Class numbers, for `log_prob`: one a row, or several in place of the class axis.
    axis, ignore_index, logit_scale, softcap : optional
        Those of `softmax_cross_entropy_value_and_grad`, which has the formula of z. A target `ignore_index` has a
        `log_prob` of 0.
    support : (ids, offsets), optional
        The classes of row r, counted in the logits' shape without the class axis, are `ids[offsets[r]:offsets[r + 1]]`;
        p is the softmax over these alone.
    outside : {"raise", "-inf", "add"}, default "raise"
        A target outside its support is an error, has a `log_prob` of -inf, or is added to the support.

    Returns
    -------
    Statistics
        `max`, `sum_exp`, `logsumexp`, `log_prob`, `entropy` and `argmax` of each row.

    Raises
    ------
    IndexError
        For a target out of range.
    ValueError
        For a target outside its support.

    Examples
    --------
    >>> float(class_statistics([[0.0, 0.0]]).entropy[0])  # log 2
    0.6931471805599453
    """
    x, each, _ = _arranged(logits, targets, axis, ignore_index, support, outside)
    scale = logit_scale if softcap is None else None
    with np.errstate(all="ignore"):
        z, _ = transform(x, logit_scale, softcap)
        top = x.argmax(axis=-1)  # z grows with x, but a rounded softcap may not
        p, _, nll, logsumexp = softmax(x, z, top, scale)
        log_prob = None
        if each is not None:
            log_prob = np.zeros(each.shape)
            for k in range(each.shape[-1]):
                valid, held = held_targets(each[..., k], ignore_index, x.shape[-1])
                log_prob[..., k] = np.where(valid, -at(softmax(x, z, held, scale)[2], held), 0.0)
            log_prob = np.moveaxis(log_prob, -1, axis) if np.ndim(np.asarray(targets)) == x.ndim else log_prob[..., 0]
        entropy = np.where(p == 0.0, 0.0, p * nll).sum(-1)
        return Statistics(at(z, top), 1.0 / at(p, top), logsumexp, log_prob, entropy, top)


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
    support: tuple[ArrayLike, ArrayLike] | None = None,
    outside: str = "raise",
) -> Array:
    """Compute the gradient of class statistics with respect to the logits, in float64.

    The derivatives by z_c are [c = t] - p_c of log p_t, -p_c (log p_c + entropy) of the entropy, and p_c of logsumexp.
    They are 0 for a class outside the support.

    Parameters
    ----------
    logits, targets : array_like
        Those of `class_statistics`.
    log_prob, entropy, logsumexp : array_like, optional
        The upstream gradient of each, a scalar or an array of its shape. That of `log_prob` counts for nothing where
        the target is `ignore_index`.
    axis, ignore_index, logit_scale, softcap, support, outside : optional
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
        For an upstream gradient of `log_prob` without targets, and for a target outside its support.

    Examples
    --------
    >>> class_statistics_backward([[0.0, 0.0]], [0], log_prob=1.0)
    array([[ 0.5, -0.5]])
    """
    if log_prob is not None and targets is None:
        raise ValueError("the gradient of log_prob needs targets")
    x, each, inside = _arranged(logits, targets, axis, ignore_index, support, outside)
    scale = logit_scale if softcap is None else None
    gradient = np.zeros_like(x)
    with np.errstate(all="ignore"):
        z, dz_dx = transform(x, logit_scale, softcap)
        p, _, nll, _ = softmax(x, z, x.argmax(axis=-1), scale)
        if log_prob is not None and each is not None:
            g = np.broadcast_to(np.asarray(log_prob).astype(np.float64), np.asarray(targets).shape)
            g = np.moveaxis(g, axis, -1) if g.ndim == x.ndim else g[..., None]
            for k in range(each.shape[-1]):
                valid, held = held_targets(each[..., k], ignore_index, x.shape[-1])
                p_minus_held = softmax(x, z, held, scale)[1]
                gradient -= np.where(valid[..., None], g[..., k, None] * p_minus_held, 0.0)
        if entropy is not None:
            of_class = np.where(p == 0.0, 0.0, p * nll)
            gradient += by_row(entropy, x) * (of_class - p * of_class.sum(axis=-1, keepdims=True))
        if logsumexp is not None:
            gradient += by_row(logsumexp, x) * p
        return np.moveaxis(np.where(inside, gradient * dz_dx, 0.0), -1, axis)


def _arranged(
    logits: ArrayLike,
    targets: ArrayLike | None,
    axis: int,
    ignore_index: int,
    support: tuple[ArrayLike, ArrayLike] | None,
    outside: str,
) -> tuple[Array, Array | None, Array]:
    """Return logits (rows..., classes), -inf outside their support, targets (rows..., K), and the support as a mask."""
    x = np.moveaxis(np.asarray(logits).astype(np.float64), axis, -1)
    each = None if targets is None else np.asarray(targets)
    if each is not None:
        each = np.moveaxis(each, axis, -1) if each.ndim == x.ndim else each[..., None]
    if support is None:
        return x, each, np.ones(x.shape, np.bool_)
    ids, offsets = (np.asarray(part) for part in support)
    inside: Array = np.zeros((x[..., 0].size, x.shape[-1]), np.bool_)
    for row, (start, stop) in enumerate(pairwise(offsets)):
        inside[row, ids[start:stop]] = True
    inside = inside.reshape(x.shape)
    if each is not None and outside != "-inf":
        valid, held = held_targets(each, ignore_index, x.shape[-1])
        if outside == "add":
            for k in range(held.shape[-1]):
                put(inside, held[..., k], at(inside, held[..., k]) | valid[..., k])
        elif not np.take_along_axis(inside, held, axis=-1)[valid].all():
            raise ValueError("a target is outside its support")
    return np.where(inside, x, -np.inf), each, inside

"""The classes that top-k, top-p and min-p leave."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

Array = np.ndarray[Any, Any]


class Nucleus(NamedTuple):
    """The classes that are kept, and their mass; those of row r are `ids[offsets[r]:offsets[r + 1]]`.

    Attributes
    ----------
    ids : array of int64
        Class numbers, ascending in each row.
    offsets : array of int64
        (rows + 1,), over the rows of the logits, flattened without the class axis.
    mass : array of float64
        The sum of the probabilities of the classes that are kept, of the softmax over all classes.
    log_mass : array of float64
        Its logarithm.
    """

    ids: Array
    offsets: Array
    mass: Array
    log_mass: Array


def nucleus(
    logits: ArrayLike,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    logit_scale: float = 1.0,
    axis: int = -1,
) -> Nucleus:
    """Find the classes that top-k, then top-p, then min-p leave: a stable sort of each row, and sums in longdouble.

    With z = logit_scale logits and classes in the order of their logits, the largest first and the lowest class first
    among equal ones: top-k keeps the classes whose logit is at least the k-th, all equal ones included. Top-p keeps,
    of these, each class before which less than top_p of their mass comes. Min-p keeps, of these, each class whose
    probability is at least min_p times the largest. If the mass before a class is top_p but for rounding, another
    order of summation may decide otherwise.

    Parameters
    ----------
    logits : array_like
        Any shape that has a class axis. A class with the logit -inf is never kept.
    top_k, top_p, min_p : optional
        At least 1; in (0, 1]; in [0, 1]. None leaves a step out.
    logit_scale : float, default 1.0
        Positive: 1 / T for a temperature T.
    axis : int, default -1
        The class axis.

    Returns
    -------
    Nucleus
        A row with a nan or a +inf, or of only -inf, keeps nothing, and has a mass of nan.

    Examples
    --------
    >>> found = nucleus(np.log([[0.5, 0.3, 0.2]]), top_p=0.75)
    >>> found.ids, found.offsets, found.mass.round(4)
    (array([0, 1]), array([0, 2]), array([0.8]))
    """
    x = np.moveaxis(np.asarray(logits).astype(np.float64), axis, -1)
    rows = [_row(row, top_k, top_p, min_p, logit_scale) for row in x.reshape(-1, x.shape[-1])]
    ids = np.concatenate([np.empty(0, np.int64), *(np.sort(kept) for kept, _, _ in rows)])
    offsets = np.cumsum([0, *(len(kept) for kept, _, _ in rows)], dtype=np.int64)
    mass, log_mass = (np.array([row[i] for row in rows], np.float64).reshape(x.shape[:-1]) for i in (1, 2))
    return Nucleus(ids, offsets, mass, log_mass)


def _row(
    x: Array, top_k: int | None, top_p: float | None, min_p: float | None, logit_scale: float
) -> tuple[Array, Any, Any]:
    """Return the classes kept, most probable first, their mass and its logarithm."""
    order = np.argsort(-x, kind="stable")
    order = order[x[order] > -np.inf]
    if not order.size or not np.isfinite(x).any() or np.isnan(x).any() or x.max() == np.inf:
        return np.empty(0, np.int64), np.nan, np.nan
    z = logit_scale * x[order].astype(np.longdouble)
    e = np.exp(z - z[0])
    kept = np.ones(len(e), np.bool_)
    if top_k is not None:
        kept = x[order] >= x[order[min(top_k, len(z)) - 1]]
    if top_p is not None and top_p < 1.0:
        reached = np.cumsum(e)
        kept[1:] &= reached[:-1] < top_p * reached[kept][-1]
    if min_p is not None:
        with np.errstate(divide="ignore"):
            kept &= z - z[0] >= np.log(np.longdouble(min_p))
    inside, outside = e[kept].sum(), e[~kept].sum()
    return order[kept], inside / (inside + outside), -np.log1p(outside / inside)

"""Divergences of two softmaxes."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pce_mpi.dense.losses import softmax

Array = np.ndarray[Any, Any]


class KLValueAndGrad(NamedTuple):
    """A divergence and its gradients, in float64.

    Attributes
    ----------
    divergence : array
        0-d, or one number per row for `reduction="none"`.
    dstudent, dteacher : array
        The gradients of the logits.
    """

    divergence: Array
    dstudent: Array
    dteacher: Array


def kl_divergence_value_and_grad(
    student: ArrayLike,
    teacher: ArrayLike,
    *,
    direction: str = "forward",
    beta: float = 0.5,
    logit_scale: float = 1.0,
    rows: ArrayLike | None = None,
    reduction: str = "mean",
    axis: int = -1,
) -> KLValueAndGrad:
    """Compute the divergence of two softmaxes and its gradients, in float64, from the textbook.

    With s and t the softmax of logit_scale student and logit_scale teacher, and KL(p || q) = sum_c p_c log(p_c / q_c),
    it is KL(t || s), KL(s || t), or beta KL(t || m) + (1 - beta) KL(s || m) with m = beta t + (1 - beta) s, for a beta
    between 0 and 1. A class with p_c = 0 contributes 0. The textbook loses what a divergence below some 1e-8 is made
    of.

    Parameters
    ----------
    student, teacher : array_like
        Logits of one shape, which has a class axis.
    direction : {"forward", "reverse", "jensen-shannon"}, default "forward"
        KL(t || s), KL(s || t), or the mean of two divergences.
    beta : float, default 0.5
        The weight of the teacher, for "jensen-shannon". At 0 it is KL(t || s), at 1 KL(s || t).
    logit_scale : float, default 1.0
        The factor of the logits: 1 / T for a temperature T.
    rows : array_like of bool, optional
        The rows that count, shaped as the logits without the class axis.
    reduction : {"mean", "sum", "none"}, default "mean"
        `"mean"` divides by the number of rows that count.
    axis : int, default -1
        The class axis.

    Returns
    -------
    KLValueAndGrad
        `divergence`, `dstudent` and `dteacher`.

    Raises
    ------
    ValueError
        For an unknown direction or reduction, or a `beta` outside of [0, 1].

    Examples
    --------
    >>> import numpy as np
    >>> float(kl_divergence_value_and_grad(np.log([[1.0, 3.0]]), [[0.0, 0.0]]).divergence.round(6))  # log 2 / sqrt 3
    0.143841
    """
    if direction not in ("forward", "reverse", "jensen-shannon"):
        raise ValueError(f"direction must be 'forward', 'reverse' or 'jensen-shannon', got {direction!r}")
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta must be in [0, 1], got {beta!r}")
    x, y = (np.moveaxis(np.asarray(each).astype(np.float64), axis, -1) for each in (student, teacher))
    counts = np.ones(x.shape[:-1], bool) if rows is None else np.asarray(rows)
    if direction == "jensen-shannon" and beta in (0, 1):
        direction = "reverse" if beta else "forward"
    with np.errstate(all="ignore"):
        of_both = (softmax(z, z, z.argmax(axis=-1), None) for z in (logit_scale * x, logit_scale * y))
        (s, log_s), (t, log_t) = ((p, -nll) for p, _, nll, _ in of_both)
        if direction == "forward":
            divergence, dt = _kl(t, log_t, log_s)
            ds = s - t
        elif direction == "reverse":
            divergence, ds = _kl(s, log_s, log_t)
            dt = t - s
        else:
            larger = np.maximum(log_s, log_t)  # the logarithm of a mean of subnormal probabilities has no digits
            weight, other = (np.where(log_s < log_t, *each) for each in ((1.0 - beta, beta), (beta, 1.0 - beta)))
            ratio = np.minimum(log_s, log_t) - larger
            far = np.log(other + weight * np.exp(ratio))  # keeps a small weight of the larger one
            log_m = larger + np.where(ratio < -1.0, far, np.log1p(weight * np.expm1(ratio)))
            (of_s, ds), (of_t, dt) = _kl(s, log_s, log_m), _kl(t, log_t, log_m)
            divergence, ds, dt = (1.0 - beta) * of_s + beta * of_t, (1.0 - beta) * ds, beta * dt
        divergence = np.where(counts, divergence, 0.0)
        divisor = counts.sum() if reduction == "mean" else 1
        factor = logit_scale / divisor if divisor else np.nan
        ds, dt = (np.moveaxis(np.where(counts[..., None], each * factor, 0.0), -1, axis) for each in (ds, dt))
        if reduction == "mean":
            divergence = divergence.sum() / divisor if divisor else np.asarray(np.nan)
        elif reduction == "sum":
            divergence = divergence.sum()
        elif reduction != "none":
            raise ValueError(f"reduction must be 'none', 'sum' or 'mean', got {reduction!r}")
    return KLValueAndGrad(divergence, ds, dt)


def _kl(p: Array, log_p: Array, log_q: Array) -> tuple[Array, Array]:
    """Return KL(p || q), and its gradient by the logits of p."""
    of_class = np.where(log_p == -np.inf, 0.0, np.where(log_q == -np.inf, np.inf, p * (log_p - log_q)))
    divergence = of_class.sum(axis=-1, dtype=np.longdouble).astype(np.float64)
    return divergence, np.where(p == 0.0, 0.0, of_class - p * divergence[..., None])  # also if that is infinite

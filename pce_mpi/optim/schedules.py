"""Learning rates as functions of the step."""

from __future__ import annotations

import math

import numpy as np

from pce_mpi.exact.functions import cos
from pce_mpi.validation import integer, real


def linear_schedule(step: int, *, lr: float, steps: int, warmup: int = 0, final: float = 0.0) -> float:
    """Return the learning rate of a step: a linear rise to `lr`, then a linear fall to `final`.

    Parameters
    ----------
    step : int
        The number of the step, from 0.
    lr : float
        The highest rate.
    steps : int
        The number of steps of the training; the rate of all later steps is `final`.
    warmup : int, default 0
        The number of steps of the rise; step k of these has the rate lr (k + 1) / warmup.
    final : float, default 0.0
        The rate at the end.

    Returns
    -------
    float
        The learning rate.

    Raises
    ------
    TypeError
        If an argument is no number of its type.
    ValueError
        If `step` or `warmup` is negative, or `warmup` not less than `steps`.

    Notes
    -----
    Communicates nothing.

    Examples
    --------
    >>> [linear_schedule(step, lr=1.0, steps=6, warmup=2) for step in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    lr, final, part = real(lr, "lr"), real(final, "final"), _fallen(step, steps, warmup)
    return lr * (step + 1) / warmup if part < 0.0 else lr + (final - lr) * part


def cosine_schedule(step: int, *, lr: float, steps: int, warmup: int = 0, final: float = 0.0) -> float:
    """Return the learning rate of a step: a linear rise to `lr`, then half a cosine down to `final`.

    Parameters
    ----------
    step, lr, steps, warmup, final
        Those of `linear_schedule`.

    Returns
    -------
    float
        The learning rate.

    Raises
    ------
    TypeError, ValueError
        As in `linear_schedule`.

    Notes
    -----
    Communicates nothing.

    Examples
    --------
    >>> [round(cosine_schedule(step, lr=1.0, steps=6, warmup=2), 3) for step in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    lr, final, part = real(lr, "lr"), real(final, "final"), _fallen(step, steps, warmup)
    if part < 0.0:
        return lr * (step + 1) / warmup
    return final + (lr - final) * 0.5 * (1.0 + float(cos(np.asarray(math.pi * part))))


def _fallen(step: int, steps: int, warmup: int) -> float:
    """Return the part of the fall that is done at `step`, in [0, 1]; it is negative while the rate rises."""
    step, steps, warmup = integer(step, "step"), integer(steps, "steps"), integer(warmup, "warmup")
    if step < 0:
        raise ValueError(f"step must be at least 0, got {step}")
    if not 0 <= warmup < steps:
        raise ValueError(f"warmup must be at least 0 and less than steps, got {warmup} of {steps}")
    return -1.0 if step < warmup else min(1.0, (step - warmup) / (steps - warmup))

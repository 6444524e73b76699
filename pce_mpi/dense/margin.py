"""The margin of a loss of cosines, by the textbook."""

from typing import Any

import numpy as np

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
    angle = m1 * np.arctan2(sine, c) + m2
    has_limit = (m2 == 0.0) & ((c > 0.0) | (m1 == np.rint(m1)))
    slope = np.where(sine > 0.0, m1 * np.sin(angle) / sine, np.where(has_limit, m1 * m1 * np.cos(angle) * c, 0.0))
    return np.where(np.isinf(x), x, scale * (np.cos(angle) - m3)), scale * slope

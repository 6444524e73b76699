"""The logits of chosen classes."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Array = np.ndarray[Any, Any]


def take_classes(logits: ArrayLike, ids: ArrayLike, *, axis: int = -1) -> Array:
    """Take the logits of chosen classes, in float64.

    Parameters
    ----------
    logits : array_like
        Any shape that has a class axis.
    ids : array_like of integers
        Class numbers: the logits' shape with any number of classes in place of the class axis.
    axis : int, default -1
        The class axis.

    Returns
    -------
    array of float64
        The logits, in the shape of `ids`.

    Raises
    ------
    IndexError
        For a class out of range.

    Examples
    --------
    >>> take_classes([[1.0, 2.0, 3.0]], [[2, 0]])
    array([[3., 1.]])
    """
    x, numbers = np.asarray(logits).astype(np.float64), np.asarray(ids)
    _check(numbers, x.shape[axis])
    return np.take_along_axis(x, numbers, axis)


def take_classes_backward(dchosen: ArrayLike, ids: ArrayLike, classes: int, *, axis: int = -1) -> Array:
    """Compute the gradient of all logits from that of the chosen ones, in float64.

    Parameters
    ----------
    dchosen : array_like
        The gradient of what `take_classes` gives, in the shape of `ids`.
    ids : array_like of integers
        Those of `take_classes`.
    classes : int
        The number of classes.
    axis : int, default -1
        The class axis.

    Returns
    -------
    array of float64
        The gradient in the logits' shape; a class that is chosen more than once has the sum.

    Raises
    ------
    IndexError
        For a class out of range.

    Examples
    --------
    >>> take_classes_backward([[1.0, 2.0, 3.0]], [[2, 0, 2]], 3)
    array([[2., 0., 4.]])
    """
    g, numbers = (np.moveaxis(np.asarray(each), axis, -1) for each in (dchosen, ids))
    _check(numbers, classes)
    is_class = numbers[..., None] == np.arange(classes)  # (rows..., chosen, classes)
    return np.moveaxis((g.astype(np.float64)[..., None] * is_class).sum(axis=-2), -1, axis)


def _check(ids: Array, classes: int) -> None:
    if ((ids < 0) | (ids >= classes)).any():
        raise IndexError(f"a class is outside [0, {classes})")

"""The loss of a product."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pce_mpi.dense.losses import softmax_cross_entropy_value_and_grad

Array = np.ndarray[Any, Any]


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

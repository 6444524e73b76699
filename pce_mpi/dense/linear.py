"""The loss of a product, and the statistics of its rows."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pce_mpi.dense.losses import softmax_cross_entropy_value_and_grad
from pce_mpi.dense.statistics import Statistics, class_statistics, class_statistics_backward

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


class LinearGradients(NamedTuple):
    """The gradients of the operands of a product, in float64.

    Attributes
    ----------
    dhidden, dw : array
        The gradients of `hidden` and `w`.
    dbias : array or None
        The gradient of `bias`, if there is one.
    """

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
    loss, dlogits = softmax_cross_entropy_value_and_grad(_logits(x, w, bias), targets, **options)
    dhidden, dw, dbias = _gradients(x, w, bias, dlogits)
    return LinearValueAndGrad(loss, np.where(counts[..., None], dhidden, 0.0), dw, dbias)


def linear_class_statistics(
    hidden: ArrayLike, w: ArrayLike, targets: ArrayLike | None = None, *, bias: ArrayLike | None = None, **options: Any
) -> Statistics:
    """Compute the class statistics of the logits `hidden @ w + bias`, in float64.

    Parameters
    ----------
    hidden, w : array_like
        Those of `linear_cross_entropy_value_and_grad`.
    targets : array_like of integers, optional
        Class numbers, for `log_prob`.
    bias : array_like, optional
        That of `linear_cross_entropy_value_and_grad`.
    **options
        Those of `class_statistics` but `axis`.

    Returns
    -------
    Statistics
        `max`, `sum_exp`, `logsumexp`, `log_prob`, `entropy` and `argmax` of each row.

    Examples
    --------
    >>> float(linear_class_statistics([[1.0]], [[0.0, 0.0]]).entropy[0])  # log 2
    0.6931471805599453
    """
    return class_statistics(_logits(hidden, w, bias), targets, **options)


def linear_class_statistics_backward(
    hidden: ArrayLike,
    w: ArrayLike,
    targets: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    **upstream_and_options: Any,
) -> LinearGradients:
    """Compute the gradients of `hidden`, `w` and `bias` from those of the statistics of their logits, in float64.

    Parameters
    ----------
    hidden, w, targets, bias : array_like
        Those of `linear_class_statistics`.
    **upstream_and_options
        `log_prob`, `entropy`, `logsumexp` and the options of `class_statistics_backward` but `axis`.

    Returns
    -------
    LinearGradients
        `dhidden`, `dw` and `dbias`.

    Examples
    --------
    >>> linear_class_statistics_backward([[1.0]], [[0.0, 0.0]], [0], log_prob=1.0).dw
    array([[ 0.5, -0.5]])
    """
    dlogits = class_statistics_backward(_logits(hidden, w, bias), targets, **upstream_and_options)
    return LinearGradients(*_gradients(np.asarray(hidden).astype(np.float64), w, bias, dlogits))


def _logits(hidden: ArrayLike, w: ArrayLike, bias: ArrayLike | None) -> Array:
    product = np.asarray(hidden).astype(np.float64) @ np.asarray(w).astype(np.float64)
    return product if bias is None else product + np.asarray(bias).astype(np.float64)


def _gradients(x: Array, w: ArrayLike, bias: ArrayLike | None, dlogits: Array) -> tuple[Array, Array, Array | None]:
    columns = np.asarray(w).astype(np.float64)
    rows = dlogits.reshape(-1, columns.shape[1])
    dw = x.reshape(len(rows), columns.shape[0]).T @ rows
    return dlogits @ columns.T, dw, None if bias is None else rows.sum(axis=0)

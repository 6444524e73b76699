"""Cross entropy of `hidden @ w + bias`, whose gradients are taken while the logits of some rows are at hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import numpy as np

from pce_mpi.arrays import array_namespace, as_array, is_true
from pce_mpi.kernels import converted, standard_arithmetic
from pce_mpi.loss.chunks import Gradients, agree_on_product
from pce_mpi.loss.options import LinearOptions, Options, takes
from pce_mpi.loss.passes import Residuals, loss_fields, reduced, row_losses, write_gradient
from pce_mpi.loss.tensors import tensors_for_tensors

Array = Any  # numpy.ndarray or cupy.ndarray
HostArray = np.ndarray[Any, Any]


class LinearValueAndGrad(NamedTuple):
    """The linear loss and its gradients, on plain arrays.

    Attributes
    ----------
    loss : array
        0-d, or one number per row for `reduction="none"`.
    dhidden : array
        The gradient of `hidden`: of the loss, or of the sum over this rank's rows for `reduction="none"`. It is the sum
        over the classes of all shards, the same on every rank of `comm`.
    dw : array
        The gradient of this shard of `w`, from this rank's rows: with `batch_comm`, sum it over its ranks.
    dbias : array or None
        The gradient of this shard of `bias`, from this rank's rows. None without a bias.
    """

    loss: Array
    dhidden: Array
    dw: Array
    dbias: Array | None


@takes(LinearOptions)
@tensors_for_tensors
def linear_cross_entropy_value_and_grad(
    hidden: Any, w: Any, targets: Any, **options: Unpack[LinearOptions]
) -> LinearValueAndGrad:
    """Compute the cross entropy of `hidden @ w + bias`, and its gradients, without ever holding all logits.

    Each rank passes the same `hidden` and its own columns of `w`. The loss is `softmax_cross_entropy` of the logits
    `hidden @ w + bias`, for class numbers as targets.

    Parameters
    ----------
    hidden : array of float16, bfloat16, float32 or float64, shape (..., features)
        Equal on every rank of `comm`, bit for bit; a difference raises `CollectiveError`.
    w : array of the dtype of `hidden`, shape (features, local classes)
        This shard's classes; `w.T` of an array (classes, features) is accepted as it is.
    targets : array of integers, shape (...)
        Class numbers: global, the same on every rank of `comm`.

    Returns
    -------
    LinearValueAndGrad
        `loss`, `dhidden`, `dw` and `dbias`, in this order; gradients have the dtype of `hidden`.

    Raises
    ------
    TypeError, ValueError, IndexError, CollectiveError, CollectiveTimeout, RuntimeError
        Those of `softmax_cross_entropy`, and for `hidden`, `w` and `bias` that do not fit.

    Notes
    -----
    Collective over `comm`: one Allgather of 56 bytes; one Allreduce of 40 bytes a row (more with options) for each half
    of a chunk; and one Allreduce of `dhidden`. Collective over `batch_comm` as `softmax_cross_entropy` is.

    The bits depend on the matrix products. The loss has the bits of `softmax_cross_entropy` of the same logits. But a
    BLAS gives other last bits to a product with another number of rows or columns, and `dhidden` is a sum of
    floating-point numbers over the ranks. Logits of halves are float32, and so are the sums of the gradients. A GPU
    multiplies halves as they are (cuBLAS's `gemmEx`), and the gradient of the logits as the sum of two halves, which
    keep 16 bits of it; `rounded_gradient` takes the first alone, which keeps 8 bits, or 11 of float16. For float16,
    elements less than 2^-24 of the largest one keep fewer bits.

    Examples
    --------
    >>> import numpy as np
    >>> hidden, w, bias = np.ones((1, 2)), np.zeros((2, 4)), np.zeros(4)
    >>> found = linear_cross_entropy_value_and_grad(hidden, w, np.array([3]), bias=bias)
    >>> found.loss, found.dhidden, found.dbias
    (array(1.38629436), array([[0., 0.]]), array([ 0.25,  0.25,  0.25, -0.75]))
    """
    checked = Options.of("linear_cross_entropy_value_and_grad", options, LinearOptions)
    loss, sums = loss_and_sums(checked, hidden, w, targets)
    sums.gradients.sum_over_shards(checked.operation, checked)
    dtype = as_array(w, "w").dtype
    totals = sums.gradients
    gradients = sums.of_hidden(1.0), sums.of_classes(totals.w, 1.0), sums.of_classes(totals.bias, 1.0)
    with np.errstate(all="ignore"):
        dhidden, dw, dbias = (converted(gradient, dtype, copy=False) for gradient in gradients)
    return LinearValueAndGrad(loss, dhidden, dw, None if checked.bias is None else dbias)


@dataclass
class RowSums:
    """Gradients of the sum of the losses of rows that count; those of the loss are these times `factor`, (1,).

    `ignored`, (rows,) on the host, are the rows that do not count.
    """

    gradients: Gradients
    factor: Array
    ignored: HostArray

    def of_hidden(self, upstream: Any) -> Array:
        """Return the gradient of `hidden`, in its sum's memory; rows that do not count stay 0 for any factor."""
        found = self._scaled(self.gradients.hidden, upstream)
        if is_true(self.ignored.any()):
            found[array_namespace(found).asarray(self.ignored.reshape(found.shape[:-1]))] = 0
        return found

    def of_classes(self, total: Array, upstream: Any) -> Array:
        """Return the gradient of `w` or `bias` in the memory of its `total`; it is 0 if no row counts."""
        return total if is_true(self.ignored.all()) else self._scaled(total, upstream)

    def _scaled(self, gradient: Array, upstream: Any) -> Array:
        with np.errstate(all="ignore"):
            gradient *= (upstream * self.factor).astype(gradient.dtype)
        return gradient


def loss_and_sums(
    options: Options, hidden: Any, w: Any, targets: Any, with_gradients: bool = True
) -> tuple[Array, RowSums]:
    """Return the loss, and the gradients of the sum of the rows' losses."""
    with standard_arithmetic():
        problem, product = agree_on_product(options, hidden, w, targets, needs_targets=True, with_gradients=True)
        xp, fields, one = problem.xp, loss_fields(problem), np.ones(1)
        losses = xp.empty((2, len(product.hidden)))
        for rows, part, softmax in product.parts_of(problem, fields):
            losses[:, rows] = row_losses(part, softmax, fields)
            if with_gradients:
                write_gradient(part.logits, Residuals(part, softmax, one, ()), one)
                vectors = product.hidden[rows]
                if not problem.all_valid:  # 0 times nan is nan
                    vectors = vectors.copy()
                    vectors[xp.asarray(~part.valid)] = 0
                product.add_gradients(vectors, rows, part)
        loss, divisor = reduced(problem, losses)
        with np.errstate(all="ignore"):
            factor = 1.0 / xp.asarray(divisor)
    assert product.gradients is not None
    return loss, RowSums(product.gradients, factor, ~problem.valid)

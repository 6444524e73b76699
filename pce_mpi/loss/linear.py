"""Cross entropy and statistics of `hidden @ w + bias`, and their gradients, without all logits at once.

The gradients of the loss are taken while the logits of some rows are at hand; those of statistics compute the logits a
second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Unpack
import zlib

import numpy as np

from pce_mpi.arrays import Array, HostArray, array_namespace, as_array, is_true, to_host
from pce_mpi.comm.agreement import agree, local_checks
from pce_mpi.kernels import converted, sets_arithmetic
from pce_mpi.kernels.interface import RowSoftmax, Upstream
from pce_mpi.loss.chunks import Gradients, Product, agree_on_product, over_all_rows
from pce_mpi.loss.options import LinearOptions, LinearStatisticsOptions, Options, takes
from pce_mpi.loss.passes import (
    MadeResiduals,
    Residuals,
    loss_fields,
    reduced,
    row_losses,
    write_gradient,
    write_statistics_gradient,
)
from pce_mpi.loss.problem import Problem
from pce_mpi.loss.statistics import ClassStatistics, named_statistics, statistics_fields, upstream_of_statistics
from pce_mpi.loss.tensors import tensors_for_tensors
from pce_mpi.validation import check_floating_point


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
    of_classes = (sums.of_classes(total, 1.0) for total in (totals.w, totals.bias))
    gradients = sums.of_hidden(1.0), *over_all_rows(checked.operation, checked, *of_classes)
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
    problem, product = agree_on_product(options, hidden, w, targets, needs_targets=True, with_gradients=True)
    xp, one = problem.xp, np.ones(1)
    losses = xp.empty((2, len(product.hidden)))
    for rows, part, softmax in product.parts_of(problem, loss_fields(problem)):
        losses[:, rows] = row_losses(part, softmax)
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


class LinearGradients(NamedTuple):
    """The gradients of the operands of logits `hidden @ w + bias`, on plain arrays.

    Attributes
    ----------
    dhidden : array
        The gradient of `hidden`, the sum over the classes of all shards: the same on every rank of `comm`.
    dw : array
        The gradient of this shard of `w`, from this rank's rows.
    dbias : array or None
        The gradient of this shard of `bias`, from this rank's rows. None without a bias.
    """

    dhidden: Array
    dw: Array
    dbias: Array | None


@takes(LinearStatisticsOptions)
@tensors_for_tensors
def linear_class_statistics(
    hidden: Any, w: Any, targets: Any = None, **options: Unpack[LinearStatisticsOptions]
) -> ClassStatistics:
    """Compute the statistics of plain arrays; see `pce_mpi.linear_class_statistics`."""
    checked = Options.of("linear_class_statistics", options, LinearStatisticsOptions)
    return statistics_of_product(checked, hidden, w, targets)[0]


@dataclass(eq=False, repr=False)
class LinearStatisticsResiduals(MadeResiduals):
    """The arrays that `linear_class_statistics_forward` keeps for the backward pass, opaque to its caller.

    Attributes
    ----------
    problem : Problem
        The checked arguments.
    product : Product
        References to the caller's operands.
    softmax : list of RowSoftmax
        The numbers that follow from the merged softmax states, for the rows of each part of a chunk.
    """

    made_by = "linear_class_statistics_forward"

    problem: Problem
    product: Product
    softmax: list[RowSoftmax]

    @property
    def _comms(self) -> tuple[Any, ...]:
        """The communicators over which the backward pass communicates."""
        return (self.problem.options.comm,)


@takes(LinearStatisticsOptions)
@tensors_for_tensors
def linear_class_statistics_forward(
    hidden: Any, w: Any, targets: Any = None, **options: Unpack[LinearStatisticsOptions]
) -> tuple[ClassStatistics, LinearStatisticsResiduals]:
    """Compute `linear_class_statistics`, and the residuals from which the backward pass computes gradients.

    Each rank passes the same `hidden` and its own columns of `w`. The statistics are `class_statistics` of the logits
    `hidden @ w + bias`.

    Parameters
    ----------
    hidden, w : array
        Those of `linear_cross_entropy_value_and_grad`. They must not change until the backward pass.
    targets : array of integers, shape (...), optional
        Class numbers: global, the same on every rank of `comm`; only `log_prob` needs them.

    Returns
    -------
    statistics : ClassStatistics
        Those of `class_statistics`, with the shape of `hidden` without its last axis.
    residuals : LinearStatisticsResiduals
        References to the arrays that were passed, and about 110 bytes a row; no logits.

    Raises
    ------
    TypeError, ValueError, IndexError, CollectiveError, CollectiveTimeout, RuntimeError
        Those of `class_statistics`, and for `hidden`, `w` and `bias` that do not fit.

    Notes
    -----
    Collective over `comm`: one Allgather of 56 bytes, and one Allreduce of 80 bytes a row, 8 more with targets, for
    each half of a chunk.

    The statistics have the bits of `class_statistics` of the same logits. But a BLAS gives other last bits to a product
    with another number of rows or columns. Logits of halves are float32.

    Examples
    --------
    >>> import numpy as np
    >>> hidden, w = np.ones((1, 2)), np.zeros((2, 4))
    >>> statistics, residuals = linear_class_statistics_forward(hidden, w, np.array([3]))
    >>> statistics.log_prob
    array([-1.38629436])
    >>> linear_class_statistics_backward(residuals, log_prob=1.0).dw[0]
    array([-0.25, -0.25, -0.25,  0.75])
    """
    checked = Options.of("linear_class_statistics_forward", options, LinearStatisticsOptions)
    return statistics_of_product(checked, hidden, w, targets)


@tensors_for_tensors
def linear_class_statistics_backward(
    residuals: LinearStatisticsResiduals, *, log_prob: Any = None, entropy: Any = None, logsumexp: Any = None
) -> LinearGradients:
    """Compute the gradients of `hidden`, `w` and `bias` from those of log-probabilities, entropies and logsumexp.

    The logits of a chunk are computed again and overwritten with their gradient, which has the formula of
    `class_statistics_backward`.

    Parameters
    ----------
    residuals : LinearStatisticsResiduals
        Those of `linear_class_statistics_forward`. They can be used again.
    log_prob, entropy, logsumexp : float or array of real numbers, optional
        The upstream gradients of `class_statistics_backward`: the same on every rank of `comm`.

    Returns
    -------
    LinearGradients
        `dhidden`, `dw` and `dbias`, in this order; they have the dtype of `hidden`.

    Raises
    ------
    TypeError, ValueError, CollectiveError
        For upstream gradients that do not fit, and for `log_prob` without targets: on every rank of `comm`. Only a rank
        whose residuals are none raises alone.

    Notes
    -----
    Collective over `comm`: one Allgather of 56 bytes, and one Allreduce of `dhidden`, in float32 for halves. Sums over
    rows are float32 for halves, as in `linear_cross_entropy_value_and_grad`, whose notes on bits and on
    `rounded_gradient` hold here too.

    Examples
    --------
    >>> import numpy as np
    >>> _, residuals = linear_class_statistics_forward(np.ones((1, 1)), np.log([[1.0, 3.0]]))
    >>> linear_class_statistics_backward(residuals, entropy=1.0).dw.round(4)
    array([[ 0.206, -0.206]])
    """
    LinearStatisticsResiduals.check(residuals)
    options, operation = residuals.problem.options, "linear_class_statistics_backward"
    given = {"log_prob": log_prob, "entropy": entropy, "logsumexp": logsumexp}
    with local_checks() as checks:
        product, upstream = prepared(residuals, given)
    error = checks.error
    values = {name: 0 if error else zlib.crc32(to_host(upstream[name]).tobytes()) for name in given}
    said = {"shape": residuals.product.shape} | {name: f"checksum {value:08x}" for name, value in values.items()}
    if options.comm is not None:
        with local_checks() as checks:
            agree(options.comm, operation, said, error=error, over=options.over)
        error = checks.error
    if options.sums_rows:
        named = options.comm is not None
        agree(options.batch_comm, operation, {}, error=error, over=options.batch_over, ranks_named=named)
    elif error is not None:
        raise error
    gradients = gradients_of(residuals, product, upstream)
    gradients.sum_over_shards(operation, options)
    with np.errstate(all="ignore"):
        found = gradients.hidden, *over_all_rows(operation, options, gradients.w, gradients.bias)
        dhidden, dw, dbias = (converted(each, product.w.dtype, copy=False) for each in found)
    return LinearGradients(dhidden, dw, None if product.bias is None else dbias)


def statistics_of_product(
    options: Options, hidden: Any, w: Any, targets: Any
) -> tuple[ClassStatistics, LinearStatisticsResiduals]:
    """Return the statistics and the residuals; collective over the communicators of `options`."""
    problem, product = agree_on_product(options, hidden, w, targets, needs_targets=False, with_gradients=False)
    xp, dtype, count = problem.xp, problem.options.compute_dtype, len(product.hidden)
    numbers, argmax = xp.empty((5, count), dtype), xp.empty(count, np.int64)
    softmax: list[RowSoftmax] = []
    for rows, part, merged in product.parts_of(problem, statistics_fields(problem.targets is not None)):
        numbers[:, rows], argmax[rows] = problem.kernel.row_statistics(merged.columns, part.counted, dtype)
        softmax.append(merged)
    product.logits = ()  # residuals keep none
    return named_statistics(problem, numbers, argmax), LinearStatisticsResiduals(problem, product, softmax)


def prepared(residuals: LinearStatisticsResiduals, given: Mapping[str, Any]) -> tuple[Product, dict[str, Array]]:
    """Return the operands with room for gradients, and the upstream gradients, checked on this rank."""
    if not sets_arithmetic:
        check_floating_point()
    upstream = upstream_of_statistics(residuals.problem, **given)
    product = replace(residuals.product)
    product.make_room(1, with_gradients=True)
    return product, upstream


def gradients_of(residuals: LinearStatisticsResiduals, product: Product, upstream: Upstream) -> Gradients:
    """Return the gradients of the operands from what `prepared` gives; communicates nothing."""
    for rows, softmax in zip(product.rows(), residuals.softmax, strict=True):
        part = product.part_of(residuals.problem, rows)
        of_rows = {name: each if each.size == 1 else each[rows] for name, each in upstream.items()}
        write_statistics_gradient(part.logits, part, softmax, of_rows)
        vectors = product.hidden[rows]
        if not residuals.problem.all_valid:  # 0 times nan is nan
            xp, vectors = part.xp, vectors.copy()
            others = (xp.asarray(of_rows["entropy"]) != 0.0) | (xp.asarray(of_rows["logsumexp"]) != 0.0)
            vectors[xp.asarray(~part.valid) & ~others] = 0
        product.add_gradients(vectors, rows, part)
    assert product.gradients is not None
    return product.gradients

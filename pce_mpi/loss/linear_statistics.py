"""Statistics of each row's softmax of `hidden @ w + bias`, and gradients, which compute the logits a second time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Unpack
import zlib

import numpy as np

from pce_mpi.arrays import to_host
from pce_mpi.comm.agreement import agree, local_checks
from pce_mpi.kernels import converted, sets_arithmetic, standard_arithmetic
from pce_mpi.kernels.softmax_state import RowSoftmax
from pce_mpi.loss.chunks import Gradients, Product, agree_on_product
from pce_mpi.loss.options import LinearStatisticsOptions, Options, takes
from pce_mpi.loss.passes import MadeResiduals, write_statistics_gradient
from pce_mpi.loss.problem import Problem
from pce_mpi.loss.statistics import ClassStatistics, named_statistics, statistics_fields, upstream_of_statistics
from pce_mpi.loss.tensors import tensors_for_tensors
from pce_mpi.validation import check_floating_point

Array = Any  # numpy.ndarray or cupy.ndarray


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
    """Compute the class statistics of `hidden @ w + bias` without ever holding all logits.

    The arguments, errors and notes are those of `linear_class_statistics_forward`, which gives residuals too.

    Parameters
    ----------
    hidden, w, targets : array
        Those of `linear_class_statistics_forward`.

    Returns
    -------
    ClassStatistics
        Those of `class_statistics` of the logits.

    Examples
    --------
    >>> import numpy as np
    >>> linear_class_statistics(np.ones((1, 2)), np.zeros((2, 4))).entropy
    array([1.38629436])
    """
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
    if options.comm is not None:
        values = {name: 0 if checks.error else zlib.crc32(to_host(upstream[name]).tobytes()) for name in given}
        said = {"shape": residuals.product.shape} | {name: f"checksum {value:08x}" for name, value in values.items()}
        agree(options.comm, operation, said, error=checks.error, over=options.over)
    elif checks.error is not None:
        raise checks.error
    gradients = gradients_of(residuals, product, upstream)
    gradients.sum_over_shards(operation, options)
    with np.errstate(all="ignore"):
        found = gradients.hidden, gradients.w, gradients.bias
        dhidden, dw, dbias = (converted(each, product.w.dtype, copy=False) for each in found)
    return LinearGradients(dhidden, dw, None if product.bias is None else dbias)


def statistics_of_product(
    options: Options, hidden: Any, w: Any, targets: Any
) -> tuple[ClassStatistics, LinearStatisticsResiduals]:
    """Return the statistics and the residuals; collective over the communicators of `options`."""
    with standard_arithmetic():
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
    with standard_arithmetic():
        upstream = upstream_of_statistics(residuals.problem, **given)
    product = replace(residuals.product)
    product.make_room(1, with_gradients=True)
    return product, upstream


def gradients_of(residuals: LinearStatisticsResiduals, product: Product, upstream: Mapping[str, Array]) -> Gradients:
    """Return the gradients of the operands from what `prepared` gives; communicates nothing."""
    fields = statistics_fields(residuals.problem.targets is not None)
    with standard_arithmetic():
        for rows, softmax in zip(product.rows(), residuals.softmax, strict=True):
            part = product.part_of(residuals.problem, rows)
            of_rows = {name: each if each.size == 1 else each[rows] for name, each in upstream.items()}
            write_statistics_gradient(part.logits, part, softmax, fields, of_rows)
            vectors = product.hidden[rows]
            if not residuals.problem.all_valid:  # 0 times nan is nan
                xp, vectors = part.xp, vectors.copy()
                others = (xp.asarray(of_rows["entropy"]) != 0.0) | (xp.asarray(of_rows["logsumexp"]) != 0.0)
                vectors[xp.asarray(~part.valid) & ~others] = 0
            product.add_gradients(vectors, rows, part)
    assert product.gradients is not None
    return product.gradients

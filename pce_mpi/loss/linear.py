"""Cross entropy of `hidden @ w + bias`, a chunk of rows at a time, so that all logits are never held at once.

The logits of some rows are computed and reduced to states. The merge of the states over the ranks runs while the next
rows are multiplied. Then the gradient is written over the logits, and multiplied to give the gradients of the operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
import math
from typing import Any, NamedTuple, Unpack

import numpy as np

from pce_mpi.arrays import array_namespace, as_array, check_one_library, is_floating, is_half, name_of
from pce_mpi.comm.collectives import all_reduce
from pce_mpi.comm.tracing import cause
from pce_mpi.gpu import check_on_current_gpu
from pce_mpi.loss.agreement import agree_on
from pce_mpi.loss.kernels import gemm, standard_arithmetic
from pce_mpi.loss.options import LinearOptions, Options, takes
from pce_mpi.loss.passes import Residuals, loss_fields, reduced, row_losses, start_row_softmax, write_gradient
from pce_mpi.loss.problem import Problem, check, check_per_class
from pce_mpi.loss.products import add_gradients, multiply
from pce_mpi.loss.softmax_state import RowSoftmax

Array = Any  # numpy.ndarray or cupy.ndarray
HostArray = np.ndarray[Any, Any]

# The default number of rows of a chunk. More rows make products faster, and additions to the gradient of w rarer.
_ROWS, _ROWS_ON_GPU = 512, 4096
# Bounds of the class weights: sums of gradients are weighted, and divided at the end.
_LEAST, _MOST = 1e-18, 1e18


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
def linear_cross_entropy_value_and_grad(
    hidden: Any, w: Any, targets: Any, **options: Unpack[LinearOptions]
) -> LinearValueAndGrad:
    """Compute the cross entropy of `hidden @ w + bias`, and its gradients, without ever holding all logits.

    Each rank passes the same `hidden` and its own columns of `w`. The loss is `softmax_cross_entropy` of the logits
    `hidden @ w + bias`, for class numbers as targets.

    Parameters
    ----------
    hidden : array of float16, bfloat16, float32 or float64, shape (..., features)
        The same on every rank of `comm`.
    w : array of the dtype of `hidden`, shape (features, local classes)
        This shard's classes; `w.T` of an array (classes, features) is accepted as it is.
    targets : array of integers, shape (...)
        Class numbers: global, the same on every rank of `comm`.
    ignore_index, logit_scale, softcap, compute_dtype, weight, label_smoothing, z_loss, margin, reduction : optional
        Those of `softmax_cross_entropy`.
    comm, class_start, num_classes, batch_comm : optional
        Those of `softmax_cross_entropy`.
    bias : array of the dtype of `hidden`, shape (local classes,), optional
        The bias of this shard's classes.
    chunk : int, optional
        The number of rows of logits that are held at once, at least 2 if there are other ranks; the same on every rank.
        The default is 512, or 4,096 on a GPU.
    rounded_gradient : bool, default False
        Round the gradient of the logits of halves to their dtype before it is multiplied. On a GPU that takes three
        products rather than five. Other dtypes are not rounded.

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
    if checked.comm is not None:
        with cause(checked.operation, checked.over, "the gradient of hidden, a sum over all classes"):
            sums.hidden = all_reduce(sums.hidden, checked.comm, "sum", overwrite=True)
    dtype = as_array(w, "w").dtype
    gradients = sums.of_hidden(1.0), sums.of_classes(sums.w, 1.0), sums.of_classes(sums.bias, 1.0)
    dhidden, dw, dbias = (gradient.astype(dtype, copy=False) for gradient in gradients)
    return LinearValueAndGrad(loss, dhidden, dw, None if checked.bias is None else dbias)


@dataclass
class RowSums:
    """Gradients of the sum of the losses of rows that count; those of halves are float32, that of `bias` is float64.

    The gradient of `hidden` has its shape and is summed over this rank's classes alone. The gradients of the loss are
    these times `factor`, (1,). `ignored`, (rows,) on the host, are the rows that do not count.
    """

    hidden: Array
    w: Array
    bias: Array
    factor: Array
    ignored: HostArray

    def of_hidden(self, upstream: Any) -> Array:
        """Return the gradient of `hidden`, in its sum's memory; rows that do not count stay 0 for any factor."""
        found = self._scaled(self.hidden, upstream)
        if self.ignored.any():
            ignored = array_namespace(found).asarray(self.ignored.reshape(found.shape[:-1]))
            found[ignored] = 0
        return found

    def of_classes(self, total: Array, upstream: Any) -> Array:
        """Return the gradient of `w` or `bias` in the memory of its `total`; it is 0 if no row counts."""
        return total if self.ignored.all() else self._scaled(total, upstream)

    def _scaled(self, gradient: Array, upstream: Any) -> Array:
        with np.errstate(all="ignore"):
            gradient *= (upstream * self.factor).astype(gradient.dtype)
        return gradient


def loss_and_sums(
    options: Options, hidden: Any, w: Any, targets: Any, with_gradients: bool = True
) -> tuple[Array, RowSums]:
    """Return the loss, and the gradients of the sum of the rows' losses."""
    operands: list[_Operands] = []

    def check_arguments() -> Problem:
        operands[:] = [_Operands.of(hidden, w, options.bias)]
        return operands[0].check(options, targets)

    with standard_arithmetic():
        return _chunk_by_chunk(agree_on(options, check_arguments), operands[0], with_gradients)


@dataclass
class _Operands:
    """The operands, and room for logits and results: nothing large is allocated once the ranks have agreed."""

    hidden: Array  # (rows, features)
    w: Array
    shape: tuple[int, ...]  # of `hidden` as it was passed
    logits: list[Array]  # one buffer, or two if states are merged while the next rows are multiplied
    dhidden: Array
    dw: Array
    bias: Array | None
    dbias: Array

    @classmethod
    def of(cls, hidden: Any, w: Any, bias: Any) -> _Operands:
        given = {"hidden": hidden, "w": w} | ({} if bias is None else {"bias": bias})
        arrays = {name: as_array(value, name) for name, value in given.items()}
        check_one_library(arrays)
        check_on_current_gpu(arrays)
        check_product(arrays)
        hidden, w, bias = arrays["hidden"], arrays["w"], arrays.get("bias")
        if bias is not None:
            check_per_class("bias", bias, w.shape[1], " of this shard")
        rows = hidden.reshape(math.prod(hidden.shape[:-1]), w.shape[0])
        return cls(rows, w, hidden.shape, [], hidden, w, bias, w)

    def check(self, options: Options, targets: Any) -> Problem:
        """Return the checked arguments of the loss, with room for the logits of some rows in place of all."""
        xp, dtype = array_namespace(self.w), np.dtype(np.float32) if is_half(self.w.dtype) else self.w.dtype
        # Logits without memory, as the checks need only their shape and dtype.
        absent = xp.broadcast_to(xp.zeros((), dtype), (*self.shape[:-1], self.w.shape[1]))
        problem = check(options, absent, targets)
        if problem.targets is None:
            raise TypeError("targets must be class numbers, got probabilities")
        problem.sharded = self.w, 1
        chunk = problem.options.chunk or (_ROWS if xp is np else _ROWS_ON_GPU)
        problem.also = {"features": self.w.shape[0], "dtype of w": name_of(self.w.dtype), "chunk": chunk}
        problem.also["bias given"] = self.bias is not None
        weight = problem.options.weight
        if weight is not None and dtype == np.float32 and not np.all((weight == 0) | _in_range(np.abs(weight))):
            raise ValueError(f"weight must be 0 or from {_LEAST:g} to {_MOST:g}, as gradients are summed in float32")
        ranks = 1 if options.comm is None else options.comm.size
        held = rows_held(chunk, len(self.hidden), ranks)
        if gemm.takes(self.w):
            self.hidden, self.w = gemm.readable(self.hidden), gemm.readable(self.w)
        self.logits = [xp.empty((held, self.w.shape[1]), dtype) for _ in range(min(2, ranks))]
        self.dhidden, self.dw = xp.zeros(self.hidden.shape, dtype), xp.zeros(self.w.shape, dtype)
        self.dbias = xp.zeros(self.w.shape[1])
        self.bias = None if self.bias is None else self.bias.astype(dtype, copy=False)
        return problem


def check_product(operands: Mapping[str, Any]) -> None:
    """Raise unless `hidden` and `w`, by name, can be multiplied, and all operands have the same floating dtype."""
    dtypes = [operand.dtype for operand in operands.values()]
    for name, dtype in zip(operands, dtypes, strict=True):
        if not is_floating(dtype):
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {dtype}")
    if len(set(dtypes)) > 1:
        raise TypeError(f"{', '.join(operands)} must have one dtype, got {', '.join(map(str, dtypes))}")
    hidden, w = operands["hidden"], operands["w"]
    if w.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != w.shape[0]:
        raise ValueError(f"hidden must be (..., features) and w (features, classes), got {hidden.shape}, {w.shape}")


def rows_held(chunk: int | None, rows: int, ranks: int) -> int:
    """Return how many rows are multiplied at once: a chunk, or half of one if other ranks make it hold two parts."""
    chunk = chunk or _ROWS
    return max(1, min(rows, chunk // 2 if ranks > 1 else chunk))


def _in_range(weight: Array) -> Array:
    return (weight >= _LEAST) & (weight <= _MOST)


@dataclass
class _Part:
    """Rows whose logits are held, and the function that waits for their softmax."""

    rows: slice
    problem: Problem
    softmax: Callable[[], RowSoftmax]


def _chunk_by_chunk(problem: Problem, operands: _Operands, with_gradients: bool) -> tuple[Array, RowSums]:
    xp = problem.xp
    fields, held = loss_fields(problem), len(operands.logits[0])
    one = np.ones(1)
    losses = xp.empty((2, len(operands.hidden)))

    def start(number: int, first: int) -> _Part:
        rows = slice(first, min(first + held, len(operands.hidden)))
        logits = operands.logits[number % len(operands.logits)][: rows.stop - rows.start]
        multiply(operands.hidden[rows], operands.w, logits)
        if operands.bias is not None:
            logits += operands.bias
        part = _rows_of(problem, rows, logits)
        return _Part(rows, part, start_row_softmax(part, fields))

    def finish(part: _Part) -> None:
        softmax = part.softmax()
        losses[:, part.rows] = row_losses(part.problem, softmax, fields)
        if with_gradients:
            write_gradient(part.problem.logits, Residuals(part.problem, softmax, one, ()), one)
            hidden, dhidden = operands.hidden[part.rows], operands.dhidden[part.rows]
            if not problem.all_valid:  # 0 times nan is nan
                hidden = hidden.copy()
                hidden[xp.asarray(~part.problem.valid)] = 0
            rounded = problem.options.rounded_gradient
            add_gradients(hidden, operands.w, part.problem.logits, dhidden, operands.dw, rounded)
            if operands.bias is not None:
                operands.dbias += part.problem.logits.sum(axis=0, dtype=np.float64)

    waiting: _Part | None = None
    for number, first in enumerate(range(0, len(operands.hidden), held)):
        if waiting is not None and len(operands.logits) == 1:
            finish(waiting)
            waiting = None
        part = start(number, first)
        if waiting is not None:
            finish(waiting)
        waiting = part
    if waiting is not None:
        finish(waiting)
    loss, divisor = reduced(problem, losses)
    with np.errstate(all="ignore"):
        factor = 1.0 / xp.asarray(divisor)
    dhidden = operands.dhidden.reshape(operands.shape)
    return loss, RowSums(dhidden, operands.dw, operands.dbias, factor, ~problem.valid)


def _rows_of(problem: Problem, rows: slice, logits: Array) -> Problem:
    """Return the problem of some of the rows, with these logits."""
    assert problem.targets is not None
    assert problem.target_column is not None
    return replace(
        problem,
        options=problem.options.with_checked({"axis": 1}, problem.options.weight),
        logits=logits,
        rows_shape=logits.shape[:1],
        targets=problem.targets[rows],
        target_column=problem.target_column[rows],
        valid=problem.valid[rows],
        counted=None if problem.counted is None else problem.counted[rows],
        sharded=(logits, 1),
        inputs=(),
    )

"""Softmax and its logarithm; over a sharded axis the ranks merge their softmax states, as the loss does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import Array, compute_dtype_of, is_floating
from pce_mpi.autograd.apply import Call, Op, apply, of_array, operation
from pce_mpi.autograd.rules import Axis, Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.kernels import converted, standard_arithmetic
from pce_mpi.kernels.interface import StateFields
from pce_mpi.loss.agreement import prepare
from pce_mpi.loss.passes import row_softmax, write_probabilities
from pce_mpi.ops.elementwise import exp, widened
from pce_mpi.ops.primitive import sharded_options
from pce_mpi.ops.shape import kept_shape, normalized_axis, sum

_STATE = StateFields(hold_largest=True)
# Elements of a block of log-probabilities.
_BLOCK = 2**15


def real_dtype(operation: str) -> Callable[[np.dtype[Any]], np.dtype[Any]]:
    """Make a function that gives the dtype of the operand; `TypeError` for one that is not floating-point."""

    def dtype_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
        if not is_floating(dtype):
            raise TypeError(f"{operation} is of real numbers, got {dtype}")
        return dtype

    return dtype_of


class Softmax:
    """The softmax of an array over axes, with the bits of one process however the ranks shard them.

    Make it in a block `with standard_arithmetic()`. Collective if `axes` are sharded: one Allgather of 56 bytes and one
    Allreduce of 40 bytes a row.
    """

    def __init__(self, call: Call, x: Array, axes: Sequence[int], operation: str):
        self._x, self._others = x, [axis for axis in range(x.ndim) if axis not in axes]
        self._order = (*self._others, *axes)
        self._kept = kept_shape(x.shape, axes)
        rows = x.transpose(self._order).reshape(math.prod(self._kept), math.prod(x.shape[axis] for axis in axes))
        self._problem = prepare(sharded_options(call.mesh, call.operands, operation, axes), rows, needs_targets=False)
        self._rows = row_softmax(self._problem, _STATE)

    def probabilities(self) -> Array:
        """The softmax; that of halves is float32."""
        x, xp = self._x, self._problem.xp
        values = xp.empty(self._problem.logits.shape, compute_dtype_of(x.dtype))
        write_probabilities(values, self._problem, self._rows)
        return values.reshape([x.shape[axis] for axis in self._order]).transpose(np.argsort(self._order).tolist())

    def log_probabilities(self) -> Array:
        """The logarithm of the softmax; that of halves is float32."""
        x, xp = self._x, self._problem.xp
        values = xp.empty(x.shape, compute_dtype_of(x.dtype))
        largest, above = (
            xp.broadcast_to(self._in_shape(each), x.shape) for each in (self._largest, self._rows.held_nll)
        )
        # On the host, a block in float64 fits a cache.
        step = max(1, _BLOCK * len(x) // x.size) if xp is np and x.size else max(1, len(x))
        with np.errstate(all="ignore"):
            for start in range(0, len(x), step):
                part = slice(start, start + step)
                wide = converted(x[part], np.float64)
                wide -= largest[part]
                wide -= above[part]
                values[part] = wide if xp is np else converted(wide, values.dtype)
        return values

    def logsumexp(self) -> Array:
        """The logarithm of the sum of exponentials; the axes stay with length 1."""
        xp, largest = self._problem.xp, self._largest
        # A row with an infinite largest element gives nan; its logsumexp is that element.
        result = xp.where(xp.isinf(largest), largest, self._rows.logsumexp)
        return converted(self._in_shape(result), self._x.dtype)

    @property
    def _largest(self) -> Array:
        return self._rows.held_z

    def _in_shape(self, rows: Array) -> Array:
        return rows.reshape(self._kept)


def _rule(shape: tuple[int, ...], axes: tuple[int]) -> Rule:
    # An axis of length 0 has no states to merge.
    labels = tuple(None if axis in axes and shape[axis] == 0 else Axis(axis) for axis in range(len(shape)))
    return Rule((labels,), labels, shape)


def _forward(name: str, values_of: Callable[[Softmax], Array]) -> Callable[..., Array]:
    def forward(call: Call, x: Array, axes: tuple[int]) -> Array:
        if x.shape[axes[0]] == 0 and not call.dims(axes):
            call.residuals = x
            return x
        with standard_arithmetic():
            call.residuals = values_of(Softmax(call, x, axes, name))
            return call.residuals.astype(x.dtype, copy=False)

    return forward


def _softmax_vjp(g: DistArray, y: DistArray, x: DistArray, axes: tuple[int], residuals: Array) -> DistArray:
    exact = DistArray(residuals, y.mesh, y.sharding)
    return exact * (g - sum(g * exact, axes, keepdims=True))


def _log_softmax_vjp(g: DistArray, y: DistArray, x: DistArray, axes: tuple[int], residuals: Array) -> DistArray:
    return g - exp(DistArray(residuals, y.mesh, y.sharding)) * sum(widened(g), axes, keepdims=True)


# The residuals of halves are not rounded: a log-probability of -10 in bfloat16 may be wrong by 3 %.
_SOFTMAX, _LOG_SOFTMAX = (
    Op(name, _forward(name, values_of), (vjp,), _rule, real_dtype(name), uses=[()])
    for name, values_of, vjp in (
        ("softmax", Softmax.probabilities, _softmax_vjp),
        ("log_softmax", Softmax.log_probabilities, _log_softmax_vjp),
    )
)


@operation
@of_array
def softmax(x: DistArray, axis: int = -1) -> DistArray:
    """Compute the softmax along an axis, exp(x) / sum exp(x).

    Parameters
    ----------
    x : DistArray of a floating dtype
        An array that is Partial is reduced first.
    axis : int, default -1
        The axis to normalize over; it may be sharded.

    Returns
    -------
    DistArray
        The probabilities, with the shape, the dtype and the placement of `x`. A row of only -inf, with a +inf or with a
        `nan` gives `nan`.

    Raises
    ------
    TypeError
        For integers.
    ValueError
        For an axis that does not exist.

    Notes
    -----
    If `axis` is sharded: one Allgather of 56 bytes and one Allreduce of 40 bytes a row, and backward one Allreduce of
    one number a row. Otherwise nothing is communicated.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> y = pce.softmax(pce.distribute(np.log([[1.0, 3.0]]), mesh, data=pce.Shard(1)))
    >>> y.placements, y.full()
    ({'data': Shard(1)}, array([[0.25, 0.75]]))
    """
    return apply(_SOFTMAX, x, axes=(normalized_axis(axis, x.ndim),))


@operation
@of_array
def log_softmax(x: DistArray, axis: int = -1) -> DistArray:
    """Compute the logarithm of the softmax along an axis, x - log sum exp(x).

    For a loss, `cross_entropy` is faster, and keeps the last bits of probabilities close to 1.

    Parameters
    ----------
    x : DistArray of a floating dtype
        An array that is Partial is reduced first.
    axis : int, default -1
        The axis to normalize over; it may be sharded.

    Returns
    -------
    DistArray
        The log-probabilities, in nats, with the shape, the dtype and the placement of `x`.

    Notes
    -----
    Errors and communication are those of `softmax`.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> pce.log_softmax(pce.distribute(np.zeros(4), mesh)).full()  # -log 4
    array([-1.38629436, -1.38629436, -1.38629436, -1.38629436])
    """
    return apply(_LOG_SOFTMAX, x, axes=(normalized_axis(axis, x.ndim),))

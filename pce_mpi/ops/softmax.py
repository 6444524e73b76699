"""Softmax and its logarithm; over a sharded axis what the shards give is joined by the merge of `softmax_state`."""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, is_floating, is_half
from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.inference import Sent
from pce_mpi.autograd.op import Op, Shardings
from pce_mpi.autograd.rules import Axis, Rule
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.mesh import text_of_dims
from pce_mpi.loss.agreement import prepare
from pce_mpi.loss.options import Options
from pce_mpi.loss.passes import row_softmax
from pce_mpi.loss.softmax_state import StateFields
from pce_mpi.ops.broadcasting import kept_shape, local_extreme, sum
from pce_mpi.ops.elementwise import exp, widened
from pce_mpi.ops.shape import normalized_axis

__all__ = ["joins", "log_softmax", "maximum_and_sum", "softmax"]

Array = Any  # numpy.ndarray or cupy.ndarray

_STATE = StateFields(hold_largest=True)


def maximum_and_sum(x: Array, axes: Sequence[int], shardings: Shardings, operation: str) -> tuple[Array, Array]:
    """max x and sum exp(x - max x) over `axes`, which stay with length 1, on all ranks that share them out.

    Both are float32 for halves; the sum is float64 for all, as its logarithm may be that of a number close to 1. Where
    the largest element is infinite the sum is `nan`.

    Collective where `axes` are sharded: an Allgather of 56 bytes, and one Allreduce of 32 bytes a row.
    """
    if not is_floating(x.dtype):
        raise TypeError(f"{operation} is of real numbers, got {x.dtype}")
    xp = array_namespace(x)
    shape = kept_shape(x.shape, axes)
    if is_half(x.dtype):
        x = x.astype(np.float32)
    comm = shardings.comm(axes)
    if comm is None:
        with np.errstate(all="ignore"):
            largest = local_extreme("max", x, tuple(axes), True, -math.inf)
            return largest, xp.exp(x - largest).sum(tuple(axes), dtype=np.float64, keepdims=True)
    others = [axis for axis in range(x.ndim) if axis not in axes]
    rows = x.transpose([*others, *axes]).reshape(math.prod(shape), math.prod(x.shape[axis] for axis in axes))
    options = Options(
        operation=operation,
        comm=comm,
        num_classes=math.prod(shardings.operands[0].shape[axis] for axis in axes),
        over=text_of_dims(shardings.dims(axes)),
    )
    merged, _ = row_softmax(prepare(options, rows, needs_targets=False), _STATE)
    largest, total = (xp.asarray(values.reshape(shape)) for values in (merged.fields["largest"], merged.sum_exp_of_all))
    return largest.astype(x.dtype), total


def joins(dtype: np.dtype[Any], *, shardings: Shardings, axes: Sequence[int], **_: Any) -> list[Sent]:
    """What `maximum_and_sum` sends."""
    dims = shardings.dims(axes)
    rows = math.prod(kept_shape(shardings.operands[0].local_shape(shardings.mesh.coordinates), axes))
    return [Sent("all_reduce", text_of_dims(dims), rows * _STATE.dtype.itemsize)] if dims else []


def _rule(shape: tuple[int, ...], axes: tuple[int]) -> Rule:
    # Of shards that are all empty there is nothing to join.
    labels = tuple(None if axis in axes and shape[axis] == 0 else Axis(axis) for axis in range(len(shape)))
    return Rule((labels,), labels, shape)


def _softmax(x: Array, axes: tuple[int], shardings: Shardings) -> tuple[Array, Array]:
    largest, total = maximum_and_sum(x, axes, shardings, "softmax")
    exact = array_namespace(x).exp(x - largest) / total.astype(largest.dtype)
    return exact.astype(x.dtype, copy=False), exact


def _log_softmax(x: Array, axes: tuple[int], shardings: Shardings) -> tuple[Array, Array]:
    largest, total = maximum_and_sum(x, axes, shardings, "log_softmax")
    exact = (x - largest) - array_namespace(x).log(total).astype(largest.dtype)
    return exact.astype(x.dtype, copy=False), exact


def _softmax_vjp(g: DistArray, y: DistArray, x: DistArray, axes: tuple[int], residuals: Array) -> DistArray:
    exact = DistArray(residuals, y.mesh, y.sharding)
    return exact * (g - sum(g * exact, axes, keepdims=True))


def _log_softmax_vjp(g: DistArray, y: DistArray, x: DistArray, axes: tuple[int], residuals: Array) -> DistArray:
    return g - exp(DistArray(residuals, y.mesh, y.sharding)) * sum(widened(g), axes, keepdims=True)


# What is kept of halves is what they were rounded from: of a log-probability of -10 in bfloat16 3 % may be missing.
_SOFTMAX, _LOG_SOFTMAX = (
    Op(name, forward, (vjp,), _rule, uses=[()], takes_shardings=True, gives_residuals=True, sends=joins)
    for name, forward, vjp in (
        ("softmax", _softmax, _softmax_vjp),
        ("log_softmax", _log_softmax, _log_softmax_vjp),
    )
)


def softmax(x: DistArray, axis: int = -1) -> DistArray:
    """exp(x) / sum exp(x) along `axis`, in the dtype of x. A row of only -inf, with a +inf or a `nan`, gives `nan`.

    A sharded axis stays sharded. If it is `axis`: an Allgather of 56 bytes and one Allreduce of 32 bytes a row, and
    backward one of one number a row. What is Partial is reduced first. `TypeError` for integers, `ValueError` for an
    axis that does not exist.

    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> y = pce.softmax(pce.distribute(np.log([[1.0, 3.0]]), mesh, data=pce.Shard(1)))
    >>> y.placements, y.full()
    ({'data': Shard(1)}, array([[0.25, 0.75]]))
    """
    return apply(_SOFTMAX, x, axes=(normalized_axis(axis, x.ndim),))


def log_softmax(x: DistArray, axis: int = -1) -> DistArray:
    """x - log sum exp(x) along `axis`, in nats; dtype, placement, communication and errors as in `softmax`.

    For a loss `cross_entropy` is faster, and right to the last bits where probabilities are close to 1.
    """
    return apply(_LOG_SOFTMAX, x, axes=(normalized_axis(axis, x.ndim),))

"""Variance and standard deviation, and sums over axes for norms, in float64.

The mean of numbers far from 0 is rounded to a multiple of a large ulp, so the distances from it do not sum to 0. Their
sum corrects them; over a sharded axis it is sent together with the sum of their squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, is_floating
from pce_mpi.autograd.apply import apply, redistributed
from pce_mpi.autograd.op import Call, Op, of_array, operation
from pce_mpi.autograd.rules import Axis, Rule
from pce_mpi.comm.tracing import cause
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.placements import Replicate
from pce_mpi.exact.sums import total
from pce_mpi.ops.broadcasting import kept_shape, normalized_axes, reduction_rule, spread
from pce_mpi.ops.elementwise import astype, elementwise_rule, unary, widened
from pce_mpi.validation import flag, real

Array = Any  # numpy.ndarray or cupy.ndarray
Shape = tuple[int, ...]


def _terms(x: Array, *factor: Array, plain: bool) -> list[Array]:
    return ([x] if plain else []) + [x * other for other in factor]


def _sums(call: Call, x: Array, *factor: Array, axes: tuple[int, ...], plain: bool) -> Array:
    xp, shape = array_namespace(x), kept_shape(x.shape, axes)
    left = [axis for axis in range(x.ndim) if axis not in axes]
    found = [
        # NumPy adds up in pairs only along the last axis.
        xp.ascontiguousarray(term.transpose(*left, *axes)).reshape(*(x.shape[axis] for axis in left), -1).sum(-1)
        if term.size
        else xp.zeros(math.prod(shape))
        for term in _terms(x, *factor, plain=plain)
    ]
    return xp.stack([each.reshape(shape) for each in found])


def _exact_sums(call: Call, x: Array, *factor: Array, axes: tuple[int, ...], plain: bool) -> Array:
    length = count_of(call.operands[0].shape, axes)
    terms = array_namespace(x).stack(_terms(x, *factor, plain=plain))
    return total(terms, tuple(axis + 1 for axis in axes), length, call.summed_comm)


def _rule(x: Shape, *factor: Shape, axes: tuple[int, ...], plain: bool) -> Rule:
    labels = tuple(map(Axis, range(len(x))))
    rows = tuple(None if axis in axes else label for axis, label in enumerate(labels))
    shape = (plain + len(factor), *kept_shape(x, axes))
    return Rule((labels,) * (1 + len(factor)), (None, *rows), shape, reduces="sum")


_IN_FLOAT64 = Op(
    "astype",
    lambda call, x: x.astype(np.float64),
    (lambda g, y, x: g,),
    elementwise_rule(),
    dtype=lambda _: np.float64,
    uses=[()],
    relays=True,
)
_SUMS = Op("sum", _sums, rule=_rule, exact=_exact_sums)


def sums(x: DistArray, *factor: DistArray, axes: tuple[int, ...], plain: bool = True) -> DistArray:
    """Return the sums of `x`, if `plain`, and then of `x` times `factor`, along a new first axis.

    They are float64 and have no gradient. The summed axes stay with length 1. Sums over a sharded axis are reduced
    together.
    """
    found = apply(_SUMS, x.detach(), *(each.detach() for each in factor), axes=axes, plain=plain)
    with cause("sum", reason="the sums of all shards, together"):
        return redistributed(found, found.sharding.replacing(dict.fromkeys(found.sharding.partial_dims, Replicate())))


def count_of(shape: Shape, axes: Sequence[int]) -> int:
    """Return the number of elements along `axes`."""
    return math.prod(shape[axis] for axis in axes)


def in_float64(x: DistArray) -> DistArray:
    """Return `x` as float64; a Partial one is reduced first, while it is smaller."""
    x = widened(x)
    return x if x.dtype == np.float64 else apply(_IN_FLOAT64, x)


def deviations(x: DistArray, axes: tuple[int, ...]) -> tuple[DistArray, DistArray]:
    """Return the distances of `x` from its rounded mean, in float64, and the sums of them and of their squares.

    The mean has no gradient. Equal elements have equal distances of a few ulp: their sums are exact, so that the square
    of their mean is the mean of their squares.
    """
    near = x - sums(x, axes=axes)[0] / count_of(x.shape, axes)
    return near, sums(near, near, axes=axes)


def _root_gradient(xp: Any, g: Array, x: Array) -> Array:
    return xp.where(x == 0, g.dtype.type(0), g / (2 * xp.sqrt(x)))


_ROOT = unary("sqrt", _root_gradient)


@operation
@of_array
def var(x: DistArray, axis: int | Sequence[int] | None = None, ddof: float = 0, keepdims: bool = False) -> DistArray:
    """Compute the variance over axes of the global array: the mean of the squared distances from the mean.

    Parameters
    ----------
    x : DistArray
        The array.
    axis : int or sequence of int, optional
        The axis or axes to reduce; None means all.
    ddof : float, default 0
        The sum of the squares is divided by the number of elements minus `ddof`; 1 is the estimate from a sample.
    keepdims : bool, optional
        Keep the reduced axes, with length 1.

    Returns
    -------
    DistArray
        The variance, in the dtype of `x`, or float64 for integers; `nan` for no elements. It is Replicate over the dims
        that shard a reduced axis; other axes stay sharded.

    Raises
    ------
    ValueError
        If an axis does not exist or is named twice.

    Notes
    -----
    The variance is computed in float64 and rounded once. In float64, it, `std` and their gradients are right to 4 ulp
    of the largest term while the mean is less than 1e6 standard deviations from 0.

    If a reduced axis is sharded: one Allreduce of 8 bytes for each element of the result, and one of 16, each after an
    Allgather of 56 bytes. A Partial `x` is reduced first. Backward communicates nothing.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> pce.var(pce.distribute(np.array([1.0, 3.0, 8.0]), mesh, data=pce.Shard(0)), ddof=1).item()
    13.0
    """
    return _in_dtype_of(x, _var(x, axis, ddof, keepdims))


@operation
@of_array
def std(x: DistArray, axis: int | Sequence[int] | None = None, ddof: float = 0, keepdims: bool = False) -> DistArray:
    """Compute the standard deviation over axes of the global array: the square root of the variance.

    Parameters
    ----------
    x : DistArray
        The array.
    axis : int or sequence of int, optional
        The axis or axes to reduce; None means all.
    ddof : float, default 0
        That of `var`.
    keepdims : bool, optional
        Keep the reduced axes, with length 1.

    Returns
    -------
    DistArray
        The standard deviation, in the dtype and the placements of `var`, rounded once. If all elements are equal, the
        result and the gradient are 0, as in PyTorch.

    Notes
    -----
    Errors and communication are those of `var`.
    """
    return _in_dtype_of(x, apply(_ROOT, _var(x, axis, ddof, keepdims)))


def _in_dtype_of(x: DistArray, found: DistArray) -> DistArray:
    return astype(found, x.dtype) if is_floating(x.dtype) else found


def _var(x: DistArray, axis: int | Sequence[int] | None, ddof: float, keepdims: bool) -> DistArray:
    """Return the variance in float64."""
    axes, settings = normalized_axes(axis, x.ndim), {"ddof": real(ddof, "ddof"), "keepdims": flag(keepdims, "keepdims")}
    near, moments = deviations(in_float64(x), axes)
    return apply(_VARIANCE, near, moments, axes=axes, **settings)


def _divisor(shape: Shape, axes: tuple[int, ...], ddof: float) -> np.float64:
    return np.float64(max(0, count_of(shape, axes) - ddof))  # a division by 0 gives inf or nan, as in NumPy


def _variance(call: Call, near: Array, moments: Array, axes: tuple[int, ...], ddof: float, keepdims: bool) -> Array:
    first, second = moments
    shape = call.operands[0].shape
    count = np.float64(count_of(shape, axes))
    mean = first / count
    found = (second / count - mean * mean) * (count / _divisor(shape, axes, ddof))
    return found if keepdims else found.reshape(call.shape)


def _to_near(
    g: DistArray, y: DistArray, near: DistArray, moments: DistArray, axes: tuple[int, ...], ddof: float, keepdims: bool
) -> DistArray:
    # The distances from the mean sum to 0, so the gradient of the mean is 0.
    distances = near - moments[0] / count_of(near.shape, axes)
    return distances * spread(g * 2.0 / _divisor(near.shape, axes, ddof), near, axes)


def _variance_rule(near: Shape, moments: Shape, axes: tuple[int, ...], keepdims: bool, **_: Any) -> Rule:
    rule = reduction_rule(near, axes, keepdims, linear=False, merged=True)
    rows = tuple(None if axis in axes else Axis(axis) for axis in range(len(near)))
    return replace(rule, operands=(*rule.operands, (None, *rows)))


_VARIANCE = Op("var", _variance, (_to_near, None), _variance_rule, uses=[(0, 1), ()])

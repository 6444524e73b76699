"""Comparisons, and selections by them: the larger or the smaller of two elements, or that of one of two arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, in_one_dtype, result_type
from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.op import Call, Op, operation
from pce_mpi.distributed.array import DistArray
from pce_mpi.ops.arithmetic import binary
from pce_mpi.ops.broadcasting import sum_to
from pce_mpi.ops.elementwise import elementwise_rule, gradient_op, library_function

Array = Any  # numpy.ndarray or cupy.ndarray


def _maximum_gradient(xp: Any, g: Array, x: Array, other: Array) -> Array:
    """Return the gradient of x in max(x, other): g, 0 or, for equal elements, g / 2; `nan` if either element is."""
    where, kind = xp.where, g.dtype.type  # no product with 0, which an infinite g turns into nan
    return where(x > other, g, where(x == other, g * kind(0.5), where(x < other, kind(0), kind(np.nan))))


_LARGER = gradient_op("maximum", _maximum_gradient)
_MAXIMUM = binary(
    "maximum",
    lambda g, a, b: apply(_LARGER, g, a, b),
    lambda g, a, b: apply(_LARGER, g, b, a),
    uses=[(0, 1), (0, 1)],
)
_MINIMUM = binary(
    "minimum",
    lambda g, a, b: apply(_LARGER, g, b, a),
    lambda g, a, b: apply(_LARGER, g, a, b),
    uses=[(0, 1), (0, 1)],
)
# Unlike in `maximum` and `minimum`, an element equal to its bound has all of the gradient.
_AT_LEAST = binary(
    "clip",
    lambda g, x, low: where(comparison("greater_equal")(x, low), g, 0),
    lambda g, x, low: where(comparison("less")(x, low), g, 0),
    uses=[(0, 1), (0, 1)],
    forward=library_function("maximum"),
)
_AT_MOST = binary(
    "clip",
    lambda g, x, high: where(comparison("less_equal")(x, high), g, 0),
    lambda g, x, high: where(comparison("greater")(x, high), g, 0),
    uses=[(0, 1), (0, 1)],
    forward=library_function("minimum"),
)
_COMPARISONS = {
    name: Op(name, library_function(name), rule=elementwise_rule(), dtype=lambda *_: np.bool_)
    for name in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
}


def _where(call: Call, condition: Array, a: Array, b: Array) -> Array:
    return array_namespace(a).where(condition, *in_one_dtype(a, b))


_WHERE = Op(
    "where",
    _where,
    (
        None,
        lambda g, y, condition, a, b: sum_to(where(condition, g, 0), a.shape),
        lambda g, y, condition, a, b: sum_to(where(condition, 0, g), b.shape),
    ),
    elementwise_rule([1, 2]),
    dtype=lambda condition, *dtypes: result_type(*dtypes),
    uses=[(), (0,), (0,)],
)


@operation
def maximum(x: Any, y: Any) -> DistArray:
    """Return the larger of x and y, elementwise.

    Parameters
    ----------
    x, y : DistArray or array_like
        The operands, as in `add`.

    Returns
    -------
    DistArray
        The larger element, or `nan` if either is. Shards as in `add`; Partial operands are reduced first.

    Notes
    -----
    Equal elements have half of the gradient each.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.array([0.0, 1.0, 2.0]), mesh, requires_grad=True, data=pce.Shard(0))
    >>> pce.sum(pce.maximum(x, 1.0)).backward()
    >>> x.grad.full()
    array([0. , 0.5, 1. ])
    """
    return apply(_MAXIMUM, x, y)


@operation
def minimum(x: Any, y: Any) -> DistArray:
    """Return the smaller of x and y, elementwise.

    Parameters
    ----------
    x, y : DistArray or array_like
        The operands, as in `add`.

    Returns
    -------
    DistArray
        The smaller element, or `nan` if either is; all else is as in `maximum`.
    """
    return apply(_MINIMUM, x, y)


@operation
def clip(x: Any, min: Any = None, max: Any = None) -> DistArray:
    """Bring elements below `min` up to it, and those above `max` down to it.

    Parameters
    ----------
    x : DistArray or array_like
        The array.
    min, max : DistArray, array_like or None, optional
        The bounds, which broadcast with `x`; None is no bound. At least one bound is needed, and `x` or a bound must be
        a `DistArray`.

    Returns
    -------
    DistArray
        The clipped array: `max` where `min` is above it. Dtype and placement as in `maximum`.

    Raises
    ------
    TypeError
        If there is no `DistArray`.
    ValueError
        If there is no bound.

    Notes
    -----
    Elements at a bound have all of the gradient and the bound none, as in PyTorch.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> pce.clip(pce.distribute(np.array([-2.0, 0.5, 3.0]), mesh), 0, 1).full()
    array([0. , 0.5, 1. ])
    """
    if min is None and max is None:
        raise ValueError("clip takes min or max, or both")
    if min is not None:
        low = _within_dtype(min, x)
        both_plain = not isinstance(x, DistArray) and not isinstance(low, DistArray) and isinstance(max, DistArray)
        x = np.maximum(x, low) if both_plain else apply(_AT_LEAST, x, low)
    return x if max is None else apply(_AT_MOST, x, _within_dtype(max, x))


def _within_dtype(bound: Any, x: Any) -> Any:
    """Return `bound`, or the limit of the dtype of integers `x` for a Python int beyond it."""
    if type(bound) is not int or getattr(x, "dtype", np.dtype(bool)).kind not in "iu":
        return bound
    limits = np.iinfo(x.dtype)
    return sorted((limits.min, bound, limits.max))[1]


def comparison(name: str) -> Callable[[Any, Any], DistArray]:
    """Make the function of distributed arrays for NumPy's comparison `name`; its result has no gradient."""

    def compare(x: Any, y: Any) -> DistArray:
        return apply(_COMPARISONS[name], x, y)

    compare.__name__ = name
    return compare


for _name in _COMPARISONS:
    operation(comparison(_name))


@operation
def where(condition: Any, x: Any, y: Any) -> DistArray:
    """Select elements of x where a condition holds, and of y elsewhere.

    Parameters
    ----------
    condition : DistArray or array_like
        Truth values; numbers hold where they are not 0. It broadcasts with `x` and `y` and has no gradient.
    x, y : DistArray or array_like
        The operands, as in `add`; one of the three must be a `DistArray`.

    Returns
    -------
    DistArray
        The selected elements, in the dtype of `x` and `y` together. Placement as in `add`: beside a Replicate condition
        the selection is linear in `x` and `y` together.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.array([1.0, 2.0]), mesh, data=pce.Shard(0))
    >>> pce.where(np.array([True, False]), x, 0.0).full()
    array([1., 0.])
    """
    if getattr(condition, "dtype", np.bool_) != np.bool_:  # its dtype must not affect that of the result
        condition = condition != 0
    return apply(_WHERE, condition, x, y)

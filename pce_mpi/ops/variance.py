"""Variance and standard deviation, composed of other operations, which have the placement rules."""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, is_floating, is_half
from pce_mpi.autograd.apply import apply
from pce_mpi.distributed.array import DistArray
from pce_mpi.distributed.placements import Replicate
from pce_mpi.ops.broadcasting import normalized_axes, sum
from pce_mpi.ops.elementwise import astype, square, unary, widened
from pce_mpi.ops.reductions import mean

Array = Any  # numpy.ndarray or cupy.ndarray


def _root_gradient(g: Array, x: Array) -> Array:
    xp = array_namespace(x)
    return xp.where(x == 0, g.dtype.type(0), g / (2 * xp.sqrt(x)))


_ROOT = unary("sqrt", _root_gradient)


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
        The variance, in the dtype of `x`, or float64 for integers; `nan` for no elements. That of halves is computed
        in float32 and rounded once. Over a sharded axis the variance is Partial; other axes stay sharded.

    Raises
    ------
    ValueError
        If an axis does not exist or is named twice.

    Notes
    -----
    If a reduced axis is sharded, the mean is reduced first: one Allreduce of the result's size. A Partial `x` is
    reduced before. Backward communicates nothing.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> pce.var(pce.distribute(np.array([1.0, 3.0, 8.0]), mesh, data=pce.Shard(0)), ddof=1).item()
    13.0
    """
    found = _var(x, axis, ddof, keepdims)
    return astype(found, x.dtype) if is_half(x.dtype) else found


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
        The standard deviation, in the dtype of `var`, and Replicate where that is Partial. If all elements are equal
        the gradient is 0, as in PyTorch.

    Notes
    -----
    Errors and communication are those of `var`, with one Allreduce more of the result's size.
    """
    found = apply(_ROOT, _var(x, axis, ddof, keepdims))
    return astype(found, x.dtype) if is_half(x.dtype) else found


def _var(x: DistArray, axis: int | Sequence[int] | None, ddof: float, keepdims: bool) -> DistArray:
    """Return the variance, that of halves in float32."""
    axes = normalized_axes(axis, x.ndim)
    wide = widened(x) if is_floating(x.dtype) else astype(x, np.float64)
    # The distances from the mean sum to 0, so the gradient of the mean is 0.
    squares = sum(square(wide - mean(wide, axes, keepdims=True).detach()), axes, keepdims)
    divisor = math.prod(x.shape[each] for each in axes) - ddof
    if divisor > 0:
        return squares / divisor
    # As in NumPy, inf or nan: a term that is 0 must not decide.
    return squares.redistribute(**dict.fromkeys(squares.sharding.partial_dims, Replicate())) / 0

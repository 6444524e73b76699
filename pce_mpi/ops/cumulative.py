"""Sums of the elements up to each place along an axis."""

from __future__ import annotations

from typing import Any

from pce_mpi.arrays import array_namespace, is_floating, numpy_dtype
from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.op import Call, Op
from pce_mpi.autograd.operands import of_array
from pce_mpi.autograd.rules import Axis, Rule
from pce_mpi.distributed.array import DistArray, operation
from pce_mpi.exact.sums import running_total
from pce_mpi.kernels import converted
from pce_mpi.ops.shape import normalized_axis, reshape

Array = Any  # numpy.ndarray or cupy.ndarray


def _rule(shape: tuple[int, ...], axis: int, backwards: bool) -> Rule:
    axes = tuple(None if index == axis else Axis(index) for index in range(len(shape)))
    return Rule((axes,), axes, shape, linear=((0,),))


def _cumsum(call: Call, x: Array, axis: int, backwards: bool) -> Array:
    xp = array_namespace(x)
    return xp.flip(xp.cumsum(xp.flip(x, axis), axis), axis) if backwards else xp.cumsum(x, axis)


def _exact_cumsum(call: Call, x: Array, axis: int, backwards: bool) -> Array:
    if not is_floating(x.dtype):
        return _cumsum(call, x, axis, backwards)
    return converted(running_total(x, axis, lambda part: _cumsum(call, part, axis, backwards)), x.dtype)


_CUMSUM: Op = Op(
    "cumsum",
    _cumsum,
    (lambda g, y, x, axis, backwards: apply(_CUMSUM, g, axis=axis, backwards=not backwards),),
    _rule,
    numpy_dtype("cumsum"),
    uses=[()],
    wide=True,
    exact=_exact_cumsum,
)


@operation
@of_array
def cumsum(x: DistArray, axis: int | None = None) -> DistArray:
    """Sum the elements up to each place along an axis.

    Parameters
    ----------
    x : DistArray
        The array.
    axis : int or None, optional
        The axis; None flattens the array first.

    Returns
    -------
    DistArray
        The sums, shaped as `x`, in the dtype of `sum`; those of halves are computed in float32 and rounded once. Other
        axes stay sharded. The sums are linear: those of a Partial "sum" or "avg" stay Partial.

    Raises
    ------
    ValueError
        If the axis does not exist.

    Notes
    -----
    An array that is sharded along `axis` is redistributed first; otherwise nothing is sent.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> pce.cumsum(pce.distribute(np.array([[1, 2], [3, 4]]), mesh, data=pce.Shard(0)), axis=1).full()
    array([[1, 3],
           [3, 7]])
    """
    if axis is None:
        return cumsum(reshape(x, -1), 0)
    return apply(_CUMSUM, x, axis=normalized_axis(axis, x.ndim), backwards=False)

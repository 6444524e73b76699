"""Operations that put arrays together and take them apart: concatenate, stack and split.

They are linear, and keep Partial "max" and "min" as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, as_array
from pce_mpi.autograd.apply import apply
from pce_mpi.autograd.op import Op
from pce_mpi.autograd.operands import of_array
from pce_mpi.autograd.rules import Axis, Rule
from pce_mpi.distributed.array import DistArray, operation
from pce_mpi.ops.indexing import getitem
from pce_mpi.ops.shape import expand_dims, normalized_axis, reshape
from pce_mpi.scalars import integers

Array = Any  # numpy.ndarray or cupy.ndarray
Shape = tuple[int, ...]


def _concatenate_rule(*shapes: Shape, axis: int) -> Rule:
    axes = tuple(None if index == axis else Axis(index) for index in range(len(shapes[0])))
    length = sum(shape[axis] for shape in shapes)
    shape = (*shapes[0][:axis], length, *shapes[0][axis + 1 :])
    together = tuple(range(len(shapes)))
    return Rule((axes,) * len(shapes), axes, shape, linear=(together,), moves_data=True)


@cache
def _concatenate_op(count: int) -> Op:
    def vjp_of(index: int) -> Any:
        def vjp(g: DistArray, y: DistArray, *arrays: DistArray, axis: int) -> DistArray:
            start = sum(array.shape[axis] for array in arrays[:index])
            return getitem(g, ((slice(None),) * axis) + (slice(start, start + arrays[index].shape[axis]),))

        return vjp

    return Op(
        "concatenate",
        lambda call, *arrays, axis: array_namespace(arrays[0]).concatenate(arrays, axis),
        [vjp_of(index) for index in range(count)],
        _concatenate_rule,
        uses=[()] * count,
    )


@operation
def concatenate(arrays: Sequence[Any], axis: int | None = 0) -> DistArray:
    """Concatenate arrays along an axis.

    Parameters
    ----------
    arrays : sequence of DistArray or array_like
        The arrays, at least one of them a `DistArray`; plain arrays are Replicate. Their shapes differ along `axis` at
        most, and their dtypes promote as in NumPy.
    axis : int or None, optional
        The axis; None flattens the arrays first.

    Returns
    -------
    DistArray
        The concatenated array. Other axes stay sharded. Partial arrays of one kind, also beside Replicate ones, give a
        Partial array.

    Raises
    ------
    TypeError
        If no array is a `DistArray`.
    ValueError
        If there are no arrays, other lengths differ, or the axis does not exist.

    Notes
    -----
    Arrays that are sharded along `axis` are redistributed first; otherwise nothing is sent.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.zeros((2, 1)), mesh, data=pce.Shard(0))
    >>> y = pce.concatenate([x, np.ones((2, 1))], axis=1)
    >>> y.placements, y.full()
    ({'data': Shard(0)}, array([[0., 1.],
           [0., 1.]]))
    """
    arrays = _listed("concatenate", arrays)
    if axis is None:
        return concatenate([reshape(each, -1) if isinstance(each, DistArray) else np.ravel(each) for each in arrays])
    shapes = [array.shape if hasattr(array, "shape") else np.shape(array) for array in arrays]
    if not shapes:
        raise ValueError("concatenate takes at least one array")
    axis = normalized_axis(axis, len(shapes[0]))
    for shape in shapes:
        if len(shape) != len(shapes[0]) or any(
            length != first for index, (length, first) in enumerate(zip(shape, shapes[0], strict=True)) if index != axis
        ):
            raise ValueError(f"shapes to concatenate differ beyond axis {axis}: {', '.join(map(str, shapes))}")
    return apply(_concatenate_op(len(shapes)), *arrays, axis=axis)


def _listed(name: str, arrays: Any) -> list[Any]:
    if not isinstance(arrays, Iterable) or getattr(arrays, "ndim", 1) == 0:
        raise TypeError(f"{name} takes a sequence of arrays, got {type(arrays).__name__}")
    return list(arrays)


@operation
def stack(arrays: Sequence[Any], axis: int = 0) -> DistArray:
    """Join arrays of one shape along a new axis.

    Parameters
    ----------
    arrays : sequence of DistArray or array_like
        The arrays, at least one of them a `DistArray`; plain arrays are Replicate.
    axis : int, optional
        The place of the new axis in the result.

    Returns
    -------
    DistArray
        The joined array; placement as in `concatenate`, and all sharded axes stay so.

    Raises
    ------
    TypeError
        If no array is a `DistArray`.
    ValueError
        If there are no arrays, their shapes differ, or the axis does not exist.
    """
    operands = [
        each if isinstance(each, DistArray) else as_array(each, "an array of stack")
        for each in _listed("stack", arrays)
    ]
    shapes = dict.fromkeys(each.shape for each in operands)
    if len(shapes) != 1:
        raise ValueError(f"stack takes arrays of one shape, got {', '.join(map(str, shapes)) or 'no arrays'}")
    (shape,) = shapes
    place = normalized_axis(axis, len(shape) + 1)
    return concatenate(
        [
            expand_dims(each, place) if isinstance(each, DistArray) else array_namespace(each).expand_dims(each, place)
            for each in operands
        ],
        place,
    )


def _parts_rule(shape: Shape, axis: int, sections: int) -> Rule:
    axes = tuple(None if index == axis else Axis(index) for index in range(len(shape)))
    part = (*shape[:axis], shape[axis] // sections, *shape[axis + 1 :])
    return Rule((axes,), axes, part, linear=((0,),), moves_data=True)


def _parts(x: Array, axis: int, sections: int) -> tuple[Array, ...]:
    before, length = (slice(None),) * axis, x.shape[axis] // sections
    return tuple(x[(*before, slice(index * length, (index + 1) * length))] for index in range(sections))


@cache
def _split_op(sections: int) -> Op:
    return Op(
        "split",
        lambda call, x, axis: _parts(x, axis, sections),
        (lambda g, y, x, axis: concatenate(g, axis),),
        lambda shape, axis: _parts_rule(shape, axis, sections),
        uses=[()],
        views=True,
    )


@operation
@of_array
def split(x: DistArray, indices_or_sections: int | Sequence[int], axis: int = 0) -> list[DistArray]:
    """Split an array along an axis.

    Parameters
    ----------
    x : DistArray
        The array.
    indices_or_sections : int or sequence of int
        The number of equal parts, or the indices at which to split.
    axis : int, optional
        The axis to split.

    Returns
    -------
    list of DistArray
        The parts. Other axes stay sharded, and a Partial array stays Partial.

    Raises
    ------
    ValueError
        If the axis does not exist or has no such number of equal parts.

    Notes
    -----
    An array that is sharded along `axis` is redistributed first; otherwise nothing is sent.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> import numpy as np, pce_mpi as pce
    >>> mesh = pce.Mesh(MPI.COMM_SELF, data=1)
    >>> x = pce.distribute(np.arange(6.0), mesh, data=pce.Shard(0))
    >>> [part.full() for part in pce.split(x, [1, 4])]
    [array([0.]), array([1., 2., 3.]), array([4., 5.])]
    """
    axis = normalized_axis(axis, x.ndim)
    length = x.shape[axis]
    if np.ndim(indices_or_sections):
        before, ends = (slice(None),) * axis, [0, *integers(indices_or_sections, "indices_or_sections"), length]
        return [getitem(x, (*before, slice(start, stop))) for start, stop in pairwise(ends)]
    (sections,) = integers(indices_or_sections, "indices_or_sections")
    if sections < 1 or length % sections:
        raise ValueError(f"an axis of length {length} has no {sections} equal parts")
    return list(apply(_split_op(sections), x, axis=axis)) if sections > 1 else [x]

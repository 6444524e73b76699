"""Operations that put arrays together, take them apart and pick parts: concatenate, stack, split and indexing.

They are linear, and keep Partial "max" and "min" as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
import math
import operator
from typing import Any

import numpy as np

from pce_mpi.arrays import Array, Shape, array_namespace, as_array, in_one_dtype, is_true, to_host
from pce_mpi.autograd.apply import Call, Op, apply, of_array, operation, redistributed
from pce_mpi.autograd.rules import Axes, Axis, Rule
from pce_mpi.comm.tracing import cause
from pce_mpi.distributed.array import DistArray
from pce_mpi.exact.sums import scattered
from pce_mpi.kernels import converted
from pce_mpi.ops.shape import aligned, expand_dims, normalized_axis, reshape
from pce_mpi.validation import integers


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
        lambda call, *arrays, axis: array_namespace(arrays[0]).concatenate(in_one_dtype(*arrays), axis),
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
        variant=f"{sections} parts",
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


Range = tuple[int, int, int]  # start, stop and step, as `range` takes them


def _sliced_axes(shape: Shape, ranges: tuple[Range, ...]) -> Axes:
    """Label the axes that are left whole; the others must not be sharded."""
    return tuple(
        Axis(axis) if part == (0, length, 1) else None
        for axis, (length, part) in enumerate(zip(shape, ranges, strict=True))
    )


def _slices(x: Sequence[int], ranges: tuple[Range, ...], whole: Shape) -> tuple[slice, ...]:
    """Return `ranges` as local slices; an axis that is left whole may be sharded: its slice takes the whole shard."""
    return tuple(
        slice(None) if part == (0, length, 1) else slice(part[0], None if part[1] < 0 else part[1], part[2])
        for length, part in zip(whole, ranges, strict=True)
    )


def _slice_rule(shape: Shape, ranges: tuple[Range, ...]) -> Rule:
    axes = _sliced_axes(shape, ranges)
    return Rule((axes,), axes, tuple(len(range(*part)) for part in ranges), linear=((0,),), moves_data=True)


def _fill_rule(shape: Shape, ranges: tuple[Range, ...], whole: Shape) -> Rule:
    axes = _sliced_axes(whole, ranges)
    return Rule((axes,), axes, whole, linear=((0,),))


def _fill(call: Call, x: Array, ranges: tuple[Range, ...], whole: Shape) -> Array:
    filled = array_namespace(x).zeros(call.shape, x.dtype)
    filled[_slices(filled.shape, ranges, whole)] = x
    return filled


_FILL = Op("slice", _fill, rule=_fill_rule)
_SLICE = Op(
    "slice",
    lambda call, x, ranges: x[_slices(x.shape, ranges, call.operands[0].shape)],
    (lambda g, y, x, ranges: apply(_FILL, g, ranges=ranges, whole=x.shape),),
    _slice_rule,
    uses=[()],
    views=True,
)


def _picked_axes(shape: Shape, axes: tuple[int, ...]) -> Axes:
    """Label the axes that are not indexed by an array; the others must not be sharded."""
    return tuple(None if axis in axes else Axis(axis) for axis in range(len(shape)))


def _pick_rule(shape: Shape, *indices: Shape, axes: tuple[int, ...], at: int) -> Rule:
    block = np.broadcast_shapes(*indices)
    operand = _picked_axes(shape, axes)
    rest = [axis for axis in range(len(shape)) if axis not in axes]
    labels, lengths = [operand[axis] for axis in rest], [shape[axis] for axis in rest]
    return Rule(
        (operand, *(aligned(each, block) for each in indices)),
        (*labels[:at], *aligned(block, block), *labels[at:]),
        (*lengths[:at], *block, *lengths[at:]),
        linear=((0,),),
        moves_data=True,
    )


def _pick(call: Call, x: Array, *indices: Array, axes: tuple[int, ...], at: int) -> Array:
    """Return the elements of `x` at `indices`, one array for each of `axes`; the axes of `indices` start at `at`."""
    rest = [axis for axis in range(x.ndim) if axis not in axes]
    found = x.transpose((*axes, *rest))[indices]
    block = found.ndim - len(rest)
    return found.transpose((*range(block, block + at), *range(block), *range(block + at, found.ndim)))


def _put_rule(g: Shape, *indices: Shape, axes: tuple[int, ...], at: int, whole: Shape) -> Rule:
    pick = _pick_rule(whole, *indices, axes=axes, at=at)
    return Rule((pick.result, *pick.operands[1:]), pick.operands[0], whole, linear=((0,),), reduces="sum")


def _put(
    call: Call, g: Array, *indices: Array, axes: tuple[int, ...], at: int, whole: Shape, exact: bool = False
) -> Array:
    """Return zeros, with the elements of `g` added where `_pick` takes them from."""
    xp, rest = array_namespace(g), [axis for axis in range(len(whole)) if axis not in axes]
    block, order, lengths = g.ndim - len(rest), [*axes, *rest], call.shape
    shape = tuple(lengths[axis] for axis in order)
    moved = g.transpose((*range(at, at + block), *range(at), *range(at + block, g.ndim)))

    def scatter(how: str, target: Array, values: Array) -> None:
        getattr(xp, how).at(target, indices, values)

    if exact:
        count = math.prod(np.broadcast_shapes(*(each.shape for each in call.operands[1:])))
        sums = scattered(scatter, lambda zeros: zeros[indices], moved, shape, count, call.summed_comm)
        filled = converted(sums, g.dtype)
    else:
        filled = xp.zeros(shape, g.dtype)
        scatter("add", filled, moved)
    return filled.transpose(sorted(range(len(order)), key=order.__getitem__))


_PUT = Op("slice", _put, rule=_put_rule, dtype=lambda g, *_: g, wide=True, exact=partial(_put, exact=True))
_PICK = Op(
    "slice",
    _pick,
    (lambda g, y, x, *indices, axes, at: apply(_PUT, g, *indices, axes=axes, at=at, whole=x.shape),),
    _pick_rule,
    dtype=lambda x, *_: x,
    uses=[range(1, 65)],  # the indices, as many as there are
)


@operation
def getitem(x: DistArray, index: Any) -> DistArray:
    """Return `x[index]` for whole numbers, slices, `...`, None, and arrays of whole numbers or bool, as NumPy does.

    An axis that is left whole stays sharded; an array with another sharded axis is redistributed first. A Partial array
    stays Partial. Sharded axes of an array of whole numbers stay sharded; a distributed mask is gathered. The gradient
    is 0 for elements that are not taken, and a sum for those that are taken several times. Raises `IndexError` for
    indices that are out of bounds, too many or of the wrong shape, `TypeError` for others, such as True and False.
    """
    entries = _entries(x, index if isinstance(index, tuple) else (index,))
    ranges: list[Range] = []
    shape: list[int] = []
    arrays: dict[int, Any] = {}
    places: list[int] = []
    before = (0, 0)  # axes of the result before those of the arrays, with those of None and without
    for place, entry in enumerate(entries):
        axis = len(ranges)
        if entry is None:
            shape.append(1)
        elif isinstance(entry, slice):
            part = entry.indices(x.shape[axis])
            # Another empty range may take elements as a slice.
            ranges.append(part if range(*part) else (0, 0, 1))
            shape.append(len(range(*ranges[-1])))
        elif isinstance(entry, int):
            length = x.shape[axis]
            if not -length <= entry < length:
                raise _out_of_bounds(entry, axis, length)
            ranges.append((entry % length, entry % length + 1, 1))
        else:
            before = before if arrays else (len(shape), axis)
            arrays[axis] = entry
            places.append(place)
            ranges.append((0, x.shape[axis], 1))
    if not arrays:
        found = apply(_SLICE, x, ranges=tuple(ranges))
    else:
        if places[-1] - places[0] >= len(places):
            before = (0, 0)  # as in NumPy, if the arrays are not next to each other
        indices = _checked(x, arrays)
        try:
            shape[before[0] : before[0]] = np.broadcast_shapes(*(each.shape for each in indices))
        except ValueError as error:
            raise IndexError(f"arrays of indices do not broadcast: {error}") from None
        part = apply(_SLICE, x, ranges=tuple(ranges))
        found = apply(_PICK, part, *indices, axes=tuple(arrays), at=before[1])
    return found if found.shape == tuple(shape) else reshape(found, shape)


def _entries(x: DistArray, index: tuple[Any, ...]) -> list[Any]:
    """Return `index` with an entry for each axis: masks as the places where they hold, and no `...`.

    Beside an array of indices, a whole number becomes an array too.
    """
    entries = [_entry(each, x) for each in index]
    if sum(entry is Ellipsis for entry in entries) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    given = sum(_axes_taken(entry) for entry in entries)
    if given > x.ndim:
        raise IndexError(f"{given} indices are too many for an array of {x.ndim} dimensions")
    where = next((place for place, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    entries[where : where + 1] = [slice(None)] * (x.ndim - given)
    whole: list[Any] = []
    for entry in entries:
        if not _is_mask(entry):
            whole.append(entry)
            continue
        axis = sum(map(_axes_taken, whole))
        if entry.shape != x.shape[axis : axis + entry.ndim]:
            raise IndexError(f"a mask of shape {entry.shape} does not fit the axes of {x.shape} from {axis} on")
        mask = entry.full() if isinstance(entry, DistArray) else entry
        whole += array_namespace(mask).nonzero(mask)
    if any(hasattr(entry, "shape") for entry in whole):
        xp = array_namespace(x.local)
        whole = [xp.asarray(entry) if isinstance(entry, int) else entry for entry in whole]
    return whole


def _entry(entry: Any, x: DistArray) -> Any:
    """Return one entry of an index: an int, a slice, `...`, None, or an array of whole numbers or bool."""
    if entry is None or entry is Ellipsis or isinstance(entry, slice):
        return entry
    # operator.index takes True for a whole number, and that of NumPy before 2.2 too.
    if not isinstance(entry, bool | np.bool | DistArray) and np.ndim(entry) == 0:
        try:
            return operator.index(entry)
        except TypeError:
            raise _no_index(entry) from None
    if isinstance(entry, list | tuple):
        array = array_namespace(x.local).asarray(entry)
        entry = array if array.size else array.astype(np.int64)
    if getattr(entry, "shape", ()) == () or entry.dtype.kind not in "iub":
        raise _no_index(entry)
    return entry


def _is_mask(entry: Any) -> bool:
    return hasattr(entry, "shape") and bool(entry.dtype.kind == "b")


def _axes_taken(entry: Any) -> int:
    return entry.ndim if _is_mask(entry) else int(entry is not None and entry is not Ellipsis)


def _checked(x: DistArray, arrays: Mapping[int, Any]) -> list[Any]:
    """Return the arrays of indices, by axis; `IndexError`, on every rank, if one is out of bounds."""
    indices, error = [], None
    for axis, entry in arrays.items():
        if isinstance(entry, DistArray):
            with cause("slice", reason="indices are checked"):  # a partial is no index
                entry = redistributed(entry, entry.sharding.natural)
        indices.append(entry)
        local, length = to_host(entry.local if isinstance(entry, DistArray) else entry), x.shape[axis]
        outside = (local < -length) | (local >= length)
        if error is None and is_true(outside.any()):
            error = _out_of_bounds(local[outside].flat[0], axis, length)
    if indices:
        x.mesh.agree(x.mesh.dims, "slice", {"shape": x.shape}, error)
    return indices


def _out_of_bounds(index: Any, axis: int, length: int) -> IndexError:
    return IndexError(f"index {index} is out of bounds for axis {axis} of length {length}")


def _no_index(entry: Any) -> TypeError:
    return TypeError(
        f"an index is whole numbers, slices, ..., None, and arrays of whole numbers or bool, got {entry!r}"
    )

"""Pick parts of an array, which is linear and keeps Partial "max" and "min" as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import math
import operator
from typing import Any

import numpy as np

from pce_mpi.arrays import array_namespace, is_true, to_host
from pce_mpi.autograd.apply import apply, redistributed
from pce_mpi.autograd.op import Call, Op
from pce_mpi.autograd.rules import Axes, Axis, Rule
from pce_mpi.comm.tracing import cause
from pce_mpi.distributed.array import DistArray, operation
from pce_mpi.exact.sums import scattered
from pce_mpi.kernels import converted
from pce_mpi.ops.broadcasting import aligned
from pce_mpi.ops.shape import reshape

Array = Any  # numpy.ndarray or cupy.ndarray
Shape = tuple[int, ...]
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


def _slice(call: Call, x: Array, ranges: tuple[Range, ...]) -> Array:
    return x[_slices(x.shape, ranges, call.operands[0].shape)]


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
    _slice,
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


def _put(call: Call, g: Array, *indices: Array, axes: tuple[int, ...], at: int, whole: Shape) -> Array:
    """Return zeros, with the elements of `g` added where `_pick` takes them from."""
    xp, lengths = array_namespace(g), call.shape
    rest = [axis for axis in range(len(whole)) if axis not in axes]
    block = g.ndim - len(rest)
    order = [*axes, *rest]
    filled = xp.zeros([lengths[axis] for axis in order], g.dtype)
    moved = g.transpose((*range(at, at + block), *range(at), *range(at + block, g.ndim)))
    xp.add.at(filled, indices, moved)
    return filled.transpose(sorted(range(len(order)), key=order.__getitem__))


def _exact_put(call: Call, g: Array, *indices: Array, axes: tuple[int, ...], at: int, whole: Shape) -> Array:
    xp, lengths = array_namespace(g), call.shape
    rest = [axis for axis in range(len(whole)) if axis not in axes]
    block = g.ndim - len(rest)
    order = [*axes, *rest]
    moved = g.transpose((*range(at, at + block), *range(at), *range(at + block, g.ndim)))

    def scatter(how: str, zeros: Array, values: Array) -> None:
        getattr(xp, how).at(zeros, indices, values)

    length = math.prod(np.broadcast_shapes(*(each.shape for each in call.operands[1:])))
    shape = tuple(lengths[axis] for axis in order)
    filled = scattered(scatter, lambda zeros: zeros[indices], moved, shape, length, call.summed_comm)
    return converted(filled.transpose(sorted(range(len(order)), key=order.__getitem__)), g.dtype)


_PUT = Op("slice", _put, rule=_put_rule, dtype=lambda g, *_: g, wide=True, exact=_exact_put)
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
    if not isinstance(entry, bool | DistArray) and np.ndim(entry) == 0:  # operator.index takes True for a whole number
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

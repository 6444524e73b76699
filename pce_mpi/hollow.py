"""Hollow arrays, which have a shape and a dtype and no elements: the third array library, beside NumPy and CuPy.

Elsewhere such arrays are called fake, meta or abstract. Operations run on them as on other arrays, and give the shapes
and dtypes of their results. So a program's collectives are found without data. A function that needs the value of an
element raises `TypeError`.

The ledger counts the bytes that hollow arrays would take, by what they are for, now and at most. While it is open, an
array knows the memory that it would take: its `Allocation`, which it shares with its views, and whether its elements
would follow each other in C order there. A view without that order is copied by `reshape`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
import math
from typing import Any
from weakref import finalize

import numpy as np
from numpy.lib.stride_tricks import as_strided

#: the purposes of the bytes that a ledger counts; "tape" is all that the tape holds beside the parameters
PURPOSES = ("parameters", "gradients", "optimizer state", "tape")


class Allocation:
    """The memory of a hollow array and of its views; `held` counts the nodes of the tape that hold it."""

    __slots__ = ("bytes", "held", "ledger", "purpose")

    def __init__(self, ledger: Ledger, size: int) -> None:
        self.ledger, self.bytes, self.purpose, self.held = ledger, size, "", 0

    def enter(self, purpose: str) -> None:
        """Count this allocation for `purpose` from now on, until nothing refers to it."""
        self.leave()
        self.purpose = purpose
        self.ledger.add(purpose, self.bytes)

    def leave(self) -> None:
        """Count this allocation for nothing any more."""
        if self.purpose:
            self.ledger.add(self.purpose, -self.bytes)

    __del__ = leave


class Ledger:
    """The bytes for each of `PURPOSES`: `now`, and the `most` that there ever were."""

    def __init__(self) -> None:
        self.now = dict.fromkeys(PURPOSES, 0)
        self.most = dict(self.now)

    def add(self, purpose: str, size: int) -> None:
        """Count `size` bytes more."""
        self.now[purpose] += size
        self.most[purpose] = max(self.most[purpose], self.now[purpose])

    def hold(self, allocations: Iterable[Allocation], holder: Any) -> None:
        """Count allocations for the tape, each once, while `holder` lives; parameters are counted as such."""
        taken = [allocation for allocation in set(allocations) if allocation.purpose != "parameters"]
        for allocation in taken:
            self._held(allocation, 1)
        finalize(holder, self._release, taken).atexit = False

    def _release(self, allocations: list[Allocation]) -> None:
        for allocation in allocations:
            self._held(allocation, -1)

    def _held(self, allocation: Allocation, change: int) -> None:
        before = allocation.held
        allocation.held += change
        self.add("tape", allocation.bytes * ((allocation.held > 0) - (before > 0)))


_open: ContextVar[Ledger | None] = ContextVar("open_ledger", default=None)
# This runs without entering a Python function, for every operation.
open_ledger = _open.get


@contextmanager
def keeping() -> Iterator[Ledger]:
    """Open a ledger for a block."""
    ledger = Ledger()
    token = _open.set(ledger)
    try:
        yield ledger
    finally:
        _open.reset(token)


class Hollow(np.ndarray[Any, Any]):
    """An array whose elements are all the same zero in memory, which is never read; `hollow` makes one."""

    allocation: Allocation | None = None
    ordered = True

    def __array_finalize__(self, seen: Any) -> None:
        if getattr(seen, "allocation", None) is not None:  # this is a view
            self.allocation, self.ordered = seen.allocation, False

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        if method == "at":
            return None
        # Computed from the first elements alone, for dtypes and errors.
        found = getattr(ufunc, method)(*map(_first, inputs), **{k: v for k, v in options.items() if k != "where"})
        if out is not None:
            return out[0] if len(out) == 1 else out
        shapes = [np.shape(x) for x in inputs]
        if method == "reduce":
            shape = _reduced(shapes[0], options.get("axis", 0), options.get("keepdims", False))
        elif ufunc is np.matmul:
            (*a, rows, _), (*b, _, columns) = shapes
            shape = (*np.broadcast_shapes(tuple(a), tuple(b)), rows, columns)
        else:
            shape = np.broadcast_shapes(*shapes)
        return tuple(hollow(shape, x.dtype) for x in found) if isinstance(found, tuple) else hollow(shape, found.dtype)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        if function in _SHAPED:
            return _SHAPED[function](*arguments, **options)
        if function in _AS_THEY_ARE:
            return _as_hollow(super().__array_function__(function, types, arguments, options))
        raise TypeError(
            f"numpy.{function.__name__} takes no hollow arrays: it may depend on elements, which they do not have"
        )

    def astype(self, dtype: Any, *_: Any, **options: Any) -> Any:
        """Return a hollow array of this dtype, or the same one with `copy=False` if it has that dtype."""
        return self if self.dtype == dtype and not options.get("copy", True) else hollow(self.shape, dtype)

    def copy(self, *_: Any, **__: Any) -> Any:
        """Return a hollow array of the same shape and dtype."""
        return hollow(self.shape, self.dtype)

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(part, Hollow) for part in parts):
            found: Any = super().__getitem__(index)
            if not isinstance(found, Hollow) or any(isinstance(part, np.ndarray | list) for part in parts):  # a copy
                return hollow(found.shape, found.dtype)
            if found.allocation is not None and self.ordered:
                found.ordered = _in_order(self.shape, lambda x: x[index])
            return found
        # A mask takes all elements, the most that a mask can take.
        masks = [getattr(part, "dtype", None) == np.bool_ for part in parts]
        shapes = [(part.size,) if mask else np.shape(part) for part, mask in zip(parts, masks, strict=True)]
        axes = sum(part.ndim if mask else 1 for part, mask in zip(parts, masks, strict=True))
        return hollow((*np.broadcast_shapes(*shapes), *self.shape[axes:]), self.dtype)

    def reshape(self, *shape: Any, **options: Any) -> Any:
        """Return a view, or a copy if the elements are not in C order."""
        found = super().reshape(*shape, **options)
        if self.allocation is None:
            return found
        if not self.ordered and found.shape != self.shape:
            return hollow(found.shape, found.dtype)
        found.ordered = self.ordered
        return found

    def transpose(self, *axes: Any) -> Any:
        """Return a view with other axes first."""
        found: Any = super().transpose(*axes)
        if self.allocation is not None and self.ordered:
            found.ordered = _in_order(self.shape, lambda x: x.transpose(*axes))
        return found

    def squeeze(self, *axes: Any, **options: Any) -> Any:
        """Return a view without axes of length 1."""
        found: Any = super().squeeze(*axes, **options)
        found.ordered = self.ordered
        return found

    def view(self, *kind: Any, **options: Any) -> Any:
        """Return a view of another dtype."""
        found: Any = super().view(*kind, **options)
        found.ordered = self.ordered
        return found

    def __setitem__(self, *_: Any) -> None:
        """Do nothing: there are no elements."""

    def _value(self, *_: Any) -> Any:
        raise TypeError(
            "hollow arrays have no elements, so the value of an element cannot be given: in a rehearsal the program "
            "says it, as in loss.item(rehearsed=0.0)"
        )

    def __repr__(self) -> str:
        return f"hollow({self.shape}, {self.dtype})"

    item = tolist = _value
    tobytes = _value  # type: ignore[assignment]  # it never returns
    __bool__ = __int__ = __float__ = __index__ = __contains__ = __format__ = _value
    __str__ = __repr__


def hollow(shape: int | Sequence[int], dtype: Any = np.float64) -> Hollow:
    """Return a hollow array; it takes no memory."""
    made = np.broadcast_to(np.zeros((), dtype), shape).view(Hollow)
    ledger = open_ledger()
    if ledger is not None:
        made.allocation = Allocation(ledger, made.nbytes)
    return made


def enter(array: Any, purpose: str) -> None:
    """Count the memory of `array` for `purpose` in the open ledger; an array that is not hollow has elements."""
    if isinstance(array, Hollow) and array.allocation is not None:
        array.allocation.enter(purpose)


def has_other_size(array: Any) -> bool:
    """Return whether `array` is a view of memory that has another size."""
    if isinstance(array, Hollow):
        return array.allocation is not None and array.allocation.bytes != array.nbytes
    return not array.flags.owndata and getattr(array.base, "size", 0) != array.size


def _in_order(shape: tuple[int, ...], view: Callable[[Any], Any]) -> bool:
    """Return whether a view of an array in C order is in C order; `view` must read no element."""
    return bool(view(as_strided(np.zeros((), np.int8), shape, _strides(shape))).flags.c_contiguous)


@lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _first(x: Any) -> Any:
    return np.asarray(x)[(slice(0, 1),) * x.ndim] if isinstance(x, np.ndarray) else x


def _as_hollow(found: Any) -> Any:
    if isinstance(found, list | tuple):
        return type(found)(map(_as_hollow, found))
    if type(found) is Hollow:
        return found
    return hollow(found.shape, found.dtype) if isinstance(found, np.ndarray) else found


def _broadcast(x: Any, shape: Any) -> Any:
    found = np.broadcast_to(np.asarray(x), shape)
    made = found.view(Hollow)
    made.allocation, made.ordered = getattr(x, "allocation", None), False
    return made


def _broadcast_together(*arrays: Any) -> Any:
    shape = np.broadcast_shapes(*(x.shape for x in arrays))
    return tuple(_broadcast(x, shape) for x in arrays)


def _reduced(shape: tuple[int, ...], axis: Any, keepdims: bool) -> tuple[int, ...]:
    axes = range(len(shape)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    gone = {each % len(shape) for each in axes}
    return tuple(1 if at in gone else length for at, length in enumerate(shape) if keepdims or at not in gone)


def _like(x: Any, *_: Any, dtype: Any = None, **__: Any) -> Hollow:
    return hollow(x.shape, dtype or x.dtype)


def _where(condition: Any, x: Any, y: Any) -> Hollow:
    found = np.where(*map(_first, (condition, x, y)))
    return hollow(np.broadcast_shapes(*map(np.shape, (condition, x, y))), found.dtype)


def _concatenated(arrays: Sequence[Any], axis: int = 0, dtype: Any = None) -> Hollow:
    shape = list(arrays[0].shape)
    shape[axis] = sum(x.shape[axis] for x in arrays)
    return hollow(shape, dtype or np.result_type(*(x.dtype for x in arrays)))


def _stacked(arrays: Sequence[Any], axis: int = 0) -> Hollow:
    return _concatenated([np.expand_dims(x, axis) for x in arrays], axis)


def _einsum(letters: str, *operands: Any, **__: Any) -> Hollow:
    sources, _, result = letters.partition("->")
    lengths: dict[str, int] = {}
    batch: tuple[int, ...] = ()
    for source, x in zip(sources.split(","), operands, strict=True):
        before, dots, after = source.partition("...")
        lengths |= dict(zip(before, x.shape, strict=False))
        lengths |= dict(zip(after, x.shape[x.ndim - len(after) :], strict=True))
        batch = np.broadcast_shapes(batch, x.shape[len(before) : x.ndim - len(after)] if dots else ())
    before, dots, after = result.partition("...")
    shape = (*map(lengths.__getitem__, before), *(batch if dots else ()), *map(lengths.__getitem__, after))
    return hollow(shape, np.einsum(letters, *map(_first, operands)).dtype)


_SHAPED: dict[Any, Callable[..., Any]] = {
    np.where: _where,
    np.concatenate: _concatenated,
    np.stack: _stacked,
    np.einsum: _einsum,
    np.broadcast_to: _broadcast,
    np.broadcast_arrays: _broadcast_together,
    **dict.fromkeys([np.copyto, np.put_along_axis], lambda *_, **__: None),
    np.take_along_axis: lambda x, indices, *_, **__: hollow(indices.shape, x.dtype),
    np.argsort: lambda x, *_, **__: hollow(x.shape, np.intp),
    np.cumsum: lambda x, *_, **__: hollow(x.shape, np.cumsum(_first(x), axis=0).dtype),
    np.full_like: lambda x, _, dtype=None: hollow(x.shape, dtype or x.dtype),
    **dict.fromkeys([np.zeros_like, np.ones_like, np.empty_like, np.sort, np.triu], _like),
}
# Views, and functions that NumPy computes by ufuncs.
_AS_THEY_ARE = {
    *(np.reshape, np.transpose, np.moveaxis, np.swapaxes, np.expand_dims, np.squeeze, np.flip, np.split),
    *(np.diagonal, np.shape, np.ndim, np.size, np.result_type),
    *(np.sum, np.max, np.min, np.mean, np.any, np.all, np.clip, np.shares_memory, np.may_share_memory),
}


class Library:
    """NumPy, except that the arrays that it makes are hollow."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def zeros(shape: int | Sequence[int], dtype: Any = np.float64) -> Hollow:
        """Return a hollow array."""
        return hollow(shape, dtype)

    empty = ones = zeros

    @staticmethod
    def full(shape: int | Sequence[int], value: Any, dtype: Any = None) -> Hollow:
        """Return a hollow array of `dtype`, or of the dtype of `value`."""
        return hollow(shape, dtype or np.result_type(value))

    @staticmethod
    def asarray(x: Any, dtype: Any = None, **_: Any) -> Any:
        """Return `x` as an array; it is hollow only if `x` is."""
        return x.astype(dtype or x.dtype, copy=False) if isinstance(x, Hollow) else np.asarray(x, dtype)

    @staticmethod
    def array(x: Any, dtype: Any = None, **_: Any) -> Any:
        """Return a copy of `x`; it is hollow only if `x` is."""
        return hollow(x.shape, dtype or x.dtype) if isinstance(x, Hollow) else np.array(x, dtype)

    @staticmethod
    def ascontiguousarray(x: Any, dtype: Any = None) -> Any:
        """Return `x` in C order; it is hollow only if `x` is."""
        if not isinstance(x, Hollow):
            return np.ascontiguousarray(x, dtype)
        return x.astype(dtype or x.dtype, copy=not x.ordered)


LIBRARY = Library()

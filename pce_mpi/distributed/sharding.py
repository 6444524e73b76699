"""The sharding of a global array: a placement for each dim of a mesh, and the split points of each sharded axis.

A `Sharding` is a frozen value and knows nothing of arrays or communicators. Two dims that shard the same axis split it
in mesh order, nested: 10 over 2 x 2 gives 3, 2, 3, 2. `steps` leads from one sharding to another:

    Shard -> Replicate                      all_gather
    Shard(i) -> Shard(j), other splits      all_to_all
    Partial -> Replicate                    all_reduce
    Partial -> Shard                        reduce_scatter
    Replicate -> Shard                      slice      sends nothing
    Replicate -> Partial                    keep       sends nothing: one rank keeps a sum, the others hold -0.0
    Shard -> Partial("sum")                 pad        sends nothing: the other blocks are -0.0, which changes no sum

Everything else goes by way of Replicate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product
import math
from types import MappingProxyType
from typing import Literal
from weakref import WeakValueDictionary

from pce_mpi.distributed.placements import Partial, Placement, Placements, Replicate, Shard, shard_range
from pce_mpi.hints import hinted

Dims = tuple[tuple[str, int], ...]
Coordinates = Mapping[str, int]
Splits = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Sharding:
    """The shards of a global array that each rank holds; `Sharding.of` makes one.

    `dims` has the dims of the mesh and their sizes, in mesh order, and `placements` one entry for each. `splits` has
    one entry for each axis: the ends of its blocks, (0, ..., length), in the order of the coordinates of the dims that
    shard it, the last dim fastest; None for an axis that is not sharded.
    """

    dims: Dims
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    splits: tuple[Splits | None, ...]

    @staticmethod
    def of(
        dims: Dims, shape: tuple[int, ...], placements: Placements, splits: Mapping[int, Splits] | None = None
    ) -> Sharding:
        """Make a sharding; dims that are not named are Replicate, axes without `splits` get balanced blocks.

        Raises `TypeError` for a value that is no placement, and `ValueError` for a dim or an axis that does not exist
        and for reduce operators that do not mix.
        """
        for name, placement in placements.items():
            if not isinstance(placement, Placement):
                raise TypeError(_no_placement(name, placement))
        return _sharding(dims, tuple(shape), tuple(placements.items()), tuple((splits or {}).items()))

    def __new__(
        cls, dims: Dims, shape: tuple[int, ...], placements: tuple[Placement, ...], splits: tuple[Splits | None, ...]
    ) -> Sharding:
        # Equal shardings are one object: each operation compares them and looks them up several times.
        key = dims, shape, placements, splits
        known = _known.get(key)
        if known is None:
            known = _known[key] = super().__new__(cls)
        return known

    def __reduce__(self) -> tuple[object, ...]:
        return Sharding, (self.dims, self.shape, self.placements, self.splits)

    @cached_property
    def by_dim(self) -> Placements:
        """The placement of each dim."""
        return MappingProxyType(dict(zip((name for name, _ in self.dims), self.placements, strict=True)))

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The size of each dim."""
        return MappingProxyType(dict(self.dims))

    @cached_property
    def _dims_of(self) -> tuple[tuple[str, ...], ...]:
        return tuple(
            tuple(dim for dim, placement in self.by_dim.items() if placement == Shard(axis))
            for axis in range(len(self.shape))
        )

    def dims_of(self, axis: int) -> tuple[str, ...]:
        """Return the dims that shard `axis`, in mesh order."""
        return self._dims_of[axis]

    def dims_along(self, axes: Collection[int]) -> tuple[str, ...]:
        """Return the dims that shard one of `axes`, in mesh order."""
        return tuple(dim for dim, placement in self.by_dim.items() if any(placement == Shard(axis) for axis in axes))

    @cached_property
    def summed_dims(self) -> tuple[str, ...]:
        """The dims over which the array is Partial("sum")."""
        return tuple(dim for dim, placement in self.by_dim.items() if placement == Partial("sum"))

    @cached_property
    def partial_dims(self) -> tuple[str, ...]:
        """The dims over which the array is Partial."""
        return tuple(dim for dim, placement in self.by_dim.items() if isinstance(placement, Partial))

    @cached_property
    def unsharded_dims(self) -> tuple[str, ...]:
        """The dims of several ranks that do not shard the array."""
        placed = self.by_dim.items()
        return tuple(dim for dim, placement in placed if self.sizes[dim] > 1 and not isinstance(placement, Shard))

    def parts(self, dims: tuple[str, ...]) -> int:
        """Return the number of ranks along `dims` together."""
        return math.prod(self.sizes[dim] for dim in dims)

    def members(self, dims: tuple[str, ...], coordinates: Coordinates) -> Iterator[dict[str, int]]:
        """Yield the coordinates of the ranks that differ from `coordinates` in `dims` only, the last dim fastest."""
        for index in product(*(range(self.sizes[dim]) for dim in dims)):
            yield {**coordinates, **dict(zip(dims, index, strict=True))}

    def block(self, axis: int, coordinates: Coordinates) -> tuple[int, int]:
        """Return the range [start, stop) of `axis` that the rank at `coordinates` holds."""
        splits = self.splits[axis]
        if splits is None:
            return 0, self.shape[axis]
        index = 0
        for dim in self._dims_of[axis]:
            index = index * self.sizes[dim] + coordinates[dim]
        return splits[index], splits[index + 1]

    def slices(self, coordinates: Coordinates) -> tuple[slice, ...]:
        """Return the part of the global array that the rank at `coordinates` holds."""
        return tuple(slice(*self.block(axis, coordinates)) for axis in range(len(self.shape)))

    def local_shape(self, coordinates: Coordinates) -> tuple[int, ...]:
        """Return the shape of the array that the rank at `coordinates` holds."""
        where = tuple(map(coordinates.__getitem__, self.sizes))
        shape = self._local_shapes.get(where)
        if shape is None:
            blocks = [self.block(axis, coordinates) for axis in range(len(self.shape))]
            shape = self._local_shapes[where] = tuple(stop - start for start, stop in blocks)
        return shape

    @cached_property
    def _local_shapes(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        return {}

    def with_placements(self, placements: Placements) -> Sharding:
        """Change the placements of named dims; an axis that one of them sharded, or now shards, has balanced blocks."""
        after = Sharding.of(self.dims, self.shape, {**self.by_dim, **placements})
        kept = {
            axis: splits
            for axis, splits in enumerate(self.splits)
            if splits is not None
            and after.dims_of(axis) == self.dims_of(axis)
            and not set(after.dims_of(axis)) & set(placements)
        }
        return Sharding.of(self.dims, self.shape, after.by_dim, kept) if kept else after

    @cached_property
    def natural(self) -> Sharding:
        """The sharding of a complete gradient: the same shards, Replicate instead of Partial."""
        return self.replacing(dict.fromkeys(self.partial_dims, Replicate()))

    def with_partial_over(self, dims: tuple[str, ...]) -> Sharding:
        """Make `dims` Partial("sum"); an axis that its outermost dims still shard keeps their split points."""
        known = self._with_partial_over.get(dims)
        if known is None:
            known = self._with_partial_over[dims] = self._made_partial_over(dims)
        return known

    @cached_property
    def _with_partial_over(self) -> dict[tuple[str, ...], Sharding]:
        return {}

    def _made_partial_over(self, dims: tuple[str, ...]) -> Sharding:
        splits = {}
        for axis, points in enumerate(self.splits):
            kept = tuple(dim for dim in self.dims_of(axis) if dim not in dims)
            if points is not None and kept == self.dims_of(axis)[: len(kept)]:
                splits[axis] = outer_splits(points, self.parts(self.dims_of(axis)[len(kept) :]))
        return Sharding.of(self.dims, self.shape, {**self.by_dim, **dict.fromkeys(dims, Partial("sum"))}, splits)

    def with_whole_axis(self, axis: int, length: int) -> Sharding:
        """Give `axis` another length, and do not shard it."""
        placements = (Replicate() if placement == Shard(axis) else placement for placement in self.placements)
        shape, splits = list(self.shape), list(self.splits)
        shape[axis], splits[axis] = length, None
        return Sharding(self.dims, tuple(shape), tuple(placements), tuple(splits))

    @cached_property
    def replicated(self) -> Sharding:
        """The whole array on every rank."""
        return Sharding.of(self.dims, self.shape, {})

    def replacing(self, placements: Placements, splits: Mapping[int, Splits | None] | None = None) -> Sharding:
        """Change the placements of named dims and the split points of axes; the caller knows that they fit."""
        changed = {**dict(enumerate(self.splits)), **(splits or {})}
        return Sharding(self.dims, self.shape, tuple({**self.by_dim, **placements}.values()), tuple(changed.values()))

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        text = ", ".join(f"{dim}: {placement}" for dim, placement in self.by_dim.items())
        uneven = [
            f"axis {axis} split at {list(splits[1:-1])}"
            for axis, splits in enumerate(self.splits)
            if splits is not None and splits != balanced_splits(self.shape[axis], self.sizes_along(axis))
        ]
        return "; ".join([text, *uneven])

    def sizes_along(self, axis: int) -> tuple[int, ...]:
        return tuple(self.sizes[dim] for dim in self._dims_of[axis])


_known: WeakValueDictionary[tuple[object, ...], Sharding] = WeakValueDictionary()


@lru_cache(maxsize=4096)
def _sharding(
    dims: Dims,
    shape: tuple[int, ...],
    placements: tuple[tuple[str, Placement], ...],
    splits: tuple[tuple[int, Splits], ...],
) -> Sharding:
    names = [name for name, _ in dims]
    given = dict(placements)
    for name in given:
        if name not in names:
            raise ValueError(f"the mesh has no dim {name!r}; its dims are {', '.join(names) or 'none'}")
    placed = [_normalized(given.get(name, Replicate()), name, len(shape)) for name in names]
    operators = {placement.operator for placement in placed if isinstance(placement, Partial)}
    if len(operators) > 1 and operators != {"sum", "avg"}:
        raise ValueError(f"reduce operators: only sum and avg mix over different dims, got {sorted(operators)}")
    of_axes = dict(splits)
    all_splits: list[Splits | None] = []
    for axis, length in enumerate(shape):
        sizes = tuple(size for (_, size), placement in zip(dims, placed, strict=True) if placement == Shard(axis))
        all_splits.append(of_axes.get(axis, balanced_splits(length, sizes)) if sizes else None)
    return Sharding(dims, shape, tuple(placed), tuple(all_splits))


def _no_placement(name: str, value: object) -> str:
    text = f"{name} must be Shard(axis), Replicate() or Partial(operator), got {value!r}"
    return hinted(text, "class of placements") if isinstance(value, type) else text


def _normalized(placement: Placement, dim: str, ndim: int) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    if not -ndim <= placement.axis < ndim:
        raise ValueError(f"{dim}={placement} is out of bounds for an array of {ndim} dimensions")
    return Shard(placement.axis % ndim)


@lru_cache(maxsize=4096)
def balanced_splits(length: int, sizes: tuple[int, ...]) -> Splits:
    """Return the ends of the balanced blocks of an axis that dims of `sizes` split one after the other.

    >>> balanced_splits(10, (2, 2))
    (0, 3, 5, 8, 10)
    """
    splits: Splits = (0, length)
    for size in sizes:
        starts = [
            start + shard_range(stop - start, size, index)[0]
            for start, stop in pairwise(splits)
            for index in range(size)
        ]
        splits = (*starts, length)
    return splits


def outer_splits(splits: Splits, inner: int) -> Splits:
    """Return the split points that remain when the innermost dims, of `inner` ranks in all, do not split the axis."""
    return splits[::inner]


def within(outer: tuple[slice, ...], inner: tuple[slice, ...]) -> tuple[slice, ...]:
    """Return the part `inner` of the global array as a part of `outer`, which contains it."""
    return tuple(slice(b.start - a.start, b.stop - a.start) for a, b in zip(outer, inner, strict=True))


Verb = Literal["all_gather", "all_to_all", "all_reduce", "reduce_scatter", "slice", "keep", "pad"]
_SILENT = ("slice", "keep", "pad")


@dataclass(frozen=True)
class Step:
    """One step of all ranks along `dims`; `axis` is gathered, sliced, scattered or padded."""

    verb: Verb
    dims: tuple[str, ...]
    before: Sharding
    after: Sharding
    axis: int | None = None

    @property
    def sends(self) -> bool:
        """True if the step communicates."""
        return self.verb not in _SILENT

    @property
    def copies(self) -> bool:
        """True if the result is in memory of its own on every rank."""
        return self.verb not in ("slice", "keep")

    @cached_property
    def averaging(self) -> tuple[int, float]:
        """The divisors of the partials and of their sum, whose product is the number of ranks that are averaged over.

        The first is a power of two. It keeps the sum from overflowing and costs no bit, so that the average of equal
        whole numbers is that number.
        """
        ranks = math.prod(self.before.sizes[dim] for dim in self.dims if self.before.by_dim[dim] == Partial("avg"))
        power = 1 << (ranks - 1).bit_length()
        return power, ranks / power

    @cached_property
    def placement_before(self) -> str:
        """The placement of `dims` before the step, as text."""
        return _common(self.before, self.dims)

    @cached_property
    def placement_after(self) -> str:
        """The placement of `dims` afterwards, as text."""
        return _common(self.after, self.dims)


def _common(sharding: Sharding, dims: tuple[str, ...]) -> str:
    return ", ".join(dict.fromkeys(repr(sharding.by_dim[dim]) for dim in dims))


@lru_cache(maxsize=4096)
def steps(source: Sharding, destination: Sharding) -> tuple[Step, ...]:
    """Return the steps that bring an array from `source` to `destination`; none if they are equal.

    Steps that shrink the array come first, steps that make it grow last. Raises `ValueError` for shardings of different
    shapes or meshes.
    """
    if (source.dims, source.shape) != (destination.dims, destination.shape):
        raise ValueError(
            f"cannot redistribute shape {source.shape} over {dict(source.dims)} to {destination.shape} over "
            f"{dict(destination.dims)}"
        )
    taken: list[Step] = []
    current = source
    while current != destination:
        step = _next(current, destination)
        taken.append(step)
        current = step.after
    return tuple(taken)


def _next(current: Sharding, destination: Sharding) -> Step:
    axes = range(len(current.shape))
    deeper: tuple[tuple[Verb, type[Replicate] | type[Partial]], ...]
    deeper = ("slice", Replicate), ("reduce_scatter", Partial)
    for verb, wanted in deeper:
        for axis in axes:
            if step := _deepen(current, destination, axis, verb, wanted):
                return step
    if dims := tuple(dim for dim in current.partial_dims if current.by_dim[dim] != destination.by_dim[dim]):
        return Step("all_reduce", dims, current, current.replacing(dict.fromkeys(dims, Replicate())))
    for axis in axes:
        if step := _pad(current, destination, axis) or _exchange(current, destination, axis):
            return step
    for axis in axes:
        if step := _gather(current, destination, axis):
            return step
    dims = tuple(dim for dim in destination.partial_dims if current.by_dim[dim] != destination.by_dim[dim])
    return Step("keep", dims, current, current.replacing({dim: destination.by_dim[dim] for dim in dims}))


def _depth(current: Sharding, destination: Sharding, axis: int) -> int:
    """Count the outermost dims of `axis` that split it in `current` as they do in `destination`."""
    mine, wanted = current.dims_of(axis), destination.dims_of(axis)
    for depth in range(min(len(mine), len(wanted)), 0, -1):
        if mine[:depth] == wanted[:depth] and _outer(current, axis, depth) == _outer(destination, axis, depth):
            return depth
    return 0


def _outer(sharding: Sharding, axis: int, depth: int) -> Splits | None:
    """Return the split points of `axis` if only its `depth` outermost dims split it."""
    splits = sharding.splits[axis]
    if splits is None or depth == 0:
        return None
    return outer_splits(splits, sharding.parts(sharding.dims_of(axis)[depth:]))


def _deepen(
    current: Sharding, destination: Sharding, axis: int, verb: Verb, wanted: type[Replicate] | type[Partial]
) -> Step | None:
    """Split `axis` over the next `wanted` dims of `destination`, if all dims before them are right."""
    have = current.dims_of(axis)
    depth = _depth(current, destination, axis)
    if depth < len(have):
        return None
    dims: list[str] = []
    for dim in destination.dims_of(axis)[depth:]:
        if not isinstance(current.by_dim[dim], wanted):
            break
        dims.append(dim)
    if not dims:
        return None
    splits = _outer(destination, axis, depth + len(dims))
    after = current.replacing(dict.fromkeys(dims, Shard(axis)), {axis: splits})
    return Step(verb, tuple(dims), current, after, axis)


def _pad(current: Sharding, destination: Sharding, axis: int) -> Step | None:
    have = current.dims_of(axis)
    if not have or destination.by_dim[have[-1]] != Partial("sum"):
        return None
    after = current.replacing({have[-1]: Partial("sum")}, {axis: _outer(current, axis, len(have) - 1)})
    return Step("pad", have[-1:], current, after, axis)


def _exchange(current: Sharding, destination: Sharding, axis: int) -> Step | None:
    """Return the all_to_all that changes the split points of `axis`, or shards another axis instead."""
    have, wanted = current.dims_of(axis), destination.dims_of(axis)
    if not have:
        return None
    if have == wanted[: len(have)] and _depth(current, destination, axis) < len(have):
        return Step(
            "all_to_all", have, current, current.replacing({}, {axis: _outer(destination, axis, len(have))}), axis
        )
    last = have[-1]
    there = destination.by_dim[last]
    if not isinstance(there, Shard) or there.axis == axis:
        return None
    depth = _depth(current, destination, there.axis)
    if depth < len(current.dims_of(there.axis)) or destination.dims_of(there.axis)[depth] != last:
        return None
    splits = {axis: _outer(current, axis, len(have) - 1), there.axis: _outer(destination, there.axis, depth + 1)}
    return Step("all_to_all", (last,), current, current.replacing({last: there}, splits), axis)


def _gather(current: Sharding, destination: Sharding, axis: int) -> Step | None:
    depth = _depth(current, destination, axis)
    dims = current.dims_of(axis)[depth:]
    if not dims:
        return None
    after = current.replacing(dict.fromkeys(dims, Replicate()), {axis: _outer(current, axis, depth)})
    return Step("all_gather", dims, current, after, axis)


def wire_bytes(step: Step, itemsize: int) -> float:
    """Return the least bytes that a rank sends, on average, by the well-known algorithms; `itemsize` in bytes.

    For P ranks that hold n bytes together: all_reduce 2 (P-1)/P n, all_gather and reduce_scatter (P-1)/P n, all_to_all
    (P-1)/P**2 n.
    """
    if not step.sends:
        return 0.0
    parts = step.before.parts(step.dims)
    sharded = step.after if step.verb == "all_gather" else step.before
    blocks = math.prod(size for dim, size in sharded.dims if isinstance(sharded.by_dim[dim], Shard))
    together = math.prod(sharded.shape) * itemsize / blocks
    if step.verb == "all_to_all":
        return together * (parts - 1) / parts  # `together` is n / P bytes here
    return together * (parts - 1) / parts * (2 if step.verb == "all_reduce" else 1)

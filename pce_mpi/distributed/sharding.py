"""The sharding of a global array: a placement for each dim of a mesh, and the split points of each sharded axis.

A `Sharding` is a frozen value and knows nothing of arrays or communicators. Two dims that shard the same axis split it
in mesh order, nested: 10 over 2 x 2 gives 3, 2, 3, 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product
import math
from types import MappingProxyType
from weakref import WeakValueDictionary

from pce_mpi.distributed.placements import Partial, Placement, Replicate, Shard, shard_range

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
        dims: Dims,
        shape: tuple[int, ...],
        placements: Mapping[str, Placement],
        splits: Mapping[int, Splits] | None = None,
    ) -> Sharding:
        """Make a sharding; dims that are not named are Replicate, axes without `splits` get balanced blocks.

        Raises `TypeError` for a value that is no placement, and `ValueError` for a dim or an axis that does not exist
        and for reduce operators that do not mix.
        """
        for name, placement in placements.items():
            if not isinstance(placement, Placement):
                raise TypeError(f"{name} must be Shard(axis), Replicate() or Partial(operator), got {placement!r}")
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
    def by_dim(self) -> Mapping[str, Placement]:
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

    @cached_property
    def summed_dims(self) -> tuple[str, ...]:
        """The dims over which the array is Partial("sum")."""
        return tuple(dim for dim, placement in self.by_dim.items() if placement == Partial("sum"))

    @cached_property
    def partial_dims(self) -> tuple[str, ...]:
        """The dims over which the array is Partial."""
        return tuple(dim for dim, placement in self.by_dim.items() if isinstance(placement, Partial))

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

    def with_placements(self, placements: Mapping[str, Placement]) -> Sharding:
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

    def replacing(
        self, placements: Mapping[str, Placement], splits: Mapping[int, Splits | None] | None = None
    ) -> Sharding:
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

"""Pictures of a mesh, and of the blocks of a global array that its ranks hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from pce_mpi.distributed.placements import Partial
from pce_mpi.distributed.sharding import Dims, Sharding

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# In inches: the cell of a rank, the largest picture, and an array; a letter in a cell, and a line of them.
_CELL, _LARGEST, _ARRAY = 0.7, 6.0, (4.6, 3.0)
_LETTER, _LINE = 0.063, 0.155
# In inches: what the numbers and names around a mesh, and around an array with a title of one line, take.
_AROUND_MESH, _AROUND_ARRAY = (1.3, 0.8), (0.6, 1.0)
# If a block has more ranks than these, the first two and the last one are named.
_NAMED = 8

Ranges = tuple[tuple[int, int], ...]


class Block(NamedTuple):
    """A block of the axes that are shown: its range along each of them, and the ranks that hold it.

    `parts` has an entry for each part of the axes that are not shown, and that has a group of ranks for each replica:
    those whose partials give the part together.
    """

    ranges: Ranges
    parts: list[list[list[int]]]


def all_coordinates(dims: Dims) -> Iterator[dict[str, int]]:
    """Yield the coordinates of each rank of a mesh, in order."""
    names = [name for name, _ in dims]
    for index in product(*(range(size) for _, size in dims)):
        yield dict(zip(names, index, strict=True))


def shown_axes(sharding: Sharding) -> tuple[int, ...]:
    """Return the two axes of a picture, or fewer: sharded ones first, then the last ones."""
    axes = range(len(sharding.shape))
    by_interest = sorted(axes, key=lambda axis: (not sharding.dims_of(axis), axis if sharding.dims_of(axis) else -axis))
    return tuple(sorted(by_interest[:2]))


def blocks(sharding: Sharding) -> list[Block]:
    """Return the blocks of the axes that are shown, in the order of their lowest rank; empty ones too."""
    axes = shown_axes(sharding)
    found: dict[Ranges, dict[Ranges, dict[tuple[int, ...], list[int]]]] = {}
    for rank, at in enumerate(all_coordinates(sharding.dims)):
        part = tuple(sharding.block(axis, at) for axis in range(len(sharding.shape)))
        replica = tuple(where for dim, where in at.items() if dim not in sharding.partial_dims)
        parts = found.setdefault(tuple(part[axis] for axis in axes), {})
        parts.setdefault(part, {}).setdefault(replica, []).append(rank)
    return [Block(ranges, [list(replicas.values()) for replicas in parts.values()]) for ranges, parts in found.items()]


def mesh_size(dims: Dims) -> tuple[float, float]:
    """Return the width and height of the picture of a mesh, in inches."""
    rows, columns = _grid(dims)
    width, height = _AROUND_MESH
    return min(_LARGEST, width + _CELL * columns), min(_LARGEST, height + _CELL * rows)


def array_size(dims: Dims) -> tuple[float, float]:
    """Return the width and height of the picture of an array beside its mesh, in inches."""
    width, height = mesh_size(dims)
    return width + _ARRAY[0], max(height, _ARRAY[1])


def draw_mesh(figure: Figure, dims: Dims) -> None:
    """Draw the ranks as a grid: the last dim to the right, the others downwards."""
    _draw_ranks(figure.subplots(), dims, colors(math.prod(size for _, size in dims)))


def draw_array(figure: Figure, sharding: Sharding, title: str) -> None:
    """Draw the ranks, and the global array in which the block of each rank has the colour of that rank."""
    found = blocks(sharding)
    palette = colors(len(found))
    by_rank = {
        rank: color
        for block, color in zip(found, palette, strict=True)
        for replicas in block.parts
        for ranks in replicas
        for rank in ranks
    }
    left, right = figure.subplots(1, 2, width_ratios=(mesh_size(sharding.dims)[0], _ARRAY[0]))
    _draw_ranks(left, sharding.dims, [by_rank[rank] for rank in sorted(by_rank)])
    lines = [title, *_not_drawn(sharding)]
    room = _ARRAY[0] - _AROUND_ARRAY[0], array_size(sharding.dims)[1] - _AROUND_ARRAY[1] - 0.2 * (len(lines) - 1)
    _draw_blocks(right, sharding, found, palette, room)
    right.set_title("\n".join(lines), fontsize="medium")


def colors(count: int) -> list[Any]:
    """Return light colours, on which black text can be read."""
    from matplotlib.colors import hsv_to_rgb

    # The golden ratio: neighbours differ, however many there are.
    return [hsv_to_rgb(((0.45 + 0.618034 * index) % 1, 0.4, 0.95)) for index in range(count)]


def _grid(dims: Dims) -> tuple[int, int]:
    return math.prod(size for _, size in dims[:-1]), dims[-1][1]


def _draw_ranks(axes: Axes, dims: Dims, palette: Sequence[Any]) -> None:
    rows, columns = _grid(dims)
    unit = min(
        (size - around) / count
        for size, around, count in zip(mesh_size(dims), _AROUND_MESH, (columns, rows), strict=True)
    )
    form = next((form for form in ("rank {}", "{}") if _LETTER * len(form.format(len(palette) - 1)) < unit), "")
    for rank, color in enumerate(palette):
        row, column = divmod(rank, columns)
        _draw_cell(axes, (column, column + 1), (row, row + 1), color, form.format(rank), (unit, unit))
    axes.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal", xlabel=dims[-1][0])
    outer = list(all_coordinates(dims[:-1]))
    _label_cells(axes.xaxis, [str(column) for column in range(columns)])
    _label_cells(axes.yaxis, [", ".join(map(str, at.values())) for at in outer])
    axes.set_ylabel(", ".join(name for name, _ in dims[:-1]))


def _draw_blocks(
    axes: Axes, sharding: Sharding, found: Sequence[Block], palette: Sequence[Any], room: tuple[float, float]
) -> None:
    shown = shown_axes(sharding)
    height, width = (1, 1, *(sharding.shape[axis] for axis in shown))[-2:]
    units = room[0] / max(width, 1), room[1] / max(height, 1)
    for block, color in zip(found, palette, strict=True):
        # One axis runs to the right; an array without axes is one cell.
        vertical, horizontal = ((0, 1), (0, 1), *block.ranges)[-2:]
        if vertical[0] < vertical[1] and horizontal[0] < horizontal[1]:
            hatch = "//" if sharding.partial_dims else None
            _draw_cell(axes, horizontal, vertical, color, _text_of(block, sharding), units, hatch=hatch)
    axes.set(xlim=(0, max(width, 1)), ylim=(max(height, 1), 0), xticks=[], yticks=[])
    for axis, where in zip(reversed(shown), (axes.xaxis, axes.yaxis), strict=False):
        ends = sorted({end for block in found for end in block.ranges[shown.index(axis)]})
        where.set_ticks(ends[:: -(-len(ends) // 17)])
        split_by = ", ".join(sharding.dims_of(axis))
        where.set_label_text(f"axis {axis}" + (f", split by {split_by}" if split_by else ""))


def _text_of(block: Block, sharding: Sharding) -> str:
    """Return the ranks that hold a block, such as "ranks 0, 2" for replicas and "sum of ranks 0, 1" for partials."""
    # An average of sums has the names of both.
    operators = sorted({placement.operator for placement in sharding.placements if isinstance(placement, Partial)})
    lines = []
    for replicas in block.parts:
        groups = replicas if operators else [[rank for (rank,) in replicas]]
        lines.append("\n= ".join(" of ".join([*operators, _named(ranks)]) for ranks in groups))
    return "\n".join(lines)


def _named(ranks: Sequence[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    if len(numbers) > _NAMED:
        numbers[2:-1] = ["..."]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(numbers)}"


def _not_drawn(sharding: Sharding) -> Iterator[str]:
    """Yield lines about what the blocks do not show: over which dims the array is Partial, and further axes."""
    for placement in dict.fromkeys(sharding.by_dim[dim] for dim in sharding.partial_dims):
        over = ", ".join(dim for dim in sharding.partial_dims if sharding.by_dim[dim] == placement)
        yield f"hatched: {placement!r} over {over}"
    for axis in sorted({*range(len(sharding.shape))} - {*shown_axes(sharding)}):
        split_by = ", ".join(sharding.dims_of(axis))
        how = f"split by {split_by}, a line for each part" if split_by else "whole in each block"
        yield f"not drawn: axis {axis}, {how}"


def _draw_cell(
    axes: Axes,
    x: tuple[float, float],
    y: tuple[float, float],
    color: Any,
    text: str,
    units: tuple[float, float],
    hatch: str | None = None,
) -> None:
    """Draw a cell with `text`, upright or turned, or without if it has no room; `units` are in inches."""
    from matplotlib.patches import Rectangle

    size = x[1] - x[0], y[1] - y[0]
    axes.add_patch(Rectangle((x[0], y[0]), *size, facecolor=color, edgecolor="white", hatch=hatch))
    width, height = (length * unit for length, unit in zip(size, units, strict=True))
    lines = text.split("\n")
    for angle, along, across in ((0, width, height), (90, height, width)):
        if _LETTER * max(map(len, lines)) < along and _LINE * len(lines) < across:
            middle = sum(x) / 2, sum(y) / 2
            # The colours of the cells are light, on dark pages too.
            axes.text(*middle, text, rotation=angle, ha="center", va="center", fontsize="small", color="#000000")
            break


def _label_cells(axis: Any, texts: Sequence[str]) -> None:
    every = -(-len(texts) // 16)
    axis.set_ticks([index + 0.5 for index in range(0, len(texts), every)], list(texts[::every]))
    axis.set_tick_params(length=0)

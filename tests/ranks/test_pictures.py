"""The pictures of meshes, arrays and traces."""

import sys
from xml.etree import ElementTree

import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi.distributed.pictures import array_size, blocks, draw_array
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.pictures import new_figure
from ranks.grids import mesh_of, squarest

DIMS = (("data", 2), ("classes", 2))


def texts(figure):
    """The texts in the cells of the last axes of a figure."""
    return [text.get_text() for text in figure.axes[-1].texts]


def drawn(dims, shape, placements, splits=None):
    figure = new_figure(*array_size(dims))
    draw_array(figure, Sharding.of(dims, shape, placements, splits), "title")
    return figure


@pytest.mark.parametrize(
    ("shape", "placements", "words"),
    [
        ((6, 8), {"data": pce.Shard(0), "classes": pce.Shard(1)}, ["rank 0", "rank 1", "rank 2", "rank 3"]),
        ((6, 8), {"data": pce.Shard(0)}, ["ranks 0, 1", "ranks 2, 3"]),
        ((6, 8), {"classes": pce.Shard(1)}, ["ranks 0, 2", "ranks 1, 3"]),
        ((6, 8), {"data": pce.Partial("sum")}, ["sum(0, 2)\nsum(1, 3)"]),
        ((6, 8), {"data": pce.Shard(0), "classes": pce.Partial("max")}, ["max(0, 1)", "max(2, 3)"]),
        ((), {}, ["ranks 0, 1, 2, 3"]),
        ((1,), {"data": pce.Shard(0)}, ["ranks 0, 1"]),  # the other block is empty
        ((0, 3), {"data": pce.Shard(0)}, []),
    ],
)
def test_picture_names_ranks_of_each_block(shape, placements, words):
    assert texts(drawn(DIMS, shape, placements)) == words


def test_cells_cover_uneven_blocks():
    figure = drawn(DIMS, (5, 9), {"data": pce.Shard(0), "classes": pce.Shard(1)}, {1: (0, 2, 9)})
    assert [cell.get_bbox().bounds for cell in figure.axes[-1].patches] == [
        (0, 0, 2, 3),
        (2, 0, 7, 3),
        (0, 3, 2, 2),
        (2, 3, 7, 2),
    ]


def test_rank_has_color_of_its_block():
    figure = drawn(DIMS, (6, 8), {"classes": pce.Shard(1)})
    of_ranks, of_blocks = ([cell.get_facecolor() for cell in axes.patches] for axes in figure.axes)
    assert of_ranks == [of_blocks[0], of_blocks[1], of_blocks[0], of_blocks[1]] and of_blocks[0] != of_blocks[1]


def test_sharded_axes_are_shown_first():
    sharding = Sharding.of(DIMS, (4, 5, 6), {"data": pce.Shard(0), "classes": pce.Shard(1)})
    assert [block.ranges for block in blocks(sharding)] == [
        ((0, 2), (0, 3)),
        ((0, 2), (3, 5)),
        ((2, 4), (0, 3)),
        ((2, 4), (3, 5)),
    ]


def svg_texts(html):
    svg = ElementTree.fromstring(html[: html.index("</svg>") + len("</svg>")])
    return ["".join(text.itertext()).strip() for text in svg.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.sizes(1, 4)  # one rank, and a grid: every rank that draws imports Matplotlib first
def test_notebook_shows_pictures(comm):
    mesh = mesh_of(comm, *squarest(comm.size))
    x = pce.distribute(np.zeros((2 * comm.size, 3)), mesh, **{next(iter(mesh.dims)): pce.Shard(0)})
    with pce.trace() as events:
        pictures = [mesh._repr_html_(), x._repr_html_()]
    with pce.trace() as sent:
        x.full()
    words = [svg_texts(picture) for picture in [*pictures, sent._repr_html_()]]
    assert not events.events
    assert f"rank {comm.size - 1}" in words[0] and "(" + f"{2 * comm.size}, 3) of float64" in words[1]
    assert any("bytes of payload" in text for text in words[2])
    assert mesh.plot().axes and x.plot().axes
    bars = [bar.get_height() for bar in sent.plot().axes[0].patches]
    assert sorted(bars) == sorted(event.bytes for event in sent.events) and max(bars) > 0
    assert "0 collectives, 0 bytes of payload" in svg_texts(events._repr_html_())


def test_plot_without_matplotlib_says_what_to_install(comm, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    mesh = mesh_of(comm, comm.size)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        mesh.plot()
    assert mesh._repr_html_() is None

"""The pictures of meshes, arrays and traces."""

from itertools import combinations
import sys
from xml.etree import ElementTree

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
import numpy as np
import pytest

import pce_mpi as pce
from pce_mpi.comm.tracing import Event, Purpose
from pce_mpi.distributed.plotting import array_size, blocks, draw_array
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.svg import new_figure
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
        ((6, 8), {"data": pce.Partial("sum")}, ["sum of ranks 0, 2\n= sum of ranks 1, 3"]),
        ((6, 8), {"data": pce.Shard(0), "classes": pce.Partial("max")}, ["max of ranks 0, 1", "max of ranks 2, 3"]),
        ((6,), {"data": pce.Partial("sum"), "classes": pce.Partial("avg")}, ["avg of sum of ranks 0, 1, 2, 3"]),
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


SEVERAL = (("data", 2), ("model", 2), ("seq", 3))


@pytest.mark.parametrize(
    ("dims", "shape", "placements", "lines"),
    [
        (DIMS, (6, 8), {"data": pce.Shard(0)}, []),
        (DIMS, (2, 4, 6), {"data": pce.Shard(0)}, ["not drawn: axis 1, whole in each block"]),
        (DIMS, (2, 4, 6), {"data": pce.Shard(1)}, ["not drawn: axis 0, whole in each block"]),
        (
            DIMS,
            (2, 3, 4, 6),
            {"data": pce.Shard(0), "classes": pce.Partial("sum")},
            [
                "hatched: Partial('sum') over classes",
                "not drawn: axis 1, whole in each block",
                "not drawn: axis 2, whole in each block",
            ],
        ),
        (
            SEVERAL,
            (6,),
            {"data": pce.Partial("sum"), "model": pce.Partial("avg"), "seq": pce.Partial("sum")},
            ["hatched: Partial('sum') over data, seq", "hatched: Partial('avg') over model"],
        ),
        (
            SEVERAL,
            (2, 4, 6),
            {"data": pce.Shard(0), "model": pce.Shard(1), "seq": pce.Shard(2)},
            ["not drawn: axis 2, split by seq, a line for each part"],
        ),
    ],
)
def test_title_says_what_is_not_drawn(dims, shape, placements, lines):
    assert drawn(dims, shape, placements).axes[-1].get_title() == "\n".join(["title", *lines])


@pytest.mark.parametrize(
    ("seq", "words"),
    [(pce.Shard(2), "rank 0\nrank 1\nrank 2"), (pce.Partial("sum"), "sum of ranks 0, 1, 2")],
)
def test_block_has_line_for_each_hidden_part(seq, words):
    placements = {"data": pce.Shard(0), "model": pce.Shard(1), "seq": seq}
    assert texts(drawn(SEVERAL, (2, 4, 6), placements))[0] == words


def test_block_of_many_ranks_names_first_and_last():
    dims = (("data", 16),)
    assert texts(drawn(dims, (6, 8), {})) == ["ranks 0, 1, ..., 15"]
    assert texts(drawn(dims, (6, 8), {"data": pce.Partial("sum")})) == ["sum of ranks 0, 1, ..., 15"]


def shown(figure):
    """The figure, laid out as on a page."""
    FigureCanvasAgg(figure).draw()
    return figure


@pytest.mark.parametrize(
    ("sizes", "placements", "count"),
    [
        ((2, 2), {"data": pce.Partial("sum")}, 1),
        ((1, 4), {"model": pce.Shard(1), "data": pce.Partial("sum")}, 4),
        ((2, 8), {"model": pce.Shard(1), "data": pce.Partial("sum")}, 8),
        ((8, 2), {"data": pce.Shard(1), "model": pce.Partial("avg")}, 8),
        ((8, 2), {"data": pce.Shard(0), "model": pce.Partial("sum")}, 8),
        ((8, 8), {"data": pce.Shard(0), "model": pce.Shard(1)}, 64),
        ((16, 16), {"data": pce.Shard(0), "model": pce.Shard(1)}, 0),
        ((16, 2), {"data": pce.Partial("sum")}, 1),
        ((2, 32), {}, 1),
    ],
)
def test_texts_stay_in_their_cells(sizes, placements, count):
    figure = shown(drawn(tuple(zip(("data", "model"), sizes, strict=True)), (16, 16), placements))
    for axes in figure.axes:
        cells = [cell.get_window_extent() for cell in axes.patches]
        for text in filter(Text.get_text, axes.texts):
            box = text.get_window_extent()
            inside = [cell for cell in cells if cell.containsx(box.x0) and cell.containsx(box.x1)]
            assert [cell for cell in inside if cell.containsy(box.y0) and cell.containsy(box.y1)], text
    assert len(figure.axes[-1].texts) == count


# ------------------------------------------------------------------------------------------------------------- traces


def event(operation, size, *, phase="forward", purpose=Purpose.PAYLOAD, collective="all_reduce"):
    return Event(phase, operation, collective, purpose, "data", 2, size, "a reason")


def agreement(operation, phase="forward"):
    return event(operation, 56, phase=phase, purpose=Purpose.AGREEMENT, collective="all_gather")


def trace_of(*events):
    trace = pce.Trace()
    trace.events.extend(events)
    return trace


def step_of(layers):
    """The events of a training step: few in its last phase."""
    forward = [each for layer in range(layers) for each in (agreement("layer_norm"), event("matmul", 8 << layer))]
    backward = [event(operation, 4096, phase="backward") for operation in ("matmul", "gelu", "layer_norm") * layers]
    return trace_of(*forward, *backward, agreement("AdamW", "step"), event("AdamW", 10**6, phase="step"))


TRACES = {
    "empty": trace_of(),
    "one": trace_of(event("sum", 8)),
    "one without bytes": trace_of(event("sum", 0)),
    "loss": trace_of(agreement("cross_entropy"), event("cross_entropy", 640)),
    "step": step_of(3),
    "many": step_of(40),
    "long names": trace_of(*(event(f"{'long_' * 6}{index}", 10**index) for index in range(10))),
}


def bars_of(figure):
    return [bar.get_height() for bars in figure.axes[0].containers for bar in bars]


def names_of(figure):
    return [label.get_text() for label in figure.axes[0].get_xticklabels()]


def test_title_counts_what_select_returns():
    trace = step_of(3)
    found = trace.plot().get_suptitle()
    assert found == f"{trace.count()} collectives, {trace.bytes():,} bytes of payload; 4 agreements of ranks"
    assert trace.count(purpose=None) == trace.count() + 4
    assert trace_of(event("sum", 8)).plot().get_suptitle() == "1 collective, 8 bytes of payload"


def test_bars_are_named_after_operations():
    assert names_of(step_of(1).plot()) == ["layer_norm", "matmul", "matmul", "gelu", "layer_norm", "AdamW"]


def test_largest_bars_are_named_first():
    trace = trace_of(*(event(f"operation {index}", index) for index in range(200)))
    found = names_of(trace.plot())
    assert found[-1] == "operation 199" and 20 <= len(found) <= 41


def test_legend_names_collectives_and_phases_once():
    [legend] = trace_of(*step_of(2).events * 2).plot().legends
    assert sorted(text.get_text() for text in legend.get_texts()) == [
        "agreement",
        "all_reduce",
        "backward",
        "forward",
        "step",
    ]


@pytest.mark.parametrize("name", TRACES)
def test_texts_of_trace_do_not_overlap(name):
    figure = shown(TRACES[name].plot())
    [axes], page, (low, high) = figure.axes, figure.bbox, figure.axes[0].get_ylim()
    labels = [label for label in axes.get_yticklabels() if low <= label.get_position()[1] <= high]
    labels += [*axes.get_xticklabels(), axes.xaxis.label, axes.yaxis.label, figure._suptitle]
    labels += [text for legend in figure.legends for text in legend.get_texts()]
    boxes = {label: label.get_window_extent() for label in labels}
    assert [pair for pair in combinations(labels, 2) if boxes[pair[0]].overlaps(boxes[pair[1]])] == []
    assert [label for label, box in boxes.items() if min(box.p0) < 0 or box.x1 > page.x1 or box.y1 > page.y1] == []
    assert axes.bbox.height > page.height / 3


@pytest.mark.parametrize("name", TRACES)
def test_highest_bar_ends_below_the_frame(name):
    figure = TRACES[name].plot()
    heights, (low, high) = bars_of(figure), figure.axes[0].get_ylim()
    assert sorted(heights) == sorted(event.bytes for event in TRACES[name].events)
    assert low == 0 and max(heights, default=0) * 2 < high


def svg_texts(html):
    svg = ElementTree.fromstring(html[: html.index("</svg>") + len("</svg>")])
    return ["".join(text.itertext()).strip() for text in svg.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.ranks(1, 4)  # one rank, and a grid: every rank that draws imports Matplotlib first
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
    bars = bars_of(sent.plot())
    assert sorted(bars) == sorted(event.bytes for event in sent.events) and max(bars) > 0
    assert "0 collectives, 0 bytes of payload" in svg_texts(events._repr_html_())


def test_plot_without_matplotlib_says_what_to_install(comm, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    mesh = mesh_of(comm, comm.size)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        mesh.plot()
    assert mesh._repr_html_() is None

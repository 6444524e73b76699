"""A report as one page of HTML, which contains its styles and pictures and loads nothing."""

from importlib import resources
import inspect
from itertools import pairwise
from typing import Any

import jinja2
import markupsafe
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
import numpy as np

from pce_mpi.conformance import judging
from pce_mpi.conformance.judging.outcomes import ErrorMap, Report
from pce_mpi.conformance.reports import summary
from pce_mpi.svg import INK, svg_element
from pce_mpi.text import cell_text, numeric


def render(report: Report) -> str:
    """Render the page; importing this file needs jinja2 and matplotlib."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"cell": cell_text, "numeric": numeric, "markup": markupsafe.Markup}
    template = resources.files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    measure = inspect.cleandoc(judging.__doc__ or "")
    return environment.from_string(template).render(report=report, measure=measure, summary=summary, drawn=drawn)


# Errors from this power of ten of what is allowed up to the largest one differ in colour.
_LEAST = -2.0
# From what is allowed on, where the gradient is too large and where it is too small: the eyes of all tell them apart.
_LARGE, _SMALL = ("#ffcf33", "#ef6c1a", "#b3122b"), ("#a9dcff", "#1f7fd1", "#1b2a9c")
_NOT_FINITE = "#d633c8"


def drawn(picture: ErrorMap, name: str, column: str = "class") -> str:
    """Draw an SVG element in the colours of the text around it; its ids begin with `name`, a word, unique in a page."""
    errors = np.ma.masked_invalid(np.asarray(picture.errors, np.float64))
    rows, most = errors.shape[0], float(np.log10(np.abs(errors.filled(0.0)).max(initial=10.0)))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        image = _show_errors(axes, errors, picture, most)
        axes.set(xlabel=column, ylabel="row")
        _show_shards(axes, errors.shape[1], picture)
        _show_targets(axes, errors.shape, picture)
        _show_scale(figure, axes, image, most)
        figure.suptitle("Error of the gradient, in units of what is allowed", fontsize=11)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside lower left", ncols=2, frameon=False)

    return svg_element(draw, 10, 2.1 + min(max(0.18 * rows, 0.6), 4.5), name)


def _show_errors(axes: Any, errors: Any, picture: ErrorMap, most: float) -> Any:
    limit = _LEAST / (_LEAST - most)  # the place of the largest error that passes
    places = (limit, (1 + limit) / 2, 1.0)
    # Fully transparent without an error, on dark and light pages; grey up to what is allowed.
    allowed = [((1 - limit) / 2, "#8a94a3b0"), (0.5, "#8a94a300"), ((1 + limit) / 2, "#8a94a3b0")]
    small = [((1 - place) / 2, color) for place, color in zip(places, _SMALL, strict=True)]
    stops = [*small[::-1], *allowed, *(((1 + place) / 2, color) for place, color in zip(places, _LARGE, strict=True))]
    colors = LinearSegmentedColormap.from_list("error", stops, N=1024).with_extremes(bad=_NOT_FINITE)
    image = axes.imshow(
        _place(errors, most),
        cmap=colors,
        vmin=-1.0,
        vmax=1.0,
        # The number of a class or a row is at its middle.
        extent=(-0.5, picture.classes - 0.5, picture.rows - 0.5, -0.5),
        aspect="auto",
        interpolation="none",
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=16))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=8))
    return image


def _place(errors: Any, most: float) -> Any:
    """Return the place of errors in the scale of colours, from -1 to 1."""
    size = np.ma.clip(np.ma.abs(errors), 10.0**_LEAST, 10.0**most)
    return np.ma.masked_array(np.sign(errors)) * (np.ma.log10(size) - _LEAST) / (most - _LEAST)


def _show_shards(axes: Any, columns: int, picture: ErrorMap) -> None:
    splits = [split * picture.classes / max(columns, 1) - 0.5 for split in picture.splits]
    for border, place in enumerate(splits[1:-1]):
        label = "_" * (border > 0) + "border of two shards"  # in the legend once
        axes.axvline(place, color=INK, linewidth=1.2, linestyle=(0, (4, 2)), label=label)
    top = axes.secondary_xaxis("top")
    filled = {(a + b) / 2: f"rank {rank}" for rank, (a, b) in enumerate(pairwise(splits)) if a < b}
    top.set_xticks([*filled], [*filled.values()])
    top.tick_params(length=0)


def _show_targets(axes: Any, blocks: tuple[int, ...], picture: ErrorMap) -> None:
    if not picture.targets:
        return
    row, column = np.asarray(picture.targets, np.float64).T
    axes.scatter(
        (column + 0.5) * picture.classes / blocks[1] - 0.5,
        (row + 0.5) * picture.rows / blocks[0] - 0.5,
        s=26,
        facecolors="none",
        edgecolors=INK,
        linewidths=1.1,
        label="target of the row",
    )


def _show_scale(figure: Any, axes: Any, image: Any, most: float) -> None:
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03)
    powers = [1.0, *[10.0 ** round(most / 2)] * (most >= 2), 10.0**most]
    ticks = [*(-tick for tick in reversed(powers)), 0.0, *powers]
    bar.set_ticks(_place(np.ma.masked_array(ticks), most), labels=[f"{tick:.2g}" for tick in ticks])
    bar.minorticks_off()
    bar.set_label("error / allowed")

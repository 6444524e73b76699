"""Figures of matplotlib as elements of an HTML page.

Importing this file loads nothing: matplotlib is an extra.
"""

from __future__ import annotations

from collections.abc import Callable
import io
import re
from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Lines and text of this colour take the colour of the text around the element, as a page may be dark or light.
INK = "#010203"

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, `width` by `height` inches; raise an `ImportError` that says what to install."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")


def svg_or_none(draw: Callable[[Figure], object], width: float, height: float, name: str) -> str | None:
    """Return the element for a notebook; None without matplotlib, for which a notebook shows the object's text.

    The prefix of its ids is `name` and a checksum of the picture, as a page can have many pictures.
    """
    try:
        picture = svg_element(draw, width, height, name)
    except ImportError:
        return None
    return picture.replace(f"{name}-", f"{name}-{crc32(picture.encode()):x}-")


def svg_element(draw: Callable[[Figure], object], width: float, height: float, name: str) -> str:
    """Let `draw` fill a figure and return it as an SVG element, at most `width` inches wide.

    `name`, one word, is the prefix of the ids in it: different pictures of a page must have different names.
    """
    import matplotlib

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = new_figure(width, height)
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg [^>]*?)width="[^"]*"', rf'\1style="max-width: {width:g}in"', svg, count=1)
    svg = re.sub(r'(<svg [^>]*?)height="[^"]*"', r"\1", svg, count=1)
    for start in ('id="', 'href="#', "url(#"):
        svg = svg.replace(start, f"{start}{name}-")
    return svg.replace(INK, "currentColor")

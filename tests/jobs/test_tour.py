"""The notebook runs, and what it shows is what stands in it."""

import io
import json
import re

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
import pytest

from jobs.launch import ROOT, job_environment
from pce_mpi.distributed.placements import Shard
from pce_mpi.distributed.plotting import array_size, draw_array
from pce_mpi.distributed.sharding import Sharding
from pce_mpi.svg import new_figure

TOUR = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))
CELLS = [cell for cell in TOUR["cells"] if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def shell():
    """IPython, in which the first cell has run: it defines how the others run on ranks."""
    shell = InteractiveShell.instance()
    shell.run_cell("".join(CELLS[0]["source"])).raise_error()
    yield shell
    InteractiveShell.clear_instance()


@pytest.mark.parametrize("cell", CELLS[1:], ids=lambda cell: cell["id"])
def test_cell_shows_what_stands_below_it(shell, monkeypatch, cell):
    for name, value in job_environment(4).items():
        monkeypatch.setenv(name, value)
    with capture_output() as shown:
        shell.run_cell("".join(cell["source"])).raise_error()
    assert shown.stdout == "".join("".join(output.get("text", "")) for output in cell["outputs"])
    pictures = [words_of(output.data["text/html"]) for output in shown.outputs]
    kept = [output["data"]["text/html"] for output in cell["outputs"] if "data" in output]
    assert pictures == [words_of("".join(page)) for page in kept]
    assert shown.stdout or pictures


def test_picture_of_readme_is_what_plot_draws():
    dims = (("data", 2), ("classes", 2))
    sharding = Sharding.of(dims, (6, 1000), {"data": Shard(0), "classes": Shard(1)})
    figure, drawn = new_figure(*array_size(dims)), io.StringIO()
    draw_array(figure, sharding, "(6, 1000) of float32")
    figure.savefig(drawn, format="svg")
    # Letters are drawn as paths, and named in comments.
    named = [re.findall("<!-- (.*?) -->", svg) for svg in (drawn.getvalue(), (ROOT / "docs/logits.svg").read_text())]
    assert named[0] == named[1] and "rank 3" in named[0]


def words_of(page):
    """The texts of a page and its pictures, in order."""
    return re.findall(r"<(?:p|text|pre)\b[^>]*>([^<]*)</", page)

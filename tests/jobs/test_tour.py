"""The notebook runs, and what it shows is what stands in it."""

import json

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
import pytest

from jobs.launch import ROOT, job_environment

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
    pictures = [output.data["text/html"].count("<svg") for output in shown.outputs]
    kept = [output["data"] for output in cell["outputs"] if "data" in output]
    assert pictures == ["".join(data["text/html"]).count("<svg") for data in kept]
    assert shown.stdout or pictures

"""The public names and their signatures are those of `public_names.txt`.

A change of that list is one that users see, and has a line in the changelog: under Added, Changed or Removed.
`python tests/jobs/public_names.py > tests/jobs/public_names.txt` writes it anew.
"""

from pathlib import Path
import subprocess
import sys

import pytest

from jobs.public_names import lines


def test_public_names_are_those_of_list():
    pytest.importorskip("numpydoc", reason="`make lint` installs numpydoc")
    listed = Path(__file__).with_name("public_names.txt").read_text(encoding="utf-8").splitlines()
    assert lines() == listed


PROGRAM = """
import sys
import pce_mpi as pce
assert "numpy" not in sys.modules
pce.load = "of the program"
assert pce.save.__name__ == "save" and pce.load == "of the program"
assert not hasattr(pce, "loss.chunks") and not hasattr(pce, "nonsense") and pce.testing.assert_ulps
assert {*pce.__all__, "__version__"} <= {*dir(pce)} and "lazy" not in dir(pce)
"""


def test_names_are_imported_when_first_used():
    assert subprocess.run([sys.executable, "-c", PROGRAM]).returncode == 0

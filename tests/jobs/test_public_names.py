"""The public names and their signatures are those of `public_names.txt`.

A change of that list is one that users see, and has a line in the changelog: under Added, Changed or Removed.
`python tests/jobs/public_names.py > tests/jobs/public_names.txt` writes it anew.
"""

from pathlib import Path

from jobs.public_names import lines


def test_public_names_are_those_of_list():
    listed = Path(__file__).with_name("public_names.txt").read_text(encoding="utf-8").splitlines()
    assert lines() == listed

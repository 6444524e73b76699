"""`make lint` counts lines of code, and fails above a limit."""

from collections import Counter
import sys

import pytest

import lines

PYTHON = '''"""A docstring
of two lines."""

import os  # counted

# A comment.
TEXT = """Not a docstring,

but three lines"""


def f(
    x,
):
    r"""One line."""
    return (
        f"{x}"  # no comment in "#"
        "#"
    )
'''
CPP = """// A comment
#include "a.h"  // counted

/* two
   lines */
int f();
"""


@pytest.fixture
def repository(tmp_path):
    for name, text in {"pce_mpi/a.py": PYTHON, "pce_mpi/kernels/b.cu": CPP, "tests/jobs/c.py": PYTHON}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def test_lines_of_code_are_counted(repository):
    totals = Counter()
    for _, name, number in lines.counted(repository):
        totals[name] += number
    code = 1 + 3 + 3 + 4
    assert totals == {
        "package, Python": code,
        "package, lines of docstrings": 3,
        "package, files of Python": 1,
        "package, C++ and CUDA": 2,
        "tests, Python": code,
        "tests, lines of docstrings": 3,
        "tests, files of Python": 1,
    }


def test_line_above_limit_fails(repository, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lines.py", str(repository)])
    monkeypatch.setattr(lines, "LIMITS", {"package, Python": 11})
    lines.main()
    monkeypatch.setattr(lines, "LIMITS", {"package, Python": 10})
    with pytest.raises(SystemExit, match=r"above the limit in tests/lines.py: package, Python$"):
        lines.main()
    assert capsys.readouterr().out.split().count("10") == 1

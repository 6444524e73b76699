"""The examples in the docstrings print what they say."""

import doctest
from importlib import import_module

import pytest

from jobs.launch import ROOT

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "pce_mpi").rglob("*.py")
    if path.name != "__main__.py" and ">>>" in path.read_text(encoding="utf-8")
)


def test_the_public_functions_have_examples():
    assert {
        "pce_mpi",
        "pce_mpi.dense",
        "pce_mpi.loss",
        "pce_mpi.distributed.placements",
        "pce_mpi.comm.tracing",
    } <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_a_module_print_what_they_say(module):
    results = doctest.testmod(import_module(module))
    assert results.attempted > 0
    assert results.failed == 0

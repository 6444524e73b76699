"""The bits of a fixed set of results, which no number of ranks, kernel or MPI may change.

`digests.json` has their digests. A change of it is a change of bits: the changelog says which, and the minor version
grows. `python tests/jobs/digests.py > tests/jobs/digests.json` writes it anew.
"""

import json
from pathlib import Path

import pytest

from jobs.launch import launch
from pce_mpi.kernels import compiled

PROGRAM = Path(__file__).with_name("digests.py")
EXPECTED = json.loads(PROGRAM.with_suffix(".json").read_text(encoding="utf-8"))


def differing(ranks, **env):
    job = launch(ranks, str(PROGRAM), env=env)
    assert job.returncode == 0, job.stderr
    found = json.loads(job.stdout)
    assert found.keys() == EXPECTED.keys()
    return [name for name in EXPECTED if found[name] != EXPECTED[name]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 9])
def test_digests_are_those_of_any_ranks(ranks):
    assert differing(ranks) == []


def test_numpy_kernel_gives_digests():
    assert differing(2, PCE_MPI_KERNEL="numpy") == []


@pytest.mark.parametrize("name", compiled.instruction_sets())
def test_every_instruction_set_gives_digests(name):
    assert differing(2, PCE_MPI_KERNEL=name) == []

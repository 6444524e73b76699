"""A process group of torch as `comm`, without MPI: bits of one process, errors on every rank, and no wait for ever."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
import json
import os
from pathlib import Path
import sys
import tempfile

import pytest

from jobs.launch import ROOT, complete, job_environment
import pce_mpi as pce
from peers.on_gloo_ranks import CLASSES, ROWS, bits, shared, sharded

PROGRAM = ROOT / "tests" / "peers" / "on_gloo_ranks.py"
SIZES = [1, 2, 3]


@cache
def on_ranks(size):
    """What each rank has said, by name; the last word counts."""
    environment = job_environment(size)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), environment["PYTHONPATH"]])
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(size) as pool:
        commands = [[sys.executable, str(PROGRAM), str(rank), str(size), folder] for rank in range(size)]
        jobs = list(pool.map(lambda command: complete(command, env=environment), commands))
    assert [job.returncode for job in jobs] == [0] * size, "\n".join(job.stderr for job in jobs)
    return [dict(map(json.loads, job.stdout.splitlines())) for job in jobs]


def everyones(size, name):
    """The one thing that all ranks say."""
    first, *others = (rank[name] for rank in on_ranks(size))
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("size", SIZES)
def test_gloo_ranks_have_bits_of_one_process(size):
    expected = {name: bits(found) for name, found in shared(None, slice(None)).items()}
    assert {name: everyones(size, name) for name in expected} | {"loss": expected["loss"]} == expected
    for name, gradient in sharded(None, slice(None)).items():
        for rank, said in enumerate(on_ranks(size)):
            mine = slice(*pce.shard_range(CLASSES, size, rank))
            assert said[name] == bits(gradient[:, mine]), (name, rank)

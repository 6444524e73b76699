"""The command that rehearses a program: its table, its JSON, and what it says about wrong arguments."""

import json
from pathlib import Path
import sys

import pytest

from jobs.launch import ROOT, launch
from pce_mpi.cli import main

PROGRAM = """
import sys
import numpy as np
import pce_mpi as pce

def program(mesh):
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    x = pce.distribute(np.ones((rows, 4)), mesh, data=pce.Shard(0))
    w = pce.distribute(np.ones((4, 2)), mesh, requires_grad=True)
    pce.sum(x @ w).backward()
    pce.SGD([w], lr=0.1).step()

def stops(mesh):
    pce.distribute(np.ones(1), mesh).item()

def looks_up(mesh):
    return {}['key']

def leaves(mesh):
    sys.exit()

def leaves_with_words(mesh):
    sys.exit("too small")

def yields(mesh):
    yield program(mesh)

async def waits(mesh):
    program(mesh)

def talks(mesh):
    raise ValueError("\\x1b]0;title" + "long " * 10_000)

class Mute(Exception):
    def __str__(self):
        raise KeyError("no")

def is_mute(mesh):
    raise Mute
"""
COMMAND = ["-m", "pce_mpi", "rehearse"]


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "own.py"
    file.write_text(PROGRAM)
    return str(file)


def test_rehearse_prints_table_and_memory(path):
    job = launch(1, *COMMAND, path, "--mesh", "data=512", "--arguments", "4096", "--link", "data=1e-5,1e9")
    lines = [line.split() for line in job.stdout.splitlines()]
    assert ["step", "SGD", "data", "all_reduce", "1", "64", "1.01e-05"] in lines
    assert ["parameters", "64"] in lines
    assert "estimated seconds" in job.stdout


def test_rehearse_prints_once_on_several_ranks(path):
    job = launch(2, *COMMAND, path, "--mesh", "data=6", "--json")
    report = json.loads(job.stdout)
    assert report["mesh"] == {"data": 6}
    step = {"phase": "step", "cause": "SGD", "over": "data", "collective": "all_reduce", "calls": 1, "bytes": 64}
    assert step in report["sent"]
    assert report["seconds"] is None


def test_rehearse_takes_step_of_large_transformer():
    sizes = "--width 4096 --layers 32 --heads 32 --length 2048 --batch 4096 --vocabulary 128000 --sequence-parallel"
    example = str(ROOT / "examples" / "transformer.py")
    job = launch(1, *COMMAND, example, "--mesh", "data=512,model=8", "--arguments", sizes, "--json")
    report = json.loads(job.stdout)
    layers = 32 * 12 * 4096**2 // 8  # of matrices, a shard
    rest = 128_000 * (4096 + 1) // 8 + (2048 + 65) * 4096
    assert report["memory"]["parameters"] == 4 * (layers + rest)
    assert report["memory"]["optimizer state"] == 2 * report["memory"]["parameters"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["missing.py", "--mesh", "data=2"], "No such file"),
        (["{}:missing", "--mesh", "data=2"], "has no function 'missing'"),
        (["{}:stops", "--mesh", "data=2"], "rehearsed=0.0"),
        (["{}:stops", "--mesh", "data=2"], "own.py:14: pce.distribute(np.ones(1), mesh).item()\nTypeError: hollow"),
        (["{}:looks_up", "--mesh", "data=2"], "own.py:17: return {}['key']\nKeyError: 'key'"),
        (["{}:leaves", "--mesh", "data=2"], "sys.exit()\nSystemExit: a program that is rehearsed has to return"),
        (["{}:leaves_with_words", "--mesh", "data=2"], "SystemExit: too small: a program that is rehearsed has to"),
        (["{}:yields", "--mesh", "data=2"], "generator, of which nothing has run"),
        (["{}:waits", "--mesh", "data=2"], "coroutine, of which nothing has run"),
        (["{}:talks", "--mesh", "data=2"], "ValueError: \N{REPLACEMENT CHARACTER}]0;titlelong long"),
        (["{}:is_mute", "--mesh", "data=2"], "Mute: no text, as its __str__ raised KeyError"),
        (["{}", "--mesh", "data=1000000000000"], "at most 4,194,304 ranks"),
        (["{}", "--mesh", "model=2"], "the mesh has no dim 'data'"),
        (["{}"], "required: --mesh"),
        (["{}", "--mesh", "=2"], "such as data=512,model=8"),
        (["{}", "--mesh", "data=2,data=2"], "such as data=512,model=8"),
        (["{}", "--mesh", "data=0"], "from 1 up"),
        (["{}", "--mesh", "data=2", "--link", "data=1"], "a number above 0"),
        (["{}", "--mesh", "data=2", "--link", "1,1"], "such as data=5e-6,1e10"),
        (["{}", "--mesh", "data=2", "--link", "model=1,1"], "there is no dim model"),
        (["{}", "--mesh", "data=2", "--link", "data=1,1", "--link", "data=1,2"], "--link is given twice for a dim"),
        (["{}", "--mesh", "data=2", "--arguments", "'"], "words as for a shell"),
    ],
)
def test_rehearse_explains_what_is_wrong(path, arguments, told, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        main(["rehearse", *(each.format(path) for each in arguments)])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert told in printed.err and not printed.out
    assert len(printed.err) < 3_000


def test_file_that_exits_is_no_rehearsal(tmp_path):
    (tmp_path / "own.py").write_text("import sys\nsys.exit(0)\n")
    job = launch(1, *COMMAND, str(tmp_path / "own.py"), "--mesh", "data=2")
    assert (job.returncode, job.stdout) == (2, "")
    assert "own.py:2: sys.exit(0)" in job.stderr and "has to return" in job.stderr


def test_rehearse_says_how_many_kinds_there_are(path):
    job = launch(1, *COMMAND, path, "--mesh", "data=3")  # 3, 3 and 2 rows
    assert (job.returncode, job.stderr) == (0, "kinds of ranks 1/1  data=2\n")


@pytest.mark.parametrize(("ranks", "mesh", "dims"), [(3, [], ["ranks"]), (2, ["--mesh", "data=2,model=1"], ["data"])])
def test_bench_measures_links_of_dims_with_several_ranks(ranks, mesh, dims):
    job = launch(ranks, "-m", "pce_mpi", "bench", "--collectives", "--repeat=1", "--json", *mesh)
    links = json.loads(job.stdout)["links"]
    assert list(links) == dims
    assert all(link["latency"] > 0 and link["bandwidth"] > 0 for link in links.values())


def test_bench_prints_links_for_rehearse(path):
    job = launch(2, "-m", "pce_mpi", "bench", "--collectives", "--repeat=1", "--mesh", "data=2")
    words = job.stdout.splitlines()[-1].partition(": ")[2].split()
    assert "estimated seconds" in launch(1, *COMMAND, path, "--mesh", "data=2", *words).stdout


def test_bench_refuses_mesh_of_other_size():
    job = launch(2, "-m", "pce_mpi", "bench", "--collectives", "--mesh", "data=3")
    assert job.returncode == 2
    assert job.stderr.count("has 3 ranks") == 1

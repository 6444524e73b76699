"""`python -m pce_mpi conformance`: runs that are interrupted, and what ranks note down as they go."""

import json
import os
import sys

import pytest

from conformance.command import conformance, processes_of, started
from jobs.launch import ROOT, complete, output_of
from pce_mpi.conformance.text import innermost
from pce_mpi.jobs.journal import Follower, Journal
from pce_mpi.jobs.mpiexec import memory_shared_by
from pce_mpi.jobs.patience import wait_until
from pce_mpi.temporary_files import new_folder

RIGHT = """
import os

import pce_mpi as pce


def candidate(logits, targets, *, class_start, num_classes, comm):
    return pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm)


candidate.stop = lambda: os._exit(9)
"""


def asleep(folder):
    """Start the command with a candidate that sleeps."""
    (folder / "sleeper.py").write_text("import time\ndef candidate(*arguments, comm, **o): time.sleep(600)\n")
    selection = ["--case", "random-logits", "--dtype", "float32"]
    run = started("-n", "2", "sleeper.py:candidate", *selection, folder=folder, text=True)
    wait_until(lambda: '"called"' in "".join(path.read_text() for path in folder.glob("*/rank-*.jsonl")))
    return run


def folders_in(folder, pattern="*"):
    return sorted(path for path in folder.glob(pattern) if path.is_dir() and path.name != "__pycache__")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent was killed")
def test_leftovers_of_killed_command_are_removed_next(tmp_path):
    run = asleep(tmp_path)
    ours = "pce_mpi-job-*"  # the MPI library may have others
    (killed,) = folders_in(tmp_path, ours)
    running, _ = new_folder(tmp_path, "pce_mpi-job-")  # of a command that still runs
    pids = [json.loads(path.read_text().splitlines()[0])["pid"] for path in killed.glob("rank-*.jsonl")]
    shared = set().union(*map(memory_shared_by, pids))
    run.kill()
    output_of(run)
    wait_until(lambda: not processes_of(tmp_path))
    left = folders_in(tmp_path, ours)
    environment = {"TMPDIR": str(tmp_path)}
    run = conformance("-n", 1, "pce", "--case", "zero-rows/mean", folder=tmp_path, **environment)
    assert run.returncode == 0, run.stderr
    assert len(pids) == 2
    assert left == sorted([killed, running])
    assert folders_in(tmp_path, ours) == [running]
    assert [each for each in shared if each.exists()] == []


def test_crash_after_last_case_is_a_warning(tmp_path):
    (tmp_path / "right.py").write_text(RIGHT)
    # Importing mpi4py now raises an ImportError.
    program = "import sys; sys.modules['mpi4py'] = None; from pce_mpi.cli import main; main(sys.argv[1:])"
    arguments = ["conformance", "-n", "2", "right.py:candidate", "--case", "random-logits", "--dtype", "float32"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = complete([sys.executable, "-c", program, *arguments], cwd=tmp_path, env=env)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 case passed" in run.stdout
    assert "warning: after the last case, rank " in run.stderr
    assert "ended with exit status 9" in run.stderr


def test_cases_are_reported_without_restart_of_candidate(tmp_path):
    (tmp_path / "it.py").write_text(
        "import os\n"
        "def candidate(logits, targets, *, class_start, num_classes, comm): os._exit(2)\n"
        "candidate.start = lambda comm: os.mkdir('started')\n"
    )
    selection = ["--case", "random-logits", "--case", "zero-rows/mean", "--dtype", "float32"]
    run = conformance("-n", 1, "it.py:candidate", *selection, "--json", "report", folder=tmp_path)
    assert run.returncode == 1
    outcomes = json.loads((tmp_path / "report").read_text())["outcomes"]
    assert [outcome["verdict"] for outcome in outcomes] == ["crashed", "not run"]
    assert "ended with exit status 2" in outcomes[0]["findings"][0]["text"]
    assert outcomes[1]["note"].startswith("not run, as the candidate did not start again: ")
    assert "FileExistsError" in outcomes[1]["note"]


def test_journal_is_read_in_complete_lines(tmp_path):
    journal, follower = Journal(tmp_path, 1), Follower(tmp_path, 2)
    journal.write("began", pid=7)
    assert list(follower.news()) == [(1, {"event": "began", "pid": 7})]
    with (tmp_path / "rank-1.jsonl").open("a") as file:
        file.write('{"event": "cal')
        file.flush()
        assert list(follower.news()) == []
        file.write('led"}\n')
    assert list(follower.news()) == [(1, {"event": "called"})]


def test_journal_yields_events_of_rank_0_first(tmp_path):
    journals = [Journal(tmp_path, rank) for rank in range(2)]
    follower = Follower(tmp_path, 2)
    journals[1].write("called")
    journals[0].write("ready")
    journals[1].write("started")
    assert [(rank, event["event"]) for rank, event in follower.news()] == [(0, "ready"), (1, "called"), (1, "started")]


def test_innermost_line_is_in_no_installed_package():
    stack = "".join(
        f'  File "{file}", line {line} in {function}\n'
        for file, line, function in [
            (json.__file__, 3, "loads"),
            ("/x/site-packages/torch/distributed.py", 5, "all_reduce"),
            ("/x/mine.py", 7, "forward"),
            ("/x/mine.py", 9, "main"),
        ]
    )
    assert innermost(stack) == "/x/mine.py:7 in forward"
    assert innermost("") == ""
    assert innermost(stack[: stack.index('  File "/x/mine')]) == "torch/distributed.py:5 in all_reduce"

"""Candidates that attack their process, files of the user's that are wrong, a bare environment: each ends in words."""

import json
import os
import shlex
import sys
from unittest.mock import Mock

import pytest

from conformance.command import CONFORMANCE, conformance
from conformance.test_reports import PASS, report
from jobs.launch import ROOT, complete
from pce_mpi.cli import main
from pce_mpi.conformance.judging.outcomes import Outcome, Verdict
from pce_mpi.conformance.reports import json_file
from pce_mpi.conformance.runs.launches import Launch, Run
from pce_mpi.conformance.runs.orders import Orders
from pce_mpi.conformance.serialization import to_json
from pce_mpi.jobs.journal import Follower, Journal, beginnings

# Each misbehaves, and then returns what is right unless it raises.
CANDIDATE = """
import os, sys
import numpy as np
import pce_mpi as pce
from pce_mpi.conformance.candidates.offers import offers


@offers(options=("weight", "label_smoothing", "z_loss", "logit_scale", "softcap"))
def candidate(logits, targets, *, class_start, num_classes, comm, **options):
    if "weight" in options:
        for descriptor in range(3):
            os.close(descriptor)
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            stream.close()
    if "label_smoothing" in options:
        os.mkdir(f"folder-{comm.rank}")
        os.chdir(f"folder-{comm.rank}")
        os.rmdir(os.getcwd())
        raise ValueError("from nowhere")
    if "z_loss" in options and os.fork() == 0:
        return logits.sum(), logits + 0
    if "logit_scale" in options:
        np.ones(2**28)
    if "softcap" in options and comm.rank:
        (journal,) = (path for path in os.scandir(sys.argv[1]) if path.name == f"rank-{comm.rank}.jsonl")
        with open(journal, "ab") as file:
            file.write(b"\\xff\\n")
    return pce.softmax_cross_entropy_value_and_grad(logits, targets, class_start=class_start, comm=comm, **options)
"""
CASES = ["logit_scale", "weight", "label_smoothing", "z_loss", "softcap", "zero-rows"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The outcome of each of `CASES`, by its family."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "it.py").write_text(CANDIDATE)
    selection = [word for case in CASES for word in ("--case", case)]
    run = conformance(
        *("-n", 2, "it.py:candidate", *selection, "--dtype", "float32", "--memory", 1, "--json", "it.json"),
        folder=folder,
    )
    assert run.returncode == 1, run.stderr
    found = json_file.parse((folder / "it.json").read_text()).outcomes
    return {outcome.family: outcome for outcome in found if outcome.verdict != "not offered"}


@pytest.mark.parametrize("family", ["weight", "z_loss", "zero-rows"])
def test_closed_streams_and_forks_disturb_nothing(outcomes, family):
    assert outcomes[family].verdict == "pass", outcomes[family].findings


def test_removed_folder_is_no_obstacle(outcomes):
    assert outcomes["label_smoothing"].verdict == "refused"
    assert "ValueError: from nowhere at it.py:19 in candidate" in outcomes["label_smoothing"].findings[0].text


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds the memory of a process")
def test_memory_is_bounded(outcomes):
    assert outcomes["logit_scale"].verdict == "refused"
    assert "MemoryError: Unable to allocate 2.00 GiB" in outcomes["logit_scale"].findings[0].text
    assert "--memory 1" in outcomes["logit_scale"].rerun


def test_damaged_journal_is_a_crash(outcomes):
    assert outcomes["softcap"].verdict == "crashed"
    assert "the file in which rank 1 notes its steps is damaged" in outcomes["softcap"].findings[0].text


class Scripted:
    """A job of 2 ranks whose files have had these events at each read."""

    ranks, status = 2, 0

    def __init__(self, *reads):
        reads = iter(reads)
        self.news = lambda: next(reads, [])
        self.ends, self.last_lines = list, lambda since, launcher=True: ""


@pytest.mark.parametrize(("number", "verdicts"), [(0, ["crashed"]), (1, ["pass", "crashed"])])
def test_damage_behind_outcomes_is_charged_to_its_case(number, verdicts):
    def started(task):
        return {"event": "started", "task": task, "printed": 0}

    tasks = ["reduction/mean", "random-logits/float32"]
    passed = [{"event": "outcome", "outcome": to_json(Outcome(task, "", Verdict.PASS))} for task in tasks]
    first = [{"event": "ready", "offer": {}, "versions": {}}, started(0), passed[0], started(1), passed[1]]
    # The file of rank 0 is read last, and may have what came after the damage.
    reads = [
        *((0, event) for event in first),
        (0, {"event": "done"}),
        *((1, started(each)) for each in range(number + 1)),
    ]
    job = Scripted(reads, [(1, {"event": "damaged"}), *((1, started(each)) for each in range(number + 1, 2))])
    launch = Launch(Run(Orders("it"), 2, 30.0, Mock()), job, tasks)
    assert [(outcome.case, outcome.verdict) for outcome in launch.results()] == list(zip(tasks, verdicts, strict=False))
    assert launch.unfinished == tasks[len(verdicts) :]


@pytest.mark.parametrize("line", [b"\xff", b"7", b"{}", b'{"event', b"[" * 100_000], ids=lambda line: repr(line[:9]))
def test_line_that_is_no_event_is_damaged(tmp_path, line):
    (tmp_path / "rank-0.jsonl").write_bytes(line + b"\n")
    assert beginnings(tmp_path) == {}
    Journal(tmp_path, 0).write("called")
    assert list(Follower(tmp_path, 1).news()) == [(0, {"event": "damaged"}), (0, {"event": "called"})]


def status_of(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["conformance", *map(str, arguments)])
    return ended.value.code


PLAIN = json.loads(json_file.render(report(PASS)))


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        bytes(range(256)),
        {**PLAIN, "candidate": 5},
        {**PLAIN, "offer": []},
        {**PLAIN, "outcomes": [{**PLAIN["outcomes"][0], "accuracies": [{}]}]},
        {**PLAIN, "outcomes": [{**PLAIN["outcomes"][0], "verdict": "perhaps"}]},
    ],
    ids=["deep", "binary", "candidate", "offer", "accuracy", "verdict"],
)
def test_damaged_report_exits_with_2(tmp_path, content, capsys):
    path = tmp_path / "report"
    path.write_bytes(json.dumps(content).encode() if isinstance(content, dict) else content)
    assert status_of("--report", path, "--html", tmp_path / "it.html") == 2
    assert f"error: --report: {path} is no report of this version: " in capsys.readouterr().err
    assert not (tmp_path / "it.html").exists()


def test_wrong_files_and_sizes_exit_with_2(tmp_path, capsys):
    binary = tmp_path / "binary"
    binary.write_bytes(bytes(range(256)))
    for arguments, said in [
        (["pce", "--known", binary], f"error: --known: {binary}: UnicodeDecodeError"),
        (["pce", "--known", tmp_path], f"error: --known: {tmp_path}: Is a directory"),
        (["pce", "-n", "9" * 5000], "expected a whole number from 1 up, got '999"),
        (["pce", "--html", "x" * 5000], "expected a file in a folder that is there, got 'xxx"),
        (["--export", tmp_path, "--ranks", 10**10], "expected numbers up to 100000"),
    ]:
        assert status_of(*arguments) == 2
        printed = capsys.readouterr().err
        assert said in printed and len(printed) < 3000


def test_run_without_streams_home_or_folder(tmp_path):
    (tmp_path / "gone").mkdir()
    page = tmp_path / "it.html"
    command = shlex.join([*CONFORMANCE, "-n", "1", "pce", "--case", "zero-rows/mean", "--html", str(page)])
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": "/no/such/folder", "TERM": "dumb"}
    run = complete(["sh", "-c", f"cd gone && rmdir ../gone && {command} <&- >&- 2>&-"], cwd=tmp_path, env=environment)
    assert run.returncode == 0
    assert "1 case passed" in page.read_text()


def test_folder_for_temporary_files_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    assert status_of("pce", "--case", "zero-rows/mean") == 2
    assert "no temporary file could be written: " in capsys.readouterr().err

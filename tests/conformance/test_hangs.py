"""Planted faults that hang or kill a job: the launcher of the kit survives and reports them."""

import json
import os

import pytest

from conformance.command import conformance
from jobs.launch import ROOT, launch
from patience import slowdown


@pytest.mark.parametrize(
    ("fault", "case", "verdict", "words"),
    [
        (
            "empty_shard_waits",
            "empty-shard/last",
            "deadlocked",
            ["ranks 0, 1 never returned", "rank 2 raised ValueError: zero-size array"],
        ),
        (
            "target_out_of_range_waits",
            "target-out-of-range/far",
            "deadlocked",
            ["ranks 0, 1 never returned", "rank 2 raised IndexError: index 1000000024 is out of bounds"],
        ),
        ("empty_shard_crashes", "empty-shard/last", "crashed", ["rank 2 died of SIGSEGV"]),
    ],
)
def test_planted_fault_that_ends_job_is_outcome(fault, case, verdict, words, tmp_path):
    report = tmp_path / "report.json"
    selection = ["--case", case, "--case", "random-logits/float32", "--timeout", 2 * slowdown()]
    run = conformance(
        *("-n", 3, f"candidates.wrong.{fault}:candidate", *selection, "--json", report),
        folder=tmp_path,
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    )
    assert run.returncode == 1, run.stdout + run.stderr
    outcomes = {outcome["case"]: outcome for outcome in json.loads(report.read_text())["outcomes"]}
    said = "\n".join(finding["text"] for finding in outcomes[case]["findings"])
    assert outcomes[case]["verdict"] == verdict, said
    for each in words:
        assert each in said
    assert outcomes["random-logits/float32"]["verdict"] == "pass"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("time.sleep(600)", "ranks 0, 1 never returned from it.py:3 in candidate; --timeout gives more time"),
        (
            "\n    if not comm.rank: raise ValueError('on one rank')\n    while True:\n"
            "        time.sleep(0.05)\n        time.sleep(0.05)\n        time.sleep(0.05)\n        time.sleep(0.05)",
            "rank 1 never returned from it.py:",
        ),
    ],
    ids=["all ranks inside", "one rank moves"],
)
def test_busy_candidate_is_slow_not_deadlocked(tmp_path, body, words):
    (tmp_path / "it.py").write_text(
        "import time\ndef candidate(logits, targets, *, class_start, num_classes, comm):\n    " + body.lstrip("\n ")
    )
    selection = ["--case", "random-logits/float32", "--timeout", 3 * slowdown(), "--json", "report"]
    run = conformance("-n", 2, "it.py:candidate", *selection, folder=tmp_path)
    assert run.returncode == 1, run.stderr
    (outcome,) = json.loads((tmp_path / "report").read_text())["outcomes"]
    assert outcome["verdict"] == "slow", outcome["findings"]
    assert words in outcome["findings"][0]["text"]


def test_assert_conforms_ends_a_job_that_hangs(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "from pce_mpi.conformance import assert_conforms, cases\n"
        "def candidate(logits, targets, *, class_start, num_classes, comm):\n"
        "    assert comm.rank\n"
        "    comm.Barrier()\n"
        "(case,) = cases(candidate, pattern='reduction/mean')\n"
        f"def test_it(): assert_conforms(candidate, case, timeout={3 * slowdown()})\n"
    )
    job = launch(2, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path / "test_it.py"))
    assert job.returncode
    assert "line 4 in candidate" in job.stdout + job.stderr

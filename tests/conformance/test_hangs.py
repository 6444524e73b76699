"""Candidates that hang, raise or kill a job: the launcher of the kit survives them and says what happened."""

import json
import os
import re
import shlex

import pytest

from conformance.command import conformance, processes_of
from jobs.launch import ROOT, launch
from pce_mpi.jobs.patience import slowdown

# The shared memory of MPICH's ranks in the memory map of a process.
SHARED_MEMORY = re.compile(r"/dev/shm/mpich_\S+")
# It misbehaves by the option that a case sets. A rank that waits for ever sleeps, as a barrier would keep a core
# busy.
TROUBLESOME = """
import os
import shutil
import signal
import time

import pce_mpi as pce
from pce_mpi.conformance.candidates.offers import offers


@offers(options=("weight", "label_smoothing", "z_loss", "logit_scale", "softcap"))
def candidate(logits, targets, *, class_start, num_classes, comm, **options):
    last = comm.rank == comm.size - 1
    if "label_smoothing" in options:
        shutil.copy("/proc/self/maps", f"maps-{comm.rank}")
        if last:
            raise ValueError("smoothing is too much for me")
        time.sleep(600)
    open("next" if os.path.exists("maps-0") else "first", "a").close()
    if "z_loss" in options:
        print("going under on rank", comm.rank)
        comm.Barrier()
        if last:
            os.kill(os.getpid(), signal.SIGSEGV)
        comm.Barrier()
    if "logit_scale" in options and last:
        os._exit(0)
    if "softcap" in options:
        if last:
            raise ValueError("on this rank alone")
        return logits.sum(), logits + 0
    loss, dlogits = pce.softmax_cross_entropy_value_and_grad(
        logits, targets, class_start=class_start, comm=comm, **options
    )
    return loss, dlogits * (2 if "weight" in options and num_classes > 5 else 1)
"""


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


def test_busy_candidate_is_slow_not_deadlocked(tmp_path):
    candidate = (
        "import time\n"
        "def candidate(logits, targets, *, class_start, num_classes, comm, weight=None):\n"
        "    if weight is None: time.sleep(600)\n"
        "    if not comm.rank: raise ValueError('on one rank')\n"
        "    while True:\n"
    ) + "        time.sleep(0.05)\n" * 50
    selection = ["--case", "reduction/mean", "--case", "weight/float32", "--timeout", 2 * slowdown()]
    run, outcomes = outcomes_of(candidate, *selection, folder=tmp_path)
    assert run.returncode == 1, run.stderr
    inside, moving = (outcome["findings"][0]["text"] for outcome in outcomes)
    assert [outcome["verdict"] for outcome in outcomes] == ["slow", "slow"], inside + moving
    assert "ranks 0, 1 never returned from it.py:3 in candidate; --timeout gives more time" in inside
    assert "rank 1 never returned from it.py:" in moving


def test_slow_judge_is_not_candidates_silence(tmp_path):
    limit = 2 * slowdown()
    candidate = (
        "import time\n"
        "from pce_mpi.conformance.runs import running\n"
        "settle = running.settle\n"
        f"running.settle = lambda *given: (time.sleep({2 * limit}), settle(*given))\n"
        "def candidate(logits, targets, *, class_start, num_classes, comm):\n"
        "    return logits.sum(), logits + 0\n"
    )
    selection = ["--case", "random-logits/float32", "--timeout", limit]
    _, (outcome,) = outcomes_of(candidate, *selection, folder=tmp_path)
    assert outcome["verdict"] == "FAIL", outcome["findings"][0]["text"]


def test_results_that_never_come_are_slow(tmp_path):
    candidate = (
        "import time\n"
        "class Later:\n"
        "    shape = ()\n"
        "    def __dlpack_device__(self): return 1, 0\n"
        "    @property\n"
        "    def dtype(self): time.sleep(600)\n"
        "    def __dlpack__(self, **given): time.sleep(600)\n"
        "def candidate(logits, targets, *, class_start, num_classes, comm):\n"
        "    return Later(), logits + 0\n"
    )
    selection = ["--case", "random-logits/float32", "--timeout", 2 * slowdown()]
    _, (outcome,) = outcomes_of(candidate, *selection, folder=tmp_path)
    said = outcome["findings"][0]["text"]
    assert outcome["verdict"] == "slow", said
    assert "ranks 0, 1 returned, and wait for results at it.py:6 in dtype; --timeout gives more time" in said


def test_assert_conforms_ends_a_job_that_hangs(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import time; from pce_mpi.conformance import assert_conforms, cases\n"
        "def candidate(logits, targets, *, class_start, num_classes, comm):\n"
        "    assert comm.rank\n"
        "    time.sleep(600)\n"
        "(case,) = cases(candidate, pattern='reduction/mean')\n"
        f"def test_it(): assert_conforms(candidate, case, timeout={3 * slowdown()})\n"
    )
    job = launch(2, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path / "test_it.py"))
    assert job.returncode
    assert "line 4 in candidate" in job.stdout + job.stderr  # of the rank that hangs, not of the one that waits


def outcomes_of(candidate, *selection, folder):
    (folder / "it.py").write_text(candidate)
    run = conformance("-n", 2, "it.py:candidate", *selection, "--json", "report", folder=folder)
    assert (folder / "report").exists(), run.stdout + run.stderr
    return run, json.loads((folder / "report").read_text())["outcomes"]


def test_candidate_that_always_deadlocks_is_stopped_soon(tmp_path):
    candidate = (
        "import time\n"
        "def candidate(logits, targets, *, class_start, num_classes, comm):\n"
        "    open('calls', 'a').write('x')\n"
        "    assert comm.rank, f'{logits.shape} is not for the first'\n"
        "    time.sleep(600)\n"
    )
    run, outcomes = outcomes_of(candidate, "--timeout", 2 * slowdown(), folder=tmp_path)
    assert (tmp_path / "calls").read_text() == 2 * 3 * "x"
    judged = [outcome for outcome in outcomes if outcome["verdict"] != "not offered"]
    assert len(judged) > 20 and len(outcomes) > len(judged)
    assert [outcome["verdict"] for outcome in judged] == ["deadlocked"] * 3 + ["not run"] * (len(judged) - 3)
    said = "rank 1 never returned from it.py:5 in candidate; rank 0 raised AssertionError: (6, 12) is not for the first"
    assert said in judged[0]["findings"][0]["text"]
    assert all(
        each["note"].startswith("not run, as the first 3 cases ended alike: rank 1 never") for each in judged[3:]
    )
    assert f"    deadlocked in case {judged[0]['case']}: {said}" in run.stderr  # before the run ends
    assert run.stderr.count("    not run, as the first 3 cases ended alike: ") == 1
    left = f"{len(outcomes) - len(judged)} not offered; {len(judged) - 3} not run"
    assert f"3 of 3 cases failed (3 deadlocked); {left}" in run.stdout
    assert re.findall(r"rerun: .* --case (\S+)", run.stdout) == [judged[0]["case"]]


def test_cases_after_a_right_one_are_run(tmp_path):
    candidate = (
        "import pce_mpi as pce\n"
        "def candidate(logits, targets, *, class_start, num_classes, comm):\n"
        "    assert comm.rank or logits.shape == (6, 12), f'{logits.shape} is not for the first'\n"
        "    if logits.shape != (6, 12): return logits.sum(), logits + 0\n"
        "    return pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm)\n"
    )
    selection = [word for case in ("random-logits", "dims/2-D", "many-classes") for word in ("--case", case)]
    _, outcomes = outcomes_of(candidate, *selection, "--dtype", "float32", folder=tmp_path)
    judged = {outcome["case"]: outcome for outcome in outcomes if outcome["verdict"] != "not offered"}
    assert judged["random-logits/float32"]["verdict"] == "pass"
    failed = [outcome for outcome in judged.values() if outcome["verdict"] != "pass"]
    assert len(failed) > 2 and all("raised on some" in outcome["findings"][0]["kind"] for outcome in failed)


@pytest.mark.parametrize("close", ["sys.stdout.close()", "os.close(1)"])
def test_closed_stdout_fails_no_case(tmp_path, close):
    candidate = (
        "import os, sys\n"
        "import pce_mpi as pce\n"
        "closed = False\n"
        "def candidate(logits, targets, *, class_start, num_classes, comm):\n"
        "    global closed\n"
        f"    if not closed: {close}\n"
        "    closed = True\n"
        "    return pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm)\n"
    )
    run, outcomes = outcomes_of(candidate, "--case", "random-logits", "--case", "reduction", folder=tmp_path)
    assert run.returncode == 0, run.stdout
    assert {outcome["verdict"] for outcome in outcomes} == {"pass", "not offered"}


def test_death_before_case_not_offered_is_warning(tmp_path):
    candidate = (
        "import os, sys\n"
        "import pce_mpi as pce\n"
        "class Trap:\n"
        "    flush = lambda self: os._exit(7)\n"
        "def candidate(logits, targets, *, class_start, num_classes, comm):\n"
        "    sys.stdout = Trap()\n"
        "    return pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm)\n"
    )
    run, outcomes = outcomes_of(candidate, "--case", "random-logits", folder=tmp_path)
    assert "warning: before case random-logits/float64, which is not offered, " in run.stderr, run.stderr
    assert "ended with exit status 7" in run.stderr
    assert {outcome["verdict"] for outcome in outcomes} == {"pass", "not offered"}


@pytest.fixture(scope="module")
def troublesome(tmp_path_factory):
    """Run cases that hang, crash and fail; return the command, its outcomes and the folder."""
    folder = tmp_path_factory.mktemp("troublesome")
    (folder / "troublesome.py").write_text(TROUBLESOME)
    (folder / "temporary").mkdir()
    cases = ["random-logits", "label_smoothing", "z_loss", "logit_scale", "softcap", "weight/float32", "zero-rows/mean"]
    selection = [word for case in cases for word in ("--case", f"{case}*")]
    run = conformance(
        *("-n", 3, "troublesome.py:candidate", *selection, "--dtype", "float32", "--timeout", 15 * slowdown()),
        *("--json", "report"),
        folder=folder,
        TMPDIR=str(folder / "temporary"),
    )
    assert (folder / "report").exists(), run.stdout + run.stderr
    report = json.loads((folder / "report").read_text())
    outcomes = {outcome["case"]: outcome for outcome in report["outcomes"]}
    return run, outcomes, folder


def of(outcomes, family):
    return next(outcome for case, outcome in outcomes.items() if case.partition("/")[0] == family)


def test_deadlock_names_ranks_and_lines(troublesome):
    _, outcomes, _ = troublesome
    outcome = of(outcomes, "label_smoothing")
    assert outcome["verdict"] == "deadlocked"
    assert outcome["findings"][0]["text"] == (
        f"deadlocked in case {outcome['case']}: ranks 0, 1 never returned from troublesome.py:18 in candidate; "
        "rank 2 raised ValueError: smoothing is too much for me at troublesome.py:17 in candidate"
    )


def test_deadlock_after_error_ends_sooner_and_cleanly(troublesome):
    *_, folder = troublesome
    began, went_on = ((folder / name).stat().st_mtime for name in ("maps-1", "next"))
    assert 5 < went_on - began < 12 * slowdown()
    shared = {each for rank in range(3) for each in SHARED_MEMORY.findall((folder / f"maps-{rank}").read_text())}
    assert shared and [each for each in shared if os.path.exists(each)] == []


def test_crash_names_rank_signal_line_and_output(troublesome):
    _, outcomes, _ = troublesome
    outcome = of(outcomes, "z_loss")
    assert outcome["verdict"] == "crashed"
    sentence, printed = (finding["text"] for finding in outcome["findings"])
    assert sentence == f"crashed in case {outcome['case']}: rank 2 died of SIGSEGV at troublesome.py:24 in candidate"
    assert "[rank 0] going under on rank 0" in printed
    assert "[rank 2] going under on rank 2" in printed


def test_rank_that_exits_silently_is_crash(troublesome):
    _, outcomes, _ = troublesome
    outcome = of(outcomes, "logit_scale")
    assert outcome["verdict"] == "crashed"
    assert "rank 2 ended with exit status 0" in outcome["findings"][0]["text"]


def test_error_on_some_ranks_fails(troublesome):
    _, outcomes, _ = troublesome
    outcome = of(outcomes, "softcap")
    assert outcome["verdict"] == "FAIL"
    said = "ValueError: on this rank alone at troublesome.py:30 in candidate (rank 2)"
    assert any(said in finding["text"] for finding in outcome["findings"])


def test_cases_after_crash_still_run(troublesome):
    run, outcomes, _ = troublesome
    assert of(outcomes, "random-logits")["verdict"] == "pass"
    assert of(outcomes, "zero-rows")["verdict"] == "pass"
    assert run.returncode == 1


def test_progress_without_terminal_is_in_lines(troublesome):
    run, outcomes, _ = troublesome
    lines = [line for line in run.stderr.splitlines() if line.startswith("conformance ")]
    assert len(lines) == len(outcomes)
    assert re.match(rf"conformance 1/{len(outcomes)}  1 pass, .* left", lines[0])


def test_run_leaves_no_process_or_file(troublesome):
    _, _, folder = troublesome
    assert processes_of(folder) == []
    assert list((folder / "temporary").iterdir()) == []


def test_command_of_failure_reproduces_it(troublesome):
    _, outcomes, folder = troublesome
    outcome = of(outcomes, "weight")
    assert outcome["verdict"] == "FAIL"
    command = shlex.split(outcome["rerun"])
    assert command[:4] == ["python", "-m", "pce_mpi", "conformance"]
    again = conformance(*command[4:], "--json", "again", folder=folder)
    assert again.returncode == 1
    (alone,) = json.loads((folder / "again").read_text())["outcomes"]
    assert (alone["case"], alone["findings"]) == (outcome["case"], outcome["findings"])

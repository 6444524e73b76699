"""The conformance command: wrong command lines, missing packages, interrupted runs."""

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest
from safetensors.numpy import save_file

from conformance.command import CONFORMANCE, conformance, processes_of, started, status
from jobs.launch import ROOT, complete, launch, output_of
from pce_mpi.conformance import offers
from pce_mpi.conformance.candidates.catalogue import catalogue
from pce_mpi.conformance.candidates.loading import check_call
from pce_mpi.conformance.candidates.offers import Offer
from pce_mpi.conformance.judging.outcomes import Outcome, Report, Verdict
from pce_mpi.conformance.problems.cases import DTYPES
from pce_mpi.conformance.problems.kinds import KINDS
from pce_mpi.conformance.runs.launches import DEFAULT_TIMEOUT, rerun_command
from pce_mpi.conformance.runs.orders import Orders
from pce_mpi.jobs.mpiexec import LaunchError, mpiexec
from pce_mpi.jobs.patience import slowdown, wait_until


def test_interrupted_run_reports_outcomes_so_far(tmp_path):
    (tmp_path / "it.py").write_text(
        "import os, signal, pce_mpi as pce\n"
        "def candidate(logits, targets, *, class_start, num_classes, comm, **options):\n"
        "    if options: signal.pause()\n"
        "    return pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm)\n"
    )
    selection = ["--case", "random-logits/float32", "--case", "label_smoothing/float32", "--json", "report"]
    run = started("-n", "1", "it.py:candidate", *selection, folder=tmp_path, stdout=subprocess.PIPE, text=True)
    while "1/2" not in (line := run.stderr.readline()):
        assert line
    run.send_signal(signal.SIGINT)
    stdout, stderr = output_of(run)
    assert run.returncode == 130, stderr
    assert "interrupted, and the report has what was known by then; conformance: 1 of 2" in stderr
    assert "random-logits" in stdout
    report = json.loads((tmp_path / "report").read_text())
    assert [outcome["verdict"] for outcome in report["outcomes"]] == ["pass"]


def test_without_ml_dtypes_only_bfloat16_is_not_offered(tmp_path):
    (tmp_path / "ml_dtypes.py").write_text("raise ImportError('as if it were not there')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    selection = ["--case", "random-logits", "--json", "report"]
    run = conformance("-n", 2, "pce", *selection, folder=tmp_path, PYTHONPATH=path)
    assert run.returncode == 0, run.stderr
    outcomes = {each["case"]: each for each in json.loads((tmp_path / "report").read_text())["outcomes"]}
    assert outcomes["random-logits/float32"]["verdict"] == outcomes["random-logits/float16"]["verdict"] == "pass"
    assert "pip install 'pce_mpi[bf16]'" in outcomes["random-logits/bfloat16"]["note"]
    alone = conformance("-n", 1, "pce", "--case", "random-logits/bfloat16", folder=tmp_path, PYTHONPATH=path)
    assert alone.returncode == 2  # no case was judged
    assert "nothing was judged: pce offers none of the selected cases" in alone.stderr


def test_known_failures_pass_until_they_are_mended(tmp_path):
    (tmp_path / "it.py").write_text(
        "import pce_mpi as pce\n"
        "def candidate(logits, targets, *, class_start, num_classes, comm, label_smoothing=0.0):\n"
        "    return pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm)\n"
    )
    (tmp_path / "known").write_text("label_smoothing  # left out so far\n\n# a comment\n")
    selection = ["-n", 1, "it.py:candidate", "--case", "label_smoothing", "--case", "reduction", "--json", "report"]
    run = conformance(*selection, "--known", "known", folder=tmp_path)
    assert run.returncode == 0, run.stdout
    assert "1 case passed; " in run.stdout and "; 1 known to fail" in run.stdout
    (tmp_path / "known").write_text("label_smoothing\nreduction/mean\n")
    assert conformance(*selection, "--known", "known", folder=tmp_path).returncode == 1
    failed = [each for each in json.loads((tmp_path / "report").read_text())["outcomes"] if each["verdict"] == "FAIL"]
    assert [(each["case"], each["findings"][0]["kind"]) for each in failed] == [("reduction/mean", "known")]
    assert conformance(*selection, "--except", "label_*", folder=tmp_path).returncode == 0
    (tmp_path / "known").write_text("no-such-case")
    assert "no case is called 'no-such-case'" in conformance(*selection, "--known", "known", folder=tmp_path).stderr


def test_first_failure_ends_run_with_x(tmp_path):
    """But not one that is known; and several cases may follow each other, with the candidate behind them."""
    (tmp_path / "it.py").write_text(
        "import pce_mpi as pce\n"
        "def candidate(logits, targets, *, class_start, num_classes, comm, label_smoothing=0.0, z_loss=0.0):\n"
        "    return pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm)\n"
    )
    (tmp_path / "known").write_text("label_smoothing/*")
    selection = [
        "--case",
        "z_loss/float32",
        "label_smoothing/float32",
        "reduction/mean",
        "results-not-aliased",
        "it.py:candidate",
    ]
    run = conformance("-n", 1, "-x", "--known", "known", "--json", "report", *selection, folder=tmp_path)
    verdicts = {each["case"]: each["verdict"] for each in json.loads((tmp_path / "report").read_text())["outcomes"]}
    assert (
        run.returncode == 1 and verdicts["label_smoothing/float32"] == "known" and verdicts["z_loss/float32"] == "FAIL"
    )
    assert list(verdicts.values()).count("FAIL") == 1 and "not run" in run.stdout


def test_cases_run_on_each_number_of_ranks(tmp_path):
    selection = ["pce", "--case", "random-logits/float32", "--case", "same-bits/float32"]
    run = conformance("-n", 2, 4, *selection, "--json", "report.json", folder=tmp_path)
    assert run.returncode == 0 and "4 cases passed" in run.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ranks"] == [2, 4] and [each["ranks"] for each in report["outcomes"]] == [2, 2, 4, 4]
    again = conformance("--report", "report.json", "--junit", "junit.xml", "--markdown", "it.md", folder=tmp_path)
    assert again.returncode == 0 and again.stdout == run.stdout
    assert "same-bits/float32 on 4 ranks" in (tmp_path / "junit.xml").read_text()
    assert "4 cases passed" in (tmp_path / "it.md").read_text()


def test_results_of_no_vector_judge_nothing(tmp_path):
    vectors, results = tmp_path / "vectors", tmp_path / "results"
    assert conformance("--export", vectors, "--case", "random-logits/float32").returncode == 0
    save_file({}, results)
    run = conformance("--vectors", vectors, "--results", results, "--junit", tmp_path / "report")
    assert run.returncode == 2
    assert f"nothing was judged: {results} has no result of {vectors}" in run.stderr
    assert (tmp_path / "report").exists()


def test_output_of_single_case_is_shown_by_rank(tmp_path):
    (tmp_path / "it.py").write_text(
        "import pce_mpi as pce\n"
        "def candidate(logits, targets, *, class_start, num_classes, comm):\n"
        "    print('classes from', class_start)\n"
        "    return pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm)\n"
    )
    run = conformance("-n", 2, "it.py:candidate", "--case", "random-logits/float32", folder=tmp_path)
    assert "[rank 0] classes from 0\n[rank 1] classes from 12\n" in run.stderr


def test_command_under_mpiexec_explains_itself_once():
    job = launch(2, "-m", "pce_mpi", "conformance", "pce")
    assert job.returncode == 2
    assert job.stderr.count("without mpiexec or srun: python -m pce_mpi conformance -n 3") == 1


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import os\nos._exit(5)", "ended with exit status 5, before the candidate was loaded and started"),
        (
            "def candidate(*arrays, **_): ...\ndef start(comm): raise OSError('no port')\ncandidate.start = start",
            "OSError: no port at it.py:2 in start",
        ),
        ("def candidate(logits, targets, group): ...", "and this one takes (logits, targets, group): "),
    ],
    ids=["a rank dies", "its start fails", "it is a function for an adapter"],
)
def test_candidate_that_cannot_start_exits_with_2(tmp_path, source, said):
    (tmp_path / "it.py").write_text(source)
    run = conformance("-n", 1, "it.py:candidate", folder=tmp_path)
    assert run.returncode == 2
    assert said in run.stderr
    assert "Traceback" not in run.stderr


def test_entropy_that_is_not_declared_is_told_so():
    def candidate(logits, *, class_start, num_classes, comm): ...

    with pytest.raises(TypeError, match=r'an entropy, which takes no targets, declare it: @offers\(kind="entropy"\)'):
        check_call(candidate)
    check_call(offers(kind="entropy")(candidate))


@pytest.mark.parametrize(
    "kind, parameters",
    [
        ("kl", "student_logits, teacher_logits, *, class_start, num_classes, comm"),
        ("topk_kl", "student, teacher, *, top_k, class_start, num_classes, comm"),
        ("step", "logits, targets, *, context_ranks, micro_batches, comm"),
        ("linear", "hidden_states, w, targets, *, class_start, num_classes, comm"),
    ],
)
def test_kind_that_is_not_declared_is_told(kind, parameters):
    candidate = eval(f"lambda {parameters}: None")
    with pytest.raises(TypeError, match=rf'declare @offers\(kind="{kind}"\), or kind="loss" if that is meant'):
        check_call(candidate)
    check_call(offers(kind=kind)(candidate))


def test_parameters_of_another_kind_may_be_declared():
    check_call(offers(kind="loss")(lambda student, teacher_targets, *, class_start, num_classes, comm: None))
    check_call(lambda logits, targets, *, class_start, num_classes, comm: None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a candidate"),
        (["pce", "--export", "x"], "a candidate and --export are given, and only one of them"),
        (["--list", "--report", "x"], "--report and --list are given, and only one of them"),
        (["--vectors", "x"], "give both --vectors DIR, with the problems, and --results FILE"),
        (["pcee"], "or one of pce, pce-value-and-grad, got 'pcee'; did you mean pce?"),
        ([__file__], f"which function in {__file__}? {__file__}:test_"),
        (["pce", "--case", "lable_smoothing"], "did you mean label_smoothing"),
        (["pce", "--case", "random-logits/float32", "--dtype", "float64"], "'random-logits/float32' have no logits of"),
        (["--adapter", "torch-shards", "it.py:f"], "torch-shards needs torch: pip install torch"),
        (["--adapter", "jax-shard-map", "it.py:f"], "jax-shard-map needs jax: pip install jax"),
        (["pce", "--case", "no-such-case"], "no case is called 'no-such-case'; there are families of cases: random"),
        (["pce", "-n", "0"], "expected a whole number from 1 up, got '0'"),
        (["pce", "--seed", "-1"], "expected a whole number from 0 up, got '-1'"),
        (["pce", "--tolerance", "nan"], "expected a number above 0, got 'nan'"),
        (["pce", "--json", "no/such/folder/x"], "expected a file in a folder that is there"),
        (["--vectors", "nowhere", "--results", "x"], "No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_command_line_exits_with_2(arguments, said, monkeypatch, capsys):
    for framework in ("torch", "jax"):
        monkeypatch.setitem(sys.modules, framework, None)  # as if it were not installed
    assert status(["conformance", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_list_has_description_and_offer_of_cases(tmp_path, capsys):
    assert status(["conformance", "--list", "--case", "zero-rows", "--case", "product"]) == 0
    everything = capsys.readouterr().out
    assert "product/bfloat16" in everything
    assert "zero-rows/mean" in everything and "zero-rows/sum" in everything and "hang" in everything
    (tmp_path / "it.py").write_text("def candidate(*arrays, class_start, num_classes, comm): ...\n")
    offered = conformance("it.py:candidate", "--list", "--case", "zero-rows", folder=tmp_path).stdout
    lines = {line.split()[0]: line for line in offered.splitlines()}
    assert "not offered: reduction sum" in lines["zero-rows/sum"]
    assert "not offered" not in lines["zero-rows/mean"]


@pytest.mark.parametrize("kind", KINDS)
def test_command_of_every_case_selects_it(kind, monkeypatch, tmp_path):
    """The line below each failure, and --except and --known, take the cases that one kind alone has."""
    offer = Offer(kind=kind, dtypes=DTYPES)
    asked = []

    def run_cases(orders, ranks, **how):
        asked.append((list(orders.cases(offer)), how["known"]))
        return Report("it", offer, ranks, {}, 0, False, 1.0, [Outcome("x", "", Verdict.PASS)])

    monkeypatch.setattr("pce_mpi.cli.conformance.run_cases", run_cases)
    names = [case.name for case in catalogue(offer)]
    rare = [name for name in names if name not in {case.name for case in catalogue(Offer(dtypes=DTYPES))}]
    assert bool(rare) == (kind != "loss")
    for name in [*rare, names[0]]:
        outcome = Outcome(name, "", Verdict.FAIL, ranks=2)
        line = shlex.split(rerun_command(Orders("it.py:it"), DEFAULT_TIMEOUT, outcome))
        assert status(line[3:]) == 0, name
        assert asked.pop() == ([name], [])
    (tmp_path / "known").write_text("\n".join(rare))
    assert status(["conformance", "it.py:it", "--known", str(tmp_path / "known"), "--except", names[-1]]) == 0
    assert asked.pop() == (names[:-1], rare)


@pytest.mark.parametrize(
    ("kind", "arrays", "case"),
    [
        ("loss", "logits, targets", "random-logits/float32"),
        ("log_prob", "logits, targets", "support/target-alone"),
        ("kl", "student, teacher", "far-teacher/float32"),
        ("linear", "hidden, w, targets", "product/float32"),
        ("step", "logits, targets", "step/micro-batches"),
    ],
)
def test_printed_command_runs_its_case(kind, arrays, case, tmp_path):
    (tmp_path / "it.py").write_text(
        "import numpy as np\nfrom pce_mpi.conformance import offers\n"
        f"@offers(kind={kind!r}, gradient={'value' if kind == 'step' else 'none'!r})\n"
        f"def candidate({arrays}, **_):\n"
        f"    given = {arrays.split(', ')[0]}\n"
        f"    return {'np.zeros(()), given' if kind == 'step' else 'np.float32(given.sum())'}\n"
    )
    run = conformance("-n", 1, "it.py:candidate", "--case", case, folder=tmp_path)
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("  rerun: python "))
    again = conformance(*shlex.split(line)[5:], folder=tmp_path)
    assert again.returncode == run.returncode == 1, again.stderr
    assert f"FAIL {case}" in again.stdout and again.stdout == run.stdout


def test_case_of_another_kind_is_told_so(tmp_path):
    run = conformance("-n", 1, "pce", "--case", "product")
    assert run.returncode == 2
    assert "no case for candidates of kind 'loss', as pce is, was selected" in run.stderr


def test_run_with_closed_output_ends_its_ranks(tmp_path):
    (tmp_path / "it.py").write_text(
        "import time, pce_mpi as pce\n"
        "def candidate(logits, targets, *, class_start, num_classes, comm, **options):\n"
        "    if options: time.sleep(600)\n"
        "    return pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm)\n"
    )
    selection = ["--case", "random-logits/float32", "--case", "weight/float32"]
    run = started("-n", "2", "it.py:candidate", *selection, folder=tmp_path, stdout=subprocess.DEVNULL)
    assert b"starting 2 ranks" in run.stderr.readline()
    run.stderr.close()  # the line on the first case fails, while the ranks are busy with the second
    assert run.wait(60 * slowdown()) == 128 + signal.SIGPIPE
    wait_until(lambda: processes_of(tmp_path) == [])


@pytest.mark.parametrize("arguments", [["pce", "--known"], ["--report"]], ids=str)
def test_file_without_end_is_refused(arguments):
    command = shlex.join([*CONFORMANCE, *arguments, "/dev/zero"])
    run = complete(["sh", "-c", f"ulimit -v 4000000; exec {command}"])
    assert run.returncode == 2
    assert "it has more than 100,000,000 characters" in run.stderr and "Traceback" not in run.stderr


def test_missing_launcher_is_explained(monkeypatch):
    monkeypatch.setenv("MPIEXEC", "/no/such/mpiexec --flag")
    assert mpiexec() == ["/no/such/mpiexec", "--flag"]
    run = conformance("pce")
    assert run.returncode == 2
    assert "/no/such/mpiexec" in run.stderr
    monkeypatch.delenv("MPIEXEC")
    monkeypatch.setattr("sys.executable", "/no/such/python")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LaunchError, match="pip install mpich"):
        mpiexec()

"""The command line, as a user starts it."""

import json
import os
from pathlib import Path
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from typing import get_type_hints

import numpy as np
import pytest
from safetensors.numpy import save_file

from jobs.launch import ROOT, complete, job_command, job_environment, launch
import pce_mpi
from pce_mpi.cli import main
from pce_mpi.jobs.mpiexec import mpiexec
from pce_mpi.jobs.patience import slowdown
from pce_mpi.loss.options import CrossEntropyOptions

COMMAND = ["-m", "pce_mpi"]
SMALL_BENCH = ["bench", "--rows=8", "--classes=50", "--repeat=1"]
REHEARSE = ["rehearse", "own.py", "--mesh=data=2"]
JUDGE = ["judge", "right.safetensors"]

PROGRAM = """
import numpy as np, pce_mpi as pce
def program(mesh):
    pce.sum(pce.distribute(np.ones((8, 4)), mesh, data=pce.Shard(0))).full(rehearsed=np.float64(0))
"""
# Its descriptor of standard error is looked for, too.
FAILS_ON_RANK_1 = f"""
import faulthandler
from mpi4py import MPI
faulthandler.enable()
{PROGRAM}
if MPI.COMM_WORLD.rank == 1:
    {{}}['key']
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a recording, a rehearsed program, and one that cannot be rehearsed on rank 1."""
    monkeypatch.chdir(tmp_path)
    tensors = {"logits": np.zeros((9, 4), np.float32), "targets": np.arange(9) % 4}
    tensors["loss"] = np.full(9, np.log(4.0), np.float32)
    save_file(tensors, "right.safetensors", {"rank": "0", "ranks": "1"})
    save_file(tensors | {"loss": np.ones(9, np.float32)}, "wrong.safetensors", {"rank": "0", "ranks": "1"})
    Path("own.py").write_text(PROGRAM)
    Path("elsewhere.py").write_text(FAILS_ON_RANK_1)
    return tmp_path


def unread(command, *, env, stderr=subprocess.PIPE, cwd=ROOT):
    """Run a command whose output nobody reads, as after `| head`, only sooner."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            command, cwd=cwd, env=env, stdout=writer, stderr=stderr, text=True, timeout=60 * slowdown()
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize("ranks", [1, 3])
def test_info_has_versions_library_and_ranks(ranks):
    job = launch(ranks, *COMMAND, "info", "--json")
    assert job.returncode == 0, job.stderr
    report = json.loads(job.stdout)
    assert report["versions"]["pce_mpi"] == pce_mpi.__version__
    assert {"library", "standard", "GPU-aware"} <= set(report["mpi"])
    assert [rank["rank"] for rank in report["ranks"]] == list(range(ranks))
    assert all(rank["size"] == ranks and rank["cores"] and rank["blas threads"] >= 1 for rank in report["ranks"])


def test_info_prints_one_line_per_rank():
    job = launch(3, *COMMAND, "info")
    host = os.uname().nodename
    assert sum(host in line and not line.startswith("warning") for line in job.stdout.splitlines()) == 3


def test_info_warns_of_more_blas_threads_than_cores():
    cores = len(os.sched_getaffinity(0))
    threads = {name: str(cores) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    if cores == 1:
        threads = dict.fromkeys(threads, "2")
    job = launch(2, *COMMAND, "info", env=threads)
    assert "BLAS threads in all on" in job.stdout
    assert "set OMP_NUM_THREADS=" in job.stdout
    assert "BLAS threads in all on" not in launch(1, *COMMAND, "info").stdout


@pytest.mark.parametrize("ranks", [1, 4])
def test_check_passes_and_prints_one_table(ranks):
    job = launch(ranks, *COMMAND, "check")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("pair/weight+label_smoothing") == 1
    assert "OFF" not in job.stdout
    assert "not run" not in job.stdout


def test_check_without_mpi_library_passes():
    program = "import sys; sys.modules['mpi4py.MPI'] = None; from pce_mpi.cli import main; main(['check'])"
    done = complete([sys.executable, "-c", program])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as they should be" in done.stdout


def test_check_fails_if_one_rank_is_wrong():
    program = """
import numpy as np
from mpi4py import MPI
from pce_mpi.kernels import host_kernel
from pce_mpi.cli import main
kernel = host_kernel()
honest = kernel.write_gradient
def wrong(out, *arguments, **options):
    honest(out, *arguments, **options)
    out *= 1.001
if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
    kernel.write_gradient = wrong
main(["check"])
"""
    job = launch(2, "-c", program)
    assert job.returncode != 0
    assert re.search(r"^random-logits/float32 .* OFF$", job.stdout, re.M)
    assert re.search(r"^random-logits/float32: .*gradient", job.stdout, re.M)


def test_bench_measures_functions_beside_a_copy():
    sizes = ["--rows", "64", "--classes", "300", "1000", "--repeat", "2"]
    job = launch(2, *COMMAND, "bench", *sizes, "--json")
    assert job.returncode == 0, job.stderr
    report = json.loads(job.stdout)
    measured = {(one["classes"], one["function"]): one for one in report["measurements"]}
    assert all(one["options"] == "" for one in measured.values())
    functions = ("forward", "backward", "value_and_grad")
    assert list(measured) == [(classes, name) for classes in (300, 1000) for name in functions]
    for (classes, name), one in measured.items():
        sends = name != "backward"
        assert (one["payload_calls"], one["payload_bytes"]) == (sends, 64 * 40 * sends)
        assert one["seconds"] > 0 and one["times_copy"] > 0 and one["gigabytes_per_second"] > 0
        assert one["peak_mebibytes"] > 0
        assert one["times_plain"] == one["seconds"] / measured[classes, "value_and_grad"]["seconds"]
    assert report["agreement_seconds"] > 0
    assert re.fullmatch(r"bench 1/2  300 classes, \d+ (s|min) left\nbench 2/2  1000 classes\n", job.stderr)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--rows=99999999999999"], "error: --rows 99999999999999 and --classes 50 take "),
        (["--classes=999999999999999999999", "--rows=1"], "error: --rows 1 and --classes 999999999999999999999 take "),
    ],
)
def test_bench_refuses_what_no_memory_holds(arguments, told):
    job = launch(2, *COMMAND, *SMALL_BENCH, *arguments)
    assert job.returncode != 0
    assert [line.startswith(told) for line in job.stderr.splitlines() if "error:" in line] == [True]
    assert "Traceback" not in job.stderr and not job.stdout


def test_bench_measures_chosen_options_beside_plain_loss():
    job = launch(2, *COMMAND, *SMALL_BENCH, "--label-smoothing=0.1", "--softcap=30", "--weight", "--json")
    assert job.returncode == 0, job.stderr
    sent = {(one["function"], one["options"]): one["payload_bytes"] for one in json.loads(job.stdout)["measurements"]}
    chosen = "softcap=30.0, label_smoothing=0.1, weight=random"
    functions = ("forward", "backward", "value_and_grad")
    assert list(sent) == [(name, options) for options in ("", chosen) for name in functions]
    assert sent["forward", chosen] > sent["forward", ""]  # smoothing with weights sends more states


def test_bench_options_measures_each_of_them():
    job = launch(2, *COMMAND, *SMALL_BENCH, "--options", "--json")
    assert job.returncode == 0, job.stderr
    measured = json.loads(job.stdout)["measurements"]
    known = {name for name, kind in get_type_hints(CrossEntropyOptions).items() if "float" in str(kind)}
    timed = {name for one in measured for name in re.findall(r"(\w+)=", one["options"])}
    assert timed == known | {"weight", "targets"}
    functions = {"class_statistics", "class_statistics_backward", "top_k of 10", "argmax"}
    assert functions <= {one["function"] for one in measured}


def test_bench_measures_divergence_of_any_weight():
    job = launch(2, *COMMAND, *SMALL_BENCH, "--beta=0.25", "--json")
    assert job.returncode == 0, job.stderr
    sent = {one["function"]: (one["options"], one["payload_bytes"]) for one in json.loads(job.stdout)["measurements"]}
    # Two Allreduces for each of 8 rows.
    assert sent["kl_divergence"] == sent["kl_divergence_value_and_grad"] == ("beta=0.25", 8 * (80 + 48))


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("--label-smoothing=2", "label_smoothing must be in [0, 1], got 2.0"),
        ("--beta=2", "beta must be 0, or from 2**-64 to 1, got 2.0"),
    ],
)
def test_bench_refuses_option_out_of_range(argument, told):
    job = launch(2, *COMMAND, *SMALL_BENCH, argument)
    assert job.returncode == 2
    assert job.stderr.count(f"error: {told}\n") == 1
    assert "Traceback" not in job.stderr and not job.stdout


@pytest.mark.parametrize("arguments", [["--mesh=d=1"], ["--collectives", "--options"]], ids=" ".join)
def test_bench_refuses_options_in_vain(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*SMALL_BENCH, *arguments])
    assert ended.value.code == 2
    assert "error: --" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_bench_takes_every_dtype(dtype):
    job = launch(1, *COMMAND, "bench", "--rows", "8", "--classes", "50", "--repeat", "1", "--dtype", dtype)
    assert job.returncode == 0, job.stderr
    assert f"8 rows, {dtype}" in job.stdout


@pytest.mark.parametrize("arguments", [[], ["bench"]], ids=["no command", "bench"])
def test_help_is_printed_once(arguments):
    job = launch(3, *COMMAND, *arguments, "--help")
    assert job.returncode == 0
    assert job.stdout.count("usage:") == 1


@pytest.mark.parametrize("arguments", [[], ["bench", "--rows", "0"]], ids=str)
def test_wrong_command_line_is_explained_once(arguments):
    job = launch(2, *COMMAND, *arguments)
    assert job.returncode != 0
    assert job.stderr.count("error:") == 1


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["bench", "--rowz=3"], "did you mean --rows? python -m pce_mpi bench --help"),
        (["info", "--quiet"], "python -m pce_mpi info --help"),
        (["conformance", "pce", "--toleranse", "2"], "did you mean --tolerance? python -m pce_mpi conformance --help"),
        (["--verion"], "did you mean --version? python -m pce_mpi --help"),
        (["chek"], "python -m pce_mpi --help"),
        (["check", "--seed=-1"], "expected a whole number from 0 up, got '-1' python -m pce_mpi check --help"),
        (["bench", "--rows=0"], "expected a whole number from 1 up, got '0' python -m pce_mpi bench --help"),
    ],
    ids=str,
)
def test_wrong_option_exits_with_2_and_hint(arguments, hint, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert f"{hint} explains" in " ".join(capsys.readouterr().err.split())


LAST_RANK_HAS_WRONG_TIMEOUT = """
import os
from mpi4py import MPI
from pce_mpi.cli import main
if MPI.COMM_WORLD.rank:
    os.environ["PCE_MPI_TIMEOUT"] = "soon"
main(["check"])
"""


@pytest.mark.parametrize("command", ["info", "conformance"])
@pytest.mark.parametrize(
    ("variable", "told"),
    [
        ("PCE_MPI_TIMEOUT=soon", "PCE_MPI_TIMEOUT must be a positive number of seconds, got 'soon'"),
        ("PCE_MPI_KERNEL=MMX", "PCE_MPI_KERNEL must be numpy or one of "),
        ("PCE_MPI_REPRODUCIBLE=yes", "PCE_MPI_REPRODUCIBLE must be 0 or 1, got 'yes'"),
        ("PCE_MPI_GPU_AWARE=2", "PCE_MPI_GPU_AWARE must be 0 or 1, got '2'"),
    ],
)
def test_wrong_environment_is_told_in_one_line(command, variable, told):
    done = complete([sys.executable, *COMMAND, command], env=job_environment(1) | dict([variable.split("=")]))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {told}") and done.stderr.count("\n") == 1, done.stderr


def test_wrong_environment_of_one_rank_ends_all():
    job = launch(2, "-c", LAST_RANK_HAS_WRONG_TIMEOUT)
    assert job.returncode != 0
    assert job.stderr.count("error: PCE_MPI_TIMEOUT must be a positive number of seconds, got 'soon'\n") == 1
    assert "Traceback" not in job.stderr and not job.stdout


@pytest.mark.parametrize("command", ["info", "check", "bench", "rehearse", "conformance"])
def test_help_explains_options_and_exit_status(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert not ended.value.code
    text = " ".join(capsys.readouterr().out.split())
    options = text.partition("options: ")[2]
    for option in re.findall(r"--[a-z-]+", text.partition("] ")[0]):
        assert re.search(rf"{option}( \S+)*? [a-z]", options), option
    assert "Exit status: 0" in text
    assert "(default: [" not in text and "(default: True)" not in text


def test_commands_need_no_docstrings():
    done = complete([sys.executable, "-OO", *COMMAND, *SMALL_BENCH], env=job_environment(1))
    assert done.returncode == 0, done.stderr


def test_version_is_printed_once():
    for job in launch(2, *COMMAND, "--version"), launch(1, *COMMAND, "--version"):
        assert (job.returncode, job.stdout) == (0, f"pce_mpi {pce_mpi.__version__}\n"), job.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        *(["conformance", "--list"], ["conformance", "--help"], ["info"], ["check"], SMALL_BENCH),
        *(["--help"], ["--version"], JUDGE, REHEARSE),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_unread_output_ends_quietly(arguments, unbuffered, here):
    # Buffered output fails when the buffer is full, or at the end.
    env = job_environment(1) | {"PYTHONUNBUFFERED": unbuffered}
    done = unread([sys.executable, *COMMAND, *arguments], env=env, cwd=here)
    assert done.returncode == 128 + signal.SIGPIPE
    assert re.fullmatch(r"((bench|judge) 1/1 .*\n)?", done.stderr)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [["info"], ["check"], SMALL_BENCH, ["--version"], JUDGE, ["judge", "wrong.safetensors"], REHEARSE],
    ids=" ".join,
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_disk_is_said_in_a_line(arguments, unbuffered, here):
    command = shlex.join([sys.executable, *COMMAND, *arguments])
    done = complete(
        ["sh", "-c", f"{command} > /dev/full"], cwd=here, env=job_environment(1) | {"PYTHONUNBUFFERED": unbuffered}
    )
    assert done.returncode == 2
    line = "error: standard output: No space left on device\n"
    assert re.fullmatch(rf"((bench|judge) 1/1 .*\n)?{line}", done.stderr), done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
@pytest.mark.parametrize(
    ("arguments", "status", "shown"),
    [
        (JUDGE, 0, "\n\nright\n"),
        (["judge", "wrong.safetensors"], 1, "\n\nwrong\n"),
        (["judge", "missing"], 2, ""),
        (SMALL_BENCH, 0, "value_and_grad"),
        (["conformance", "pce", "-n=1", "--case=random-logits/float32"], 0, "1 case passed"),
    ],
    ids=str,
)
def test_full_disk_of_progress_loses_no_report(arguments, status, shown, here):
    command = shlex.join([sys.executable, *COMMAND, *arguments])
    done = complete(["sh", "-c", f"{command} 2> /dev/full"], cwd=here, env=job_environment(1))
    assert done.returncode == status
    assert shown in done.stdout


def test_words_of_rank_failing_alone_are_shown(here):
    job = launch(3, *COMMAND, "rehearse", str(here / "elsewhere.py"), "--mesh=data=2", env={"PCE_MPI_TIMEOUT": "20"})
    assert job.returncode == 2
    told = re.escape(f"on rank 1 of 3: error: {here / 'elsewhere.py'}:11: {{}}['key']\nKeyError: 'key'\n")
    assert len(re.findall(told, job.stderr)) == 1, job.stderr
    assert "Traceback" not in job.stderr and "all_reduce" in job.stdout


@pytest.mark.parametrize("arguments", [["info"], ["check"], ["--help"]], ids=" ".join)
def test_unread_output_of_ranks_ends_quietly(arguments):
    done = unread(job_command(2, *COMMAND, *arguments), env=job_environment(2))
    # Open MPI's launcher takes what ranks print, loses it, and ends with success.
    launcher = complete([*mpiexec(), "--version"]).stdout
    assert (done.returncode == 0) == ("Open MPI" in launcher)
    assert "Traceback" not in done.stderr and "Error" not in done.stderr


def test_broken_pipe_elsewhere_raises(monkeypatch):
    def run(*_):
        raise BrokenPipeError("of a worker")

    monkeypatch.setattr("pce_mpi.cli.info.run", run)
    with pytest.raises(BrokenPipeError, match="of a worker"):
        main(["info"])


MIDDLE_RANK_FAILS = """
from mpi4py import MPI
from pce_mpi.cli import check, main
if MPI.COMM_WORLD.rank == 1:
    check.run = None
main(["check"])
"""


def test_exception_on_one_rank_ends_job():
    job = launch(3, "-c", MIDDLE_RANK_FAILS)
    assert job.returncode != 0
    assert "rank 1 of 3" in job.stderr


def test_exception_ends_job_without_mpi4py_runner():
    command = job_command(3, "-c", MIDDLE_RANK_FAILS)
    at = command.index("mpi4py")
    plain = command[: at - 1] + command[at + 1 :]
    job = complete(plain, env=job_environment(3))
    assert job.returncode != 0
    assert "on rank 1 of 3" in job.stderr


def test_action_shows_no_report_of_an_earlier_step(tmp_path):
    script = textwrap.dedent((ROOT / "action.yml").read_text().rpartition("      run: |\n")[2])
    environment = {"RUNNER_TEMP": str(tmp_path), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    # The action's `python` is the one that pip installed for, with its mpiexec beside it.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for candidate, status in (("pce", 0), ("missing.py:f", 2)):
        chosen = {"CANDIDATE": candidate, "ARGUMENTS": "-n 1 --case random-logits/float32"}
        job = complete(["bash", "-e", "-c", script], env=job_environment(1) | environment | chosen)
        assert job.returncode == status, job.stderr
    assert (tmp_path / "summary").read_text().count("Conformance of") == 1

"""However the kit's command ends, so do its ranks and all that they have started; it does not start too many."""

import signal
import sys

import pytest

from conformance.command import conformance, processes_of, started
from jobs.launch import output_of
from pce_mpi.cli import main
from pce_mpi.jobs.patience import wait_until

# Each rank starts a daemon: of another session, an orphan, deaf to signals.
DAEMON = """
import os, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
os.fork() and os._exit(0)
os.setsid()
os.fork() and os._exit(0)
open(sys.argv[1], "w").close()
time.sleep(600)
"""
CANDIDATE = f"""
import os, subprocess, sys, time
import pce_mpi as pce


def candidate(logits, targets, *, class_start, num_classes, comm, **options):
    path = os.path.join(os.path.dirname(__file__), f"daemon-{{comm.rank}}")
    if not os.path.exists(path):
        subprocess.run([sys.executable, "-c", {DAEMON!r}, path], check=True)
        while not os.path.exists(path):
            time.sleep(0.01)
    if options:
        time.sleep(600)
    return pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm)
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of all that it has started")


@linux
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGHUP, 130), (signal.SIGKILL, -signal.SIGKILL)],
    ids=["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"],
)
def test_ended_command_leaves_no_child_of_ranks(tmp_path, number, status):
    (tmp_path / "it.py").write_text(CANDIDATE)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, under which the tests may run, has it ignored
    cases = ("--case", "random-logits/float32", "--case", "weight/float32")  # the second never ends
    run = started("-n", "2", "it.py:candidate", *cases, "--timeout", "300", folder=tmp_path, text=True)
    signal.signal(signal.SIGHUP, before)
    assert any("conformance 1/2" in line for line in iter(run.stderr.readline, ""))
    assert any("daemon-1" in each for each in processes_of(tmp_path))
    run.send_signal(number)
    _, stderr = output_of(run)
    assert run.returncode == status
    if number == signal.SIGKILL:
        wait_until(lambda: processes_of(tmp_path) == [], 10)
    else:
        assert "what was known by then; conformance: 1 of 2" in stderr
        assert not list(tmp_path.glob("pce_mpi-job-*"))
    assert processes_of(tmp_path) == []


@linux
def test_finished_run_leaves_no_child_of_ranks(tmp_path):
    (tmp_path / "it.py").write_text(CANDIDATE)
    run = conformance("-n", 2, "it.py:candidate", "--case", "random-logits/float32", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert len(list(tmp_path.glob("daemon-*"))) == 2
    assert processes_of(tmp_path) == []


def test_hangup_that_is_ignored_ends_nothing(tmp_path):
    (tmp_path / "it.py").write_text(
        "import os, time\n"
        "import pce_mpi as pce\n"
        "def candidate(logits, targets, *, class_start, num_classes, comm):\n"
        "    open('began', 'w').close()\n"
        "    while not os.path.exists('go'): time.sleep(0.01)\n"
        "    return pce.softmax_cross_entropy_value_and_grad(logits, targets, comm=comm)\n"
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which the command inherits, as from nohup
    try:
        run = started("-n", "1", "it.py:candidate", "--case", "zero-rows/mean", folder=tmp_path, text=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_until((tmp_path / "began").exists)
    run.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    _, stderr = output_of(run)
    assert run.returncode == 0, stderr


def fake_launcher(folder, text):
    """Write a launcher that starts no ranks, and return the command that takes it."""
    path = folder / "fake-mpiexec"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@linux
def test_deaf_launcher_ends_with_killed_command(tmp_path, monkeypatch):
    launcher = fake_launcher(tmp_path, f"trap '' TERM; touch {tmp_path}/began; while :; do sleep 1; done")
    monkeypatch.setenv("MPIEXEC", launcher)
    run = started("-n", "2", "pce", "--case", "zero-rows/mean", folder=tmp_path, text=True)
    wait_until((tmp_path / "began").exists)
    run.kill()
    output_of(run)
    wait_until(lambda: processes_of(tmp_path) == [], 20)


def test_too_many_ranks_are_not_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MPIEXEC", fake_launcher(tmp_path, f'printf "%s " "$@" > {tmp_path}/told; exit 3'))

    def said_with(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["conformance", "pce", "--case", "zero-rows/mean", "-n", *map(str, arguments)])
        assert ended.value.code == 2
        return capsys.readouterr().err

    for sizes in ([100_000], [2, 100_000], [10**30]):
        said = said_with(*sizes)
        assert f"{sizes[-1]} ranks are more than" in said and "--oversubscribe" in said
    assert not (tmp_path / "told").exists()
    assert "mpiexec ended with exit status 3" in said_with(100_000, "--oversubscribe")
    assert (tmp_path / "told").read_text().startswith("-n 100000 ")

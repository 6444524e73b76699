"""The harness of this suite, each test on a suite of its own: what runs, beside what, and how that is told."""

import mmap
import os
from pathlib import Path
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from jobs.launch import ROOT, complete, job_environment, launch_source, output_of
from jobs.suites import change, closing_line, run, write
from pce_mpi.jobs.patience import wait_until
from run import SETTLED, SHARED_MEMORY, remove_memory_left_behind


def test_ci_ends_with_failures_of_all_steps(tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci")
    (tmp_path / "Makefile").write_text(
        ".venv/bin/pip lint test-openmpi:\n"
        "\t@echo fine\n"
        ".venv/torch:\n"
        "\t@echo torch is missing >&2; exit 2\n"
        "test-peers: .venv/torch\n"
        "docs:\n"
        "\t@echo a page is missing >&2; exit 3\n"
        "test test-kernels test-cupy:\n"
        "\t@for number in `seq 20`; do printf 'failed: $@ %s %0500d\\n' $$number 0; done\n"
        "\t@echo much more; exit 1\n"
    )
    (tmp_path / ".venv/bin").mkdir(parents=True)
    missing = {"git": "echo no clone; exit 1", "python3.13": "exit 127"}
    for program, does in {
        "apt-get": "exit",
        ".venv/bin/python": "echo another number fails; exit 1",
        **missing,
    }.items():
        (tmp_path / program).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / program).chmod(0o755)
    job = complete([tmp_path / ".ci/run"], env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert job.returncode == 1
    end = job.stdout[-4000:]
    steps = r"make docs, make test, (\.venv/bin/python tests/run\.py -n 5 .*), "
    steps += "make test-peers, test_versions python3, make test-kernels, make test-cupy"
    assert re.search(rf"\nfailed: {steps}\n$", end)
    for words in [
        "a page is missing",
        "another number fails",
        "failed: test 1 00",
        "failed: test-cupy 1 00",
        "torch is missing",
        "no clone",
    ]:
        assert words in end
    assert "fine" not in end


# tests/run.py


def test_run_tells_outcome_by_part_and_in_total(suite):
    write(
        suite,
        "tests/ranks/test_it.py",
        """
        import pytest

        def test_that_passes(comm):
            pass

        @pytest.mark.ranks(2)
        def test_that_is_the_same_at_every_size():
            pass

        def test_that_needs_company(comm):
            if comm.size == 1:
                pytest.skip("one rank only")

        @pytest.mark.ranks(2, 3)
        def test_that_is_long(comm):
            assert comm.size == 2

        @pytest.mark.ranks(3, 4)
        def test_of_sizes_that_are_not_asked_for(comm):
            assert comm.size in (3, 4)
        """,
    )
    write(suite, "tests/jobs/test_it.py", "def test_it():\n    pass")
    job = run(suite, "-n", "1", "2")
    assert job.returncode == 0
    words = [line.split() for line in job.stdout.splitlines()]
    assert ["passed", "failed", "skipped", "seconds"] in words
    assert ["--ranks", "1,2", "5", "0", "2"] in [line[:5] for line in words]
    assert ["jobs/test_it", "1", "0", "0"] in [line[:4] for line in words]
    assert closing_line(job) == "6 passed, 0 failed, 2 skipped"


def test_run_says_how_far_it_is(suite):
    change(suite, "tests/run.py", "TELLING = 60", "TELLING = 0.2")
    write(suite, "tests/ranks/test_it.py", "def test_of_ranks(comm):\n    pass")
    write(suite, "tests/jobs/test_short.py", "def test_a():\n    assert False\n\ndef test_b():\n    pass")
    long = "import time\n\ndef test_a():\n    pass\n\ndef test_b():\n    time.sleep(3)\n"
    write(suite, "tests/jobs/test_long.py", long)
    core = str(min(os.sched_getaffinity(0)))
    job = complete(["taskset", "--cpu-list", core, sys.executable, "tests/run.py", "-n", "1", "2"], cwd=suite)
    lines = re.findall(r"^\d of 3 files, \d passed, \d failed$", job.stdout, re.MULTILINE)
    assert lines[0] == "0 of 3 files, 0 passed, 0 failed" and lines == sorted(lines)
    # A file that is not over counts by the tests of it that are.
    assert "2 of 3 files, 4 passed, 1 failed" in lines
    assert closing_line(job) == "5 passed, 1 failed, 0 skipped"


def test_file_that_waits_runs_beside_another(suite):
    # Each waits for the other, and the one core is not enough for two files that compute.
    for name in ("test_failing_ranks", "test_other"):
        write(
            suite,
            f"tests/jobs/{name}.py",
            """
            from pathlib import Path
            from pce_mpi.jobs.patience import wait_until

            def test_it():
                Path(__file__).with_suffix(".here").touch()
                wait_until(lambda: len([*Path(__file__).parent.glob("*.here")]) == 2, seconds=10)
            """,
        )
    core = str(min(os.sched_getaffinity(0)))
    job = complete(["taskset", "--cpu-list", core, sys.executable, "tests/run.py", "tests/jobs"], cwd=suite)
    assert closing_line(job) == "2 passed, 0 failed, 0 skipped"


def test_file_of_a_folder_may_skip_all_tests(suite):
    write(suite, "tests/ranks/test_it.py", "def test_of_ranks(comm):\n    pass")
    write(suite, "tests/jobs/test_one.py", "def test_of_one():\n    pass")
    write(suite, "tests/jobs/test_other.py", "import pytest\n\n@pytest.mark.skip\ndef test_of_other():\n    pass")
    job = run(suite, "-n", "1")
    assert job.returncode == 0, job.stdout
    assert closing_line(job) == "2 passed, 0 failed, 1 skipped"


def test_run_with_selection_needs_tests_at_some_size(suite):
    write(suite, "tests/ranks/test_it.py", "def test_of_ranks(comm):\n    pass")
    write(suite, "tests/jobs/test_it.py", "def test_of_jobs():\n    pass")
    assert run(suite, "-n", "1", "-k", "test_of_ranks").returncode == 0
    nothing = run(suite, "-n", "1", "-k", "test_of_nobody")
    assert nothing.returncode == 1
    assert "no test was executed" in nothing.stdout


def test_hang_of_job_fails_alone_without_leftovers(suite):
    change(suite, "tests/run.py", "SILENCE = 150", "SILENCE = 3")
    write(
        suite,
        "tests/jobs/test_it.py",
        f"""
        import os, subprocess, sys
        from jobs.launch import job_command

        HANG = "import os, signal, sys; print(os.getpid(), file=open(sys.argv[1], 'a')); signal.pause()"

        def test_that_hangs():
            subprocess.run(job_command(2, "-c", HANG, {str(suite / "pids")!r}), start_new_session=True)

        def test_after_it():
            pass
        """,
    )
    job = run(suite, "tests/jobs")
    assert "no phase of a test has ended" in job.stdout and "in test_that_hangs" in job.stdout
    assert closing_line(job) == "1 passed, 1 failed, 0 skipped"
    pids = (suite / "pids").read_text().split()
    assert len(pids) == 2
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="one core runs one thing at a time")
def test_interrupted_run_ends_ranks_and_jobs_together(suite):
    pids = suite / "pids"
    sleep = f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n') and time.sleep(300)"
    write(suite, "tests/ranks/test_it.py", f"import os, time\n\ndef test_it(comm):\n    {sleep}")
    write(suite, "tests/jobs/test_it.py", f"import os, time\n\ndef test_it():\n    {sleep}")
    process = subprocess.Popen([sys.executable, "tests/run.py"], cwd=suite, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: pids.exists() and pids.read_text().count("\n") == 2)
    process.send_signal(signal.SIGINT)
    printed, _ = output_of(process)
    assert process.returncode == 1
    assert "interrupted in --ranks 1,2,3,4 and jobs" in printed
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split()))


@pytest.mark.skipif(not Path(SHARED_MEMORY).exists(), reason="MPICH shares memory elsewhere")
def test_shared_memory_of_killed_ranks_is_removed():
    now = time.time()
    ages = {"older than the run": 9 * SETTLED, "left": 2 * SETTLED, "held": 2 * SETTLED, "new": SETTLED / 2}
    segments = {name: Path(SHARED_MEMORY, f"mpich_shm_{os.getpid()}_{name.replace(' ', '_')}") for name in ages}
    try:
        for name, age in ages.items():
            segments[name].write_bytes(bytes(100))
            os.utime(segments[name], (now - age, now - age))
        with segments["held"].open("rb") as file, mmap.mmap(file.fileno(), 100, access=mmap.ACCESS_READ):
            remove_memory_left_behind(since=now - 5 * SETTLED)
        assert [name for name in ages if segments[name].exists()] == ["older than the run", "held", "new"]
    finally:
        for segment in segments.values():
            segment.unlink(missing_ok=True)


# tests/jobs/launch.py


@pytest.fixture(scope="module")
def launched():
    """A job of more ranks than most machines for tests have cores."""
    source = """
        import os, sys
        from mpi4py import MPI

        print(f"{MPI.COMM_WORLD.size} ranks, {sys.argv[1:]}, {os.environ['COLOUR']}, {os.environ['OMP_NUM_THREADS']};")
        print("err", file=sys.stderr)
        sys.exit(3)
        """
    return launch_source(5, source, "a b", env={"COLOUR": "red"})


def test_launch_gives_exit_status_and_output(launched):
    assert launched.returncode != 0
    assert launched.stdout
    assert "err" in launched.stderr


def test_launch_hands_on_size_arguments_and_environment(launched):
    assert "5 ranks, ['a b'], red, " in launched.stdout


def test_launch_gives_each_rank_one_thread(launched):
    assert "red, 1;" in launched.stdout
    assert job_environment(1)["OPENBLAS_NUM_THREADS"] == "1"


def test_launch_ends_long_job_and_shows_stacks():
    program = "import sys, time; print('still alive', flush=True)\ndef hang(): time.sleep(300)\nhang()"
    with pytest.raises(TimeoutError, match=r"(?s)still alive.*in hang"):
        launch_source(2, program, limit=3)

"""The harness on tests that end their session, hang, or are interrupted: each makes a suite, or a job, of its own."""

import os
from pathlib import Path
import re
import signal
import subprocess
import sys

import pytest

from jobs.launch import launch_source, output_of
from jobs.suites import change, closing_line, last_words, new_suite, reports, run, run_at, write
from pce_mpi.jobs.patience import wait_until


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run of tests most of which end their session."""
    suite = new_suite(tmp_path_factory.mktemp("ended"))
    change(suite, "tests/verdict.py", "GRACE = 5.0", "GRACE = 1.0")
    return run_at(
        suite,
        2,
        """
        import os, signal
        from hypothesis import given, strategies as st
        from pce_mpi.testing import in_step
        import pytest

        def test_that_is_well(comm):
            pass

        def test_with_a_collective(comm):
            if comm.rank == 1:
                raise ValueError("no collective for me")
            comm.Barrier()

        @given(x=st.integers(0, 100))
        def test_with_examples(comm, x):
            with in_step(comm):
                if comm.rank == 1 and x > 50:
                    raise ValueError("no collective for me")
                comm.Barrier()

        def test_in_which_a_rank_is_killed(comm):
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.Barrier()

        def test_that_exits(comm):
            if comm.rank == 1:
                pytest.exit("enough of this")
            comm.Barrier()

        def test_after_them(comm):
            comm.Barrier()
        """,
    )


def test_ended_sessions_fail_one_test_each(ended):
    assert ended.returncode == 1
    assert closing_line(ended) == "2 passed, 4 failed, 0 skipped"


@pytest.mark.parametrize("test", ["test_with_a_collective", "test_with_examples"])
def test_failure_before_collective_ends_session_with_text(ended, test):
    assert f"{test} (call) failed here and left other ranks waiting" in reports(ended)[test]
    assert "ValueError: no collective for me" in reports(ended)[test]


def test_killed_rank_ends_session(ended):
    assert "did not come to its end" in reports(ended)["test_in_which_a_rank_is_killed"]


def test_pytest_exit_on_one_rank_has_its_text(ended):
    assert "enough of this" in reports(ended)["test_that_exits"]


def test_ends_of_sessions_are_repeated_after_table(ended):
    *failures, _ = last_words(ended)
    killed = "failed: 2 ranks: tests/ranks/test_it.py::test_in_which_a_rank_is_killed: did not come to its end: "
    assert [failure.startswith(killed) for failure in failures].count(True) == 1
    assert "failed: 2 ranks: tests/ranks/test_it.py::test_with_examples: ValueError: no collective for me" in failures


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
    """A run of tests in which one of two ranks hangs."""
    suite = new_suite(tmp_path_factory.mktemp("hung"))
    change(suite, "tests/run.py", "SILENCE = 150", "SILENCE = 1")
    return run_at(
        suite,
        2,
        """
        import signal, time

        def wait_for_the_other(comm):
            time.sleep(600)  # a barrier would keep a core busy

        def test_that_is_well(comm):
            comm.Barrier()

        def test_hang_0(comm):
            signal.pause() if comm.rank == 0 else wait_for_the_other(comm)

        def test_hang_1(comm):
            signal.pause() if comm.rank == 1 else wait_for_the_other(comm)

        def test_after_them(comm):
            comm.Barrier()

        def test_after_them_on_one_rank(comm):
            assert comm.rank
        """,
    )


@pytest.mark.parametrize("stuck", [0, 1])
def test_hang_fails_alone_with_stacks(hung, stuck):
    report = reports(hung)[f"test_hang_{stuck}"]
    stacks = dict(re.findall(r"----- stacks of rank (\d)\n(.*?)(?=-----|\Z)", report, re.DOTALL))
    assert "did not come to its end" in report
    assert f"in test_hang_{stuck}" in stacks["0"] and f"in test_hang_{stuck}" in stacks["1"]
    assert "in wait_for_the_other" in stacks[str(1 - stuck)] and "in wait_for_the_other" not in stacks[str(stuck)]
    assert hung.returncode == 1
    assert closing_line(hung) == "2 passed, 3 failed, 0 skipped"


def test_hang_of_job_fails_alone_without_leftovers(suite):
    change(suite, "tests/run.py", "SILENCE = 150", "SILENCE = 1")
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
    assert "test_that_hangs did not come to its end" in job.stdout
    assert "in test_that_hangs" in job.stdout
    assert closing_line(job) == "1 passed, 1 failed, 0 skipped"
    pids = (suite / "pids").read_text().split()
    assert len(pids) == 2
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_sessions_that_end_are_restarted_few_times(suite):
    change(suite, "tests/run.py", "MOST_SESSIONS = 10", "MOST_SESSIONS = 2")
    job = run_at(
        suite,
        2,
        """
        import os
        import pytest

        @pytest.mark.parametrize("number", range(5))
        def test_it(comm, number):
            if comm.rank:
                os._exit(3)
            comm.Barrier()
        """,
    )
    assert job.returncode == 1
    assert "not run: tests/ranks/test_it.py::test_it[2] and all after it, 3 in all" in job.stdout
    assert closing_line(job) == "0 passed, 2 failed, 0 skipped"


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
    assert "interrupted in 1 rank and jobs" in printed
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split()))


@pytest.mark.parametrize(("where", "signal_number"), [("ranks", signal.SIGTERM), ("jobs", signal.SIGINT)])
def test_interrupted_run_leaves_no_process_behind(suite, where, signal_number):
    pids = suite / "pids"
    program = f"""
        import os, time

        def note_and_sleep():
            with open({str(pids)!r}, "a") as file:
                file.write(f"{{os.getpid()}}\\n")
            time.sleep(300)
        """
    write(suite, "tests/sleeper.py", program)
    if where == "ranks":
        write(suite, "tests/ranks/test_it.py", "import sleeper\n\ndef test_it(comm):\n    sleeper.note_and_sleep()")
    else:
        write(
            suite,
            "tests/jobs/test_it.py",
            """
            from jobs.launch import launch_source

            def test_it():
                launch_source(2, "import sys; sys.path.insert(0, 'tests'); import sleeper; sleeper.note_and_sleep()")
            """,
        )
    process = subprocess.Popen(
        [sys.executable, "tests/run.py", f"tests/{where}", "-n", "2"], cwd=suite, stdout=subprocess.PIPE, text=True
    )
    wait_until(lambda: pids.exists() and pids.read_text().count("\n") == 2)
    process.send_signal(signal_number)
    printed, _ = output_of(process)
    assert process.returncode == 1
    assert "interrupted" in printed
    sleepers = [int(pid) for pid in pids.read_text().split()]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in sleepers))


def test_launch_ends_long_job_and_shows_stacks():
    program = "import sys, time; print('still alive', flush=True)\ndef hang(): time.sleep(300)\nhang()"
    with pytest.raises(TimeoutError, match=r"(?s)still alive.*in hang"):
        launch_source(2, program, limit=3)

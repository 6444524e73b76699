"""The harness on tests that go wrong: each program below is a test suite of its own, run at 2 or 3 ranks."""

import mmap
import os
from pathlib import Path
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from jobs.launch import ROOT, CompletedJob, complete, job_environment, launch, launch_source, output_of
from patience import wait_until
from run import SETTLED, SHARED_MEMORY, remove_memory_left_behind

HARNESS = [ROOT / "pyproject.toml", *(ROOT / "tests").glob("*.py"), ROOT / "tests/jobs/launch.py"]


def new_suite(folder: Path) -> Path:
    """Make a repository that has the harness and no tests yet."""
    for path in HARNESS:
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    (folder / "tests/ranks").mkdir()
    return folder


@pytest.fixture
def suite(tmp_path):
    return new_suite(tmp_path)


def write(suite: Path, path: str, source: str) -> None:
    (suite / path).write_text(textwrap.dedent(source), encoding="utf-8")


def change(suite: Path, path: str, old: str, new: str) -> None:
    """Give the suite another setting than the repository has."""
    text = (suite / path).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (suite / path).write_text(text.replace(old, new), encoding="utf-8")


def run(suite: Path, *arguments: str) -> CompletedJob:
    """`python tests/run.py ARGUMENTS` in the suite."""
    return complete([sys.executable, "tests/run.py", *arguments], cwd=suite)


def run_at(suite: Path, n: int, source: str) -> CompletedJob:
    """Run one file of tests on n ranks, and nothing else."""
    write(suite, "tests/ranks/test_it.py", source)
    return run(suite, "-n", str(n), "--no-jobs")


def pytest_at(n: int, suite: Path, *options: str) -> CompletedJob:
    """pytest itself on the suite's rank tests, without tests/run.py."""
    return launch(n, "-m", "pytest", "--color=no", "-c", f"{suite}/pyproject.toml", f"{suite}/tests/ranks", *options)


def closing_line(job: CompletedJob) -> str:
    return job.stdout.splitlines()[-1]


def reports(job: CompletedJob) -> dict[str, str]:
    """Return what the run says of each test that failed."""
    return dict(
        re.findall(r"^===== \d ranks: .*?::(\w+)(.*?)(?=^===== \d ranks: |\Z)", job.stdout, re.DOTALL | re.MULTILINE)
    )


# A test that goes wrong on one rank


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory):
    """A run of tests each of which goes wrong on rank 1 of 3."""
    return run_at(
        new_suite(tmp_path_factory.mktemp("one_rank")),
        3,
        """
        from mpi4py import MPI
        import pytest

        here = MPI.COMM_WORLD.rank == 1

        @pytest.fixture
        def resource(request):
            fail_in(request, "setup")
            yield
            fail_in(request, "teardown")

        def fail_in(request, phase):
            print("rank", MPI.COMM_WORLD.rank, "was here")
            assert not (request.node.name == f"test_{phase}" and here), "the middle rank is unwell"

        def test_setup(comm, resource, request):
            fail_in(request, "call")

        test_call = test_teardown = test_setup

        @pytest.mark.skipif(here, reason="not here")
        def test_skip_by_mark(comm):
            pass

        def test_skip_within(comm):
            if here:
                pytest.skip("not here")

        @pytest.mark.xfail(strict=False)
        def test_xfail(comm):
            assert not here

        def test_that_comes_after_them(comm):
            assert comm.allreduce(1) == comm.size
        """,
    )


def test_failures_on_one_rank_are_counted(on_one_rank):
    assert on_one_rank.returncode == 1
    assert closing_line(on_one_rank) == "1 passed, 6 failed, 0 skipped"
    assert "test_xfail" in reports(on_one_rank)


@pytest.mark.parametrize("phase", ["setup", "call", "teardown"])
def test_failure_on_one_rank_has_its_text(on_one_rank, phase):
    report = reports(on_one_rank)[f"test_{phase}"]
    assert report.startswith(f" failed ({phase})")
    assert "failed on rank 1 of 3" in report
    assert "the middle rank is unwell" in report
    assert "rank 1 was here" in report


@pytest.mark.parametrize("how", ["by_mark", "within"])
def test_skip_on_one_rank_is_failure(on_one_rank, how):
    report = reports(on_one_rank)[f"test_skip_{how}"]
    assert "skipped on rank 1 of 3" in report
    assert "not here" in report


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
        from in_step import in_step
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


def last_words(job: CompletedJob) -> list[str]:
    """What a run says after its table."""
    return job.stdout.rpartition("\n\n")[2].splitlines()


def test_failures_are_repeated_after_table(on_one_rank, ended):
    *failures, _ = last_words(on_one_rank)
    assert len(failures) == 6
    assert "failed: 3 ranks: tests/ranks/test_it.py::test_call: AssertionError: the middle rank is unwell" in failures
    *failures, _ = last_words(ended)
    killed = "failed: 2 ranks: tests/ranks/test_it.py::test_in_which_a_rank_is_killed: did not come to its end: "
    assert [failure.startswith(killed) for failure in failures].count(True) == 1
    assert "failed: 2 ranks: tests/ranks/test_it.py::test_with_examples: ValueError: no collective for me" in failures


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
        "test test-kernels:\n"
        "\t@for number in `seq 20`; do printf 'failed: $@ %s %0500d\\n' $$number 0; done\n"
        "\t@echo much more; exit 1\n"
    )
    (tmp_path / "apt-get").write_text("#!/bin/sh\n")
    (tmp_path / "apt-get").chmod(0o755)
    job = complete([tmp_path / ".ci/run"], env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert job.returncode == 1
    end = job.stdout[-3000:]
    assert end.endswith("\nfailed: docs test test-kernels test-peers\n")
    for words in ["a page is missing", "failed: test 1 00", "failed: test-kernels 1 00", "torch is missing"]:
        assert words in end
    assert "fine" not in end


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
    """A run of tests in which one of two ranks hangs."""
    suite = new_suite(tmp_path_factory.mktemp("hung"))
    change(suite, "tests/run.py", "SILENCE = 150", "SILENCE = 1")
    return run_at(
        suite,
        2,
        """
        import signal

        def wait_for_the_other(comm):
            comm.Barrier()

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


# Collection


# Tests with a fault that is no failure of one of them, what is said of it, and the closing line.
FAULTY = {
    "one rank has an import error": (
        """
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank == 1:
            raise ImportError("not on this rank")

        def test_it(comm):
            pass
        """,
        ["failed on rank 1 of 2", "ImportError: not on this rank"],
        "0 passed, 1 failed, 0 skipped",
    ),
    "ranks collect different tests": (
        """
        from mpi4py import MPI

        def test_of_all(comm):
            pass

        if MPI.COMM_WORLD.rank == 1:
            def test_of_one(comm):
                pass
        """,
        ["rank 0 and rank 1 collected different tests", "test_of_one"],
        "",
    ),
    "no test is executed": (
        "import pytest\n\n@pytest.mark.skip\ndef test_it(comm):\n    pass",
        ["no test was executed"],
        "",
    ),
    "a rank exits with an error": (
        """
        import atexit, os

        def test_it(comm):
            if comm.rank == 1:
                atexit.register(os._exit, 3)
        """,
        ["though no test failed"],
        "1 passed, 1 failed, 0 skipped",
    ),
}


@pytest.mark.parametrize(("source", "said", "closing"), FAULTY.values(), ids=FAULTY)
def test_run_fails_and_says_why(suite, source, said, closing):
    job = run_at(suite, 2, source)
    assert job.returncode == 1
    for words in said:
        assert words in job.stdout
    assert closing in closing_line(job)


def test_ranks_stop_together_and_rank_0_alone_reports(suite):
    write(
        suite,
        "tests/ranks/test_it.py",
        """
        import pytest

        @pytest.mark.skip(reason="not anywhere")
        def test_that_is_skipped(comm):
            pass

        def test_that_fails_on_all_ranks(comm):
            print("seen", "once")
            assert False

        def test_that_fails_on_one_rank(comm):
            assert comm.rank == 0

        def test_that_is_never_run(comm):
            pass
        """,
    )
    job = pytest_at(3, suite, "--maxfail=2", "-rs")
    assert job.returncode == 1
    assert job.stdout.count("test session starts") == 1
    assert job.stdout.count("2 failed, 1 skipped") == 1
    assert job.stdout.count("not anywhere") == 1
    assert "stopping after 2 failures" in job.stdout
    # One block for ranks that say the same; a warning that the MPI library printed on one of them makes two.
    everywhere = re.search(r"_ test_that_fails_on_all_ranks _.*?_ test_that_fails_on_one_rank _", job.stdout, re.DOTALL)
    blocks = everywhere[0].count("----- failed on")
    assert 1 <= blocks <= 3, job.stdout
    assert job.stdout.count("seen once") == blocks, job.stdout


def test_mpiexec_of_another_mpi_is_named(suite):
    write(suite, "tests/ranks/test_it.py", "def test_it(comm):\n    pass")
    environment = {**job_environment(1), "OMPI_COMM_WORLD_SIZE": "3"}
    job = complete([sys.executable, "-m", "pytest", "tests/ranks"], cwd=suite, env=environment)
    assert job.returncode != 0
    assert "launched as 3 ranks (OMPI_COMM_WORLD_SIZE=3), but MPI sees 1" in job.stdout + job.stderr


def test_ranks_need_no_mpiexec_at_size_1(suite):
    write(suite, "tests/ranks/test_it.py", "def test_it(comm):\n    assert comm.size == 1")
    assert complete([sys.executable, "-m", "pytest", "tests/ranks"], cwd=suite).returncode == 0


# tests/run.py


def test_run_tells_outcome_by_size_and_in_total(suite):
    write(
        suite,
        "tests/ranks/test_it.py",
        """
        import pytest

        def test_that_passes(comm):
            pass

        def test_that_is_the_same_at_every_size():
            pass

        def test_that_needs_company(comm):
            if comm.size == 1:
                pytest.skip("one rank only")

        @pytest.mark.sizes(2, 3)
        def test_that_is_long(comm):
            assert comm.size == 2

        @pytest.mark.sizes(7)
        def test_that_is_long_and_whose_size_is_not_run(comm):
            pass
        """,
    )
    write(suite, "tests/jobs/test_it.py", "def test_it():\n    pass")
    job = run(suite, "-n", "1", "2")
    assert job.returncode == 0
    words = [line.split() for line in job.stdout.splitlines()]
    assert ["passed", "failed", "skipped", "seconds"] in words
    assert ["1", "rank", "3", "0", "1"] in [line[:5] for line in words]
    assert ["2", "ranks", "4", "0", "0"] in [line[:5] for line in words]
    assert ["jobs/test_it", "1", "0", "0"] in [line[:4] for line in words]
    assert closing_line(job) == "8 passed, 0 failed, 1 skipped"


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


def test_file_that_waits_runs_beside_another(suite):
    # Each waits for the other, and the one core is not enough for two files that compute.
    for name in ("test_failing_ranks", "test_other"):
        write(
            suite,
            f"tests/jobs/{name}.py",
            """
            from pathlib import Path
            from patience import wait_until

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

"""The harness on tests that go wrong: each program below is a test suite of its own, run at 2 or 3 ranks."""

import mmap
import os
from pathlib import Path
import re
import shutil
import sys
import time

import pytest

from jobs.launch import ROOT, complete, job_environment, launch_source
from jobs.suites import closing_line, last_words, new_suite, pytest_at, reports, run, run_at, write
from run import SETTLED, SHARED_MEMORY, remove_memory_left_behind

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


def test_failures_are_repeated_after_table(on_one_rank):
    *failures, _ = last_words(on_one_rank)
    assert len(failures) == 6
    assert "failed: 3 ranks: tests/ranks/test_it.py::test_call: AssertionError: the middle rank is unwell" in failures


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
    for program, does in {"apt-get": "exit", ".venv/bin/python": "echo another number fails; exit 1"}.items():
        (tmp_path / program).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / program).chmod(0o755)
    job = complete([tmp_path / ".ci/run"], env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert job.returncode == 1
    end = job.stdout[-4000:]
    steps = r"make docs, make test, (\.venv/bin/python tests/run\.py -n 5 .*), "
    steps += "make test-peers, make test-kernels, make test-cupy"
    assert re.search(rf"\nfailed: {steps}\n$", end)
    for words in [
        "a page is missing",
        "another number fails",
        "failed: test 1 00",
        "failed: test-cupy 1 00",
        "torch is missing",
    ]:
        assert words in end
    assert "fine" not in end


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
    assert ["1", "rank", "2", "0", "1"] in [line[:5] for line in words]
    assert ["2", "ranks", "3", "0", "0"] in [line[:5] for line in words]
    assert ["3", "ranks", "1", "0", "0"] in [line[:5] for line in words]
    assert ["4", "ranks", "1", "0", "0"] in [line[:5] for line in words]
    assert ["jobs/test_it", "1", "0", "0"] in [line[:4] for line in words]
    assert closing_line(job) == "8 passed, 0 failed, 1 skipped"


@pytest.mark.parametrize("start", ["run", "pytest"])
def test_no_test_runs_at_sizes_of_others(suite, start):
    write(
        suite,
        "tests/ranks/test_it.py",
        """
        import pytest

        @pytest.mark.ranks(1)
        def test_of_one_rank(comm):
            assert comm.size == 1

        @pytest.mark.ranks(1, 2)
        def test_of_two_ranks_or_one(comm):
            assert comm.size == 2
        """,
    )
    job = run(suite, "-n", "2", "--no-jobs") if start == "run" else pytest_at(2, suite)
    assert job.returncode == 0, job.stdout
    assert ("2 passed, 0 failed" if start == "run" else "1 passed, 1 deselected") in closing_line(job)


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

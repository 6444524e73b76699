"""Tests that go wrong on some ranks, in every way: `pytest --ranks` tells which test and which ranks, and goes on."""

from collections.abc import Iterable
import os
from pathlib import Path
import pty
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from xml.etree import ElementTree

import pytest

from jobs.faulty_tests import AFTER, FAULTS, NOT_COLLECTED, START
from jobs.launch import ROOT, CompletedJob, complete, job_command, job_environment, output_of, stop
from pce_mpi.jobs.mpiexec import mpiexec
from pce_mpi.jobs.patience import slowdown, wait_until
from pce_mpi.testing.sizes import at_size

# Seconds in which no phase of a test ends.
SILENCE = 4


def write(folder: Path, source: str, name: str = "it") -> Path:
    (folder / f"test_{name}.py").write_text(textwrap.dedent(source), encoding="utf-8")
    return folder


def run(folder: Path, *arguments: str, limit: float = 100.0) -> CompletedJob:
    command = [sys.executable, "-m", "pytest", "--color=no", f"--ranks-timeout={SILENCE}", *arguments]
    return complete(command, cwd=folder, limit=limit, env={**job_environment(3), "COLUMNS": "150"})


def without_mpiexec(folder: Path) -> tuple[str, dict[str, str]]:
    """Return a Python beside which there is no mpiexec, and an environment without one."""
    python = folder / "python"
    python.symlink_to(sys.executable)
    paths = os.pathsep.join(path for path in sys.path if path)
    bare = {"PATH": "/usr/bin:/bin", "MPIEXEC": "", "COLUMNS": "150", "PYTHONPATH": paths}
    bare["LD_LIBRARY_PATH"] = f"{sys.prefix}/lib"  # of PyPI's MPI library, which is found beside its own Python
    return str(python), job_environment(1) | bare


def cases_of(report: Path) -> dict[str, str]:
    """Return what a report in JUnit's format says of each test: all that went wrong, or nothing."""
    cases: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        test = f"{case.get('classname')}::{case.get('name')}"
        wrong: Iterable[ElementTree.Element] = (each for each in case if each.tag in ("failure", "error"))
        cases[test] = cases.get(test, "") + "\n".join(f"{each.get('message')}\n{each.text}" for each in wrong)
    return cases


@pytest.fixture(scope="module")
def faulty(request, tmp_path_factory):
    """The names of the faults that are chosen, the cases of one run with them on 3 ranks, and its output."""
    faults, folder = {**FAULTS, **NOT_COLLECTED}, tmp_path_factory.mktemp("faulty")
    parametrized = [item for item in request.session.items if {"faulty", "name"} <= {*item.fixturenames}]
    names = {item.callspec.params["name"] for item in parametrized} or faults.keys()
    for name in names:
        write(folder, START + faults[name][0] + AFTER, name)
    options = ["--continue-on-collection-errors", "--junitxml=report.xml"]
    job = run(folder, "--ranks=3", *options, limit=400)
    assert "test session starts" in job.stdout, job.stdout + job.stderr
    return names, cases_of(folder / "report.xml"), job


@pytest.mark.parametrize("name", FAULTS)
def test_fault_names_its_test_and_its_ranks(faulty, name):
    _, cases, _ = faulty
    for words in FAULTS[name][1]:
        assert words in cases[f"test_{name}::test_it@3"]
    assert cases[f"test_{name}::test_after@3"] == ""


@pytest.mark.parametrize("name", NOT_COLLECTED)
def test_file_that_ranks_find_differently_fails_alone(faulty, name):
    _, cases, _ = faulty
    for words in NOT_COLLECTED[name][1]:
        assert words in cases[f"::test_{name}"]
    assert f"test_{name}::test_after@3" not in cases


def test_every_fault_is_counted_once(faulty):
    names, cases, job = faulty
    assert job.returncode == 1
    assert {test for test in cases if "::test_it" in test} == {
        f"test_{name}::test_it@3" for name in names & FAULTS.keys()
    }
    wrong = [f"test_{name}.py{'::test_it@3' * (name in FAULTS)}" for name in names]
    assert sorted(re.findall(r"^(?:FAILED|ERROR) (\S+)", job.stdout, re.MULTILINE)) == sorted(wrong)
    assert len(job.stdout) < 1_000_000


def test_rank_that_exits_after_its_tests_is_told(tmp_path):
    job = run(
        write(tmp_path, START + "import atexit\n\ndef test_it():\n    if here:\n        atexit.register(os._exit, 3)"),
        "--ranks=2",
    )
    assert job.returncode == 1
    assert "rank 1 of 2 ended with exit status 3" in job.stdout
    assert "after test_it.py::test_it" in job.stdout or "after the last test" in job.stdout


def test_rank_that_does_not_begin_is_told(tmp_path):
    job = run(write(tmp_path, START + "os._exit(3 * here)\n"), "--ranks=2")
    assert job.returncode == 1
    assert "before its first test" in job.stdout
    assert "ended with exit status" in job.stdout


@pytest.mark.parametrize(
    "fault, words",
    {
        "raise ValueError('unwell')": "before its first test, has failed",
        "raise pytest.UsageError('unwell')": "before its first test, has failed",
        "del items[1:]": "is not found any more",
    }.items(),
)
def test_tests_that_no_session_can_run_are_named(tmp_path, fault, words):
    tests = (
        "def test_it():\n    open('began', 'w')\n    os._exit(3)\n\ndef test_a():\n    pass\n\ndef test_b():\n    pass"
    )
    again = f"def pytest_collection_modifyitems(items):\n    if os.path.exists('began'):\n        {fault}"
    (tmp_path / "conftest.py").write_text(f"import os, pytest\n\n{again}\n", encoding="utf-8")
    job = run(write(tmp_path, START + tests), "--ranks=2", "--junitxml=report.xml")
    cases = cases_of(tmp_path / "report.xml")
    assert job.returncode == 1
    assert "ended with exit status 3" in cases["test_it::test_it@2"]
    assert words in cases["test_it::test_a@2"] and words in cases["test_it::test_b@2"], job.stdout
    assert "unwell" not in fault or "unwell" in job.stdout


def test_rank_ended_by_a_timeout_is_told(tmp_path):
    (tmp_path / "timeout.py").touch()
    write(tmp_path, START + "def test_it():\n    os._exit(1)\n")
    assert "thread method of pytest-timeout" in run(tmp_path, "-p", "timeout", "--ranks=2").stdout


def test_duplicate_that_ends_its_session_is_run_once(tmp_path):
    write(tmp_path, START + "def test_it():\n    os._exit(3)" + AFTER)
    job = run(tmp_path, "--ranks=2", "--keep-duplicates", "test_it.py", "test_it.py")
    assert "2 failed, 2 passed in" in job.stdout


ORDINARY = """
    from pathlib import Path
    import warnings

    import pytest

    @pytest.fixture(scope="module", params=["a", "b"])
    def letter(request):
        return request.param

    def test_letter(comm, letter):
        print("seen on", comm.rank)
        assert comm.allreduce(1) == comm.size

    @pytest.mark.ranks(2)
    def test_of_two(comm):
        assert comm.size == 2

    @pytest.mark.ranks(min=2)
    def test_of_several(comm):
        assert comm.size > 1

    @pytest.mark.ranks(5, 7)
    def test_of_others(comm):
        assert False

    @pytest.mark.mesh(data=2, model="rest")
    def test_mesh(mesh):
        assert str(mesh) == f"Mesh(data=2, model={mesh.size // 2})"

    @pytest.mark.parametrize("mesh", [{"rows": 3}, {"all": "rest"}], indirect=True, ids=str)
    def test_mesh_by_parameter(mesh, comm):
        assert mesh.size == comm.size

    def test_folder(comm, rank_tmp_path):
        (rank_tmp_path / str(comm.rank)).touch()
        comm.Barrier()
        assert len([*rank_tmp_path.iterdir()]) == comm.size

    @pytest.mark.xfail(strict=True)
    def test_expected():
        warnings.warn("careful")
        assert False

    @pytest.mark.skip(reason="nowhere")
    def test_skipped():
        pass
    """


def test_ordinary_tests_run_at_their_sizes(tmp_path):
    job = run(write(tmp_path, ORDINARY), "--ranks=1,2,3", "-rs", "-v", "--durations=3", "--junitxml=report.xml")
    assert job.returncode == 0, job.stdout
    cases = cases_of(tmp_path / "report.xml")
    sizes = {
        "test_letter[a]": [1, 2, 3],
        "test_of_two": [2],
        "test_of_several": [2, 3],
        "test_of_others": [1],
        "test_mesh": [2],
        "test_folder": [1, 2, 3],
    }
    for name, expected in sizes.items():
        assert [at_size(test)[1] for test in cases if at_size(test)[0] == f"test_it::{name}"] == expected
    assert "runs on 5 or 7 ranks, which 1 and 2 and 3 are not" in job.stdout
    assert "UserWarning: careful" in job.stdout and ", 3 warnings in" in job.stdout
    assert "slowest 3 durations" in job.stdout
    assert "test_it.py::test_of_two@2 PASSED" in job.stdout


def test_last_failures_and_names_run_alone(tmp_path):
    write(tmp_path, "def test_bad(comm):\n    assert comm.size != 2\n\ndef test_good():\n    pass")
    assert "1 failed, 3 passed" in run(tmp_path, "--ranks=1,2").stdout
    last = run(tmp_path, "--ranks=1,2", "--lf")
    assert "test_it.py::test_bad@2" in last.stdout and "1 failed in" in last.stdout.splitlines()[-1]
    named = run(tmp_path, "--ranks=1,2", "-p", "no:debugging", "--", "test_it.py::test_bad@2")
    assert "1 failed in" in named.stdout
    assert "2 passed, 2 deselected" in run(tmp_path, "--ranks=1,2", "-k", "good").stdout
    listed = run(tmp_path, "--ranks=1,2", "--collect-only", "-q").stdout
    assert "test_it.py::test_good@2" in listed and "passed" not in listed


def test_first_failure_ends_the_session(tmp_path):
    write(tmp_path, START + "def test_bad():\n    assert not here\n\ndef test_good():\n    pass")
    job = run(tmp_path, "--ranks=2,3", "-x")
    assert "stopping after 1 failures" in job.stdout
    assert job.stdout.splitlines()[-1].startswith("=") and "1 failed in" in job.stdout.splitlines()[-1]


def test_first_failure_lets_fixtures_end(tmp_path):
    fixture = (
        "yield\n    time.sleep(1)\n    open(f'ended-{comm.rank}', 'w')\n\ndef test_it(resource):\n    assert False"
    )
    write(tmp_path, START + f"@pytest.fixture(scope='module')\ndef resource():\n    {fixture}")
    assert run(tmp_path, "--ranks=2", "-x").returncode == 1
    assert len([*tmp_path.glob("ended-*")]) == 2


def test_first_error_of_collection_is_shown(tmp_path):
    write(write(tmp_path, "import no_such_module", "a"), "def test_it():\n    pass", "b")
    job = run(tmp_path, "--ranks=2", "-x")
    assert job.returncode == 1
    assert "No module named 'no_such_module'" in job.stdout


def test_number_in_a_name_is_of_that_name(tmp_path):
    for name in "ab":
        write(tmp_path, "def test_it(comm):\n    pass", name)
    assert "3 passed in" in run(tmp_path, "--ranks=1,2", "test_a.py", "test_b.py::test_it@2").stdout
    assert "3 passed, 1 deselected" in run(tmp_path, "--ranks=1,2", "--deselect", "test_a.py::test_it@2").stdout


def test_named_folder_is_divided_among_ranks(tmp_path):
    write(
        tmp_path,
        "def test_it(comm, tmp_path):\n    (tmp_path / 'x').touch()\n    comm.Barrier()\n"
        "    assert [*tmp_path.iterdir()]",
    )
    assert "1 passed in" in run(tmp_path, "--ranks=2", "--basetemp=base").stdout
    assert {path.parts[-3] for path in tmp_path.glob("base/*/*/x")} == {"2-0", "2-1"}


def test_number_that_is_not_asked_for_is_refused(tmp_path):
    job = run(write(tmp_path, "def test_it():\n    pass"), "--ranks=1,3", "test_it.py::test_it@2")
    assert job.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--ranks 1,3" in job.stderr and "@2" in job.stderr


def test_warning_of_any_rank_is_shown_once(tmp_path):
    source = (
        "import warnings\n\ndef test_it(comm):\n    warnings.warn('all')\n    if comm.rank:\n"
        "        warnings.warn('one')"
    )
    job = run(write(tmp_path, source), "--ranks=2")
    assert job.stdout.count("UserWarning: all") == job.stdout.count("UserWarning: one") == 1


def test_marks_count_without_ranks(tmp_path):
    write(
        tmp_path,
        "import pytest\n\n@pytest.mark.ranks(3)\ndef test_a():\n    assert False\n\n"
        "@pytest.mark.mesh(a=2)\ndef test_b(mesh):\n    assert False",
    )
    job = run(tmp_path, "-rs")
    assert job.returncode == 0
    assert "runs on 3 ranks, which 1 is not" in job.stdout and "runs on 2 ranks, which 1 is not" in job.stdout


def test_exit_has_its_status(tmp_path):
    job = run(write(tmp_path, "import pytest\n\ndef test_it():\n    pytest.exit('bye', returncode=7)"), "--ranks=2")
    assert job.returncode == 7 and "bye" in job.stdout


def test_much_output_is_shown_once(tmp_path):
    job = run(
        write(tmp_path, "def test_it():\n    for n in range(20000):\n        print(n, 'x' * 100)"), "--ranks=1", "-s"
    )
    assert re.findall(r"\[rank 0\] (\d+) x", job.stdout) == [str(n) for n in range(20000)]


def test_output_is_shown_as_it_comes(tmp_path):
    job = run(write(tmp_path, "def test_it(comm):\n    print('seen on', comm.rank)"), "--ranks=2", "-s")
    assert "[rank 0] seen on 0" in job.stdout
    assert "[rank 1] seen on 1" in job.stdout


def test_without_mpi_other_sizes_are_told(tmp_path):
    write(tmp_path, "import pytest\n\ndef test_it():\n    pass\n\n@pytest.mark.ranks(2)\ndef test_two():\n    pass")
    python, environment = without_mpiexec(tmp_path)
    job = complete([python, "-m", "pytest", "--ranks=1,2", "-rs"], cwd=tmp_path, env=environment)
    assert "no mpiexec was found" in job.stdout, job.stdout + job.stderr
    assert "1 passed, 1 skipped" in job.stdout


def test_srun_starts_ranks_within_a_job(tmp_path):
    write(tmp_path, "def test_it(comm):\n    assert comm.allreduce(1) == 2")
    python, environment = without_mpiexec(tmp_path)
    srun = tmp_path / "srun"  # a stand-in, from which mpiexec must not learn of a job that is none
    launcher = f"env -u SLURM_JOB_ID {shlex.join(mpiexec())}"
    srun.write_text(f'#!/bin/sh\n[ "$3" = --kill-on-bad-exit=1 ] && shift 3 && exec {launcher} "$@"\n')
    srun.chmod(0o755)
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    job = complete([python, "-m", "pytest", "--ranks=2"], cwd=tmp_path, env=environment | {"SLURM_JOB_ID": "1"})
    assert f"ranks: 2, by {srun} --overlap" in job.stdout, job.stdout + job.stderr
    assert "1 passed in" in job.stdout


@pytest.mark.parametrize("ranks", ["0", "two", "1,"])
def test_wrong_sizes_are_refused_in_words(tmp_path, ranks):
    job = run(tmp_path, f"--ranks={ranks}")
    assert job.returncode == pytest.ExitCode.USAGE_ERROR
    assert "give numbers of ranks" in job.stderr


@pytest.mark.parametrize("mark", ["ranks('a')", "ranks(max=2)", "mesh(2)", "mesh(a='rest', b='rest')", "mesh(a=0)"])
def test_wrong_marks_are_refused_in_words(tmp_path, mark):
    job = run(write(tmp_path, f"import pytest\n\n@pytest.mark.{mark}\ndef test_it(mesh):\n    pass"), "--ranks=2")
    assert job.returncode == pytest.ExitCode.USAGE_ERROR
    assert re.search(rf"pytest.mark.{mark.partition('(')[0]} takes|one dim of a mesh can be the \"rest\"", job.stderr)


def test_file_that_is_not_there_is_refused(tmp_path):
    job = run(tmp_path, "--ranks=1,2", "test_no.py")
    assert job.returncode == pytest.ExitCode.USAGE_ERROR
    assert "file or directory not found: test_no.py" in job.stderr


def test_most_failures_are_counted_over_sizes(tmp_path):
    write(tmp_path, "def test_bad():\n    assert False\n\ndef test_worse():\n    assert False")
    assert "3 failed in" in run(tmp_path, "--ranks=1,2", "--maxfail=3").stdout.splitlines()[-1]


def test_report_on_the_page_is_what_pytest_says(tmp_path):
    page = (ROOT / "docs/testing.md").read_text(encoding="utf-8")
    write(tmp_path, re.findall(r"```py\n(from mpi4py.*?)```", page, re.DOTALL)[0], "mean")
    job = run(tmp_path, "--ranks=1,3", "--tb=line")
    failure = re.search(r"^FAILED .*$", job.stdout, re.MULTILINE)
    assert failure and failure[0] in page
    assert re.search(r"^\S+/test_mean.py:14: ranks 1, 2 of 3: assert", job.stdout, re.MULTILINE)


def test_order_by_chance_is_that_of_all_ranks(tmp_path):
    (tmp_path / "chance.py").write_text(
        "import random\n\ndef pytest_addoption(parser):\n    parser.addoption('--randomly-seed', type=int)\n\n"
        "def pytest_configure(config):\n"
        "    seed = config.option.randomly_seed or random.getrandbits(30)\n"
        "    config.option.randomly_seed = getattr(config, 'workerinput', {'randomly_seed': seed})['randomly_seed']\n\n"
        "def pytest_collection_modifyitems(config, items):\n"
        "    random.Random(config.option.randomly_seed).shuffle(items)\n"
    )
    write(tmp_path, START + "@pytest.mark.parametrize('n', range(9))\ndef test_it(n):\n    n or here and os._exit(3)")
    assert "1 failed, 8 passed in" in run(tmp_path, "-p", "chance", "--ranks=2").stdout


# Under a launcher


def test_launched_ranks_are_one_session(tmp_path):
    write(
        tmp_path,
        """
        import pytest

        @pytest.mark.skip(reason="not anywhere")
        def test_that_is_skipped(comm):
            pass

        def test_that_fails_on_all_ranks(comm):
            assert False, "seen once"

        def test_that_fails_on_one_rank(comm):
            assert comm.rank == 0

        def test_that_is_never_run(comm):
            pass
        """,
    )
    options = ["--maxfail=2", "-rs", "--color=no", "--junitxml=report.xml"]
    job = complete(job_command(3, "-m", "pytest", "--ranks=3", *options), cwd=tmp_path, env=job_environment(3))
    assert job.returncode == 1
    assert job.stdout.count("test session starts") == 1
    assert job.stdout.count("2 failed, 1 skipped") == 1
    assert job.stdout.count("not anywhere") == 1
    assert "rank 2 of 3 failed; passed on 1" in job.stdout
    assert len(cases_of(tmp_path / "report.xml")) == 3


def test_launched_rank_that_leaves_ends_the_job(tmp_path):
    write(tmp_path, START + "def test_it():\n    if here:\n        raise ValueError('not with me')\n    comm.Barrier()")
    job = complete(job_command(2, "-m", "pytest", "--ranks=2"), cwd=tmp_path, env=job_environment(2))
    assert job.returncode != 0
    assert "test_it (call) failed here and left other ranks waiting" in job.stderr
    assert "ValueError: not with me" in job.stderr


@pytest.mark.parametrize("hook", ["configure(config)", "collection_modifyitems(items)", "runtest_protocol(item)"])
def test_launched_rank_that_cannot_run_ends_the_job(tmp_path, hook):
    source = f"{START}def pytest_{hook}:\n    if here:\n        raise pytest.UsageError('unwell')\n"
    (tmp_path / "conftest.py").write_text(source, encoding="utf-8")
    write(tmp_path, "def test_it(comm):\n    comm.Barrier()")
    job = complete(job_command(2, "-m", "pytest", "--ranks=2"), cwd=tmp_path, env=job_environment(2))
    assert job.returncode != 0
    assert "rank 1 of 2] pytest could not run: unwell" in job.stderr


@pytest.mark.parametrize("hang", ["comm.recv(source=comm.rank, tag=7)", "''.join(map(str, iter(int, 1)))"])
def test_launched_ranks_that_all_hang_are_told(tmp_path, hang):
    write(tmp_path, f"def test_it(comm):\n    {hang}")
    command = job_command(2, "-m", "pytest", "--ranks=2", f"--ranks-timeout={SILENCE}")
    job = complete(command, cwd=tmp_path, env=job_environment(2), limit=100)
    assert job.returncode != 0
    assert job.stderr.count("in test_it") == 2
    assert "recv" not in hang or "rank 1 of 2] test_it.py::test_it, after its setup: nothing has ended" in job.stderr


def test_mpiexec_of_another_mpi_is_named(tmp_path):
    write(tmp_path, "def test_it(comm):\n    pass")
    environment = {**job_environment(1), "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"}
    job = complete([sys.executable, "-m", "pytest", "--ranks=3"], cwd=tmp_path, env=environment)
    assert job.returncode != 0
    assert "launched as 3 ranks (OMPI_COMM_WORLD_SIZE=3), but MPI sees 1" in job.stdout + job.stderr


# Ends


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_session_that_ends_leaves_no_process_behind(tmp_path, number):
    sleep = "open('pids', 'a').write(f'{os.getpid()}\\n')\n    time.sleep(300)"
    write(tmp_path, f"import os, time\n\ndef test_it():\n    {sleep}")
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "--ranks=2"],
        cwd=tmp_path,
        env=job_environment(2),
        stdout=subprocess.PIPE,
        text=True,
    )
    pids = tmp_path / "pids"
    wait_until(lambda: pids.exists() and pids.read_text().count("\n") == 2)
    process.send_signal(number)
    printed, _ = output_of(process)
    assert number == signal.SIGKILL or "KeyboardInterrupt" in printed
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split()))


def test_debugger_opens_on_the_rank_that_failed(tmp_path):
    write(tmp_path, START + "def test_it():\n    answer = 42 + comm.rank\n    assert not here")
    main, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "--ranks=2", "--pdb", "--color=no"],
        cwd=tmp_path,
        env=job_environment(2),
        stdin=other,
        stdout=other,
        stderr=other,
        start_new_session=True,
    )
    os.close(other)
    said = ""
    deadline = time.monotonic() + 60 * slowdown()
    try:
        for typed, awaited in ((b"", "(Pdb)"), (b"p answer\nc\n", " failed in")):
            os.write(main, typed)
            while awaited not in said:
                assert time.monotonic() < deadline, said
                said += os.read(main, 10_000).decode(errors="replace")
    finally:
        stop(process)
        os.close(main)
    assert "rank 1 of 2" in said and "43" in said


@pytest.mark.parametrize("option, words", {"--pdb": "needs a terminal", "--stepwise": "give -x"}.items())
def test_option_that_does_not_work_is_refused(tmp_path, option, words):
    job = run(write(tmp_path, "def test_it():\n    pass"), "--ranks=2", option)
    assert job.returncode == pytest.ExitCode.USAGE_ERROR
    assert option in job.stderr and words in job.stderr

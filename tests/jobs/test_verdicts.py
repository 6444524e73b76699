"""Tests, plugins and conftests that get in the way of a verdict of `pytest --ranks`: a failing test is still told."""

import re
import signal
import subprocess
import sys
import textwrap

import pytest

from jobs.faulty_tests import START
from jobs.launch import complete, job_command, job_environment
from jobs.test_faulty_tests import cases_of, run, write
from pce_mpi.jobs.patience import wait_until
from pce_mpi.testing.session import _in_names_of_first_rank

NAMES = """
import builtins, json, os, signal, socket, threading, time
import pytest

MODULES = {"builtins": builtins, "json": json, "os": os, "signal": signal, "socket": socket, "threading": threading,
           "time": time}
NAMES = [(module, name) for module in MODULES for name in sorted(vars(MODULES[module])) if not name.startswith("__")]

@pytest.mark.parametrize(("module", "name"), NAMES)
def test_name(monkeypatch, module, name):
    monkeypatch.setattr(MODULES[module], name, lambda *arguments, **options: None)
    assert False, "unwell"
"""


def outcomes(folder, *arguments):
    """Return the outcome of each test in the verbose report, the job, and what it printed."""
    job = run(folder, "-v", "--tb=short", *arguments)
    words = re.findall(r"::(\S+?) (PASSED|FAILED|ERROR|RERUN|SKIPPED)", job.stdout)
    return dict(words), job


@pytest.mark.parametrize("module", ["builtins", "json", "os", "signal", "socket", "threading", "time"])
def test_patched_name_hides_no_failure(tmp_path, module):
    write(tmp_path, NAMES)
    run(tmp_path, "--ranks=1", f"-k={module}-", "--junitxml=report.xml", "-p", "no:cacheprovider", limit=400)
    count = complete([sys.executable, "-m", "pytest", "-q", "--co", f"-k={module}-"], cwd=tmp_path).stdout
    names = re.findall(r"::(test_name\[\S+\])", count)
    cases = cases_of(tmp_path / "report.xml")
    assert len(names) > 5
    for name in names:
        assert cases[f"test_it::{name.replace('[', '@1[')}"], name


def test_patched_sleep_fails_no_right_test(tmp_path):
    write(
        tmp_path,
        START + "def test_it(monkeypatch):\n"
        "    monkeypatch.setattr(time, 'sleep', lambda _: 1 / 0)\n"
        "    begin = time.monotonic()\n"
        "    while here and time.monotonic() < begin + 1: pass\n",
    )
    assert "1 passed in" in run(tmp_path, "--ranks=2").stdout


def test_report_that_cannot_be_written_is_a_failure(tmp_path):
    write(
        tmp_path,
        """
        import resource
        import pytest

        @pytest.fixture
        def full():
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
            yield
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

        def test_fails(full):
            assert "right" == "wrong" * 3000

        def test_passes():
            pass
        """,
    )
    found, job = outcomes(tmp_path, "--ranks=1", "-p", "no:cacheprovider")
    assert found == {"test_fails@1": "ERROR", "test_passes@1": "PASSED"}  # its setup has filled the disk
    assert job.returncode == 1


def test_damaged_report_is_a_failure(tmp_path):
    write(
        tmp_path,
        START + "import glob, tempfile\n"
        "def test_writes_to_the_journal():\n"
        "    for path in glob.glob(f'{tempfile.gettempdir()}/pce_mpi-job-*/rank-0.jsonl'):\n"
        "        if str(os.getpid()) in open(path).readline():\n"
        "            open(path, 'ab').write(b'half an eve')\n" + "def test_passes():\n    pass",
    )
    found, job = outcomes(tmp_path, "--ranks=2")
    assert found["test_writes_to_the_journal@2"] != "PASSED"
    assert found["test_passes@2"] == "PASSED"
    assert "has written what is no event" in job.stdout


WRAPPER = """
import pytest
from mpi4py import MPI

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" and MPI.COMM_WORLD.rank == 1:
        report.outcome, report.longrepr = "failed", "a soft assertion failed"
    return report
"""

STATUS = """
from mpi4py import MPI

def pytest_sessionfinish(session, exitstatus):
    if MPI.COMM_WORLD.rank == 1:
        session.exitstatus = STATUS
"""

SILENT = """
import pytest
from mpi4py import MPI

def pytest_runtest_protocol(item, nextitem):
    if MPI.COMM_WORLD.size > 1:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True
"""

TWICE_ON_ONE = """
from _pytest.runner import runtestprotocol
from mpi4py import MPI

def pytest_runtest_protocol(item, nextitem):
    if MPI.COMM_WORLD.rank == 1:
        runtestprotocol(item, nextitem=nextitem, log=False)
"""

LEFT_OUT = """
from mpi4py import MPI

def pytest_runtestloop(session):
    return MPI.COMM_WORLD.size > 1 or None
"""


@pytest.mark.parametrize(
    ("conftest", "words"),
    [
        (WRAPPER, "a soft assertion failed"),
        (STATUS.replace("STATUS", "1"), "sessions have ended with status 1 (rank 1)"),
        (STATUS.replace("STATUS", "77"), "sessions have ended with status 77 (rank 1)"),
        (SILENT, "no report has come of its setup and teardown"),
        (TWICE_ON_ONE, "is in another phase than other ranks"),
        (LEFT_OUT, "the ranks have ended their session without it"),
    ],
)
def test_conftest_hides_no_failure(tmp_path, conftest, words):
    (tmp_path / "conftest.py").write_text(conftest, encoding="utf-8")
    write(tmp_path, "def test_it():\n    pass\n\ndef test_other():\n    pass")
    job = run(tmp_path, "--ranks=2", "-p", "no:cacheprovider")
    assert job.returncode == 1
    assert words in job.stdout


def test_forked_child_is_no_rank(tmp_path):
    write(
        tmp_path,
        START + "def test_fails():\n"
        "    if here:\n"
        "        child = os.fork()\n"
        "        if child == 0: return\n"
        "        os.waitpid(child, 0)\n"
        "        assert False, 'the parent fails'\n\n"
        "def test_passes():\n    pass",
    )
    found, job = outcomes(tmp_path, "--ranks=2")
    assert found == {"test_fails@2": "FAILED", "test_passes@2": "PASSED"}
    assert "the parent fails" in job.stdout


def test_subtests_are_parts_of_their_test(tmp_path):
    write(
        tmp_path,
        START + "import unittest\n\n"
        "def test_blocks(subtests):\n"
        "    for block in range(1 + here):\n"
        "        with subtests.test(block=block): assert block >= 0\n\n"
        "def test_fails(subtests):\n"
        "    for block in range(1 + here):\n"
        "        with subtests.test('a message', block=block): assert block == 0\n\n"
        "class TestUnits(unittest.TestCase):\n"
        "    def test_units(self):\n"
        "        for n in range(3):\n"
        "            with self.subTest(n=n): self.assertTrue(n < 2 or not here)\n\n"
        "def test_passes(): assert comm.allreduce(1) == comm.size",
    )
    found, job = outcomes(tmp_path, "--ranks=1,2")
    assert {name for name, outcome in found.items() if outcome == "FAILED"} == {
        "test_fails@2",
        "TestUnits::test_units@2",
    }
    assert found["test_passes@2"] == "PASSED"
    assert "subtest [a message] (block=1)" in job.stdout
    assert "2 failed, 6 passed, 10 subtests passed" in job.stdout


RERUN = """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    for run in range(2):
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        again = run == 0 and any(each.failed for each in reports)
        for each in reports:
            if again and each.failed:
                each.outcome = "rerun"
            item.ihook.pytest_runtest_logreport(report=each)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if not again:
            break
        item._initrequest()
    return True
"""


def test_test_that_runs_again_has_passed(tmp_path):
    (tmp_path / "conftest.py").write_text(RERUN, encoding="utf-8")
    write(
        tmp_path,
        START + "runs = []\n\ndef test_again():\n    runs.append(1)\n    assert not here or len(runs) > 1\n\n"
        "def test_fails():\n    assert not here\n\ndef test_passes():\n    pass",
    )
    found, job = outcomes(tmp_path, "--ranks=2")
    assert found == {"test_again@2": "PASSED", "test_fails@2": "FAILED", "test_passes@2": "PASSED"}
    assert job.returncode == 1


NODE = """
import pytest

class Hooks:
    @pytest.hookspec
    def pytest_configure_node(self, node): ...

def pytest_addhooks(pluginmanager):
    pluginmanager.add_hookspecs(Hooks)

def pytest_configure_node(node):
    node.workerinput["of_chance"] = 77

def pytest_sessionstart(session):
    if hasattr(session.config, "workerinput"):
        assert session.config.workerinput["of_chance"] == 77
"""


def test_ranks_are_told_what_workers_of_xdist_are(tmp_path):
    (tmp_path / "conftest.py").write_text(NODE, encoding="utf-8")
    write(tmp_path, "def test_it():\n    pass")
    assert "1 passed in" in run(tmp_path, "--ranks=2").stdout


def test_names_with_ranks_in_them_are_equal(tmp_path):
    write(
        tmp_path,
        START + "@pytest.mark.parametrize('value', [1, 2], ids=[f'one-{comm.rank}', f'two-{id(comm)}'])\n"
        "def test_it(value):\n    assert not here or value == 1\n\n"
        "@pytest.mark.parametrize('value', [1, 2])\ndef test_other(value):\n"
        "    os._exit(3) if here and value == 1 else 0",
    )
    job = run(tmp_path, "--ranks=2", "-v")
    assert "test_it@2[one-0] PASSED" in job.stdout
    assert re.search(r"test_it@2\[two-\d+\] FAILED", job.stdout)
    assert "2 failed, 2 passed in" in job.stdout


def test_order_of_equal_names_is_not_changed():
    names = ["a::t[x]", "a::t[y]", "b::t"]
    assert _in_names_of_first_rank([names, names[::-1]]) == [names, names[::-1]]
    assert _in_names_of_first_rank([["a::t[0]", "a::u"], ["a::t[1]", "a::u"]]) == [["a::t[0]", "a::u"]] * 2
    assert _in_names_of_first_rank([["a::t[0]"], ["a::t[1]", "a::t[2]"]]) == [["a::t[0]"], ["a::t[1]", "a::t[2]"]]


def test_state_machines_draw_alike_on_ranks(tmp_path):
    write(
        tmp_path,
        START + "from hypothesis import settings, strategies as st\n"
        "from hypothesis.stateful import RuleBasedStateMachine, rule\n\n"
        "class Machine(RuleBasedStateMachine):\n"
        "    @rule(n=st.integers(0, 1000))\n"
        "    def add(self, n): assert len({*comm.allgather(n)}) == 1\n\n"
        "class Failing(RuleBasedStateMachine):\n"
        "    @rule(n=st.integers(0, 1000))\n"
        "    def add(self, n): assert not here or n < 500\n\n"
        "TestMachine, TestFailing = Machine.TestCase, Failing.TestCase\n"
        "TestMachine.settings = TestFailing.settings = settings(max_examples=20, stateful_step_count=5)\n",
    )
    found, job = outcomes(tmp_path, "--ranks=2")
    assert found == {"TestMachine::runTest@2": "PASSED", "TestFailing::runTest@2": "FAILED"}
    assert "state.add(n=500)" in job.stdout


def test_properties_that_json_has_not_are_text(tmp_path):
    write(
        tmp_path,
        "def test_it(record_property):\n    circle = []\n    circle.append(circle)\n"
        "    record_property('circle', circle)\n    record_property('by tuple', {(1, 2): 3})\n",
    )
    job = run(tmp_path, "--ranks=2", "--junitxml=report.xml")
    assert "1 passed in" in job.stdout
    assert "[[...]]" in (tmp_path / "report.xml").read_text()


# Where nobody has asked for ranks


def test_marks_of_other_projects_are_left_alone(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    mesh: kind\n    ranks: of cards\n")
    write(
        tmp_path,
        """
        import pytest

        @pytest.mark.mesh("triangles")
        def test_one(): pass

        @pytest.mark.ranks("high")
        def test_two(): pass

        @pytest.mark.mesh(n=4)
        def test_three(): pass
        """,
    )
    assert "3 passed in" in run(tmp_path).stdout


def test_installed_plugin_is_seen_in_its_name_alone(tmp_path):
    write(tmp_path, "def test_it():\n    pass")
    plugins = []
    for option in ([], ["-p", "no:pce_mpi"]):
        job = complete([sys.executable, "-m", "pytest", "--trace-config", *option], cwd=tmp_path)
        assert "1 passed in" in job.stdout
        plugins.append({line.split(":")[0] for line in job.stdout.splitlines() if "PLUGIN registered" in line})
        plugins[-1] = {re.sub(r" at 0x[0-9a-f]+|0x[0-9a-f]+", "", line) for line in plugins[-1]}
    assert all("pce_mpi" in line for line in plugins[0] ^ plugins[1])


def test_launched_ranks_without_the_option_are_ordinary(tmp_path):
    write(
        tmp_path,
        """
        from mpi4py import MPI

        def test_sum(): assert MPI.COMM_WORLD.allreduce(1) == 2
        def test_other(): assert MPI.COMM_WORLD.rank < 5
        """,
    )
    job = complete(job_command(2, "-m", "pytest", "-p", "no:cacheprovider"), cwd=tmp_path, env=job_environment(2))
    assert job.returncode == 0
    assert job.stdout.count("2 passed in") == 2


def test_launched_tests_on_ranks_want_the_option(tmp_path):
    write(tmp_path, "def test_it(comm):\n    comm.Barrier()")
    job = complete(job_command(2, "-m", "pytest", "-p", "no:cacheprovider"), cwd=tmp_path, env=job_environment(2))
    assert job.returncode != 0
    assert "test_it is a test on ranks, and mpiexec has started several: give --ranks" in job.stderr


def test_conftest_for_ranks_is_named_where_it_fails(tmp_path):
    (tmp_path / "conftest.py").write_text("from mpi4py import MPI\nassert MPI.COMM_WORLD.size == 2, 'needs two'\n")
    write(tmp_path, "def test_it():\n    pass")
    job = run(tmp_path, "--ranks=2")
    assert job.returncode == pytest.ExitCode.USAGE_ERROR
    assert "could not be imported in the session that starts the ranks and reports" in job.stderr
    assert "needs two" in job.stderr


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--ranks=", "--ranks ''"),
        ("--ranks=99999999999999999999", "below a million"),
        ("--ranks-timeout=nan", "invalid number of seconds value: 'nan'"),
        ("--ranks-timeout=0", "invalid number of seconds value: '0'"),
        ("--ranks-timeout=-3", "invalid number of seconds value: '-3'"),
    ],
)
def test_wrong_numbers_are_refused_in_words(tmp_path, option, words):
    write(tmp_path, "def test_it():\n    pass")
    job = run(tmp_path, *([] if option.startswith("--ranks=") else ["--ranks=2"]), option)
    assert job.returncode == pytest.ExitCode.USAGE_ERROR
    assert words in job.stderr


def test_line_of_a_failure_is_one_line(tmp_path):
    write(tmp_path, START + "def test_it():\n    assert not here, 'one\\ntwo'")
    job = run(tmp_path, "--ranks=1,2", "--tb=line")
    failures = job.stdout.partition("= FAILURES =")[2].partition("short test summary")[0].splitlines()
    assert len([line for line in failures if "test_it.py" in line or "two" in line]) == 1
    assert re.findall(r"\[ *(\d+)%\]", job.stdout) == ["100"]


def test_mark_for_other_sizes_deselects_nothing(tmp_path):
    write(tmp_path, "import pytest\n\n@pytest.mark.ranks(2)\ndef test_it():\n    pass\n\ndef test_other():\n    pass")
    job = run(tmp_path, "--ranks=1,2", "-p", "no:capture")
    assert "3 passed in" in job.stdout
    assert "deselected" not in job.stdout


def test_launched_ranks_with_failures_do_not_abort(tmp_path):
    write(tmp_path, textwrap.dedent("def test_it(comm):\n    assert False, 'unwell'"))
    job = complete(job_command(2, "-m", "pytest", "--ranks=2"), cwd=tmp_path, env=job_environment(2))
    assert job.returncode == 1
    assert "MPI_Abort" not in job.stdout + job.stderr
    assert "application called" not in job.stdout + job.stderr


def test_terminated_session_reports_what_had_failed(tmp_path):
    write(
        tmp_path,
        START + "def test_fails():\n    assert False, 'unwell'\n\n"
        "def test_is_slow():\n    open(f'slow-{comm.rank}', 'w').close()\n    time.sleep(100)",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "--ranks=2"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    wait_until((tmp_path / "slow-1").exists)
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "AssertionError: unwell" in stdout
    assert "Interrupted: SIGTERM" in stdout


def test_long_wait_says_what_it_waits_for(tmp_path):
    (tmp_path / "conftest.py").write_text("from pce_mpi.testing import controller\n\ncontroller._NOTICE = 0.2\n")
    write(tmp_path, START + "def test_it():\n    time.sleep(2 * here)")
    assert "nothing has ended in test_it.py::test_it@2 for 0.2 s; the wait ends in" in run(tmp_path, "--ranks=2").stdout

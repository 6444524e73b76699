"""Files of tests that go wrong, each in its own way, with what pytest must say of them.

In each file, the tests that are named after the fault fail or are errors, and `test_after` passes.
"""

AFTER = """

def test_after():
    from mpi4py import MPI

    assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size
"""

START = """
from mpi4py import MPI
import os, pytest, signal, sys, time

comm = MPI.COMM_WORLD
here = comm.rank == 1

"""

# For each fault: the file, and texts that stand in the report of its test.
FAULTS: dict[str, tuple[str, list[str]]] = {
    "assert_on_one_rank": (
        "def test_it():\n    assert not here, 'unwell'",
        ["rank 1 of 3 failed; passed on 2", "unwell"],
    ),
    "assert_on_two_ranks": (
        "def test_it():\n    first = comm.rank == 0\n    assert first, 'unwell'",
        ["ranks 1, 2 of 3 failed; passed on 1", "unwell"],
    ),
    "assert_on_all_ranks": ("def test_it():\n    assert False, 'unwell'", ["every rank of 3 failed", "unwell"]),
    "raise_before_a_collective": (
        "def test_it():\n    if here:\n        raise ValueError('not with me')\n    comm.Barrier()",
        ["rank 1 of 3 failed; others were waiting", "not with me", "meanwhile, ranks 0, 2 of 3", "in test_it"],
    ),
    "raise_before_a_call_of_the_package": (
        """
import numpy as np
import pce_mpi as pce

def test_it():
    if here:
        raise ValueError("not with me")
    pce.softmax_cross_entropy(np.zeros((2, 3)), np.zeros(2, int), comm=comm)
""",
        ["rank 1 of 3 failed", "ValueError: not with me"],
    ),
    "setup_on_one_rank": (
        "@pytest.fixture\ndef broken():\n    assert not here, 'unwell'\n\ndef test_it(broken):\n    pass",
        ["failed on setup", "rank 1 of 3 failed; passed on 2", "unwell"],
    ),
    "teardown_on_one_rank": (
        "@pytest.fixture\ndef broken():\n    yield\n    assert not here, 'unwell'\n\ndef test_it(broken):\n    pass",
        ["failed on teardown", "rank 1 of 3 failed; passed on 2", "unwell"],
    ),
    "fixture_of_the_module_on_one_rank": (
        "@pytest.fixture(scope='module')\ndef broken():\n    assert not here, 'unwell'\n\n"
        "def test_it(broken):\n    pass",
        ["failed on setup", "rank 1 of 3 failed; passed on 2", "unwell"],
    ),
    "collectives_in_another_order": (
        """
def test_it():
    first, second = (comm.Barrier, comm.Dup) if here else (comm.Dup, comm.Barrier)
    first()
    time.sleep(1000)
""",
        ["--ranks-timeout", "at that time, ranks 0, 1, 2 of 3", "in test_it"],
    ),
    "receive_of_nothing": (
        "def test_it():\n    if here:\n        comm.recv(source=0, tag=77)",
        ["--ranks-timeout", "at that time, rank 1 of 3", "in test_it", "at that time, ranks 0, 2 of 3"],
    ),
    "sys_exit": (
        "def test_it():\n    if here:\n        sys.exit('enough')",
        ["rank 1 of 3 failed; passed on 2", "SystemExit: enough"],
    ),
    "pytest_exit": (
        "def test_it():\n    if here:\n        pytest.exit('enough of this')\n    comm.Barrier()",
        ["rank 1 left the session", "enough of this", "meanwhile, ranks 0, 2 of 3"],
    ),
    "keyboard_interrupt": (
        "def test_it():\n    if here:\n        raise KeyboardInterrupt\n    comm.Barrier()",
        ["rank 1 left the session", "meanwhile, ranks 0, 2 of 3"],
    ),
    "os_exit": (
        "def test_it():\n    if here:\n        os._exit(3)\n    comm.Barrier()",
        ["rank 1 of 3 ended with exit status 3"],
    ),
    "os_exit_0": (
        "def test_it():\n    if here:\n        os._exit(0)\n    comm.Barrier()",
        ["rank 1 of 3 ended with exit status 0"],
    ),
    "kill": (
        "def test_it():\n    if here:\n        os.kill(os.getpid(), 9)\n    comm.Barrier()",
        ["rank 1 of 3 died of SIGKILL"],
    ),
    "terminate": (
        "def test_it():\n    if here:\n        os.kill(os.getpid(), 15)\n    comm.Barrier()",
        ["rank 1 of 3 died of SIGTERM"],
    ),
    "mpi_abort": (
        "def test_it():\n    if here:\n        comm.Abort(7)\n    comm.Barrier()",
        ["exit status 7"],
    ),
    "segmentation_fault": (
        "import ctypes\n\ndef test_it():\n    if here:\n        ctypes.string_at(0)\n    comm.Barrier()",
        ["rank 1 of 3 died of SIGSEGV", "in test_it"],
    ),
    "loop_in_python": (
        "def test_it():\n    while here:\n        pass\n    comm.Barrier()",
        ["--ranks-timeout", "at that time, rank 1 of 3", "in test_it"],
    ),
    "loop_in_c": (
        "def test_it():\n    if here:\n        ''.join(map(str, iter(int, 1)))\n    comm.Barrier()",
        ["--ranks-timeout", "at that time, rank 1 of 3", "in test_it"],
    ),
    "sleep_with_signals_blocked": (
        """
def test_it():
    if here:
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
        time.sleep(1000)
    comm.Barrier()
""",
        ["--ranks-timeout", "at that time, rank 1 of 3", "does not answer"],
    ),
    "setup_beside_a_common_folder": (
        "@pytest.fixture\ndef broken():\n    assert not here, 'unwell'\n\n"
        "def test_it(broken, rank_tmp_path):\n    pass",
        ["failed on setup", "rank 1 of 3 failed; passed on 2", "unwell"],
    ),
    "hang_in_teardown": (
        "@pytest.fixture\ndef broken():\n    yield\n    time.sleep(1000 * here)\n\ndef test_it(broken):\n    pass",
        ["failed on teardown", "--ranks-timeout", "at that time, rank 1 of 3", "in broken"],
    ),
    "part_of_a_test": (
        "def test_it(subtests):\n    with subtests.test('part'):\n        assert not here, 'unwell'",
        ["rank 1 of 3 failed; passed on 2", "unwell"],
    ),
    "alarm_on_all_ranks": (
        """
def stop(*arguments):
    raise TimeoutError("too slow")

def test_it():
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(1 + here)  # those of the others come while they wait for it
    if here:
        time.sleep(1000)
""",
        ["rank 1 of 3 failed; passed on 2", "too slow"],
    ),
    "output_of_50_MB": (
        "def test_it():\n    print('x' * 50_000_000)\n    assert not here, 'unwell'",
        ["rank 1 of 3 failed; passed on 2", "unwell"],
    ),
    "skip_on_one_rank": (
        "def test_it():\n    if here:\n        pytest.skip('not here')",
        ["rank 1 of 3 skipped; passed on 2", "not here"],
    ),
    "skip_before_a_collective": (
        "def test_it():\n    if here:\n        pytest.skip('not here')\n    comm.Barrier()",
        ["rank 1 of 3 skipped; others were waiting", "not here", "meanwhile, ranks 0, 2 of 3"],
    ),
    "skip_by_mark_on_one_rank": (
        "@pytest.mark.skipif(here, reason='not here')\ndef test_it():\n    pass",
        ["rank 1 of 3 skipped; passed on 2", "not here"],
    ),
    "expected_failure_on_one_rank": (
        "@pytest.mark.xfail(strict=False)\ndef test_it():\n    assert not here",
        ["rank 1 of 3 skipped; passed on 2"],
    ),
    "warning_as_error_on_one_rank": (
        "import warnings\n\n@pytest.mark.filterwarnings('error')\n"
        "def test_it():\n    if here:\n        warnings.warn('careful')",
        ["rank 1 of 3 failed; passed on 2", "UserWarning: careful"],
    ),
    "exception_group": (
        "def test_it():\n    if here:\n        raise ExceptionGroup('two', [ValueError('one'), TypeError('other')])",
        ["rank 1 of 3 failed; passed on 2", "ValueError: one"],
    ),
    "examples_of_hypothesis": (
        """
from hypothesis import given, strategies as st

@given(x=st.integers(0, 100))
def test_it(x):
    comm.Barrier()
    assert not here or x < 50
""",
        ["rank 1 of 3 failed", "x=50"],
    ),
}

# Files of which no test is found on some rank, or others on each.
NOT_COLLECTED: dict[str, tuple[str, list[str]]] = {
    "import_error_on_one_rank": (
        "if here:\n    raise ImportError('not on this rank')\n\ndef test_it():\n    pass",
        ["rank 1 of 3 failed; passed on 2", "not on this rank"],
    ),
    "importorskip_on_one_rank": (
        "if here:\n    pytest.importorskip('no_such_module')\n\ndef test_it():\n    pass",
        ["rank 1 of 3 skipped; passed on 2", "no_such_module", "test_it: ranks 0, 2"],
    ),
    "parametrization_by_rank": (
        "@pytest.mark.parametrize('x', range(comm.rank))\ndef test_it(x):\n    pass",
        ["test_it[0]: ranks 1, 2", "test_it[1]: rank 2"],
    ),
    "syntax_error": ("def test_it(:\n    pass", ["every rank of 3 failed", "SyntaxError"]),
}

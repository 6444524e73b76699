"""An error that nobody catches is printed once, by one rank, with the lines of the user."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
import os
import re
import sys

import pytest

from jobs.launch import CompletedJob, complete, job_environment, launch, launch_source
from jobs.mistakes import MISTAKES
from pce_mpi.jobs.mpiexec import mpiexec

# Lines on stderr for each mistake, on any number of ranks, and jobs at a time.
MOST_LINES, AT_A_TIME = 25, 2
PROGRAM = "tests/jobs/mistakes.py"
# Each is of another kind: before the first collective, agreed, of one rank's own numbers, and one that others hear of.
AT_16 = ["misspelt_option", "number_of_classes_of_the_shard", "no_comm", "backward_again"]
# Each of these takes the way of another one that is run always.
LIKE_OTHERS = """
    targets_of_python_floats targets_of_all_classes targets_counted_from_one no_comm_but_number_of_classes
    number_of_classes_of_the_shard start_at_zero_everywhere option_of_torch axis_that_is_none logits_transposed
    shard_of_a_third_axis placement_not_made word_for_placement backward_of_a_matrix backward_without_parameters
    data_of_torch method_of_torch parameter_without_list rate_as_text
""".split()
NAMES = [name for name in MISTAKES if name not in LIKE_OTHERS]
GROUPS = {f"from {NAMES[start]}": NAMES[start : start + 10] for start in range(0, len(NAMES), 10)}


def lines_of_error(job: CompletedJob) -> list[str]:
    return re.findall(r"^(?:\w+\.)*\w+(?:Error|Timeout|Group)\b.*", job.stderr, re.MULTILINE)


def assert_said_once(job: CompletedJob, name: str) -> None:
    kind, words, _ = MISTAKES[name]
    assert job.returncode != 0, name
    assert len(job.stderr.splitlines()) <= MOST_LINES, job.stderr
    assert job.stderr.count("Traceback (most recent call last)") == 1, job.stderr
    [line] = lines_of_error(job)
    assert line.startswith(f"{kind}: ") and words in line, (name, line)
    assert f", in {name}\n" in job.stderr
    assert "/pce_mpi/" not in job.stderr.replace(line, "") and "runpy" not in job.stderr


def launched(names: Sequence[str], ranks: int) -> list[CompletedJob]:
    with ThreadPoolExecutor(AT_A_TIME) as jobs:
        return list(jobs.map(lambda name: launch(ranks, PROGRAM, name), names))


@pytest.mark.parametrize("names", GROUPS.values(), ids=GROUPS)
def test_mistake_prints_one_short_text(names):
    for name, job in zip(names, launched(names, 3), strict=True):
        assert_said_once(job, name)


@pytest.mark.skipif("MISTAKES" not in os.environ, reason="MISTAKES=all runs those that are like others")
def test_mistake_like_another_prints_one_short_text():
    for name, job in zip(LIKE_OTHERS, launched(LIKE_OTHERS, 3), strict=True):
        assert_said_once(job, name)


@pytest.mark.parametrize("name", AT_16)
def test_mistake_of_16_ranks_prints_no_more(name):
    assert_said_once(launch(16, PROGRAM, name), name)


def test_mistake_under_plain_python_prints_as_much():
    command = [*mpiexec(), "-n", "3", sys.executable, PROGRAM, "targets_in_a_column"]
    assert_said_once(complete(command, env=job_environment(3)), "targets_in_a_column")


def test_full_traceback_has_every_rank_and_frame():
    job = launch(3, PROGRAM, "targets_in_a_column", env={"PCE_MPI_TRACEBACK": "full"})
    assert job.stderr.count("Traceback (most recent call last)") == 3
    assert job.stderr.count("/pce_mpi/") >= 9 and job.stderr.count("runpy") >= 3
    assert job.stderr.count("The above exception") == 0  # no cause with the same sentence


# A rank raises an error, and the others one that they have heard from it.
HEARD = """
    import sys
    import time
    from mpi4py import MPI
    import pce_mpi
    from pce_mpi.comm import uncaught

    comm = MPI.COMM_WORLD
    uncaught.install()


    def raise_first():
        raise LookupError("no data")


    def hear():
        error = LookupError(f"no data (rank {origin})")
        error.origin = origin
        raise error


    origin, late = map(int, sys.argv[1:])
    comm.Barrier()
    time.sleep(0.25 * (comm.rank == late))
    raise_first() if comm.rank == origin else hear()
"""


@pytest.mark.parametrize(("origin", "late"), [(0, 0), (1, 0), (2, 2)])
def test_heard_error_is_printed_by_its_origin(origin, late):
    job = launch_source(3, HEARD, str(origin), str(late))
    assert lines_of_error(job) == ["LookupError: no data"]
    assert ", in raise_first\n" in job.stderr and ", in hear\n" not in job.stderr


def test_error_that_its_origin_caught_is_printed():
    job = launch_source(3, HEARD.replace("    raise_first() if", "    time.sleep(1e4) if"), "1", "1")
    assert lines_of_error(job) == ["LookupError: no data (rank 1)"]


def test_other_texts_of_one_line_take_one_line():
    job = launch_source(
        4,
        """
        from mpi4py import MPI
        import pce_mpi as pce

        pce.Mesh(MPI.COMM_WORLD, data=4)
        raise OSError(f"shard {MPI.COMM_WORLD.rank // 2} is empty\\nsecond line")
        """,
    )
    first, second = (line for line in job.stderr.splitlines() if "is empty" in line and "raise" not in line)
    assert first == "OSError: shard 0 is empty"
    assert second == "pce_mpi: at the same line: OSError: shard 1 is empty (ranks 2, 3)"


def test_different_errors_of_ranks_are_all_printed():
    job = launch_source(
        2,
        """
        from mpi4py import MPI
        import pce_mpi as pce

        pce.Mesh(MPI.COMM_WORLD, data=2)
        if MPI.COMM_WORLD.rank:
            raise OSError("a full disk")
        raise KeyError("a missing key")
        """,
    )
    assert sorted(lines_of_error(job)) == ["KeyError: 'a missing key'", "OSError: a full disk"]


def test_master_that_takes_any_message_gets_none():
    job = launch_source(
        3,
        """
        from mpi4py import MPI
        import numpy as np
        import pce_mpi as pce

        if MPI.COMM_WORLD.rank == 0:
            print(MPI.COMM_WORLD.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG))
        pce.softmax_cross_entropy(np.zeros((1, 2)), [5])
        """,
    )
    assert job.stdout == ""
    [line] = lines_of_error(job)
    assert line.startswith("IndexError: targets[0] = 5")


# ----------------------------------------------------------------------------------------------------- on one process

ALONE = """
    import contextlib
    import numpy as np
    import pce_mpi as pce


    def wrong():
        pce.softmax_cross_entropy(np.zeros((1, 2)), [5])


    with contextlib.suppress(IndexError):
        wrong()
"""


def alone(source: str) -> str:
    job = launch_source(1, ALONE + source)
    assert job.returncode != 0
    return job.stderr


def test_cause_of_the_program_is_printed():
    printed = alone("""
    try:
        wrong()
    except IndexError as error:
        raise ValueError(f"bad batch: {error}") from error
    """)
    assert printed.count("Traceback") == 2 and printed.count("is outside [0, 2)") == 2
    assert "direct cause" in printed and "/pce_mpi/" not in printed


def test_group_and_notes_are_printed():
    printed = alone("""
    try:
        wrong()
    except IndexError as error:
        error.add_note("in batch 7")
        raise ExceptionGroup("two", [error, OSError("the other")])
    """)
    for text in ("| ExceptionGroup: two (2 sub-exceptions)", "is outside [0, 2)", "| in batch 7", "OSError: the other"):
        assert text in printed
    assert "/pce_mpi/" not in printed


def test_syntax_error_shows_its_line():
    printed = alone('    compile("1 +* 2", "settings", "exec")\n')
    assert 'File "settings", line 1' in printed and "    1 +* 2\n" in printed and "SyntaxError: invalid" in printed


def test_callback_of_the_program_is_shown():
    printed = alone("""
    class Rows:
        def __len__(self):
            raise OSError("rows are gone")

        def __array__(self, dtype=None, copy=None):
            raise OSError("rows are gone")

    pce.softmax_cross_entropy(np.zeros((1, 2)), Rows())
    """)
    assert "rows are gone" in printed and ", in __array__\n" in printed and "/pce_mpi/" not in printed


def test_hook_of_the_program_is_called_once():
    job = launch_source(
        3,
        """
        import sys

        def hook(kind, error, traceback):
            print(f"caught by a hook: {error!r}", file=sys.stderr)

        sys.excepthook = hook
        from mpi4py import MPI
        import pce_mpi as pce

        pce.Mesh(MPI.COMM_WORLD, data=3).all()
        """,
    )
    assert job.stderr.count("caught by a hook: AttributeError(") == 1 and "Traceback" not in job.stderr


def test_closed_stderr_does_no_harm():
    assert "Error in sys.excepthook" not in alone("    import sys\n    sys.stderr = None\n    wrong()\n")

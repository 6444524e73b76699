"""Ranks that never arrive, raise, exit or die: every job below ends by itself, and says why where it can."""

import json
from pathlib import Path
import re
import textwrap
from typing import Any

import pytest

from jobs.launch import CompletedJob, launch_source
from pce_mpi.hints import hinted
from pce_mpi.jobs.patience import slowdown

# The time that ranks wait for each other in most jobs, the time that they then listen for each other, and the slack: in
# seconds of a machine that has nothing else to do, as are all times that ranks tell.
TIMEOUT = 0.5
ROLL_CALL = 0.5
SLACK = 3.0

# Every program begins with this. A rank tells of itself in a file: output of several ranks may come mixed.
PROLOGUE = """
import itertools
import json
import os
from pathlib import Path
import re
import signal
import sys
import time

from mpi4py import MPI
import numpy as np

import pce_mpi as pce
from pce_mpi.comm import communicators
from pce_mpi.comm.agreement import agree
from pce_mpi.comm.collectives import all_gather, all_reduce
from pce_mpi.comm.tracing import cause

SECOND = float(os.environ["SECOND"])
communicators._ROLL_CALL_SECONDS = 0.5 * SECOND
comm = MPI.COMM_WORLD
folder = Path(sys.argv[1])
told = []


def loss(on=comm, rows=4):
    # Equal logits: the loss is the logarithm of the number of classes, 3 on each rank.
    logits, targets = np.zeros((rows, 3)), np.zeros(rows, int)
    return float(pce.softmax_cross_entropy(logits, targets, comm=on))


def caused(operation, send):
    with cause(operation, reason="to see"):
        return send()


def tell(call):
    # Call, and tell what came of it.
    start = time.time()
    try:
        told.append({"returned": call()})
    except (Exception, KeyboardInterrupt) as error:
        told.append({"kind": type(error).__name__, "text": str(error)})
    told[-1]["seconds"] = (time.time() - start) / SECOND
    draft = folder / f"draft-{comm.rank}"
    draft.write_text(json.dumps(told))
    draft.rename(folder / f"rank-{comm.rank}-{len(told)}")


def wait_for(ranks, times):
    # Until all of them have told that often.
    deadline = time.monotonic() + 20 * SECOND
    while not all((folder / f"rank-{rank}-{times}").exists() for rank in ranks):
        if time.monotonic() > deadline:
            raise RuntimeError("the other ranks have not told what came of it")
        time.sleep(0.01)


def patient():
    # From its first call on, the rank waits longer than the job may take.
    os.environ["PCE_MPI_TIMEOUT"] = "10000"
"""


def run(folder: Path, n: int, program: str, timeout: float | None = TIMEOUT, notice: float = 1000) -> CompletedJob:
    """A job of `n` ranks that has ended by itself; `timeout` is PCE_MPI_TIMEOUT, and `notice` PCE_MPI_NOTICE."""
    second = slowdown(n)
    env = {"SECOND": f"{second}", "PCE_MPI_NOTICE": f"{notice * second}"}
    if timeout is not None:
        env["PCE_MPI_TIMEOUT"] = f"{timeout * second}"
    return launch_source(n, PROLOGUE + textwrap.dedent(program), str(folder), env=env)


def told(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return what the rank has told, one entry a call."""
    reports = sorted(folder.glob(f"rank-{rank}-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return json.loads(reports[-1].read_text(encoding="utf-8")) if reports else []


def assert_timed_out(report: dict[str, Any], *fragments: str) -> None:
    assert report.get("kind") == "CollectiveTimeout", report
    for fragment in fragments:
        assert fragment in report["text"]


# -------------------------------------------------------------------------------------------- a rank that never arrives


@pytest.mark.parametrize("use", ["first", "later"])
def test_rank_that_never_arrives_is_named(tmp_path, use):
    job = run(
        tmp_path,
        3,
        f"""
        if comm.rank == 1:
            patient()  # by itself it would still be waiting when the other has gone
        pair = comm.Split(comm.rank == 2)
        if {use == "later"}:
            loss()
        comm.Barrier()
        if comm.rank == 2:
            signal.pause()
        tell(loss)
        tell(loss)
        tell(lambda: agree(comm, "another operation", {{}}))
        tell(lambda: float(caused("one more", lambda: all_reduce(np.ones(1), comm, "sum"))[0]))
        tell(lambda: loss(pair))
        wait_for([0, 1], times=5)
        loss()
        """,
    )
    early, late = told(tmp_path, 0), told(tmp_path, 1)
    for reports in (early, late):
        first, *afterwards, of_another = reports
        assert_timed_out(first, "PCE_MPI_TIMEOUT", "softmax_cross_entropy", "(ranks 0, 1)", "silent: rank 2")
        assert ("first use" in first["text"]) == (use == "first")
        assert len(afterwards) == 3
        for again in afterwards:
            assert_timed_out(again, "not usable any more", "silent: rank 2")
            assert again["seconds"] < TIMEOUT
        assert of_another["returned"] == pytest.approx(1.791759469228055, rel=1e-15)  # log 6
    assert TIMEOUT <= early[0]["seconds"] < TIMEOUT + ROLL_CALL + SLACK
    assert "waited 10000 s" in late[0]["text"]  # as it would have, alone
    assert told(tmp_path, 2) == []
    # An error that nobody catches ends the job, the silent rank included.
    assert job.returncode != 0
    assert "CollectiveTimeout" in job.stderr


@pytest.mark.parametrize(
    ("n", "before", "absence", "said"),
    [
        (4, "loss()", "signal.pause()", "silent: ranks 1, 3"),
        (3, "comm.Barrier()", "sys.exit()", "silent: rank 1"),
    ],
    ids=["two hang", "one exits with success, first use"],
)
def test_silent_ranks_are_all_named(tmp_path, n, before, absence, said):
    job = run(
        tmp_path,
        n,
        f"""
        {before}
        if comm.rank % 2:
            {absence}
        tell(loss)
        wait_for([0, 2], times=1)
        raise SystemExit("enough")
        """,
    )
    for rank in (0, 2):
        [report] = told(tmp_path, rank)
        assert_timed_out(report, "softmax_cross_entropy", "(ranks 0, 2)", said)
        assert TIMEOUT <= report["seconds"] < TIMEOUT + ROLL_CALL + SLACK
    assert job.returncode != 0


def test_call_left_by_ctrl_c_breaks_its_communicator(tmp_path):
    # It comes between two collectives of a call: the next call's first would meet the others' second.
    run(
        tmp_path,
        3,
        """
        from unittest import mock

        from pce_mpi.loss import passes

        def interrupted(*_, **options):
            raise KeyboardInterrupt

        loss()
        if comm.rank == 0:
            with mock.patch.object(passes, "start_all_reduce", interrupted):
                try:
                    loss()
                except KeyboardInterrupt:
                    tell(loss)
        tell(loss)
        wait_for([1, 2], times=1)
        raise SystemExit("enough")
        """,
    )
    for report in told(tmp_path, 0):
        assert report["kind"] == "CollectiveError"
        assert "this communicator is closed since an error" in report["text"]
        assert "KeyboardInterrupt (rank 0)" in report["text"]
    for rank in (1, 2):
        [report] = told(tmp_path, rank)
        assert (report["kind"], report["text"]) == ("CollectiveError", "KeyboardInterrupt (rank 0)")
        assert report["seconds"] < TIMEOUT


def test_busy_silent_rank_prolongs_no_wait(tmp_path):
    # More ranks than cores, and one of them computes: a wait that counts its looks and not the time takes for ever.
    run(
        tmp_path,
        4,
        """
        loss()
        if comm.rank == 3:
            while True:
                pass
        tell(loss)
        wait_for([0, 1, 2], times=1)
        raise SystemExit("enough")
        """,
    )
    for rank in range(3):
        [report] = told(tmp_path, rank)
        assert_timed_out(report, "(ranks 0, 1, 2)", "silent: rank 3")
        assert report["seconds"] < TIMEOUT + ROLL_CALL + SLACK


def test_ranks_waiting_apart_each_name_their_operation(tmp_path):
    run(
        tmp_path,
        3,
        """
        comms = [comm.Dup() for _ in range(comm.size)]
        for each in comms:
            agree(each, "all is well", {})
        mine = comms[comm.rank]
        calls = [
            lambda: caused("the sum", lambda: all_reduce(np.zeros(3), mine, "sum")),
            lambda: agree(mine, "the agreement", {}),
            lambda: caused("the gathering", lambda: all_gather(np.zeros(3), mine, [(3,)] * comm.size)),
        ]
        tell(calls[comm.rank])
        wait_for([0, 1, 2], times=1)
        raise SystemExit("enough")
        """,
    )
    names = ["the sum", "the agreement", "the gathering"]
    for rank, name in enumerate(names):
        [report] = told(tmp_path, rank)
        others = ", ".join(str(other) for other in range(3) if other != rank)
        assert_timed_out(report, name, f"(rank {rank})", f"silent: ranks {others}")
        assert not any(other in report["text"] for other in names if other != name)
        assert TIMEOUT <= report["seconds"] < TIMEOUT + ROLL_CALL + SLACK


def test_late_rank_is_refused_and_writes_nothing(tmp_path):
    # MPI completes the abandoned collective once the late rank joins it: its buffers must still be there.
    job = run(
        tmp_path,
        2,
        """
        length = 1_000_000
        total = lambda: caused("the sum", lambda: all_reduce(np.ones(length), comm, "sum"))
        if comm.rank == 1:
            patient()
        loss()
        if comm.rank == 1:
            wait_for([0], times=1)
            tell(lambda: float(total()[0]))
            tell(loss)
        else:
            tell(lambda: float(total()[0]))
            # Whatever the abandoned call has given back, these take.
            fresh = [np.full(length, 7.0) for _ in range(4)]
            deadline = time.monotonic() + 20 * SECOND
            while not (folder / "rank-1-2").exists() and time.monotonic() < deadline:
                comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
                time.sleep(0.001)
            tell(lambda: all(bool((each == 7.0).all()) for each in fresh))
            tell(loss)
        wait_for([0], times=3)
        wait_for([1], times=2)
        raise SystemExit("enough")
        """,
    )
    assert len(told(tmp_path, 0)) == 3, f"rank 0 died of what the late rank sent:\n{job.stdout}\n{job.stderr}"
    gave_up, memory, afterwards = told(tmp_path, 0)
    assert_timed_out(gave_up, "the sum", "silent: rank 1")
    assert memory["returned"] is True
    assert_timed_out(afterwards, "not usable any more")
    came_late = told(tmp_path, 1)
    # The late rank may find all that it needs, but then it fails at the next call: it does not wait.
    assert_timed_out(came_late[1])


def test_interrupted_wait_makes_communicator_unusable(tmp_path):
    # Otherwise the next call would be paired with the one that was left, and compute with its numbers.
    run(
        tmp_path,
        2,
        """
        class Interrupted(KeyboardInterrupt):
            pass

        def interrupt(*_):
            raise Interrupted("by a signal")

        if comm.rank == 0:
            patient()
        loss()
        if comm.rank == 1:
            wait_for([0], times=2)
            tell(loss)
        else:
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            tell(loss)
            tell(lambda: loss(rows=9))
        wait_for([0], times=2)
        wait_for([1], times=1)
        raise SystemExit("enough")
        """,
    )
    interrupted, afterwards = told(tmp_path, 0)
    [other] = told(tmp_path, 1)
    assert interrupted["kind"] == "Interrupted"
    assert afterwards.get("kind") in ("CollectiveError", "CollectiveTimeout"), afterwards
    assert "not usable any more" in afterwards["text"]
    assert (other["kind"], other["text"]) == ("CollectiveError", "Interrupted: by a signal (rank 0)")


def test_timeout_is_written_before_roll_call(tmp_path):
    # A process may die in that call, if its network has failed: what it waited in must be known by then.
    job = run(
        tmp_path,
        2,
        """
        from pce_mpi.comm.communicators import Channel

        Channel._roll_call = lambda *_: os._exit(7)
        if comm.rank == 1:
            wait_for([0], times=1)  # in vain
        sys.stderr = open(folder / "stderr", "w")  # a launcher may lose the last words of a process that dies
        loss()
        """,
    )
    assert job.returncode != 0
    [line] = (tmp_path / "stderr").read_text().splitlines()
    assert re.fullmatch(
        r"pce_mpi: rank 0 of 2 has waited \S+ s \(PCE_MPI_TIMEOUT\) in softmax_cross_entropy "
        r"\(its first use of the communicator\); ranks now tell where they are",
        line,
    )


def test_rank_late_but_in_time_is_waited_for(tmp_path):
    job = run(
        tmp_path,
        3,
        """
        for _ in range(2):  # the first use of the communicator, and a later one
            if comm.rank == 1:
                time.sleep(0.5)
            tell(loss)
        """,
        timeout=60,
    )
    assert job.returncode == 0, job.stderr
    for rank in range(3):
        reports = told(tmp_path, rank)
        assert [report.get("returned") for report in reports] == [
            pytest.approx(2.1972245773362196, rel=1e-15)
        ] * 2  # log 9


def test_long_wait_is_said_once_for_each_operation(tmp_path):
    job = run(
        tmp_path,
        3,
        """
        loss()
        for _ in range(2):
            if comm.rank == 1:
                time.sleep(1.5 * SECOND)
            tell(loss)
        """,
        timeout=60,
        notice=0.5,
    )
    assert job.returncode == 0, job.stderr
    [line] = re.findall("^pce_mpi: .*", job.stderr, re.MULTILINE)
    waits = r"pce_mpi: ranks 0, 2 have waited \d+ s in softmax_cross_entropy; rank 1 has not come\. .*"
    assert re.fullmatch(waits, line)
    assert all("returned" in report for rank in range(3) for report in told(tmp_path, rank))


@pytest.mark.parametrize("first", ["", "loss()"], ids=["first use of the mesh", "later"])
def test_ranks_that_have_ended_are_not_waited_for(tmp_path, first):
    # The first mistake of all: only one rank asks for the whole array.
    job = run(
        tmp_path,
        3,
        f"""
        mesh = pce.Mesh(comm, data=3)
        w = pce.distribute(np.ones((4, 2)), mesh, data=pce.Shard(0))
        {first}
        if mesh.rank == 0:
            tell(lambda: w.full().tolist())
            raise SystemExit("enough")
        """,
        timeout=60,
    )
    [report] = told(tmp_path, 0)
    assert_timed_out(report, "rank 0 along data waits in full at program.py:", "ended. Every rank has to")
    assert report["seconds"] < SLACK
    assert job.returncode != 0


def test_ranks_with_a_longer_loop_end_at_once(tmp_path):
    job = run(
        tmp_path,
        3,
        """
        for step in range(3 - (comm.rank == 1)):
            tell(loss)
        raise SystemExit("enough" if comm.rank != 1 else None)
        """,
        timeout=60,
    )
    for rank in (0, 2):
        *_, report = told(tmp_path, rank)
        assert_timed_out(report, "waits in softmax_cross_entropy at program.py:", "for rank 1, whose program has ended")
        assert report["seconds"] < SLACK
    assert job.returncode != 0


def test_bad_timeout_is_clear_error_on_every_rank(tmp_path):
    job = run(
        tmp_path,
        2,
        """
        for value in ["soon", "", "0", "-3", "nan", "1 minute", "inf", "30.5"]:
            os.environ["PCE_MPI_TIMEOUT"] = value
            tell(lambda: loss(comm.Dup()))
        """,
    )
    assert job.returncode == 0
    for rank in range(2):
        *refused, infinite, fraction = told(tmp_path, rank)
        for value, report in zip(["soon", "", "0", "-3", "nan", "1 minute"], refused, strict=True):
            assert report.get("kind") == "ValueError", report
            assert "PCE_MPI_TIMEOUT must be a positive number of seconds" in report["text"]
            assert repr(value) in report["text"]
        assert "returned" in infinite
        assert "returned" in fraction


# ----------------------------------------------------------------------------------------- a rank that raises or leaves


# The ranks, what the first and the last of them do between two calls, and what is said of it.
ENDINGS = {
    "the first raises before the first call": (2, "", 0, 'raise LookupError("no data")', "LookupError: no data"),
    "the last raises before a later call": (4, "loss()", -1, 'raise LookupError("no data")', "LookupError: no data"),
    "the last exits with a status": (2, "loss()", -1, "sys.exit(3)", ""),
    "all find an error of the last": (
        2,
        "targets = np.array([0, 16 if comm.rank else 1])",
        None,
        "pce.softmax_cross_entropy(np.zeros((2, 8)), targets, comm=comm)",
        f"IndexError: {hinted('targets[1] = 16 is outside [0, 16)', 'other class numbers')} (rank 1)",
    ),
}


@pytest.mark.parametrize(("n", "before", "who", "deed", "said"), ENDINGS.values(), ids=ENDINGS)
def test_rank_that_raises_or_exits_ends_job(tmp_path, n, before, who, deed, said):
    job = run(
        tmp_path,
        n,
        f"""
        {before}
        if {who} in (None, comm.rank, comm.rank - comm.size):
            {deed}
        loss()
        """,
        timeout=None,
    )
    assert job.returncode != 0
    assert said in job.stderr


def test_error_between_calls_reaches_ranks_that_wait(tmp_path):
    job = run(
        tmp_path,
        3,
        """
        loss()
        if comm.rank == 1:
            raise LookupError("no data")
        tell(loss)
        wait_for([0, 2], times=1)
        """,
        timeout=60,
    )
    for rank in (0, 2):
        [report] = told(tmp_path, rank)
        assert (report.get("kind"), report.get("text")) == ("LookupError", "no data (rank 1)")
    assert "LookupError: no data\n" in job.stderr
    assert job.returncode != 0


@pytest.mark.parametrize(
    "call",
    [
        "pce.nucleus(x, top_p=0.9, comm=comm)",
        "pce.top_k(x, 400, comm=comm)",
        "pce.class_statistics(x, several, comm=comm)",
        "pce.class_statistics(x, several[:, 0], support=few, outside='-inf', comm=comm)",
        "pce.class_statistics(x, several[:, 0], support=many, outside='-inf', comm=comm)",
        "pce.softmax_cross_entropy_value_and_grad(x, several[:, 0], comm=comm)",
    ],
)
def test_memory_short_on_one_rank_raises_everywhere(tmp_path, call):
    job = run(
        tmp_path,
        3,
        f"""
        import resource

        x = np.random.default_rng(comm.rank).standard_normal((1000, 4000), np.float32)
        several = np.random.default_rng(0).integers(0, 12000, (1000, 64))
        few, many = (pce.nucleus(x, top_k=k, comm=comm)[:2] for k in (5, 500))
        call = lambda: {call} is None
        call()  # whatever is made once is made
        for spare in (1, 6, 30):
            if comm.rank == 2:
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + spare * 2**20, -1))
            tell(call)
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
            tell(loss)
        """,
        timeout=60,
    )
    assert job.returncode == 0, job.stderr
    reports = [told(tmp_path, rank) for rank in range(3)]
    for first, second, third in zip(*(each[::2] for each in reports), strict=True):
        kinds = {each.get("kind") for each in (first, second)}
        # MPI's own shortage is no MemoryError; one that the ranks have not agreed on has closed the communicator.
        assert kinds in ({None}, {"MemoryError"}, {"RuntimeError"}, {"CollectiveError"})
        assert (third.get("kind") is None) == (kinds == {None})
        assert all("(rank 2)" in each["text"] for each in (first, second) if kinds != {None})
    for afterwards in zip(*(each[1::2] for each in reports), strict=True):
        assert len({report.get("kind") for report in afterwards}) == 1
        for report in afterwards:
            is_closed = "this communicator is closed since an error" in report.get("text", "")
            assert is_closed or report.get("returned") == pytest.approx(2.1972245773362196, rel=1e-15)  # log 9


def test_rank_that_is_killed_in_midst_ends_job(tmp_path):
    job = run(
        tmp_path,
        3,
        """
        for number in itertools.count():
            loss(rows=2000)
            if number == 20:
                tell(loss)
                if comm.rank == comm.size - 1:
                    wait_for(range(comm.size), times=1)
                    os.kill(os.getpid(), signal.SIGKILL)
        """,
        timeout=None,
    )
    for rank in range(3):  # all of them were at work
        assert "returned" in told(tmp_path, rank)[0]
    assert job.returncode != 0

"""pytest in every rank of a job, as one session: a plugin for the pytest of each rank.

Every rank runs the same tests in the same order. After each phase of a test (setup, call, teardown) the ranks tell each
other how it ended and go on with one report, so that `-x`, skips and the summary are in step. A rank that can not tell
its own, as others wait for it in a collective, ends the job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
import faulthandler
import fcntl
import io
import json
import os
from pathlib import Path
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, TextIO
import warnings

import pytest

from pce_mpi.comm.communicators import channel_of
from pce_mpi.comm.errors import ranks_text
from pce_mpi.comm.library import mpi
from pce_mpi.comm.peers import all_peers
from pce_mpi.comm.restoring import report_of, restore
from pce_mpi.jobs.journal import Journal
from pce_mpi.jobs.patience import Patience, slowdown
from pce_mpi.testing.examples import keep_in_step
from pce_mpi.testing.orders import NAME, STARTUP, Orders
from pce_mpi.testing.sizes import at_size, select
from pce_mpi.testing.verdict import Data, RanksFailure, blocks_of, exchange, own_stack
from pce_mpi.text import bounded, grouped

if TYPE_CHECKING:
    from mpi4py import MPI

# A rank that failed may have left others inside a collective. It gives them so many seconds of `Patience` to get out,
# or a part of the limit.
_GRACE = 5.0

# Seconds between two looks at a phase, and in which all ranks tell their stacks before the first one ends the job.
_TICK, _TOLD = 0.2, 2.0

# Captured output of a phase beyond so many characters loses its middle.
_MOST_OUTPUT = 100_000


class RankSession:
    """One rank's part of a session; without a journal, rank 0 reports to its own terminal, and others to `stderr`."""

    __name__ = NAME  # pytest registers it by this

    def __init__(
        self,
        comm: MPI.Intracomm | None,
        orders: Orders,
        journal: Journal | None = None,
        folder: Path | None = None,
        stderr: TextIO = sys.stderr,
    ) -> None:
        self.comm, self.orders = comm, orders
        self.rank, self.size = (comm.rank, comm.size) if comm else (0, 1)
        self._journal, self._folder, self._stderr = journal, folder, stderr
        self._collected: dict[str, Data] = {}
        self._deselected = 0
        self._phase = "the collection of tests"  # that runs; "" once no more is watched
        self._peers: Any = None
        self._block = 0  # of the phase that runs
        self._quiet = _Quiet()
        # The folder of `rank_tmp_path`, which rank 0 makes and tells the others of.
        self.shared = Path(tempfile.mkdtemp(prefix="pytest-ranks-", dir=folder) if self.rank == 0 else "")

    # Configuration.

    def begin(self, config: pytest.Config) -> None:
        """Let other plugins take this process for a worker of pytest-xdist, which writes no files for the user."""
        if self._journal or self.rank:
            given = {"workerid": f"rank {self.rank}", "workercount": self.size, "cov_master_rsync_roots": []}
            given |= {"cov_master_host": socket.gethostname(), "cov_master_topdir": os.getcwd()}
            given["randomly_seed"] = getattr(config.known_args_namespace, "randomly_seed", None)
            vars(config).update(workerinput=given, workeroutput={})

    def own_folder(self, basetemp: str) -> str:
        """Return the folder of this rank below the one that the user has named for all `tmp_path`."""
        path = Path(basetemp, f"{self.size}-{self.rank}")
        path.parent.mkdir(parents=True, exist_ok=True)
        return str(path)

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        self.config = config
        if (self._journal or self.rank) and config.pluginmanager.has_plugin("terminalreporter"):
            silent = pytest.TerminalReporter(config, self._quiet)  # type: ignore[arg-type]  # a text stream
            config.pluginmanager.unregister(name="terminalreporter")
            config.pluginmanager.register(silent, "terminalreporter")
        failures = config.pluginmanager.get_plugin("lfplugin")
        if self._journal and failures is not None:
            for test, value in [*failures.lastfailed.items()]:
                del failures.lastfailed[test]
                name, size = at_size(str(test))
                if size in (0, self.size):  # since pytest 9.2 tests have names of a type of their own
                    failures.lastfailed[name if isinstance(test, str) else type(test).parse(name)] = value
        if self.orders.terminal:
            self._debugger: Any = config.pluginmanager.unregister(name="pdbinvoke")
        if self.comm and not self._journal:
            threading.Thread(target=self._watch, daemon=True).start()

    # Collection: every rank must have found the same tests.

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        select(config, items, self.size, self.orders.sizes, self.orders.missing)
        keep_in_step(items, self)

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        self._deselected += len(list(items))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._collected[report.nodeid] = self._data(report)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> Generator[None, object, object]:
        try:
            result = yield
        except session.Failed:  # as many errors as -x or --maxfail allows
            self._agree_on_collection(session, stopped=True)
            raise
        except pytest.UsageError as error:
            self._write("refused", text=str(error))
            raise
        except Exception as error:
            self._write("left", how="could not collect its tests", text=str(error), report=None)
            raise
        self._agree_on_collection(session)
        if self.orders.remaining is not None:
            left = Counter(self.orders.remaining)
            for index in reversed(range(len(session.items))):  # of duplicates the last ones remain
                test = session.items[index].nodeid
                left[test] -= 1
                if left[test] < 0:
                    del session.items[index]
        tests = [item.nodeid for item in session.items]
        session.testscollected = len(tests)
        if self.comm:
            # From now on, an error on one rank is told to those that wait for it.
            self._peers = channel_of(mpi().COMM_WORLD, "pytest").peers
            self.shared = self.comm.bcast(self.shared if self.rank == 0 else None)
        self._report("collected", tests=tests, deselected=self._deselected)
        return result

    def _agree_on_collection(self, session: pytest.Session, stopped: bool = False) -> None:
        of_ranks = [(self._collected, [item.nodeid for item in session.items], stopped)]
        if self.comm:
            exchange(self.comm, True, 0, self.waiting("collection"))
            of_ranks = self.comm.allgather(of_ranks[0])
        reports, tests, stops = zip(*of_ranks, strict=True)
        everywhere = set(tests[0]).intersection(*tests)
        different = set() if any(stops) else set().union(*tests) - everywhere  # one that has stopped has found no more
        faulty = dict.fromkeys(_file(each) for each in sorted(different))
        for name in sorted(set().union(*reports) | faulty.keys()):
            alike = [{"$report_type": "CollectReport", "nodeid": name, "outcome": "passed", "longrepr": ""}] * self.size
            of_name = [found.get(name, passed) for found, passed in zip(reports, alike, strict=True)]
            outcomes = {report["outcome"] for report in of_name}
            if outcomes == {"skipped"}:
                continue
            blocks: list[list[Any]] = blocks_of(of_name)
            if name in faulty:
                blocks += [["tests that some ranks alone have found", _tests_of_some(name, tests), ""]]
            failure: Any = RanksFailure(blocks, self.config)
            report = pytest.CollectReport(name, "failed", failure, [])
            vars(report)["blocks"] = blocks
            if self._collected.get(name, {}).get("outcome") != "failed":
                self.config.hook.pytest_collectreport(report=report)
            self._report("collect", report=self._data(report))
        kept = [item for item in session.items if item.nodeid in everywhere and _file(item.nodeid) not in faulty]
        session.items[:] = kept
        orders = self.comm.allgather([item.nodeid for item in kept]) if self.comm else []
        differing = [rank for rank, order in enumerate(orders) if order != orders[0]]
        if differing:
            raise session.Interrupted(f"{ranks_text(differing)} found the tests in another order than rank 0")

    # Tests: one report for all ranks.

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._phase = nodeid
        self._begin_phase()
        self._report("started", test=nodeid, location=location)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self._phase = f"{item.nodeid}, after its {report.when}"
        report.sections = [(title, bounded(text, _MOST_OUTPUT)) for title, text in report.sections]
        if call.excinfo is not None and not call.excinfo.errisinstance((pytest.skip.Exception, KeyboardInterrupt)):
            error = call.excinfo.value
            if "origin" in vars(error):
                vars(report)["heard"] = f"{type(error).__name__}: {error}"
            if self._block:  # ranks that wait in this package hear of it
                self._peers.report(self._block, report_of(self._peers, error))
        if self.orders.terminal and report.failed:
            self._debug(item, call, report)
        if self.comm is None:
            return report
        text = "" if report.passed else report.longreprtext or report.outcome
        waiting = self.waiting(f"{item.nodeid} ({report.when})", text, report.outcome, report)
        has_errors = any(peers.has_errors for peers in all_peers())
        passed, errors = exchange(self.comm, report.passed, has_errors, waiting)
        if not passed:
            reports = self.comm.allgather(self._data(report))
            if {each["outcome"] for each in reports} != {"skipped"}:
                self._merge(report, reports)
        self._end_phase(settle=not passed or errors > 0)
        if report.when != "teardown":
            self._begin_phase()
        return report

    # A phase is as a block of `Mesh.attempt`: no rank hears in the next one of an error of this one.

    def _begin_phase(self) -> None:
        self._block = self._peers.begin() if self._peers else 0

    def _end_phase(self, settle: bool) -> None:
        block, self._block = self._block, 0
        if not block:
            return
        self._peers.leave(block)
        if settle:
            self._peers.report(block + 1, report_of(self._peers, None))
            restore(self._peers, self._peers.all_reports(block + 1))

    def _merge(self, report: pytest.TestReport, reports: list[Data]) -> None:
        """Make one report of those of all ranks, of which some have not passed."""
        blocks = blocks_of(reports)
        report.outcome = "failed"
        report.longrepr = RanksFailure(blocks, self.config)  # type: ignore[assignment]  # it can be shown, as pytest asks
        report.sections = [
            (f"{title} ({ranks_text([rank])})", text)
            for rank, each in enumerate(reports)
            for title, text in each["sections"]
            if each["outcome"] != "passed"
        ]
        vars(report)["blocks"] = blocks
        vars(report).pop("wasxfail", None)  # a failure that was expected on some ranks only is a failure

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._journal and self.rank == 0:
            self._report("reported", report=self._data(report))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._report("finished", test=nodeid, location=location)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        about = warning_message
        text = [str(about.message), about.category.__name__, about.filename, about.lineno]
        self._write("warning", warning=text, when=when, test=nodeid)

    # The end.

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        interrupted = excinfo.errisinstance(pytest.Session.Interrupted)
        status = getattr(excinfo.value, "returncode", None)
        self._write("exit", text=str(excinfo.value), status=status, interrupted=interrupted)
        # Session.Interrupted comes from all ranks alike; anything else (pytest.exit) may come from this one alone.
        if self.comm and not self._journal and not interrupted:
            exchange(self.comm, False, 0, self.waiting("the session", excinfo.exconly(), "was interrupted"))

    def pytest_internalerror(self, excrepr: object) -> None:
        self._leave("pytest", "failed", str(excrepr))

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        if self.comm and not self._journal and isinstance(error := sys.exception(), pytest.UsageError):
            self._leave("pytest", f"could not run: {error}", "", status=pytest.ExitCode.USAGE_ERROR)
        # The first rank to exit with a failure ends the job: not before rank 0 has printed its summary.
        if self.comm and not self._journal:
            self.comm.Barrier()
            self._phase = ""
            shutil.rmtree(self.shared, ignore_errors=True)

    # Journal and job.

    def _data(self, report: pytest.TestReport | pytest.CollectReport) -> Data:
        data: Data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        return json.loads(json.dumps(data, default=str))

    def _write(self, event: str, **what: Any) -> None:
        if self._journal:
            self._journal.write(event, **what)

    def _report(self, event: str, **what: Any) -> None:
        """Write an event that all ranks have alike."""
        if self.rank == 0:
            self._write(event, **what)

    def waiting(self, where: str, text: str = "", how: str = "failed", report: Any = None) -> Callable[[float], None]:
        """Return what to do while other ranks are missing: end the job, if this one has a text to tell."""

        def wait(seconds: float) -> None:
            if text and seconds > min(_GRACE, self.orders.limit / 4):
                self._leave(where, how, text, report)

        return wait

    def _leave(self, where: str, how: str, text: str, report: Any = None, status: int = 1) -> None:
        """End the job, as ranks that this one has left waiting cannot be told otherwise."""
        if self._journal:
            self._write("left", how=how, text=text, report=report and self._data(report))
            while True:  # until the job is ended
                time.sleep(1)
        elif self.comm:
            left = " here and left other ranks waiting" * bool(text)
            self._stderr.write(f"\n[rank {self.rank} of {self.size}] {where} {how}{left}\n{text}\n")
            self.comm.Abort(status)

    def _watch(self) -> None:
        """End the job once no phase has ended for the limit, after the stack of each rank."""
        limit, has_timer = max(self.orders.limit, STARTUP), self.config.pluginmanager.has_plugin("faulthandler")
        phase, patience = self._phase, Patience(limit)
        while not patience.is_over():
            # For ranks that all keep the interpreter's lock, as a loop in C can, from the start of a phase on.
            if not (has_timer and float(self.config.getini("faulthandler_timeout") or 0)):  # there is one alone
                seconds = (self.orders.limit + _TOLD / 2) * slowdown()
                faulthandler.dump_traceback_later(seconds, exit=True, file=self._stderr)
            time.sleep(_TICK)
            if not self._phase:
                return faulthandler.cancel_dump_traceback_later()
            if phase is not self._phase:
                limit = self.orders.limit
                phase, patience = self._phase, Patience(limit)
        faulthandler.cancel_dump_traceback_later()
        main = sys._current_frames()[threading.main_thread().ident]  # type: ignore[index]  # it has begun
        stack = own_stack(each.rstrip() for each in reversed(traceback.format_stack(main)))
        who = f"[rank {self.rank} of {self.size}] {phase}"
        self._stderr.write(f"\n{who}: nothing has ended for {limit:g} s (--ranks-timeout)\n{stack}\n")
        time.sleep(_TOLD)
        os._exit(1)

    # --pdb.

    def _debug(self, item: pytest.Item, call: pytest.CallInfo[Any], report: pytest.TestReport) -> None:
        """Enter the debugger, one rank after the other."""
        assert self._folder is not None
        with open(self._folder / "terminal", "w") as lock, self._quiet.shown():
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._quiet.write(f"\n{'=' * 20} rank {self.rank} of {self.size}: {item.nodeid} {'=' * 20}\n")
            self._debugger.pytest_exception_interact(node=item, call=call, report=report)


class _Quiet(io.TextIOBase):
    """A stream that drops everything, but to standard output while it is shown."""

    _is_shown = False

    @contextmanager
    def shown(self) -> Iterator[None]:
        self._is_shown = True
        try:
            yield
        finally:
            self._is_shown = False

    def write(self, text: str) -> int:
        return sys.__stdout__.write(text) if self._is_shown else len(text)  # type: ignore[union-attr]  # a terminal

    def isatty(self) -> bool:
        return False


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _tests_of_some(file: str, tests: Sequence[list[str]]) -> str:
    """Name the tests of a file that some ranks have found, and which ranks."""
    ranks_by_test = grouped((test, rank) for rank, each in enumerate(tests) for test in each if _file(test) == file)
    return "\n".join(f"{test}: {ranks_text(on)}" for test, on in ranks_by_test.items() if len(on) < len(tests))

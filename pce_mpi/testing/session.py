"""pytest in every rank of a job, as one session: a plugin for the pytest of each rank.

Every rank runs the same tests in the same order. After each phase of a test (setup, call, teardown) the ranks tell each
other which phase it was and how it ended, and go on with one report, so that `-x`, skips and the summary are in step. A
rank that can not tell its own, as others wait for it in a collective, ends the job; so do ranks in different phases.
What the test itself does cannot come between: the communicator is the session's own, subtests are parts of a phase, a
process that the test has forked ends here, and functions that a test may patch are kept as they are at import.
"""

from __future__ import annotations

import atexit
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
import faulthandler
import fcntl
import io
from itertools import compress
import json
import os
from os import getpid
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
from zlib import crc32

import pytest

from pce_mpi.comm.communicators import channel_of
from pce_mpi.comm.errors import ranks_text, text_by_rank
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

# No outcome of pytest's: one that failed would count, and stop a session with -x, on its rank alone.
_FAILED_SUBTEST = "subtests failed"

_PHASES = ("setup", "call", "teardown")

# As they are at import: a test may patch the modules that have them, and its verdict is still told.
_naps, _exit, _print = (time.sleep,), os._exit, os.write
_encoded, _decoded = json.JSONEncoder(default=str).encode, json.JSONDecoder().decode

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
        self._is_in_phase = False
        self._failed_subtests: list[str] = []  # of this phase
        self._items: list[pytest.Item] = []
        self._places: dict[pytest.Item, int] = {}
        self._process = getpid()
        self._verdicts = _Verdicts(self._decide)
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
            given |= self.orders.workerinput
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
        select(items, self.size, self.orders.sizes, self.orders.missing)
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
                test = self._names[index]
                left[test] -= 1
                if left[test] < 0:
                    del session.items[index], self._names[index]
        self._items = [*session.items]
        self._places = {item: len(_PHASES) * index for index, item in enumerate(session.items)}
        session.testscollected = len(self._items)
        if self.comm:
            # From now on, an error on one rank is told to those that wait for it.
            self._peers = channel_of(mpi().COMM_WORLD, "pytest").peers
            self.shared = self.comm.bcast(self.shared if self.rank == 0 else None)
        self._report("collected", tests=self._names, deselected=self._deselected)
        return result

    def _agree_on_collection(self, session: pytest.Session, stopped: bool = False) -> None:
        of_ranks = [(self._collected, [item.nodeid for item in session.items], stopped)]
        if self.comm:
            exchange(self.comm, True, 0, self.waiting("collection"))
            of_ranks = self.comm.allgather(of_ranks[0])
        reports, own_names, stops = zip(*of_ranks, strict=True)
        tests = _in_names_of_first_rank(own_names)
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
        kept = [name in everywhere and _file(name) not in faulty for name in tests[self.rank]]
        session.items[:] = compress(session.items, kept)
        self._names = [*compress(tests[self.rank], kept)]
        orders = self.comm.allgather(self._names) if self.comm else []
        differing = [rank for rank, order in enumerate(orders) if order != orders[0]]
        if differing:
            raise session.Interrupted(f"{ranks_text(differing)} found the tests in another order than rank 0")

    # Tests: one report for all ranks.

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._phase = nodeid
        self._report("started", test=nodeid, location=location)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._verdicts.stay_outermost(item.config)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, None, None]:
        with self._in_phase():
            yield

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        with self._in_phase():
            yield

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, None, None]:
        with self._in_phase():
            yield

    @contextmanager
    def _in_phase(self) -> Iterator[None]:
        self._begin_phase()
        self._is_in_phase, self._failed_subtests = True, []
        try:
            yield
        finally:
            self._is_in_phase = False

    def _decide(self, item: pytest.Item, call: pytest.CallInfo[Any], report: pytest.TestReport) -> pytest.TestReport:
        """Return the report of all ranks on a phase, from that of this rank."""
        if getpid() != self._process:
            _print(2, f"a process that {item.nodeid} has forked returns from it as if it were the rank\n".encode())
            _exit(1)
        if self._is_in_phase:
            return self._subtest(report)
        if self._failed_subtests and report.passed:
            report.outcome, report.longrepr = "failed", "\n".join(self._failed_subtests)
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
        place = self._places.get(item, crc32(item.nodeid.encode())) + _PHASES.index(report.when)
        passed, errors, places = exchange(self.comm, report.passed, has_errors, waiting, place)
        if len({*places}) > 1:
            where = {rank: self._where(place) for rank, place in enumerate(places)}
            how = "is in another phase than other ranks, as where it alone has run a test again"
            self._leave("pytest", how, f"{text_by_rank(where, 'comm')}\n{text}", report)
        if not passed:
            reports = self.comm.allgather(self._data(report))
            if {each["outcome"] for each in reports} != {"skipped"}:
                self._merge(report, reports)
        self._end_phase(settle=not passed or errors > 0)
        return report

    def _where(self, place: int) -> str:
        index, phase = divmod(place, len(_PHASES))
        item = self._items[index].nodeid if 0 <= index < len(self._items) else "another test"
        return "at the end of its session" if place < 0 else f"{item} ({_PHASES[phase]})"

    def _subtest(self, report: pytest.TestReport) -> pytest.TestReport:
        """Note a subtest, of which ranks may have different ones: one that has failed fails its test, on all ranks."""
        if report.failed:
            self._failed_subtests.append(report.longreprtext)
            vars(report)["outcome"] = _FAILED_SUBTEST
        return report

    # A phase is as a block of `Mesh.attempt`: no rank hears in the next one of an error of this one.

    def _begin_phase(self) -> None:
        if self._peers and not self._block:
            self._block = self._peers.begin()

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
        if report.outcome == _FAILED_SUBTEST and hasattr(report, "_sub_test_description"):
            self._failed_subtests[-1] = f"subtest {report._sub_test_description()}\n{self._failed_subtests[-1]}"
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
            exchange(self.comm, False, 0, self.waiting("the session", excinfo.exconly(), "was interrupted"), -1)

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
            # `python -m mpi4py` would abort the job where tests have failed, though all ranks are here.
            atexit.register(getattr(mpi(), "_set_abort_status", int), 0)
            shutil.rmtree(self.shared, ignore_errors=True)

    # Journal and job.

    def _data(self, report: pytest.TestReport | pytest.CollectReport) -> Data:
        data: Data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        try:
            return _decoded(_encoded(data))
        except (TypeError, ValueError, RecursionError):  # properties with keys or circles that JSON has not
            data["user_properties"] = [(str(name), str(value)) for name, value in data["user_properties"]]
            return _decoded(_encoded(data))

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
                _naps[0](1)
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


class _Verdicts:
    """The plugin that makes one report of those of all ranks, when all other plugins have done with theirs."""

    def __init__(self, decide: Callable[..., pytest.TestReport]) -> None:
        self._decide = decide

    def stay_outermost(self, config: pytest.Config) -> None:
        """Be the plugin that was registered last: of wrappers that are to be first, it is the outermost."""
        if config.hook.pytest_runtest_makereport.get_hookimpls()[-1].plugin is not self:
            if config.pluginmanager.is_registered(self):
                config.pluginmanager.unregister(self)
            config.pluginmanager.register(self)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        return self._decide(item, call, (yield))


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


def _in_names_of_first_rank(names_of_ranks: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the names of each rank's tests, where those of a function differ in their parameters alone as on rank 0.

    A name may have a rank or an address in it. The tests of a function are then the same in the order of the names.
    """
    by_function: list[dict[str, list[str]]] = []
    for names in names_of_ranks:
        by_function.append({})
        for name in names:
            by_function[-1].setdefault(_function(name), []).append(name)
    first = by_function[0]
    same_number = {
        function
        for function, names in first.items()
        if {len(each.get(function, ())) for each in by_function} == {len(names)}
        and any({*each[function]} != {*names} for each in by_function)
    }
    in_order = [{function: iter(first[function]) for function in same_number} for _ in by_function]
    return [
        [next(names[_function(name)], name) if _function(name) in same_number else name for name in of_rank]
        for names, of_rank in zip(in_order, names_of_ranks, strict=True)
    ]


def _function(nodeid: str) -> str:
    file, colons, names = nodeid.partition("::")
    return f"{file}{colons}{names.partition('[')[0]}"


def _tests_of_some(file: str, tests: Sequence[list[str]]) -> str:
    """Name the tests of a file that some ranks have found, and which ranks."""
    ranks_by_test = grouped((test, rank) for rank, each in enumerate(tests) for test in each if _file(test) == file)
    return "\n".join(f"{test}: {ranks_text(on)}" for test, on in ranks_by_test.items() if len(on) < len(tests))

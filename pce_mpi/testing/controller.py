"""pytest --ranks: a session that runs no test itself, but starts one on each number of ranks and reports what they do.

To other plugins of pytest the reports that come from the ranks are its own, as those of pytest-xdist's workers are.
"""

from collections.abc import Iterable
from contextlib import suppress
import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any
import warnings

import pytest

from pce_mpi.comm.errors import ranks_text, text_by_rank
from pce_mpi.jobs.job import Job
from pce_mpi.jobs.mpiexec import LaunchError, mpiexec
from pce_mpi.jobs.patience import Patience
from pce_mpi.testing.orders import STARTUP, Orders
from pce_mpi.testing.sizes import at_size, with_size
from pce_mpi.testing.verdict import RanksFailure, own_stack
from pce_mpi.text import grouped

# Tests that end their session are left behind, but not any number of them: a hang takes its time.
_MOST_SESSIONS = 30

# Seconds for the end of the ranks after the last test; and until all of them have said that they exit.
_END, _EXIT = 10.0, 1.0

_POLL = 0.01

# After so many seconds without an end of a phase, of an idle machine, a line says what is waited for.
_NOTICE = 60.0


class Controller:
    """The plugin of the session that the user has started."""

    def __init__(self, config: pytest.Config, sizes: list[int], limit: float, terminal: str) -> None:
        self._config, self._limit = config, limit
        self._terminal = terminal if getattr(config.option, "usepdb", False) else ""
        self._sizes, self._why_not = sizes, ""
        self._tests = 0  # that the ranks have found, at all sizes so far
        if max(sizes) > 1:
            try:
                mpiexec()
            except LaunchError as error:
                self._sizes, self._why_not = [1], f": {error}"

    def pytest_report_header(self) -> str:
        """Say on how many ranks the tests run, and by which launcher."""
        launcher = f", by {' '.join(mpiexec())}" if max(self._sizes) > 1 else self._why_not
        return f"ranks: {', '.join(map(str, self._sizes))}{launcher}; test@3 is a test on 3 ranks"

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        """Collect nothing: the ranks do."""
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests on each number of ranks."""
        failures = self._config.pluginmanager.get_plugin("lfplugin")
        known = {at_size(str(test))[1] for test in failures.lastfailed} if failures and failures.active else set()
        self._sessions = [size for size in self._sizes if size in known] or self._sizes
        of_sizes = {size: self._arguments(size) for size in self._sizes}
        if not any(of_sizes.values()):
            sizes = ",".join(map(str, self._sizes))
            raise pytest.UsageError(f"--ranks {sizes} has no number of {' '.join(self._config.option.file_or_dir)}")
        with suppress(AttributeError):  # the ranks import what is measured; pytest-cov has no option for that
            plugin: Any = self._config.pluginmanager.get_plugin("_cov")
            coverage = plugin.cov_controller.cov
            coverage._warn_no_data = coverage._warn_unimported_source = False
        self._sessions = [size for size in self._sessions if of_sizes[size]]
        before = signal.signal(signal.SIGTERM, _stop)  # which would end this process without its summary
        try:
            for index, size in enumerate(self._sessions):
                self._run(session, size, of_sizes[size], len(self._sessions) - index - 1)
        finally:
            signal.signal(signal.SIGTERM, before)
        return True

    def _arguments(self, size: int) -> list[str]:
        """Return the command line for this number of ranks; none if all tests that it names are of others."""
        named = [at_size(each)[1] for each in self._config.option.file_or_dir]
        if named and not any(of in (0, size) for of in named):
            return []
        given: list[str] = []
        for each in map(str, self._config.invocation_params.args):
            option, equals, value = each.partition("=") if each.startswith("--deselect=") else ("", "", each)
            name, of = at_size(value)
            if of in (0, size) and value != "--":  # options follow
                given.append(f"{option}{equals}{name}")
            elif given[-1:] == ["--deselect"]:
                given.pop()
        return [
            *given,
            # Ranks start coverage together, and would delete each other's.
            *["--cov-append"] * bool(getattr(self._config.option, "cov_source", None)),
            # Of pytest-randomly: one order on all ranks, also of the sessions that go on.
            *[f"--randomly-seed={seed}" for seed in [getattr(self._config.option, "randomly_seed", None)] if seed],
            f"--rootdir={self._config.rootpath}",
            # A rank has imported this package before it starts pytest.
            "-Wignore:Module already imported:pytest.PytestAssertRewriteWarning",
        ]

    def _workerinput(self) -> dict[str, Any]:
        """Return what plugins tell workers of pytest-xdist, if that is installed, as far as JSON has it."""
        manager, node = self._config.pluginmanager, SimpleNamespace(config=self._config, workerinput={})
        if hasattr(manager.hook, "pytest_configure_node"):
            coverage = manager.get_plugin("_cov")  # which has told all that a rank needs
            manager.subset_hook_caller("pytest_configure_node", [coverage])(node=node)
        return {name: value for name, value in node.workerinput.items() if isinstance(value, str | int | float)}

    def _run(self, session: pytest.Session, size: int, arguments: list[str], following: int) -> None:
        # Plain `pytest` leaves the folder that it is started in off the path, `python -m pytest` does not.
        isolated = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
        remaining: list[str] | None = None
        for left_behind in range(1, _MOST_SESSIONS + 1):
            most = self._config.option.maxfail  # the ranks stop by themselves, and end what fixtures have begun
            left = [f"--maxfail={most - session.testsfailed}"] if most else []
            orders = Orders(
                [*arguments, *left],
                self._sizes,
                self._why_not,
                remaining,
                self._limit,
                self._terminal,
                self._workerinput(),
            )
            try:
                with Job(size, [*isolated, "-m", "pce_mpi.testing.rank"], orders.write, alone=size == 1) as job:
                    course = _Course(session, job, orders, self._tests, following)
                    course.follow()
            except LaunchError as error:
                raise pytest.UsageError(str(error)) from None
            self._tests += course.tests
            if left_behind == _MOST_SESSIONS:
                course.leave_out(f"{_MOST_SESSIONS} tests have ended their session")
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            if not (remaining := course.waiting):
                return


def _stop(number: int, _: object) -> None:
    raise pytest.Session.Interrupted(signal.Signals(number).name)


class _Course:
    """One job of ranks, from its first event to its end.

    There were tests `before`, and numbers of ranks are `following` that have about as many as this one.
    """

    def __init__(self, session: pytest.Session, job: Job, orders: Orders, before: int, following: int) -> None:
        self._session, self._job, self._orders = session, job, orders
        self._config, self._hook = session.config, session.config.hook
        self.waiting = orders.remaining or []  # tests that have not begun
        self._goes_on = orders.remaining is not None  # after a session that a test has ended
        self._test, self._is_running = "", False
        self._outcomes: dict[str, str] = {}  # of the phases of the test that runs
        self._before, self._following, self._failed_before = before, following, session.testsfailed
        self.tests = 0
        self._locations: dict[str, Any] = {}
        self._over: dict[int, int] = {}  # how the session of each rank has ended
        self._exits: dict[int, dict[str, Any]] = {}
        self._left: list[tuple[int, dict[str, Any]]] = []
        self._shown = [0] * job.ranks
        self._when: Any = "setup"  # the phase of the test that runs
        self._has_collected = False
        self._warnings: list[Any] = []  # each once, whatever the rank

    def follow(self) -> None:
        """Report what the ranks do, until they have ended."""
        try:
            self._follow()
        finally:
            self._show_output(last=True)

    def _follow(self) -> None:
        patience, notice = Patience(max(self._orders.limit, STARTUP)), Patience(_NOTICE)
        while not patience.is_over() or self._orders.terminal:
            # Before reading the events, so that these include everything before the end.
            ended = bool(self._job.ends()) or self._job.status is not None
            for rank, event in self._job.news():
                self._take_in(rank, event)
                patience = Patience(max(self._orders.limit, 0 if self._has_collected else STARTUP))
                notice = Patience(_NOTICE)
            self._show_output()
            if notice.is_over():
                self._say_what_is_waited_for(patience)
                notice = Patience(patience.left)
            if self._left or self._exits:
                return self._end_of_some()
            if len(self._over) == self._job.ranks:
                return self._end_of_all()
            if ended:
                return self._fault(self._death())
            time.sleep(_POLL)
        return self._fault(f"no phase of a test has ended for {self._orders.limit:g} s (--ranks-timeout)", stacks=True)

    def _take_in(self, rank: int, event: dict[str, Any]) -> None:
        match event:
            case {"event": "refused", "text": text}:
                if not self._goes_on:
                    raise pytest.UsageError(text)
                self._left.append((rank, {"how": "could not find its tests", "text": text, "report": None}))
            case {"event": "collected", "tests": tests, "deselected": deselected}:
                found = {*tests}
                gone, self.waiting = [test for test in self.waiting if test not in found], tests
                self._has_collected = True
                self.leave_out("is not found any more", gone)
                if not self._goes_on:
                    # With those of the sessions to come, so that percentages do not begin anew with each.
                    self.tests = len(tests)
                    self._session.testscollected = self._before + self.tests * (1 + self._following)
                terminal = self._config.pluginmanager.get_plugin("terminalreporter")
                if terminal is not None and not self._goes_on:
                    terminal._numcollected = self._session.testscollected  # reports of files do not come here
                    terminal.pytest_deselected([SimpleNamespace(nodeid="")] * deselected)
                if self._config.option.collectonly:
                    print(*map(self._name, tests), sep="\n")
                    self.waiting = []
            case {"event": "collect", "report": report} if not self._goes_on or any(
                test.startswith(f"{report['nodeid']}::") for test in self.waiting
            ):
                self._hook.pytest_collectreport(report=self._report(report))
            case {"event": "started", "test": test, "location": location}:
                self._test, self._is_running, self._when = test, True, "setup"
                self._outcomes.clear()
                self._locations[test] = (*location[:2], self._name(location[2]))
                if test in self.waiting:  # a plugin may begin it once more
                    self.waiting.remove(test)
                self._hook.pytest_runtest_logstart(nodeid=self._name(test), location=self._locations[test])
            case {"event": "reported", "report": report}:
                if report.get("$report_type") == "TestReport":  # not of a subtest
                    self._when = {"setup": "call"}.get(report["when"], "teardown")
                    self._outcomes[report["when"]] = report["outcome"]
                self._hook.pytest_runtest_logreport(report=self._report(report))
            case {"event": "finished", "test": test}:
                self._is_running = False
                if phases := self._phases_without_report():
                    self._fail(test, [[f"no report has come of its {' and '.join(phases)}", "", ""]])
                self._hook.pytest_runtest_logfinish(nodeid=self._name(test), location=self._locations[test])
            case {"event": "warning", "when": when} if (
                event in self._warnings or (self._goes_on and when != "runtest")  # the session before has told it
            ):
                pass
            case {"event": "warning", "warning": [text, category, filename, lineno], "when": when, "test": test}:
                self._warnings.append(event)
                kind = type(category, (Warning,), {})
                message = warnings.WarningMessage(kind(text), kind, filename, lineno)
                name = test and self._name(test)
                said = {"warning_message": message, "when": when, "nodeid": name, "location": None}
                self._hook.pytest_warning_recorded.call_historic(kwargs=said)
            case {"event": "exit"}:
                self._exits[rank] = event
            case {"event": "left"}:
                self._left.append((rank, event))
            case {"event": "damaged"}:
                text = "What it has reported is lost in part: a disk may be full, or a test has written to its file."
                self._left.append((rank, {"how": "has written what is no event", "text": text, "report": None}))
            case {"event": "ended", "status": status}:
                self._over[rank] = status

    def _phases_without_report(self) -> list[str]:
        """Return the phases of the test that has finished of which no report of all ranks has come."""
        expected = ["setup", "teardown"]
        if self._outcomes.get("setup") == "passed" and not getattr(self._config.option, "setuponly", False):
            expected.insert(1, "call")
        return [phase for phase in expected if phase not in self._outcomes]

    def _say_what_is_waited_for(self, patience: Patience) -> None:
        what = f"in {self._name(self._test)}" if self._is_running else "in the collection of tests"
        waits = f"nothing has ended {what} for {_NOTICE:g} s; the wait ends in {patience.left:.0f} s (--ranks-timeout)"
        if (terminal := self._config.pluginmanager.get_plugin("terminalreporter")) is not None:
            terminal.ensure_newline()
            terminal.write_line(waits)

    def _name(self, test: str) -> str:
        return with_size(test, self._job.ranks)

    def _report(self, data: dict[str, Any]) -> Any:
        """Return a report of the ranks as one of this session."""
        blocks = data.pop("blocks", None)
        if data.get("$report_type") != "CollectReport":  # of a test, or of a part of one
            data["nodeid"] = self._name(data["nodeid"])
            data["location"] = (*data["location"][:2], self._name(data["location"][2]))
        if isinstance(data["longrepr"], list):  # of a skipped test or file
            data["longrepr"] = tuple(data["longrepr"])
        report = self._hook.pytest_report_from_serializable(config=self._config, data=data)
        if blocks:
            report.longrepr = RanksFailure(blocks, self._config)
        return report

    # The end of a job, as it should be, or not.

    def _end_of_all(self) -> None:
        statuses = set(self._over.values())
        if statuses & {pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR}:
            return self._fault("pytest could not run")
        has_failed = self._session.testsfailed > self._failed_before
        worse = {
            rank: f"status {status}"
            for rank, status in self._over.items()
            if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
            and not (has_failed and status == pytest.ExitCode.TESTS_FAILED)
        }
        if worse:
            self._fault(f"no test has failed so, but sessions have ended with {text_by_rank(worse, 'comm')}")
        if not (has_failed and self._session.shouldfail):
            self.leave_out("the ranks have ended their session without it")
        self.waiting, patience = [], Patience(_END)
        while self._job.status is None and not patience.is_over():
            time.sleep(_POLL)
        if self._job.status is None:
            return self._fault(f"ranks had not ended {_END:g} s after the last test", stacks=True)
        if any(status for _, status in self._job.ends()) or (self._job.status and not self._job.ends()):
            self._fault(f"after the last test, {self._death(failed=True)}")

    def _end_of_some(self) -> None:
        patience = Patience(_EXIT)
        while len(self._exits) < self._job.ranks and not patience.is_over():
            for rank, event in self._job.news():
                self._take_in(rank, event)
            time.sleep(_POLL)
        first = min(self._exits, default=0)
        if len(self._exits) == self._job.ranks and (self._test or not self._goes_on):
            text = self._exits[first]["text"]
            if self._exits[first]["interrupted"]:
                raise self._session.Interrupted(text)
            pytest.exit(text, self._exits[first]["status"])
        blocks = [[f"rank {rank} left the session", event["text"], ""] for rank, event in self._exits.items()]
        waiting = "; others were waiting" * (len(self._left) < self._job.ranks)
        for rank, event in self._left:
            who = f"rank {rank} of {self._job.ranks}"
            blocks.append([f"{who} {event['how']}{waiting}", event["report"] or event["text"], f"{who}: "])
        others = set(range(self._job.ranks)) - self._exits.keys() - {rank for rank, _ in self._left}
        self._end(blocks + self._stacks(sorted(others), "meanwhile"))

    def _fault(self, text: str, stacks: bool = False) -> None:
        printed = self._job.last_lines([0] * self._job.ranks)
        for rank in range(self._job.ranks):  # a stack is the end of what a rank prints, and longer than what is shown
            _, crash, stack = self._job.printed(rank, 0).rpartition("Fatal Python error")
            printed = f"{crash}{stack.partition('/_pytest/')[0].rpartition(chr(10))[0]}" if crash else printed
        blocks = [[text, printed or "nothing was printed", ""]]
        self._end(blocks + (self._stacks(range(self._job.ranks), "at that time") if stacks else []))

    def _end(self, blocks: list[list[Any]]) -> None:
        """Report a fault of the test that runs, or else of the session."""
        if self._is_running:
            return self._fail(self._test, blocks)
        when = f"after {self._test}" if self._test else "before its first test"
        failure: Any = RanksFailure(blocks, self._config)
        name = f"the session on {self._job.ranks} ranks, {when}"
        self._hook.pytest_collectreport(report=pytest.CollectReport(name, "failed", failure, []))
        if not self._test:  # another session would fail as well
            self.leave_out(f"{name}, has failed")

    def leave_out(self, why: str, tests: list[str] | None = None) -> None:
        """Report tests that are not run, all that wait by default, as errors, so that they are not lost."""
        self._when, tests = "setup", self.waiting if tests is None else tests
        while tests and not self._session.shouldfail:
            self._fail(tests.pop(0), [["not run", why, ""]])

    def _fail(self, test: str, blocks: list[list[Any]]) -> None:
        location = self._locations.get(test, (test.partition("::")[0], None, self._name(test)))
        failure: Any = RanksFailure(blocks, self._config)
        report = pytest.TestReport(self._name(test), location, {}, "failed", failure, self._when)
        self._hook.pytest_runtest_logreport(report=report)
        self._hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=location)

    def _death(self, failed: bool = False) -> str:
        rank, how = self._job.death(failed)
        if how.endswith("exit status 1") and self._config.pluginmanager.has_plugin("timeout"):
            how += ": it ended itself, perhaps by the thread method of pytest-timeout"
        return f"a rank {how}" if rank is None else f"rank {rank} of {self._job.ranks} {how}"

    def _stacks(self, ranks: Iterable[int], what: str) -> list[list[Any]]:
        """Return where these ranks are, without the frames of pytest."""
        stacks = {rank: self._job.stack(rank).splitlines()[1:] for rank in ranks}
        on = grouped((own_stack(lines) if lines else "does not answer", rank) for rank, lines in stacks.items())
        return [[f"{what}, {ranks_text(who)} of {self._job.ranks}", stack, ""] for stack, who in on.items()]

    # Output.

    def _show_output(self, last: bool = False) -> None:
        """With -s, show what the ranks print, as they print it."""
        if getattr(self._config.option, "capture", "no") != "no":
            return
        for rank in range(self._job.ranks):
            path = self._job.folder / f"output-{rank}"
            if path.exists() and path.stat().st_size > self._shown[rank]:
                with path.open("rb") as file:
                    file.seek(self._shown[rank])
                    text = file.read()
                whole = text if last else text[: text.rfind(b"\n") + 1]
                self._shown[rank] += len(whole)
                lines = whole.decode(errors="replace").splitlines()
                sys.stdout.write("".join(f"[rank {rank}] {line}\n" for line in lines))
        sys.stdout.flush()

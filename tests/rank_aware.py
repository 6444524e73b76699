"""pytest in every rank of an MPI job, as one session: a pytest plugin that conftest.py registers on each rank.

Every rank runs the same tests in the same order. After each phase of each test (setup, call, teardown) the ranks
tell each other how it ended and go on with one report, so that `-x`, skips and the summary are in step. Rank 0
alone shows output. A failure that cannot be reported that way ends the job: see `verdict.exchange`.
"""

from collections.abc import Generator
import os

from mpi4py import MPI
import pytest

from pce_mpi.comm.board import count_errors
from pce_mpi.comm.program import program
from record import text_of
from verdict import PASSED, Verdict, describe, end_job, exchange


class RankAware:
    def __init__(self, config: pytest.Config) -> None:
        # Verdicts never meet a message of the code under test.
        self.comm: MPI.Comm = MPI.COMM_WORLD.Dup()
        self.config = config
        self.collection_errors: dict[str, str] = {}
        if self.comm.rank > 0:
            silent = pytest.TerminalReporter(config, open(os.devnull, "w"))
            config.pluginmanager.unregister(name="terminalreporter")
            config.pluginmanager.register(silent, "terminalreporter")

    # Collection: every rank must have found the same tests.

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.collection_errors[report.nodeid] = text_of(report)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> Generator[None, object, object]:
        try:
            return (yield)
        except Exception as error:
            self.collection_errors.setdefault("collection", str(error))
            raise
        finally:
            self.agree_on_collection(session)

    def agree_on_collection(self, session: pytest.Session) -> None:
        texts = "\n".join(f"{nodeid}\n{text}" for nodeid, text in self.collection_errors.items())
        mine = Verdict("failed", texts) if texts else Verdict(PASSED)
        exchange(self.comm, mine, where="collection")
        errors_by_rank = self.comm.allgather(self.collection_errors)
        for nodeid in sorted(set().union(*errors_by_rank) - self.collection_errors.keys()):
            verdicts = [
                Verdict("failed", errors[nodeid]) if nodeid in errors else Verdict(PASSED) for errors in errors_by_rank
            ]
            report = pytest.CollectReport(nodeid, "failed", describe(verdicts), [])
            self.config.hook.pytest_collectreport(report=report)
        tests_by_rank = self.comm.allgather([item.nodeid for item in session.items])
        for rank, tests in enumerate(tests_by_rank):
            if tests != tests_by_rank[0]:
                differing = sorted(set(tests) ^ set(tests_by_rank[0])) or ["the same tests in another order"]
                raise session.Interrupted(f"rank 0 and rank {rank} collected different tests: {', '.join(differing)}")

    # Tests: one report for all ranks.

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        mine = Verdict(report.outcome, "" if report.passed else text_of(report))
        verdicts = exchange(self.comm, mine, f"{item.nodeid} ({report.when})")
        outcomes = {verdict.outcome for verdict in verdicts}
        if "failed" in outcomes or len(outcomes) > 1:
            report.outcome = "failed"
            report.longrepr = describe(verdicts)
            report.sections = []
            # A failure that was expected on some ranks only is a failure.
            vars(report).pop("wasxfail", None)
        if report.when == "teardown":  # no rank hears in the next test of an error that this one has caught
            count_errors(self.comm.allreduce(program.errors, MPI.MAX))
        return report

    # The end.

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        # Session.Interrupted comes from all ranks alike; anything else (pytest.exit) may come from this one alone.
        if not isinstance(excinfo.value, pytest.Session.Interrupted):
            end_job(self.comm, "the session was interrupted", excinfo.exconly())

    def pytest_internalerror(self, excrepr: object) -> None:
        end_job(self.comm, "pytest failed", str(excrepr))

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        # The first rank to exit with a failure ends the job: not before rank 0 has printed its summary.
        self.comm.Barrier()

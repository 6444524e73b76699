"""The course of a test session, for tests/run.py: written as it happens, it survives the end of the process."""

import faulthandler
import json
from pathlib import Path
import resource

import pytest

# The sizes that tests of a session name, where those that were asked for are none of them.
NOT_ASKED_FOR = pytest.StashKey[list[int]]()


class Recorder:
    """A pytest plugin that writes lines of JSON.

    They say which tests there are, which one starts, how each of its phases ends, which file cannot be collected.
    """

    def __init__(self, folder: Path) -> None:
        self.file = (folder / "course").open("w", encoding="utf-8", buffering=1)

    def write(self, **event: object) -> None:
        self.file.write(json.dumps(event) + "\n")

    def pytest_runtestloop(self, session: pytest.Session) -> None:
        if not session.testsfailed:  # otherwise a file could not be collected, and no test will run
            tests = [item.nodeid for item in session.items]
            self.write(event="collected", tests=tests, not_asked_for=session.config.stash[NOT_ASKED_FOR])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(event="started", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.write(
            event="reported", test=report.nodeid, phase=report.when, outcome=report.outcome, text=text_of(report)
        )

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write(event="finished", test=nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(event="reported", test=report.nodeid, phase="collection", outcome="failed", text=text_of(report))


def show_stacks_in(folder: Path, rank: int) -> None:
    """If this process dies of a signal, write the stacks of its threads to a file of the rank's own."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable(file=(folder / f"stacks-{rank}").open("w"))


def text_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the text of a failed report: the failure itself and the output captured on the way."""
    captured = [f"----- {title}\n{content}" for title, content in report.sections]
    return "\n".join([report.longreprtext, *captured])

"""The course of a test session as lines of JSON, each written as it happens: it survives the end of the process."""

import json
from pathlib import Path

import pytest


class Recorder:
    """A pytest plugin: which test starts, how each of its phases ends, which file cannot be collected."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w", encoding="utf-8", buffering=1)

    def write(self, **event: object) -> None:
        self.file.write(json.dumps(event) + "\n")

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


def text_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """What a failed report has to say: the failure itself and the output captured on the way."""
    captured = [f"----- {title}\n{content}" for title, content in report.sections]
    return "\n".join([report.longreprtext, *captured])

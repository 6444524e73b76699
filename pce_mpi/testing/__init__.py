"""A plugin of pytest for tests on several ranks: `pytest_plugins = ["pce_mpi.testing"]` in a conftest.py.

A test that fails on one rank is told to the ranks that wait for that one in a call of this package: they fail with its
words, and the next test begins together. Start ranks with plain `python -m pytest`: `python -m mpi4py` ends the job
when the first rank ends.
"""

from __future__ import annotations

from typing import Any

import pytest

from pce_mpi.comm.board import program, tell


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note which test begins: a rank in this one is not where a rank in another one is."""
    program.count += 1
    program.names.append(nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[Any]) -> None:
    """Tell the other ranks why a test, its setup or its teardown has failed on this one."""
    if call.excinfo is not None and not call.excinfo.errisinstance((pytest.skip.Exception, KeyboardInterrupt)):
        tell(call.excinfo.value)

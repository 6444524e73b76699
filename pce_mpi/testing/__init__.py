"""A plugin of pytest for tests on several ranks: `pytest_plugins = ["pce_mpi.testing"]` in a conftest.py.

A test that fails on one rank is told to the ranks that wait for that one in a call of this package: they fail with its
words, and the next test begins together. Start ranks with plain `python -m pytest`: `python -m mpi4py` ends the job
when the first rank ends.
"""

from __future__ import annotations

from functools import cache
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pce_mpi.comm.board import count_errors, tell, timeout_seconds
from pce_mpi.comm.library import is_running, mpi
from pce_mpi.comm.program import program

if TYPE_CHECKING:
    from mpi4py import MPI


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[Any]) -> None:
    """Tell the other ranks why a test, its setup or its teardown has failed on this one."""
    if call.excinfo is not None and not call.excinfo.errisinstance((pytest.skip.Exception, KeyboardInterrupt)):
        tell(call.excinfo.value, [])


def pytest_runtest_logfinish() -> None:
    """Let no rank hear in the next test of an error of this one."""
    if is_running() and mpi().COMM_WORLD.size > 1:
        mine, most = np.array([program.errors]), np.zeros(1, int)
        request, deadline = _world().Iallreduce(mine, most, mpi().MAX), time.monotonic() + timeout_seconds()
        while not request.Test():
            if time.monotonic() > deadline:
                pytest.exit(f"waited {timeout_seconds():g} s (PCE_MPI_TIMEOUT) for the other ranks to end the test", 1)
            time.sleep(0.0002)
        count_errors(int(most[0]))


@cache
def _world() -> MPI.Intracomm:
    # Not that of the tests, which a rank may have left in the middle of a collective.
    return mpi().COMM_WORLD.Dup()

"""Hypothesis on several ranks: an example that fails on one rank fails on all, so that all shrink in step.

    @given(rows=st.integers(0, 9))
    def test_something(comm, rows):
        with in_step(comm):
            ...                          # may fail on one rank only

Every rank then raises the same `AssertionError` from the same line, with the text of the ranks that failed. All
that Hypothesis sees is the same everywhere, and so is every example that it draws next.
"""

import os
import traceback
from types import TracebackType

from hypothesis.errors import StopTest, UnsatisfiedAssumption
from mpi4py import MPI
import pytest

from verdict import PASSED, Verdict, describe, exchange

# Neither passed nor failed: Hypothesis withdraws the example, or the test skips itself.
WITHDRAWALS = (StopTest, UnsatisfiedAssumption, pytest.skip.Exception)

# A communicator keeps its duplicate for verdicts under this key: duplicating takes longer than many an example.
VERDICT_COMM = MPI.Comm.Create_keyval()


class in_step:
    """Context manager around the body of one example; collective over `comm`."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm = comm

    def __enter__(self) -> None:
        # Verdicts never meet a message that the body left behind.
        verdict_comm = self.comm.Get_attr(VERDICT_COMM)
        if not isinstance(verdict_comm, MPI.Comm):
            verdict_comm = self.comm.Dup()
            self.comm.Set_attr(VERDICT_COMM, verdict_comm)
        self.verdict_comm = verdict_comm

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            mine = Verdict(PASSED)
        elif isinstance(error, WITHDRAWALS):
            mine = Verdict("withdrawn", repr(error))
        else:
            mine = Verdict("failed", "".join(traceback.format_exception(error)))
        test = os.environ.get("PYTEST_CURRENT_TEST", "an example")
        verdicts = exchange(self.verdict_comm, mine, where=test)
        outcomes = {verdict.outcome for verdict in verdicts}
        if outcomes in ({PASSED}, {"withdrawn"}):
            return
        try:
            raise AssertionError(describe(verdicts))
        except AssertionError as failure:
            # Hypothesis tells failures apart by their context too, and only the ranks that failed have one.
            failure.__context__ = None
            raise

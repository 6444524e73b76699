"""Hypothesis on several ranks: ranks draw the same examples, and one that fails on one of them fails on all.

Every rank then raises the same `AssertionError` from the same line. All that Hypothesis sees is the same everywhere,
and so is every example that it draws next: ranks shrink in step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, wraps
import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pce_mpi.testing.verdict import RanksFailure, blocks_of, exchange

if TYPE_CHECKING:
    from mpi4py import MPI
    import pytest

_session: Any = None  # the `RankSession` of this process


class in_step:
    """Context manager around the body of one example: an error of one rank is raised on all ranks.

    The plugin of pytest does the same for every test of Hypothesis. Functions within a test that Hypothesis calls need
    it, and tests on ranks that run pytest without the plugin.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Ranks that run the example. Each enters and leaves; they send 16 bytes each, and more after an error.

    Raises
    ------
    AssertionError
        On all ranks, if an example has failed on some, with the texts of these.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> from pce_mpi.testing import in_step
    >>> with in_step(MPI.COMM_WORLD):
    ...     assert MPI.COMM_WORLD.rank < MPI.COMM_WORLD.size
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def __enter__(self) -> None:
        # Verdicts never meet a message that the body left behind: a communicator keeps a duplicate for them.
        duplicate: Any = self._comm.Get_attr(_keyval())
        if duplicate is None:
            duplicate = self._comm.Dup()
            self._comm.Set_attr(_keyval(), duplicate)
        self._verdicts: MPI.Intracomm = duplicate

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outcome, text = "passed", ""
        if isinstance(error, _withdrawals()):
            outcome, text = "withdrawn", repr(error)
        elif error is not None:
            outcome, text = "failed", "".join(traceback.format_exception(error))
        wait = _session.waiting("an example", text, outcome) if _session else lambda seconds: None
        if exchange(self._verdicts, error is None, 0, wait)[0]:
            return
        verdicts = self._verdicts.allgather({"outcome": outcome, "longrepr": text})
        if all(each["outcome"] == "withdrawn" for each in verdicts):
            return
        texts = [[heading, verdict["longrepr"], who] for heading, verdict, who in blocks_of(verdicts)]
        try:
            raise AssertionError(str(RanksFailure(texts)))
        except AssertionError as failure:
            failure.__context__ = None  # Hypothesis tells failures apart by it too, and only ranks that failed have one
            raise


def _withdrawals() -> tuple[type[BaseException], ...]:
    """Return what neither passes nor fails: Hypothesis withdraws the example, or the test skips itself."""
    withdrawals: list[type[BaseException]] = []
    if "hypothesis" in sys.modules:
        from hypothesis.errors import StopTest, UnsatisfiedAssumption

        withdrawals += [StopTest, UnsatisfiedAssumption]
    if "pytest" in sys.modules:
        from pytest import skip

        withdrawals.append(skip.Exception)
    return tuple(withdrawals)


@cache
def _keyval() -> int:
    from mpi4py import MPI

    return MPI.Comm.Create_keyval()


def keep_in_step(items: Iterable[pytest.Item], session: Any) -> None:
    """Have the tests of Hypothesis among these draw the same examples on any ranks, and run each on all together."""
    global _session
    _session = session
    if "hypothesis" not in sys.modules:
        return
    from hypothesis import HealthCheck, Phase, settings

    def sure(given: settings) -> settings:
        # Nothing may depend on chance, on a clock, or on what an earlier run left on disk.
        return settings(
            given,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[phase for phase in given.phases if phase is not Phase.explain],
            suppress_health_check=[*given.suppress_health_check, HealthCheck.too_slow],
        )

    settings.register_profile("ranks", sure(settings()))  # for functions within a test
    settings.load_profile("ranks")
    if "hypothesis.stateful" in sys.modules:
        _keep_machines_in_step(sure, session.comm)
    for item in items:
        test: Any = getattr(item, "function", None)
        handle = getattr(test, "hypothesis", None)
        if handle is None or hasattr(handle.inner_test, "is_in_step"):
            continue
        if session.comm:
            handle.inner_test = _stepping(handle.inner_test, session.comm)
        test._hypothesis_internal_use_settings = sure(test._hypothesis_internal_use_settings)


def _keep_machines_in_step(sure: Callable[[Any], Any], comm: MPI.Intracomm | None) -> None:
    """Have state machines, whose tests are made as they run, draw the same; a step that fails somewhere fails on all.

    A rank that went on alone would draw more.
    """
    from hypothesis import stateful as module

    stateful: Any = module
    make, state_of = stateful.get_state_machine_test, stateful.RuleBasedStateMachine.setup_state.__func__
    if hasattr(make, "is_in_step"):
        return

    @wraps(make)
    def in_step_on_ranks(factory: Any, *, settings: Any = None, **options: Any) -> Any:
        return make(factory, settings=sure(settings or factory.TestCase.settings), **options)

    def with_steps_on_all_ranks(machine: type) -> Any:
        state = state_of(machine)
        for step in (*state.rules, *state.initializers, *state.invariants):
            if not hasattr(step.function, "is_in_step"):
                object.__setattr__(step, "function", _stepping(step.function, comm))
        return state

    vars(in_step_on_ranks)["is_in_step"] = True
    stateful.get_state_machine_test = in_step_on_ranks
    if comm:
        stateful.RuleBasedStateMachine.setup_state = classmethod(with_steps_on_all_ranks)


def _stepping(test: Callable[..., Any], comm: Any) -> Callable[..., Any]:
    @wraps(test)
    def example(*arguments: Any, **options: Any) -> Any:
        with in_step(comm):
            return test(*arguments, **options)

    vars(example)["is_in_step"] = True
    return example

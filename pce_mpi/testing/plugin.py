"""A plugin of pytest for tests on several ranks, which does nothing until `--ranks` asks for it.

`pytest --ranks 1,2,3` starts the ranks itself (`controller.py`); `mpiexec -n 3 python -m mpi4py -m pytest --ranks 3`
makes one session of the ranks that the launcher has started (`session.py`). Without `--ranks` tests that are marked for
other numbers of ranks are skipped, and nothing else is done.
"""

from collections.abc import Generator
from contextlib import suppress
import math
import os
import sys

from _pytest.config import ConftestImportFailure  # of which pytest has no public name
import pytest

from pce_mpi.comm.launcher import launcher_env, why_apart
from pce_mpi.testing.fixtures import comm as comm, mesh as mesh, rank_tmp_path as rank_tmp_path
from pce_mpi.testing.orders import NAME, Orders
from pce_mpi.testing.sizes import asks_for_ranks, parse_sizes, select

_LIMIT = 300.0

# Options of other plugins that do not go with ranks, and why.
_OTHERS = {
    "numprocesses": "starts processes itself: leave out -n of pytest-xdist",
    "stepwise": "has a session for each number of ranks, and --stepwise counts the tests of one: give -x, then -x --lf",
    "forked": "starts processes itself, and MPI has no ranks in forked ones: leave out --forked of pytest-forked",
    "force_flaky": "needs --reruns of pytest-rerunfailures, as --force-flaky runs a test again on one rank alone",
}

_launched = launcher_env()
_is_rank = _launched is not None and _launched.size > 1
# pytest captures standard input, output and error from its start to its end.
_terminal = ""
with suppress(OSError):  # a terminal of another container has no name here
    _terminal = os.ttyname(0) if os.isatty(1) else ""
_stderr = open(os.dup(2), "w", buffering=1) if _is_rank else sys.stderr


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.0 < seconds < math.inf:
        raise ValueError
    return seconds


_seconds.__name__ = "number of seconds"  # in the error of a wrong one


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks", "tests on several ranks (pce_mpi)")
    group.addoption(
        "--ranks",
        metavar="N,N",
        help="run the tests on each of these numbers of MPI ranks; under mpiexec, as one session on the ranks that it "
        "has started",
    )
    group.addoption(
        "--ranks-timeout",
        type=_seconds,
        default=_LIMIT,
        metavar="SECONDS",
        help="fail a test in which nothing ends for so many seconds of an idle machine, and show where each rank is "
        f"(default: {_LIMIT:g})",
    )


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, object, object]:
    options, plugins = early_config.known_args_namespace, early_config.pluginmanager
    if options.ranks is not None:
        parse_sizes(options.ranks)
    is_asked = options.ranks is not None
    if _is_rank and is_asked and not plugins.has_plugin(NAME):
        from mpi4py import MPI

        from pce_mpi.testing.session import RankSession

        if apart := why_apart(MPI.COMM_WORLD):
            raise pytest.UsageError(apart)
        size, limit = MPI.COMM_WORLD.size, options.ranks_timeout
        plugins.register(RankSession(MPI.COMM_WORLD.Dup(), Orders([], [size], limit=limit), stderr=_stderr), NAME)
    session = plugins.get_plugin(NAME)
    if session is not None:
        session.begin(early_config)
    try:
        return (yield)
    except ConftestImportFailure as failure:
        if session is None and is_asked:
            where = "in the session that starts the ranks and reports, which is no rank itself"
            raise pytest.UsageError(f"{failure.path} could not be imported {where}: {failure.cause!r}") from failure
        raise


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.pluginmanager.has_plugin(NAME):
        return
    if not _is_rank:
        return select(items, 1, [1], "; pytest --ranks takes others", own_marks=False)
    for item in items:
        if asks_for_ranks(item):
            raise pytest.UsageError(
                f"{item.nodeid} is a test on ranks, and mpiexec has started several: give --ranks and their number, so "
                "that they are one session, in which no rank waits for one that has failed"
            )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(n, ..., min=n): a test that runs on these numbers of ranks alone")
    config.addinivalue_line("markers", 'mesh(data=n, model="rest"): the shape of the mesh of all ranks in fixture mesh')
    option = config.option
    if (session := config.pluginmanager.get_plugin(NAME)) is not None and option.basetemp:
        option.basetemp = session.own_folder(option.basetemp)
    if option.ranks is None:
        return
    for name, needs in _OTHERS.items():
        if getattr(option, name, None):
            raise pytest.UsageError(f"--ranks {needs}")
    if session is not None:
        return
    sizes = parse_sizes(option.ranks)
    if getattr(option, "usepdb", False) and not _terminal:
        raise pytest.UsageError("--pdb with --ranks needs a terminal for standard input and output")
    from pce_mpi.testing.controller import Controller

    config.pluginmanager.register(Controller(config, sizes, option.ranks_timeout, _terminal), "pce_mpi-controller")

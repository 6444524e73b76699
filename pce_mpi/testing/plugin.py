"""A plugin of pytest for tests on several ranks, which does nothing until it is asked for.

`pytest --ranks 1,2,3` starts the ranks itself (`controller.py`); `mpiexec -n 3 python -m mpi4py -m pytest` makes one
session of the ranks that the launcher has started (`session.py`).
"""

from contextlib import suppress
import os
import sys

import pytest

from pce_mpi.comm.launcher import launcher_env, why_apart
from pce_mpi.testing.fixtures import comm as comm, mesh as mesh, rank_tmp_path as rank_tmp_path
from pce_mpi.testing.orders import NAME, Orders
from pce_mpi.testing.sizes import parse_sizes, select

_LIMIT = 300.0

_launched = launcher_env()
_is_rank = _launched is not None and _launched.size > 1
# pytest captures standard input, output and error from its start to its end.
_terminal = ""
with suppress(OSError):  # a terminal of another container has no name here
    _terminal = os.ttyname(0) if os.isatty(1) else ""
_stderr = open(os.dup(2), "w", buffering=1) if _is_rank else sys.stderr


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks", "tests on several ranks (pce_mpi)")
    group.addoption("--ranks", metavar="N,N", help="run the tests on each of these numbers of MPI ranks")
    group.addoption(
        "--ranks-timeout",
        type=float,
        default=_LIMIT,
        metavar="SECONDS",
        help="fail a test in which nothing ends for so many seconds of an idle machine, and show where each rank is "
        f"(default: {_LIMIT:g})",
    )


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    plugins = early_config.pluginmanager
    if _is_rank and not plugins.has_plugin(NAME):
        from mpi4py import MPI

        from pce_mpi.testing.session import RankSession

        if apart := why_apart(MPI.COMM_WORLD):
            raise pytest.UsageError(apart)
        size, limit = MPI.COMM_WORLD.size, early_config.known_args_namespace.ranks_timeout
        plugins.register(RankSession(MPI.COMM_WORLD.Dup(), Orders([], [size], limit=limit), stderr=_stderr), NAME)
    if (session := plugins.get_plugin(NAME)) is not None:
        session.begin(early_config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.has_plugin(NAME):  # one rank, of which nobody has been asked
        select(config, items, 1, [1], "; pytest --ranks takes others")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(n, ..., min=n): a test that runs on these numbers of ranks alone")
    config.addinivalue_line("markers", 'mesh(data=n, model="rest"): the shape of the mesh of all ranks in fixture mesh')
    option = config.option
    if (session := config.pluginmanager.get_plugin(NAME)) is not None and option.basetemp:
        option.basetemp = session.own_folder(option.basetemp)
    if not option.ranks or session is not None:
        return
    sizes = parse_sizes(option.ranks)
    if getattr(option, "numprocesses", None):
        raise pytest.UsageError("--ranks starts processes itself: leave out -n of pytest-xdist")
    if getattr(option, "stepwise", False):
        raise pytest.UsageError(
            "--stepwise counts the tests of one number of ranks: with --ranks give -x, then -x --lf"
        )
    if getattr(option, "usepdb", False) and not _terminal:
        raise pytest.UsageError("--pdb with --ranks needs a terminal for standard input and output")
    from pce_mpi.testing.controller import Controller

    config.pluginmanager.register(Controller(config, sizes, option.ranks_timeout, _terminal), "pce_mpi-controller")

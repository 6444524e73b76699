"""One conftest for any number of ranks: `pytest`, or `mpiexec -n 3 python -m mpi4py -m pytest tests/ranks`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
import signal
from typing import TYPE_CHECKING

import hypothesis
import pytest

from patience import slowdown
from pce_mpi.comm.library import launcher_env, why_apart
from record import NOT_ASKED_FOR, Recorder, show_stacks_in
import strict_cupy

if TYPE_CHECKING:
    from mpi4py import MPI

    from pce_mpi import Mesh

# The ranks draw the same examples: nothing may depend on chance, on a clock, or on what an earlier run left on disk.
# Shrinking in step needs `in_step` as well.
hypothesis.settings.register_profile(
    "ranks",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    phases=set(hypothesis.Phase) - {hypothesis.Phase.explain},
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("ranks")


cupy, stand_in, xp = strict_cupy.cupy, strict_cupy.stand_in, strict_cupy.xp  # fixtures, for tests to find here


@pytest.fixture(scope="session")
def comm() -> MPI.Intracomm:
    """All ranks of the job; a process that was started without mpiexec is a job of one rank."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture
def line(comm: MPI.Intracomm) -> Mesh:
    """A mesh of one dim, `data`."""
    from ranks.grids import mesh_of

    return mesh_of(comm, comm.size)


@pytest.fixture
def square(comm: MPI.Intracomm) -> Mesh:
    """A mesh of two dims, `data` and `model`."""
    from ranks.grids import mesh_of, squarest

    return mesh_of(comm, *squarest(comm.size))


@pytest.fixture
def several(comm: MPI.Intracomm) -> None:
    if comm.size == 1:
        pytest.skip("one rank agrees with itself: run this on 2 ranks or more")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits in vain gives up before the session does."""
    monkeypatch.setenv("PCE_MPI_TIMEOUT", f"{20 * slowdown()}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="write the course of the session to this folder, as lines of JSON")
    parser.addoption("--after", metavar="TEST", help="leave out the tests up to this one, which has ended a session")
    parser.addoption("--only-with-comm", action="store_true", help="leave out the tests that ask for no communicator")
    parser.addoption(
        "--sizes",
        default="",
        metavar="N,N",
        help="the sizes asked for (default: this one), as tests run at their own only",
    )
    parser.addoption("--gpu", action="store_true", help="run the tests of CuPy arrays, and no others, on a GPU")
    parser.addoption("--cupy-on-cpu", action="store_true", help="the same with CuPy on the CPU; needs no GPU, but g++")


@pytest.hookimpl(trylast=True)  # a test that -k leaves out names no sizes
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.only_with_comm:
        keep(config, items, lambda item: asks_for(item, {"comm"}))
    if config.option.gpu:
        keep(config, items, lambda item: asks_for(item, {"cupy", "stand_in", "xp"}))
    here = told.size if (told := launcher_env()) else 1
    asked = {int(size) for size in config.option.sizes.split(",")} if config.option.sizes else {here}
    # A test runs at its own sizes alone: at those of them that are asked for, or else at them all.
    sizes = {item: sizes_of(item) & asked or sizes_of(item) or asked for item in items if asks_for(item, {"comm"})}
    config.stash[NOT_ASKED_FOR] = sorted(set().union(*sizes.values()) - asked)
    # Without `comm` a test runs at the first size, whatever its file says.
    keep(config, items, lambda item: here in sizes.get(item, {here}))
    if config.option.after:
        names = [item.nodeid for item in items]
        del items[: names.index(config.option.after) + 1]


def asks_for(item: pytest.Item, fixtures: set[str]) -> bool:
    return isinstance(item, pytest.Function) and not fixtures.isdisjoint(item.fixturenames)


def sizes_of(item: pytest.Item) -> set[int]:
    """At how many ranks it runs, if it does not run at any number of them."""
    marker = item.get_closest_marker("sizes")
    return set(marker.args) if marker else set()


def keep(config: pytest.Config, items: list[pytest.Item], condition: Callable[[pytest.Item], bool]) -> None:
    kept = [item for item in items if condition(item)]
    config.hook.pytest_deselected(items=[item for item in items if not condition(item)])
    items[:] = kept


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    comm = None
    if launcher_env() is None:
        # A pytest that is told to end must end the jobs that its tests have launched.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    else:
        from mpi4py import MPI

        if apart := why_apart(MPI.COMM_WORLD):
            raise pytest.UsageError(apart)
        from rank_aware import RankAware

        comm = MPI.COMM_WORLD
        config.pluginmanager.register(RankAware(config))
    if config.option.record:
        rank = comm.rank if comm else 0
        show_stacks_in(config.option.record, rank)
        if rank == 0:
            config.pluginmanager.register(Recorder(config.option.record))
    if config.option.cupy_on_cpu:
        import cupy_on_cpu

        try:
            cupy_on_cpu.install()
        except (ImportError, RuntimeError) as error:
            raise pytest.UsageError(f"--cupy-on-cpu: {error}") from error
        config.pluginmanager.register(cupy_on_cpu.Session())
        config.option.gpu = True
    if config.option.gpu:
        from pce_mpi.cli.info import take_gpu_of_rank

        try:
            take_gpu_of_rank(comm)
        except RuntimeError as error:
            raise pytest.UsageError(f"--gpu: {error}") from error

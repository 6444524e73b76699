"""Fixtures and options of the tests, which run on any number of ranks by the plugin `pce_mpi.testing`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pce_mpi.comm.launcher import launcher_env
from pce_mpi.jobs.patience import slowdown
from pce_mpi.testing.orders import NAME
import strict_cupy

if TYPE_CHECKING:
    from mpi4py import MPI

    from pce_mpi import Mesh

cupy, stand_in, xp = strict_cupy.cupy, strict_cupy.stand_in, strict_cupy.xp  # fixtures, for tests to find here


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
    parser.addoption("--gpu", action="store_true", help="run the tests of CuPy arrays, and no others, on a GPU")
    parser.addoption("--cupy-on-cpu", action="store_true", help="the same with CuPy on the CPU; needs no GPU, but g++")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.gpu:
        libraries = {"cupy", "stand_in", "xp"}
        config.hook.pytest_deselected(items=[item for item in items if not asks_for(item, libraries)])
        items[:] = [item for item in items if asks_for(item, libraries)]
    session = config.pluginmanager.get_plugin(NAME)
    first = session.orders.sizes[0] if session else 1
    for item in items:
        if not asks_for(item, {"comm"}):
            # Without `comm` a test is the same on any number of ranks, whatever its own mark or that of its file says.
            item.add_marker(pytest.mark.ranks(first), append=False)


def asks_for(item: pytest.Item, fixtures: set[str]) -> bool:
    return isinstance(item, pytest.Function) and not fixtures.isdisjoint(item.fixturenames)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
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

        comm = None
        if launcher_env() is not None:
            from mpi4py import MPI

            comm = MPI.COMM_WORLD
        try:
            take_gpu_of_rank(comm)
        except RuntimeError as error:
            raise pytest.UsageError(f"--gpu: {error}") from error

"""Fixtures and options of the tests, which run on any number of ranks by the plugin `pce_mpi.testing`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import hypothesis
import pytest

from pce_mpi.comm.library import launcher_env
from pce_mpi.jobs.patience import slowdown
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
    parser.addoption("--only-with-comm", action="store_true", help="leave out the tests that ask for no communicator")
    parser.addoption(
        "--sizes",
        default="",
        metavar="N,N",
        help="the sizes asked for (default: this one), as tests run at their own only",
    )
    parser.addoption("--gpu", action="store_true", help="run the tests of CuPy arrays, and no others, on a GPU")
    parser.addoption("--cupy-on-cpu", action="store_true", help="the same with CuPy on the CPU; needs no GPU, but g++")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.only_with_comm:
        keep(config, items, lambda item: asks_for(item, {"comm"}))
    if config.option.gpu:
        keep(config, items, lambda item: asks_for(item, {"cupy", "stand_in", "xp"}))
    asked = {int(size) for size in config.option.sizes.split(",") if size}
    here = told.size if (told := launcher_env()) else 1
    for item in items:
        if not asks_for(item, {"comm"}):
            # Without `comm` a test is the same on any number of ranks, whatever its file says.
            item.own_markers.append(pytest.mark.ranks(here).mark)
    # Of sizes that others are asked for, the plugin says that a test is skipped; here another session runs it.
    keep(config, items, lambda item: here in (sizes_of(item) or {here}) or not sizes_of(item) & asked)


def asks_for(item: pytest.Item, fixtures: set[str]) -> bool:
    return isinstance(item, pytest.Function) and not fixtures.isdisjoint(item.fixturenames)


def sizes_of(item: pytest.Item) -> set[int]:
    """At how many ranks it runs, if it does not run at any number of them."""
    marker = item.get_closest_marker("ranks")
    return set(marker.args) if marker else set()


def keep(config: pytest.Config, items: list[pytest.Item], condition: Callable[[pytest.Item], bool]) -> None:
    kept = [item for item in items if condition(item)]
    config.hook.pytest_deselected(items=[item for item in items if not condition(item)])
    items[:] = kept


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

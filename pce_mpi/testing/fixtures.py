"""Fixtures for tests on several ranks."""

from __future__ import annotations

import math
from pathlib import Path
import re
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest

from pce_mpi.testing.orders import NAME
from pce_mpi.testing.sizes import shape_of

if TYPE_CHECKING:
    from mpi4py import MPI

    from pce_mpi.distributed.mesh import Mesh


@pytest.fixture(scope="session")
def comm() -> MPI.Intracomm:
    """All ranks: MPI.COMM_WORLD."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        pytest.skip(f"comm needs mpi4py and an MPI library: {error}")
    return MPI.COMM_WORLD


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Mesh:
    """A mesh of all ranks: a line, dim `ranks`, or as in `@pytest.mark.mesh(data=2, model="rest")`."""
    from pce_mpi.distributed.mesh import Mesh

    try:
        from mpi4py import MPI
    except ImportError:
        comm: Any = None
    else:
        comm = MPI.COMM_WORLD
    size = 1 if comm is None else comm.size
    shape: dict[str, Any] = {**shape_of(request.node)} or {"ranks": size}
    known = math.prod(each for each in shape.values() if each != "rest")
    return Mesh(comm, **{name: size // known if each == "rest" else each for name, each in shape.items()})


@pytest.fixture
def rank_tmp_path(request: pytest.FixtureRequest) -> Path:
    """One empty folder for all ranks, which share a file system; it goes when the session ends."""
    session = request.config.pluginmanager.get_plugin(NAME)
    if session is None:
        path: Path = request.getfixturevalue("tmp_path")
        return path
    name = re.sub("[^a-zA-Z0-9]", "_", request.node.name)[:30]
    path = session.shared / f"{name}-{crc32(request.node.nodeid.encode()):x}"
    path.mkdir(exist_ok=True)  # by the rank that comes first: a fixture that communicates could leave others waiting
    return path

"""One rank of a session of pytest: `python -m pce_mpi.testing.rank FOLDER RANKS`, where FOLDER has the `Orders`."""

import os
from pathlib import Path
import signal
import sys

import pytest

from pce_mpi.comm.launcher import why_apart
from pce_mpi.jobs.guard import end_with_parent
from pce_mpi.jobs.journal import begin
from pce_mpi.testing.orders import Orders
from pce_mpi.testing.session import RankSession


def main(folder: Path, ranks: int) -> None:
    """Run the session that is ordered in `folder` on this rank."""
    end_with_parent(signal.SIGKILL)  # also on a host where no guard runs
    orders, comm = Orders.read(folder), None
    if ranks > 1:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD.Dup()  # verdicts never meet a message of the code under test
    rank = comm.rank if comm else 0
    journal = begin(folder, rank)
    if apart := why_apart(comm, ranks):
        journal.write("refused", text=apart)
        return
    if orders.terminal:
        for descriptor, flags in enumerate([os.O_RDONLY, os.O_WRONLY, os.O_WRONLY]):
            os.dup2(os.open(orders.terminal, flags | os.O_NOCTTY), descriptor)
    # A rank that waits in this package gives up before the session does.
    os.environ.setdefault("PCE_MPI_TIMEOUT", f"{orders.limit / 2:g}")
    status = pytest.main(orders.arguments, plugins=[RankSession(comm, orders, journal, folder)])
    journal.write("ended", status=int(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

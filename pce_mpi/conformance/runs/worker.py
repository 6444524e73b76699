"""One rank of a launch: load the candidate, run its cases in order, and write events to the journal.

A `Job` starts it on RANKS ranks, as `python -m pce_mpi.conformance.runs.worker FOLDER RANKS`; FOLDER has the orders.

============  =====  ==================================================================================================
event         ranks  meaning, and the fields beside it
============  =====  ==================================================================================================
`began`       all    the process runs
`apart`       any    MPI does not see all ranks that were started, and this one ends; `text`
`unusable`    any    the candidate could not be loaded or started; `text`
`ready`       0      the candidate is loaded and started; `offer`, `versions`
`started`     all    a task begins; `task` is its number, `printed` how many bytes this rank had printed by then
`called`      all    the candidate is called, or the backward function that it returned
`returned`    all    ... and has returned
`raised`      all    ... or has raised; `error`, in a line that says where
`judging`     0      all ranks have returned or raised, and this one compares what they gave
`outcome`     0      the task has ended; `outcome`
`torn`        0      some ranks raised and others did not, so this launch ends here
`done`        0      all tasks have ended
============  =====  ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
import faulthandler
from functools import partial
from importlib.metadata import PackageNotFoundError, version
import os
from pathlib import Path
import platform
import resource
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any

from pce_mpi.comm.launcher import why_apart
from pce_mpi.conformance.candidates.loading import NAMED_CANDIDATES, adapted, check_call, load
from pce_mpi.conformance.candidates.offers import Offer, offer_of
from pce_mpi.conformance.judging.comparing import Tolerance
from pce_mpi.conformance.runs.orders import Orders
from pce_mpi.conformance.runs.running import run_and_tell
from pce_mpi.conformance.serialization import to_json
from pce_mpi.conformance.text import error_text
from pce_mpi.jobs.guard import end_with_parent
from pce_mpi.jobs.journal import Journal, begin
from pce_mpi.jobs.mpiexec import LaunchError
from pce_mpi.text import bounded

if TYPE_CHECKING:
    from mpi4py import MPI

# A report has the versions of these, if they were imported, and that of the arrays' library.
_PACKAGES = ("numpy", "mpi4py", "ml_dtypes", "torch", "jax", "jaxlib", "paddle", "tensorflow")


class Recorded:
    """A candidate that writes its calls to the journal, and those of the backward functions that it returns."""

    def __init__(self, candidate: Callable[..., Any], journal: Journal) -> None:
        self._candidate, self._journal = candidate, journal
        self.raised = False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        returned = self._call(self._candidate, *arguments, **options)
        if isinstance(returned, tuple) and len(returned) == 2 and callable(returned[1]):
            loss, backward = returned
            return loss, lambda *upstream: self._call(backward, *upstream)
        return returned

    def _call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self._journal.write("called")
        try:
            returned = function(*arguments, **options)
        except BaseException as error:
            self.raised = True
            self._journal.write("raised", error=error_text(error))
            raise
        self._journal.write("returned")
        return returned


def _run(
    orders: Orders, offer: Offer, candidate: Recorded, comm: MPI.Intracomm, journal: Journal, output: Path
) -> bool:
    """Execute all tasks; return False if some ranks raised and others did not, which ends the launch."""
    cases = orders.cases(offer)
    settings: dict[str, Any] = {
        "tolerance": Tolerance(orders.strict, orders.tolerance),
        "seed": orders.seed,
        "rows": orders.rows,
        "classes": orders.classes,
        "offer": offer,
        "judging": partial(journal.write, "judging"),
    }
    for number, name in enumerate(cases if orders.tasks is None else orders.tasks):
        with suppress(Exception):  # the candidate may have closed or replaced it
            sys.stdout.flush()
        journal.write("started", task=number, printed=output.stat().st_size)
        candidate.raised = False
        outcome = run_and_tell(candidate, cases[name], comm, **settings)
        if comm.rank == 0:
            journal.write("outcome", outcome=to_json(outcome))
        # There may be messages that nobody has received, or ranks inside a collective.
        if len(set(comm.allgather(candidate.raised))) > 1:
            return False
    return True


def main(folder: Path, ranks: int) -> None:
    """Execute the orders in `folder` on all ranks; raise `LaunchError` if these are not `ranks`."""
    end_with_parent(signal.SIGKILL)  # also on a host where no guard runs
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    journal = begin(folder, comm.rank)
    if apart := why_apart(comm, ranks):
        journal.write("apart", text=apart)
        raise LaunchError(apart)
    output = folder / f"output-{comm.rank}"
    faulthandler.enable(all_threads=False)
    orders = Orders.read(folder)
    try:
        if orders.memory is not None:
            _limit_memory(orders.memory)
        candidate = _candidate(orders)
        if hasattr(candidate, "start"):
            candidate.start(comm)
        offer = offer_of(candidate)
    except Exception as error:
        journal.write("unusable", text=error_text(error))
        raise
    if comm.rank == 0:
        journal.write("ready", offer=to_json(offer), versions=_versions(MPI, offer.arrays))
    comm.Barrier()  # no rank is seen to start a case before that was written
    whole = _run(orders, offer, Recorded(candidate, journal), comm, journal, output)
    if comm.rank == 0:
        journal.write("done" if whole else "torn")
    comm.Barrier()  # no rank is seen to end before that was written
    if whole and hasattr(candidate, "stop"):
        candidate.stop()


def _limit_memory(gib: float) -> None:
    """Let this process, and each that it starts, have so much memory of its own; shared memory does not count."""
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    size = int(min(gib * 2**30, sys.maxsize if most == resource.RLIM_INFINITY else most))
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def _candidate(orders: Orders) -> Any:
    if orders.adapter is not None:
        return adapted(orders.adapter, load(orders.candidate))
    if orders.candidate in NAMED_CANDIDATES:
        return NAMED_CANDIDATES[orders.candidate]
    candidate = load(orders.candidate)
    check_call(candidate)
    return candidate


def _versions(mpi: Any, arrays: str) -> dict[str, str]:
    vendor, release = mpi.get_vendor()
    found = {"python": platform.python_version(), "MPI": f"{vendor} {'.'.join(map(str, release))}"}
    imported = (package for package in (*_PACKAGES, arrays) if package in sys.modules)
    for package in ("pce_mpi", *imported):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = bounded(str(getattr(sys.modules.get(package), "__version__", "unknown")), 100)
    return found


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # The usual exit waits for the other ranks.
        os._exit(1)

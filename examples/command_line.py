"""The command line of a program on many ranks: rank 0 parses it and prints messages once; all ranks get the result."""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
import os
import shlex
import signal
import sys
import time
from types import TracebackType

from mpi4py import MPI

from pce_mpi.comm.launch import launch, why_apart
from pce_mpi.conformance.launching import number_of_cores


def parse_arguments(comm: MPI.Intracomm, parser: ArgumentParser, ranks_per: str = "") -> Namespace:
    """Parse the command line on rank 0, for every rank; the number of ranks is a multiple of the option `ranks_per`."""
    sys.excepthook = lambda *raised: end_job(comm, parser.prog, *raised)
    outcome: Namespace | SystemExit | None = None
    if comm.rank == 0:
        try:
            if apart := why_apart(comm):
                raise SystemExit(f"error: {apart}")
            outcome = parser.parse_args()
            if ranks_per and (getattr(outcome, ranks_per) < 1 or comm.size % getattr(outcome, ranks_per)):
                parser.error(f"--{ranks_per} {getattr(outcome, ranks_per)} does not divide {comm.size} ranks")
            if launch() is None:
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly under `| head`, as ranks of mpiexec do
                again = f"mpiexec -n 4 python -m mpi4py {shlex.join(sys.argv)}"
                print(f"started without mpiexec, so on 1 rank; on 4 ranks: {again}", file=sys.stderr, flush=True)
        except SystemExit as end:
            outcome = end
    outcome = comm.bcast(outcome)
    share_cores(comm)
    if isinstance(outcome, SystemExit):
        MPI.Finalize()  # otherwise mpi4py takes the exit status for a crash and aborts the job
        raise outcome
    return outcome


def end_job(comm: MPI.Intracomm, program: str, kind: type, error: BaseException, trace: TracebackType | None) -> None:
    """Say in one line what memory or a disk lacks, once if it lacks on all ranks; other errors are Python's to show."""
    if not isinstance(error, MemoryError | OSError):
        sys.__excepthook__(kind, error, trace)
        return
    everywhere, patience = comm.Ibarrier(), time.monotonic() + 2.0
    while not (alike := everywhere.Test()) and time.monotonic() < patience:
        time.sleep(0.01)
    if comm.rank == 0 or not alike:
        print(f"{program}: error: {str(error) or 'out of memory'}", file=sys.stderr, flush=True)
    if not alike:
        time.sleep(0.5)  # mpiexec may end before it has passed on a line that was printed just now
        comm.Abort(1)
    comm.Barrier()
    MPI.Finalize()  # as above


def share_cores(comm: MPI.Intracomm) -> None:
    """Give the ranks of a host as many BLAS threads together as it has cores, unless the environment says how many."""
    if {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        return
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    threads = max(1, number_of_cores() // here.size)
    here.Free()
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        if comm.rank == 0:
            print(f"set OMP_NUM_THREADS={threads}, or install threadpoolctl, for full speed", file=sys.stderr)
        return
    threadpool_limits(threads, user_api="blas")


def no_options(comm: MPI.Intracomm, docstring: str | None) -> None:
    """Parse the command line of a program without options; --help prints its docstring."""
    parse_arguments(comm, ArgumentParser(description=docstring, formatter_class=RawDescriptionHelpFormatter))

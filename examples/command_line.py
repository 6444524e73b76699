"""The command line of a program of many ranks: rank 0 reads it for all, and what there is to say is said once."""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
import shlex
import sys

from mpi4py import MPI

from pce_mpi.comm.launch import launch, why_apart


def parse_arguments(comm: MPI.Intracomm, parser: ArgumentParser) -> Namespace:
    """What the command line says, on every rank."""
    outcome: Namespace | SystemExit | None = None
    if comm.rank == 0:
        try:
            if apart := why_apart(comm):
                raise SystemExit(f"error: {apart}")
            outcome = parser.parse_args()
            if launch() is None:
                again = f"mpiexec -n 4 python -m mpi4py {shlex.join(sys.argv)}"
                print(f"started without mpiexec, so on 1 rank; on 4 ranks: {again}", file=sys.stderr, flush=True)
        except SystemExit as end:
            outcome = end
    outcome = comm.bcast(outcome)
    if isinstance(outcome, SystemExit):
        MPI.Finalize()  # Else mpi4py takes the status for a crash and aborts the job, with a message of its own.
        raise outcome
    return outcome


def no_options(comm: MPI.Intracomm, docstring: str | None) -> None:
    """The command line of a program without options: --help prints its docstring, and all else is refused."""
    parse_arguments(comm, ArgumentParser(description=docstring, formatter_class=RawDescriptionHelpFormatter))

"""The command line: `info`, `check` and `bench`, each started on any number of ranks by mpiexec, and `conformance`.

Of the first three rank 0 prints, the others are silent, and an exception on any rank ends the whole job. `conformance`
starts ranks itself, and never touches MPI in the process that it is started in.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import contextlib
import os
import sys
from typing import TYPE_CHECKING

from pce_mpi.channel import check_mpi
from pce_mpi.cli import bench, check, conformance, info
from pce_mpi.collectives import agree
from pce_mpi.launched import why_apart

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command, all but `conformance` on all ranks, and exit with its status, the same on each."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["conformance"]:
        sys.exit(2 if conformance.started_as_rank() else conformance.run(_parser().parse_args(arguments)))
    comm = _world()
    with contextlib.ExitStack() as stack:
        if comm is not None and comm.rank > 0:
            silence = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(silence))
            stack.enter_context(contextlib.redirect_stderr(silence))
        try:
            options = _parser().parse_args(arguments)
        except SystemExit:
            if comm is not None:
                # The first rank to leave may end the job: not before rank 0 has printed.
                agree(comm, "command line", {})
            raise
        apart = why_apart(comm)
        if apart and options.run is not info.run:  # which says so beside all the rest
            sys.exit(f"error: {apart}")
        try:
            status = options.run(options, comm)
        except BaseException as error:
            if comm is not None and comm.size > 1:
                from mpi4py.run import set_abort_status

                # Once Python has printed the traceback, this process ends the job: as `python -m mpi4py` does it.
                set_abort_status(error)
                error.add_note(f"on rank {comm.rank} of {comm.size}")
            raise
    sys.exit(status)


def _world() -> MPI.Intracomm | None:
    """COMM_WORLD, or None where no MPI library can be loaded."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    check_mpi()
    return MPI.COMM_WORLD


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but for those that only say that an option was not given."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        unset = action.default is None or action.default is False
        return action.help if unset else super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pce_mpi",
        description="Softmax cross entropy over a class axis that is sharded across MPI ranks.",
        epilog="On several ranks: mpiexec -n 4 python -m pce_mpi check; python -m pce_mpi conformance -n 4 CANDIDATE",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (info, check, bench, conformance):
        name = command.__name__.rpartition(".")[2]
        summary = (command.__doc__ or "").partition("\n")[0].partition(": ")[2]
        subparser = commands.add_parser(name, help=summary, description=summary, formatter_class=_HelpFormatter)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser

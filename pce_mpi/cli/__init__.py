"""The command line: `info`, `check`, `bench` and `rehearse`, on any number of ranks by mpiexec, and two others.

In the first four, rank 0 prints, the others are silent, and an exception on any rank ends the whole job. `conformance`
starts the ranks itself, and never uses MPI in its own process. `judge` reads files, and needs one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import contextlib
from difflib import get_close_matches
import io
import json
import os
import re
import sys
import textwrap
from typing import TYPE_CHECKING, NoReturn, TextIO, cast

from pce_mpi import __version__
from pce_mpi.cli import bench, check, conformance, info, judge, rehearse
from pce_mpi.cli.output import Stream, Unwritten
from pce_mpi.comm.agreement import all_gather_text
from pce_mpi.comm.launcher import launcher_env, why_apart
from pce_mpi.comm.library import check_mpi, told_gpu_aware
from pce_mpi.comm.waits import timeout_seconds
from pce_mpi.exact.arithmetic import check_settings
from pce_mpi.text import bounded

if TYPE_CHECKING:
    from mpi4py import MPI

# The characters that a rank tells the others when it fails.
_MOST_TEXT = 10_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command, on all ranks unless it is `conformance`, and exit with the same status on each."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed before Python started
            setattr(sys, name, open(os.devnull, "w"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that its encoding lacks is escaped
            stream.reconfigure(errors="backslashreplace")
    outputs = Stream(sys.stdout), Stream(sys.stderr)
    with contextlib.redirect_stdout(cast(TextIO, outputs[0])), contextlib.redirect_stderr(cast(TextIO, outputs[1])):
        try:
            sys.exit(_status(sys.argv[1:] if arguments is None else arguments))
        except SystemExit:
            sys.stdout.flush()  # may raise `Unwritten`
            raise


def _status(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["conformance"] and not (launcher_env() and {"-h", "--help"} & {*arguments}):
        status = conformance.status_as_rank()
        if status is None and (wrong := _wrong_environment()):
            print(f"error: {wrong}", file=sys.stderr)
            status = 2
        return conformance.run(_parsed(arguments)) if status is None else status
    return _status_on_ranks(arguments)


def _status_on_ranks(arguments: Sequence[str]) -> int:
    comm = _world()
    words = _Words()
    with contextlib.ExitStack() as stack:
        if comm is not None and comm.rank > 0:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            stack.enter_context(contextlib.redirect_stderr(words))
        wrong = _wrong_environment()
        if comm is not None:  # not by an agreement, whose time limit may be what is wrong
            wrong = next(filter(None, comm.allgather(wrong)), "")
        if wrong:
            print(f"error: {wrong}", file=sys.stderr, flush=True)
            if comm is not None:
                comm.Barrier()  # as below
            return 2
        try:
            status = _ran(arguments, comm)
            if comm is None or comm.size == 1:
                return status
            sys.stdout.flush()  # the first rank to leave may end the job: not before rank 0 has printed
            return _worst_status(status, words.getvalue(), comm)
        except BaseException as error:
            if comm is not None and comm.size > 1:
                from mpi4py.run import set_abort_status

                # Once Python has printed the traceback, this process ends the job, as under `python -m mpi4py`.
                set_abort_status(error)
                error.add_note(f"on rank {comm.rank} of {comm.size}")
            raise


class _Words(io.StringIO):
    """The standard error of a rank that is silent."""

    def fileno(self) -> int:
        """Return the descriptor for what Python does not write itself, such as the stacks of faulthandler."""
        return 2


def _ran(arguments: Sequence[str], comm: MPI.Intracomm | None) -> int:
    """Run a command on this rank, and return its status."""
    try:
        options = _parsed(arguments)
    except Unwritten:
        raise
    except SystemExit as ended:
        return int(ended.code or 0)
    if (apart := why_apart(comm)) and options.run is not info.run:  # info reports it
        print(f"error: {apart}", file=sys.stderr)
        return 1
    status: int = options.run(options, comm)
    return status


def _worst_status(status: int, words: str, comm: MPI.Intracomm) -> int:
    """Return the worst status of all ranks; rank 0 repeats the words of the first that failed, if it did not itself."""
    texts = all_gather_text(json.dumps([status, bounded(words, _MOST_TEXT)]), comm, operation="command line")
    ended = [json.loads(text) for text in texts]
    if not ended[0][0] and (failed := [rank for rank, (its, _) in enumerate(ended) if its]):
        its, words = ended[failed[0]]
        print(f"on rank {failed[0]} of {comm.size}: {words.rstrip() or f'error: status {its}'}", file=sys.stderr)
    return max(its for its, _ in ended)


def _wrong_environment() -> str:
    """Say what is wrong about a variable that is this package's own; '' if nothing is."""
    try:
        for check in (timeout_seconds, told_gpu_aware, check_settings):
            check()
    except (ImportError, ValueError) as error:
        return str(error)
    return ""


def _world() -> MPI.Intracomm | None:
    """Return COMM_WORLD, or None if no MPI library can be loaded."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    check_mpi()
    return MPI.COMM_WORLD


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the defaults of options that take a value, and paragraphs as they are."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default in (None, "", argparse.SUPPRESS) or isinstance(default, bool):
            return action.help
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        return f"{action.help} (default: {shown})"

    def _split_lines(self, text: str, width: int) -> list[str]:
        # Options and candidates are kept in one piece.
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(f"{message}\n{self.prog} --help explains what can be given")


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    chosen = options.parser
    if unknown:
        known = re.findall(r"--[a-z-]+", chosen.format_usage())
        alike = [each for word in unknown for each in get_close_matches(word.partition("=")[0], known, 1)]
        meant = f"; did you mean {' and '.join(alike)}?" if alike else ""
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
    if chosen is parser:
        parser.error("a command is missing: info, check, bench, rehearse, conformance or judge")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m pce_mpi",
        description="Softmax cross entropy over a class axis that is sharded across MPI ranks.",
        formatter_class=_HelpFormatter,
        epilog="""\
on several ranks:
  mpiexec -n 4 python -m pce_mpi check
  python -m pce_mpi conformance -n 4 package.module:candidate

`python -m pce_mpi COMMAND --help` explains the options of a command, and its exit status. That is 2 as well if standard
output is on a full disk, and 141 if nobody reads it.""",
    )
    parser.add_argument("--version", action="version", version=f"pce_mpi {__version__}", help="print the version")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser)
    for command in (info, check, bench, rehearse, conformance, judge):
        name = command.__name__.rpartition(".")[2]
        summary = (command.__doc__ or "").partition("\n")[0].partition(": ")[2]
        subparser = commands.add_parser(name, help=summary, formatter_class=_HelpFormatter)
        subparser.description = summary[:1].upper() + summary[1:]  # empty under python -OO
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, parser=subparser)
    return parser

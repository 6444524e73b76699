"""The command line: `info`, `check`, `bench` and `rehearse`, on any number of ranks by mpiexec, and two others.

In the first four, rank 0 prints, the others are silent, and an exception on any rank ends the whole job. `conformance`
starts the ranks itself, and never uses MPI in its own process. `judge` reads files, and needs one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
import contextlib
from difflib import get_close_matches
import io
import os
import re
import select
import signal
import sys
import textwrap
from typing import TYPE_CHECKING, NoReturn, TextIO

from pce_mpi import __version__
from pce_mpi.cli import bench, check, conformance, info, judge, rehearse
from pce_mpi.comm.agreement import agree
from pce_mpi.comm.communicators import timeout_seconds
from pce_mpi.comm.launch import launch, why_apart
from pce_mpi.comm.library import check_mpi, told_gpu_aware
from pce_mpi.exact.arithmetic import check_settings

if TYPE_CHECKING:
    from mpi4py import MPI


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command, on all ranks unless it is `conformance`, and exit with the same status on each."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed before Python started
            setattr(sys, name, open(os.devnull, "w"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal or a file in another encoding cannot show
            stream.reconfigure(errors="backslashreplace")
    with _quiet_once_nobody_reads():
        arguments = sys.argv[1:] if arguments is None else arguments
        if arguments[:1] == ["conformance"] and not (launch() and {"-h", "--help"} & {*arguments}):
            status = conformance.status_as_rank()
            if status is None and (wrong := _wrong_environment()):
                print(f"error: {wrong}", file=sys.stderr)
                status = 2
            sys.exit(conformance.run(_parsed(arguments)) if status is None else status)
        sys.exit(_status_on_ranks(arguments))


def _status_on_ranks(arguments: Sequence[str]) -> int:
    comm = _world()
    with contextlib.ExitStack() as stack:
        if comm is not None and comm.rank > 0:
            silence = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(silence))
            stack.enter_context(contextlib.redirect_stderr(silence))
        wrong = _wrong_environment()
        if comm is not None:  # not by an agreement, whose time limit may be what is wrong
            wrong = next(filter(None, comm.allgather(wrong)), "")
        if wrong:
            print(f"error: {wrong}", file=sys.stderr, flush=True)
            if comm is not None:
                comm.Barrier()  # as below
            return 2
        try:
            options = _parsed(arguments)
        except SystemExit:
            if comm is not None:
                # The first rank to leave may end the job: not before rank 0 has printed.
                agree(comm, "command line", {})
            raise
        apart = why_apart(comm)
        if apart and options.run is not info.run:  # info reports it
            sys.exit(f"error: {apart}")
        try:
            status: int = options.run(options, comm)
        except BaseException as error:
            if comm is not None and comm.size > 1:
                from mpi4py.run import set_abort_status

                # Once Python has printed the traceback, this process ends the job, as under `python -m mpi4py`.
                set_abort_status(error)
                error.add_note(f"on rank {comm.rank} of {comm.size}")
            raise
        if status and comm is not None:
            with contextlib.suppress(BrokenPipeError):  # which ends rank 0 later
                print(end="", flush=True)
            agree(comm, "command line", {})  # as above
    return status


def _wrong_environment() -> str:
    """Say what is wrong about a variable that is this package's own; '' if nothing is."""
    try:
        for check in (timeout_seconds, told_gpu_aware, check_settings):
            check()
    except (ImportError, ValueError) as error:
        return str(error)
    return ""


@contextlib.contextmanager
def _quiet_once_nobody_reads() -> Iterator[None]:
    """If the reader of the output has closed it, as `head` does, exit with the status of SIGPIPE."""
    try:
        try:
            yield
        except SystemExit as ended:
            try:
                print(end="", flush=True)  # later errors would be reported
            except BrokenPipeError:
                raise
            except OSError as error:
                with open(os.devnull, "w") as devnull:
                    os.dup2(devnull.fileno(), sys.stdout.fileno())
                if ended.code != 2:
                    print(f"error: standard output: {error.strerror}", file=sys.stderr)
                    sys.exit(2)
            raise
    except BrokenPipeError:
        unread = [stream for stream in (sys.stdout, sys.stderr) if _is_unread(stream)]
        if not unread:
            raise  # another pipe has broken
        with open(os.devnull, "w") as devnull:
            for stream in unread:
                os.dup2(devnull.fileno(), stream.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _is_unread(stream: TextIO) -> bool:
    try:
        stream.flush()
        poll = select.poll()
        poll.register(stream, select.POLLOUT)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except BrokenPipeError:
        return True
    except (AttributeError, OSError, ValueError):  # None, no file, closed
        return False


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
        return textwrap.wrap(
            " ".join(text.split()), width, break_on_hyphens=False
        )  # keep options and candidates in one piece


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

`python -m pce_mpi COMMAND --help` explains the options of a command.""",
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

"""rehearse: show what a program would send and keep on a large mesh, without ranks or data."""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
import json
from pathlib import Path
import runpy
import sys
import traceback
from typing import Any

from pce_mpi.autograd.rehearsal import rehearsed
from pce_mpi.cli.arguments import link, mesh_sizes, words
from pce_mpi.cli.output import Comm, Unwritten, progress
from pce_mpi.conformance.text import text_of, visible
from pce_mpi.distributed.sharding import Coordinates
from pce_mpi.text import bounded

# The characters of an error.
_MOST_TEXT = 2_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
A file has a function `program`, or another that is named, which takes a mesh and does what it does on a real one:

  python -m pce_mpi rehearse examples/transformer.py --mesh data=512,model=8 --arguments "--width 4096 --heads 32"

The table has, for the rank that puts in most, the calls and the bytes of each phase, cause and dim. A link for every
dim, as `bench --collectives` measures it, adds estimated seconds. PCE_MPI_REPRODUCIBLE=1 rehearses that arithmetic.
Exit status: 0; 2 if the program cannot be loaded, or raises an error, which is shown with the program's line."""
    add = parser.add_argument
    add("program", metavar="FILE[:FUNCTION]", help="a file of Python, and the function in it")
    sizes = "dims and sizes, such as data=512,model=8"
    add("--mesh", type=mesh_sizes, required=True, metavar="DIM=N,...", help=sizes)
    add("--arguments", type=words, default=[], metavar="TEXT", help="the program's own command line")
    links = "for a dim, the seconds of a small collective and the bytes a second from a rank; may be repeated"
    add("--link", type=link, action="append", default=[], metavar="DIM=S,B", help=links)
    add("--json", action="store_true", help="print JSON rather than text")


def run(options: argparse.Namespace, comm: Comm) -> int:
    """Print what the program would send and keep; return 2 if it cannot be rehearsed."""
    path, _, name = options.program.rpartition(":") if ".py:" in options.program else (options.program, "", "program")
    sys.argv = [path, *options.arguments]
    sys.path.insert(0, str(Path(path).absolute().parent))  # as Python does for a file that it runs
    try:
        found = runpy.run_path(path).get(name)
        if found is None:
            raise ValueError(f"{path} has no function {name!r}: name one as in {path}:FUNCTION")
        if len(links := dict(options.link)) < len(options.link):
            raise ValueError("--link is given twice for a dim")
        trace = rehearsed(found, options.mesh, links, partial(_followed, comm=comm))
    except Unwritten:
        raise
    except (Exception, SystemExit) as error:
        print(visible(bounded(f"error: {_told(error, path)}", _MOST_TEXT)), file=sys.stderr)
        return 2
    if options.json:
        head, *rows = trace.rows()
        report: dict[str, Any] = {"mesh": trace.mesh, "memory": trace.memory, "seconds": trace.seconds}
        report["sent"] = [dict(zip(head, row, strict=True)) for row in rows]
        print(json.dumps(report, indent=1))
    else:
        print(trace)
    return 0


def _followed(kinds: Sequence[Coordinates], comm: Comm) -> Iterator[Coordinates]:
    """Yield each kind of ranks, and show how many there are and have been rehearsed."""
    names = [", ".join(f"{dim}={at}" for dim, at in kind.items()) for kind in kinds]
    for kind, _ in zip(kinds, progress("kinds of ranks", names, comm), strict=True):
        yield kind


def _told(error: BaseException, path: str) -> str:
    """Say what ended a program, and in which of its lines."""
    text = text_of(error)
    if isinstance(error, SystemExit):
        text = f"{text}: a program that is rehearsed has to return".removeprefix(": ")
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if own:
        return f"{path}:{own[-1].lineno}: {own[-1].line}\n{type(error).__name__}: {text}"
    return text or type(error).__name__

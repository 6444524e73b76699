"""The options of the conformance command, and the forms that its report comes in."""

from __future__ import annotations

import argparse

from pce_mpi.cli.arguments import natural, positive, positive_real, writable_file
from pce_mpi.conformance.adapters import FUNCTION_ADAPTERS, NAMED_CANDIDATES
from pce_mpi.conformance.batches import DEFAULT_TIMEOUT, LARGE_TIMEOUT
from pce_mpi.conformance.offers import DTYPES

# The option of each form of the report, its module in `conformance.reports`, and its description.
FILES = {
    "json": ("json_file", "everything, as JSON"),
    "html": ("html", "one page with pictures, readable without network"),
    "markdown": ("markdown", "a summary for a pull request"),
    "junit": ("junit", "JUnit XML, for continuous integration"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = """\
examples:
  python -m pce_mpi conformance -n 2 3 own_loss.py:cross_entropy --html report.html
  python -m pce_mpi conformance own_loss.py:cross_entropy --case label_smoothing --dtype float32
  python -m pce_mpi conformance --list

What the candidate prints is shown, by rank, where a single case is run, and where a case crashes.
Exit status: 0 if nothing failed, 1 if something did, 2 if nothing was run or judged or the report could not be written,
130 if interrupted."""
    parser.add_argument(
        "candidate",
        nargs="?",
        default="",
        help="package.module:candidate, path/to/file.py:candidate, or one of " + ", ".join(NAMED_CANDIDATES),
    )
    parser.add_argument(
        "-n",
        nargs="+",
        default=["3"],
        metavar="N",
        help="how many ranks to start; all cases are run at each of several numbers. 3 unless given, as a power of two "
        "hides what recursive doubling gets wrong",
    )
    parser.add_argument(
        "--oversubscribe", action="store_true", help="start more ranks than the cores of this machine are sure to bear"
    )
    parser.add_argument(
        "--adapter",
        choices=FUNCTION_ADAPTERS,
        help="the candidate is a function on shards of that framework: (logits, targets, group, **options) on torch's "
        "tensors, or (logits, targets, axis_name=..., **options) under jax.shard_map",
    )
    parser.add_argument(
        "--case",
        dest="patterns",
        action="append",
        metavar="PATTERN",
        help="only this case, family, or shell pattern; may be repeated",
    )
    parser.add_argument(
        "--except",
        dest="but",
        action="append",
        default=[],
        metavar="PATTERN",
        help="all cases but this one, family, or shell pattern; may be repeated",
    )
    parser.add_argument(
        "--known",
        metavar="FILE",
        help="cases that are known to fail, a name or pattern in each line (# begins a comment): the run passes if no "
        "other case fails, and fails if one of these passes",
    )
    parser.add_argument(
        "--dtype",
        dest="dtypes",
        action="append",
        choices=DTYPES,
        help="only cases with logits of this dtype; may be repeated. Cases without a dtype in their name come in one "
        f"dtype only: the first of {', '.join(DTYPES)} that is offered and among these",
    )
    parser.add_argument("--list", action="store_true", help="list the cases and what each catches; run nothing")
    parser.add_argument("--strict", action="store_true", help="allow little more than the best that can be had")
    parser.add_argument(
        "--tolerance", type=positive_real, default=1.0, metavar="X", help="multiply what is allowed by this"
    )
    parser.add_argument(
        "--timeout",
        type=positive_real,
        metavar="S",
        help="seconds without a sign of life after which a case is deadlocked, "
        f"{DEFAULT_TIMEOUT:g} unless given, with --large {LARGE_TIMEOUT:g}; a sixth of that, 5 s at least, where one "
        "rank has raised",
    )
    parser.add_argument("--seed", type=natural, default=0, metavar="K", help="seed of the random numbers")
    parser.add_argument("--rows", type=positive, metavar="R", help="rows, in place of each case's own")
    parser.add_argument("--classes", type=positive, metavar="C", help="classes, in place of each case's own")
    parser.add_argument(
        "--large",
        action="store_true",
        help="also a case with a shard of more than 2**31 elements: in float16 it takes 4 GiB for logits, as much for "
        "their gradient, and what the candidate takes besides; where shards must be equal, on each rank",
    )
    parser.add_argument(
        "--memory",
        type=positive_real,
        metavar="GIB",
        help="memory that each process of a rank may take, beyond which it gets a MemoryError; on Linux",
    )
    for option, (_, what) in FILES.items():
        parser.add_argument(f"--{option}", type=writable_file, metavar="FILE", help=f"write the report there: {what}")
    parser.add_argument(
        "--report", metavar="FILE", help="run nothing, but write a report that --json wrote in the other forms"
    )
    parser.add_argument(
        "--export", metavar="DIR", help="run nothing, but write the problems and their exact answers as files to DIR"
    )
    parser.add_argument(
        "--ranks", type=positive, nargs="+", default=[4], metavar="N", help="numbers of shards in what --export writes"
    )
    parser.add_argument("--vectors", metavar="DIR", help="run nothing, but judge --results against the vectors in DIR")
    parser.add_argument("--results", metavar="FILE", help="answers to --vectors, by any program")

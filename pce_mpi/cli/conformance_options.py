"""The options of the conformance command, and the forms that its report comes in."""

from __future__ import annotations

import argparse
from typing import Any

from pce_mpi.cli.arguments import natural, positive, positive_real, writable_file
from pce_mpi.conformance.candidates.adapters import FUNCTION_ADAPTERS, NAMED_CANDIDATES
from pce_mpi.conformance.problems.cases import DTYPES
from pce_mpi.conformance.runs.batches import DEFAULT_TIMEOUT, LARGE_TIMEOUT

# The option of each form of the report, its module in `conformance.reports`, and its description.
FILES = {
    "json": ("json_file", "write the report there: everything, as JSON"),
    "html": ("html", "write the report there: one page with pictures, readable without network"),
    "markdown": ("markdown", "write the report there: a summary for a pull request"),
    "junit": ("junit", "write the report there: JUnit XML, for continuous integration"),
}

_FLAG: dict[str, Any] = {"action": "store_true"}
_FILE: dict[str, Any] = {"metavar": "FILE"}
_FOLDER: dict[str, Any] = {"metavar": "DIR"}
_PATTERNS: dict[str, Any] = {"action": "append", "metavar": "PATTERN"}
_REPORT: dict[str, Any] = {"type": writable_file, "metavar": "FILE"}
# The name of each option, its settings, and what it is for.
_OPTIONS: tuple[tuple[str, dict[str, Any], str], ...] = (
    (
        "candidate",
        {"nargs": "?", "default": ""},
        "package.module:candidate, path/to/file.py:candidate, or one of " + ", ".join(NAMED_CANDIDATES),
    ),
    (
        "-n",
        {"nargs": "+", "default": ["3"], "metavar": "N"},
        "how many ranks to start; all cases are run at each of several numbers. 3 unless given, as a power of two "
        "hides what recursive doubling gets wrong",
    ),
    ("--oversubscribe", _FLAG, "start more ranks than the cores of this machine are sure to bear"),
    (
        "--adapter",
        {"choices": FUNCTION_ADAPTERS},
        "the candidate is a function on shards of that framework: (logits, targets, group, **options) on torch's "
        "tensors, or (logits, targets, axis_name=..., **options) under jax.shard_map",
    ),
    ("--case", _PATTERNS | {"dest": "patterns"}, "only this case, family, or shell pattern; may be repeated"),
    (
        "--except",
        _PATTERNS | {"dest": "but", "default": []},
        "all cases but this one, family, or shell pattern; may be repeated",
    ),
    (
        "--known",
        _FILE,
        "cases that are known to fail, a name or pattern in each line (# begins a comment): the run passes if no other "
        "case fails, and fails if one of these passes",
    ),
    (
        "--dtype",
        {"dest": "dtypes", "action": "append", "choices": DTYPES},
        "only cases with logits of this dtype; may be repeated. Cases without a dtype in their name come in one dtype "
        f"only: the first of {', '.join(DTYPES)} that is offered and among these",
    ),
    ("--list", _FLAG, "list the cases and what each catches; run nothing"),
    ("--strict", _FLAG, "allow little more than the best that can be had"),
    ("--tolerance", {"type": positive_real, "default": 1.0, "metavar": "X"}, "multiply what is allowed by this"),
    (
        "--timeout",
        {"type": positive_real, "metavar": "S"},
        f"seconds without a sign of life after which a case is deadlocked, {DEFAULT_TIMEOUT:g} unless given, with "
        f"--large {LARGE_TIMEOUT:g}; a sixth of that, 5 s at least, where one rank has raised",
    ),
    ("--seed", {"type": natural, "default": 0, "metavar": "K"}, "seed of the random numbers"),
    ("--rows", {"type": positive, "metavar": "R"}, "rows, in place of each case's own"),
    ("--classes", {"type": positive, "metavar": "C"}, "classes, in place of each case's own"),
    (
        "--large",
        _FLAG,
        "also vocabularies of models, 65,536 tokens, and a shard of more than 2**31 elements: in float16 that takes 4 "
        "GiB for logits, as much for their gradient, and what the candidate takes besides; where shards must be equal, "
        "on each rank",
    ),
    (
        "--memory",
        {"type": positive_real, "metavar": "GIB"},
        "memory that each process of a rank may take, beyond which it gets a MemoryError; on Linux",
    ),
    ("--report", _FILE, "run nothing, but write a report that --json wrote in the other forms"),
    ("--export", _FOLDER, "run nothing, but write the problems and their exact answers as files to DIR"),
    (
        "--ranks",
        {"type": positive, "nargs": "+", "default": [4], "metavar": "N"},
        "numbers of shards in what --export writes",
    ),
    (
        "--bits",
        _FLAG,
        "with --export: write problems with the bits of their results, in place of exact answers",
    ),
    ("--vectors", _FOLDER, "run nothing, but judge --results against the vectors in DIR"),
    ("--results", _FILE, "answers to --vectors, by any program"),
)


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
    for name, settings, what in (*_OPTIONS, *((f"--{form}", _REPORT, text) for form, (_, text) in FILES.items())):
        parser.add_argument(name, **settings, help=what)

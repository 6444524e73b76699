"""conformance: hold another sharded cross entropy against the float64 oracle, case by case.

Unlike the other commands this one is not started by mpiexec: it starts the ranks itself, again after each case that
hung or died, and this process never touches MPI.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
import importlib
from pathlib import Path
import shutil
import signal
import sys
import textwrap
from typing import Any

from pce_mpi.cli.arguments import natural, positive, positive_real, writable_file
from pce_mpi.cli.output import Bar
from pce_mpi.comm.launcher import launcher_env
from pce_mpi.conformance.candidates.loading import FUNCTION_ADAPTERS, NAMED_CANDIDATES, missing_framework
from pce_mpi.conformance.judging.outcomes import Outcome, Report, Verdict
from pce_mpi.conformance.problems.cases import DTYPES, fits
from pce_mpi.conformance.reports import json_file, terminal
from pce_mpi.conformance.runs.launches import DEFAULT_TIMEOUT, LARGE_TIMEOUT, asked_offer, run_cases
from pce_mpi.conformance.runs.orders import Orders, names_of_all_cases
from pce_mpi.conformance.text import visible
from pce_mpi.jobs.mpiexec import LaunchError, most_ranks, number_of_cores
from pce_mpi.temporary_files import replace_file
from pce_mpi.text import bounded

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
_PATTERNS: dict[str, Any] = {"action": "extend", "nargs": "+", "metavar": "PATTERN"}
_REPORT: dict[str, Any] = {"type": writable_file, "metavar": "FILE"}
# The name of each option, its settings, and what it is for, by groups of `--help`.
_OPTIONS: dict[str, tuple[tuple[str, dict[str, Any], str], ...]] = {
    "what is judged": (
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
    ),
    "which cases": (
        ("--case", _PATTERNS | {"dest": "patterns"}, "only these cases, families, or shell patterns"),
        (
            "--except",
            _PATTERNS | {"dest": "but", "default": []},
            "all cases but these, families, or shell patterns",
        ),
        (
            "--known",
            _FILE,
            "cases that are known to fail, a name or pattern in each line (# begins a comment): the run passes if no "
            "other case fails, and fails if one of these passes",
        ),
        (
            "--dtype",
            {"dest": "dtypes", "action": "append", "choices": DTYPES},
            "only cases with logits of this dtype; may be repeated. Cases without a dtype in their name come in one "
            f"dtype only: the first of {', '.join(DTYPES)} that is offered and among these",
        ),
        (
            "--large",
            _FLAG,
            "also vocabularies of models, 65,536 tokens, and a shard of more than 2**31 elements: in float16 that "
            "takes 4 GiB for logits, as much for their gradient, and what the candidate takes besides; where shards "
            "must be equal, on each rank",
        ),
        ("--list", _FLAG, "list the cases and what each catches; run nothing"),
    ),
    "how a case is judged": (
        ("--strict", _FLAG, "allow little more than the best that can be had"),
        ("--tolerance", {"type": positive_real, "default": 1.0, "metavar": "X"}, "multiply what is allowed by this"),
        ("--seed", {"type": natural, "default": 0, "metavar": "K"}, "seed of the random numbers"),
        ("--rows", {"type": positive, "metavar": "R"}, "rows, in place of each case's own"),
        ("--classes", {"type": positive, "metavar": "C"}, "classes, in place of each case's own"),
    ),
    "how the run ends": (
        ("-x", _FLAG | {"dest": "to_first"}, "end the run with the first case that fails"),
        (
            "--timeout",
            {"type": positive_real, "metavar": "S"},
            f"seconds without a sign of life after which a case is deadlocked, or slow, {DEFAULT_TIMEOUT:g} unless "
            f"given, with --large {LARGE_TIMEOUT:g}; a sixth of that, 5 s at least, where one rank has raised. The "
            "time in which answers are judged has no limit",
        ),
        (
            "--memory",
            {"type": positive_real, "metavar": "GIB"},
            "memory that each process of a rank may take, beyond which it gets a MemoryError; on Linux",
        ),
    ),
    "the report, and files for other programs": (
        ("--report", _FILE, "run nothing, but write a report that --json wrote in the other forms"),
        ("--export", _FOLDER, "run nothing, but write the problems and their exact answers as files to DIR"),
        (
            "--ranks",
            {"type": positive, "nargs": "+", "default": [4], "metavar": "N"},
            "numbers of shards in what --export writes",
        ),
        ("--bits", _FLAG, "with --export: write problems with the bits of their results, in place of exact answers"),
        ("--vectors", _FOLDER, "run nothing, but judge --results against the vectors in DIR"),
        ("--results", _FILE, "answers to --vectors, by any program"),
    ),
}
# The group of the options that write the report.
_WRITES = "the report, and files for other programs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
examples:
  python -m pce_mpi conformance -n 2 3 own_loss.py:cross_entropy --html report.html
  python -m pce_mpi conformance own_loss.py:cross_entropy --case label_smoothing --dtype float32
  python -m pce_mpi conformance --list

What the candidate prints is shown, by rank, where a single case is run, and where a case crashes.
Exit status: 0 if nothing failed, 1 if something did, 2 if nothing was run or judged or the report could not be written,
130 if interrupted."""
    for title, options in _OPTIONS.items():
        group = parser.add_argument_group(title)
        files = FILES if title == _WRITES else {}
        for name, settings, what in (*((f"--{form}", _REPORT, text) for form, (_, text) in files.items()), *options):
            group.add_argument(name, **settings, help=what)


# The characters of an error: some hold what a file has, or what ranks printed.
_MOST_TEXT = 10_000
# ... and those of a file with a report or with names of cases.
_MOST_OF_FILE = 100_000_000
# Shards in files; more than any case has classes would only be empty.
_MOST_SHARDS = 100_000


def status_as_rank() -> int | None:
    """Return the exit status of this process if it is a rank; rank 0 prints the right command and fails for all.

    A launcher may end the job once a rank has failed, and rank 0 with it before it has printed.
    """
    launched = launcher_env()
    if launched is None:
        return None
    if launched.rank:
        return 0
    print(
        "error: conformance starts the ranks itself; without mpiexec or srun: python -m pce_mpi conformance -n 3 ...",
        file=sys.stderr,
    )
    return 2


def run(options: argparse.Namespace) -> int:
    """Run and report; return 0 if nothing failed, 1 if something did, 130 if interrupted.

    2 if nothing was judged, or what was judged could not be written.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has SIGHUP
            signal.signal(number, signal.default_int_handler)
    display = _Display()
    try:
        return _run(options, display)
    except (LaunchError, _UsageError) as error:
        return _wrong(str(error))
    except argparse.ArgumentTypeError as error:
        return _wrong(f"argument -n: {error}")
    except ImportError as error:
        return _wrong(f"{error}: pip install 'pce_mpi[conformance]'")
    except KeyboardInterrupt:
        print(f"interrupted; {display}", file=sys.stderr)
        return 130
    finally:
        display.close()


def _run(options: argparse.Namespace, display: _Display) -> int:
    _find_candidate(options)
    sizes = _sizes(options)
    given = {each.name: getattr(options, each.name) for each in fields(Orders) if each.name in options}
    settled: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    orders = Orders(**settled)
    timeout = options.timeout or (LARGE_TIMEOUT if options.large else DEFAULT_TIMEOUT)
    known = _known_failures(options.known)
    if unknown := orders.patterns_of_no_case(known):
        raise _UsageError(_no_such_case(unknown, orders))
    if wrong := _wrong_work(options):
        raise _UsageError(wrong)
    renderers = _renderers(options)
    if options.list:
        print(_listed(orders, timeout, display))
        return 0
    if options.export is not None:
        from pce_mpi.conformance.offline import vectors

        with _naming("--export", OSError, ValueError):
            some: dict[str, Any] = {"ranks": options.ranks, "pattern": orders.patterns, "dtypes": orders.dtypes}
            if options.bits:
                count = vectors.export_bits(options.export)
            else:
                count = vectors.export(options.export, seed=orders.seed, **some)
        print(f"{count} vectors in {options.export}")
        return 0
    if options.report is not None:
        report = _earlier(options.report)
    elif options.vectors is not None:
        from pce_mpi.conformance.offline import vectors

        with _naming("--vectors and --results", OSError, ValueError):
            settings: dict[str, Any] = {"strict": orders.strict, "tolerance": orders.tolerance}
            report = vectors.judged(options.vectors, options.results, **settings)
    else:
        ranks = f"{' and then '.join(map(str, sizes))} rank{'s' * (sizes != [1])}"
        print(f"starting {ranks} with {orders.candidate}", file=sys.stderr, flush=True)
        report = run_cases(orders, sizes, timeout=timeout, display=display, known=known, to_first=options.to_first)
    display.close()
    written = _written(report, renderers)
    if report.interrupted:
        print(f"interrupted, and the report has what was known by then; {display}", file=sys.stderr)
        return 130
    if all(outcome.verdict is Verdict.NOT_OFFERED for outcome in report.outcomes):
        why = f"{orders.candidate} offers none of the selected cases, --list says why"
        if not report.outcomes:
            why = f"no case for candidates of kind {report.offer.kind!r}, as {orders.candidate} is, was selected"
        if options.vectors:
            why = f"{options.results} has no result of {options.vectors}"
        raise _UsageError(f"nothing was judged: {why}")
    return int(bool(report.failed)) if written else 2


def _written(report: Report, renderers: dict[Path, Callable[[Report], str]]) -> bool:
    """Print the report, write it to the files whatever becomes of that, and return True if all of it was written."""
    problems = []
    try:
        print(terminal.render(report), end="", flush=True)
    finally:
        for path, render in renderers.items():
            try:
                replace_file(path, render(report))
            except Exception as error:  # any renderer may fail; the other files do not need it
                problems.append(f"{path}: {_why(error)}")
        for problem in problems:
            _wrong(f"the report could not be written to {problem}")
    return not problems


def _find_candidate(options: argparse.Namespace) -> None:
    """Find a candidate that follows several values of an option, as in `-n 2 3 own_loss.py:cross_entropy`."""
    for values in (options.n, options.patterns or [], options.but):
        last = values[-1] if len(values) > 1 else ""
        if not options.candidate and (":" in last or last in NAMED_CANDIDATES):
            options.candidate = values.pop()


def _sizes(options: argparse.Namespace) -> list[int]:
    """Return the numbers of ranks."""
    sizes = [positive(text) for text in options.n]
    if max(sizes) > (most := most_ranks()) and not options.oversubscribe:
        raise argparse.ArgumentTypeError(
            f"{max(sizes)} ranks are more than {most}, what {number_of_cores()} core{'s' * (number_of_cores() > 1)} of "
            "this machine may bear; --oversubscribe starts them all the same, as where other hosts take most of them"
        )
    return sizes


def _text_in(path: str) -> str:
    """Read a file, which may be a device without an end."""
    with open(path, encoding="utf-8") as file:
        text = file.read(_MOST_OF_FILE + 1)
    if len(text) > _MOST_OF_FILE:
        raise ValueError(f"it has more than {_MOST_OF_FILE:,} characters")
    return text


def _known_failures(path: str | None) -> list[str]:
    """Read the names and patterns in a file."""
    try:
        lines = [] if path is None else _text_in(path).splitlines()
    except (OSError, ValueError) as error:
        raise _UsageError(f"--known: {path}: {_why(error)}") from error
    return [name for line in lines if (name := line.partition("#")[0].strip())]


def _no_such_case(patterns: list[str], orders: Orders) -> str:
    """Explain why these patterns select no case."""
    every = names_of_all_cases()
    for pattern in patterns:
        if any(fits(name, pattern) for name in every):
            return f"the cases {pattern!r} have no logits of {' or '.join(orders.dtypes or ())}"
    families = list(dict.fromkeys(name.partition("/")[0] for name in every))
    alike = [each for pattern in patterns for each in get_close_matches(pattern, [*families, *every])]
    meant = f"; did you mean {' or '.join(alike)}?" if alike else ""
    called = ", ".join(map(repr, patterns))
    return f"no case is called {called}{meant}; there are families of cases: {', '.join(families)}"


def _wrong_work(options: argparse.Namespace) -> str:
    """Return the contradiction between these options, '' if there is none."""
    works = ["a candidate"] * bool(options.candidate)
    works += [f"--{work}" for work in ("report", "export", "vectors") if getattr(options, work)]
    if len(works) > 1 or (options.list and works not in ([], ["a candidate"])):
        works += ["--list"] * options.list
        return f"{' and '.join(works)} are given, and only one of them can be done at a time"
    if (options.vectors is None) != (options.results is None):
        return "give both --vectors DIR, with the problems, and --results FILE, with their answers"
    if options.bits and not options.export:
        return "--bits says what --export DIR writes"
    others = {"--case": options.patterns, "--dtype": options.dtypes, "--seed": options.seed, "--strict": options.strict}
    others |= {"--ranks": options.ranks != [4], "--tolerance": options.tolerance != 1.0}
    if options.bits and (changed := [name for name, value in others.items() if value]):
        return f"--bits is of one set of problems, whatever {' and '.join(changed)} is"
    if max(options.ranks) > _MOST_SHARDS:
        return f"argument --ranks: expected numbers up to {_MOST_SHARDS}, got {max(options.ranks)}"
    if not (works or options.list):
        return (
            "give a candidate (package.module:candidate), --list, --report FILE, --export DIR, or "
            "--vectors DIR --results FILE"
        )
    return _wrong_candidate(options.candidate, options.adapter) if options.candidate else ""


def _wrong_candidate(name: str, adapter: str | None) -> str:
    """Return the fault of a candidate that shows before ranks are started, '' if there is none."""
    if adapter and (missing := missing_framework(adapter)):
        return f"{adapter} needs {missing}: pip install {missing}"
    if ":" in name or (adapter is None and name in NAMED_CANDIDATES):
        return ""
    if name.endswith(".py") and Path(name).is_file():
        functions = _functions_in(Path(name))
        return f"which function in {name}? " + (" or ".join(f"{name}:{each}" for each in functions) or "it has none")
    alike = get_close_matches(name, NAMED_CANDIDATES, 1)
    meant = f"; did you mean {alike[0]}?" if alike else ""
    known = "" if adapter else f", or one of {', '.join(NAMED_CANDIDATES)}"
    return f"a candidate is package.module:function or path/to/file.py:function{known}, got {name!r}{meant}"


def _functions_in(path: Path) -> list[str]:
    try:
        statements = ast.parse(path.read_bytes()).body
    except SyntaxError:
        return []
    return [each.name for each in statements if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")]


class _UsageError(Exception):
    """A name on the command line cannot be used."""


@contextmanager
def _naming(option: str, *kinds: type[Exception]) -> Iterator[None]:
    """Take errors of these kinds for those of an option."""
    try:
        yield
    except kinds as error:
        raise _UsageError(f"{option}: {error}") from error


def _earlier(path: str) -> Report:
    try:
        report = json_file.parse(_text_in(path))
        terminal.render(report)
        return report
    except OSError as error:
        raise _UsageError(f"--report: {path}: {_why(error)}") from error
    except Exception as error:  # anything may stand at any place of a file
        raise _UsageError(f"--report: {path} is no report of this version: {_why(error)}") from error


class _Display:
    """The progress of a run, on stderr; `launches.Display` says when each method is called."""

    def __init__(self) -> None:
        self._bar = Bar("", 0, shown=False)
        self._said = ""
        self._verdicts = Counter[Verdict]()

    def __str__(self) -> str:
        return str(self._bar) if self._bar.total else "nothing was run"

    def begin(self, total: int) -> None:
        self.close()
        self._bar, self._verdicts = Bar("conformance", total), Counter()

    def started(self, case: str) -> None:
        self._bar.started(case)

    def finished(self, outcome: Outcome) -> None:
        verdict = outcome.verdict
        unrun = verdict is Verdict.NOT_RUN
        line = verdict.failed or unrun
        self._verdicts[verdict] += 1
        so_far = ", ".join(f"{count} {each}" for each, count in self._verdicts.items())
        self._bar.finished(f"{verdict:11}  {outcome.case}" if line else so_far, worth_a_line=line)
        if not line or not (unrun or verdict.unended):
            return
        # The cause, as soon as it is known. The findings after the first are the output of the ranks.
        texts = [outcome.note] if unrun else [finding.text for finding in outcome.findings]
        for text in texts if verdict is Verdict.CRASHED else texts[:1]:
            if text != self._said:  # as for cases that are not run
                self._bar.say(textwrap.indent(visible(text), "    "))
            self._said = text

    def waiting(self, seconds: float, timeout: float | None) -> None:
        limit = "judging" if timeout is None else f"deadlocked at {timeout:.0f} s"
        self._bar.tell(f"(silent for {seconds:.0f} s, {limit})")

    def printed(self, text: str) -> None:
        if text:
            self._bar.say(visible(text))

    def warn(self, text: str) -> None:
        self._bar.say(visible(f"warning: {text}"))

    def close(self) -> None:
        self._bar.close()


def _listed(orders: Orders, timeout: float, display: _Display) -> str:
    """List the selected cases with the fault that each catches and, for a candidate, its offer."""
    width = shutil.get_terminal_size((120, 24)).columns
    if not orders.candidate:
        return visible(terminal.listing(orders.cases_of_all_kinds(), width=width))
    offer = asked_offer(orders, timeout=timeout, display=display)
    return visible(terminal.listing(orders.cases(offer).values(), offer, width))


def _renderers(options: argparse.Namespace) -> dict[Path, Callable[[Report], str]]:
    """Import the renderer of each requested file, so that missing packages show before the run."""
    return {
        path: importlib.import_module(f"pce_mpi.conformance.reports.{module}").render
        for option, (module, _) in FILES.items()
        if (path := getattr(options, option)) is not None
    }


def _why(error: Exception) -> str:
    """Return what is wrong with a file that the user named, in a line."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return bounded(f"{type(error).__name__}: {error}", 200)


def _wrong(text: str) -> int:
    print(visible(bounded(f"error: {text}", _MOST_TEXT)), file=sys.stderr)
    return 2

"""judge: compare recorded tensors, one safetensors file for each rank, with the exact numbers."""

import argparse
from collections.abc import Iterator, Sequence
import contextlib
from pathlib import Path
import sys

import numpy as np

from pce_mpi.cli.output import Bar, Comm
from pce_mpi.conformance.offline.logprob_differences import PARTS, Differences
from pce_mpi.conformance.offline.recording_errors import Judge, Judged
from pce_mpi.conformance.offline.recordings import Recording, pieces
from pce_mpi.conformance.problems.problem import row_name
from pce_mpi.conformance.reports.terminal import wrapped
from pce_mpi.conformance.text import visible
from pce_mpi.text import Cell, bounded, table

_WORST = 10
# ... and so many of those that are left out.
_NAMED = 4
_MOST_TEXT = 2_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
A recording is a folder with one safetensors file for each rank, or the only file:
  logits (..., classes of the rank), or hidden (..., features), the same on every rank, and w (features, classes of it)
  targets (...), global class numbers, the same on every rank; or probabilities, shaped as the logits
  any of loss, log_prob, entropy (...), and gradient, shaped as the logits: that of the first of these, summed
  weight (classes of the rank)
  metadata rank and ranks; the options ignore_index, label_smoothing, z_loss, logit_scale, softcap, reduction, and
  smoothing (all or others), num_classes (the rest is padding), logits_dtype (what the head of hidden and w rounds to)

A rollout has log_prob and targets, and where it differs logit_scale (1 / temperature), top_k, top_p, min_p,
num_classes and logits_dtype. docs/recordings.md has a recorder for torch.

Exit status: 0 if all numbers are right, 1 if some are wrong, 2 if a file is malformed."""
    parser.add_argument("recording", type=Path, metavar="DUMP", help="the recording to judge")
    rollout = "a recording of the log-probabilities of the same tokens elsewhere: what the differences come from"
    parser.add_argument("rollout", type=Path, nargs="?", metavar="ROLLOUT", help=rollout)


def run(options: argparse.Namespace, comm: Comm) -> int:
    """Judge and report; return 0 if all numbers are right, 1 if some are wrong, 2 if a file is malformed."""
    try:
        with contextlib.ExitStack() as stack, np.errstate(all="ignore"):
            recording = stack.enter_context(contextlib.closing(Recording(options.recording)))
            judge = Judge(recording)
            differences = None
            if options.rollout is not None:
                rollout = stack.enter_context(contextlib.closing(Recording(options.rollout)))
                differences = Differences(recording, rollout)
            count = len(pieces(recording))
            _follow("judge", count, judge.run())
            judged = judge.judged()
            print(visible("\n\n".join(_report(recording, judged))))
            if differences is not None:
                _follow("differences", count, differences.run())
                print(visible("\n" + "\n\n".join(_table_of(recording, differences))))
    except (OSError, ValueError, ImportError, MemoryError) as error:
        print(visible(bounded(f"error: {error}", _MOST_TEXT)), file=sys.stderr)
        return 2
    return int(bool(judged.findings))


def _follow(work: str, count: int, done: Iterator[int]) -> None:
    """Show the progress of what yields, after each piece, how many rows are done."""
    with contextlib.closing(Bar(work, count)) as bar:
        for rows in done:
            bar.finished(f"{rows} rows")


def _report(recording: Recording, judged: Judged) -> Iterator[str]:
    lengths = np.diff(recording.splits).tolist()
    shards = f" ({' + '.join(map(str, lengths))})" if len(lengths) > 1 else ""
    head = "hidden and w" if recording.has("hidden") else "logits"
    options = "".join(f", {name}={value}" for name, value in recording.options.items())
    size = f"{recording.rows} rows, {recording.splits[-1]} classes{shards}"
    yield f"{recording.path}: {size}, {recording.dtype} {head}{options}"
    heads = ["quantity", "ulps of", "median", "worst", "best possible", "allowed", "wrong rows", "at"]
    rows: list[Sequence[Cell]] = [
        [each.quantity, each.dtype, median, each.error, each.best, each.allowed, wrong, each.where]
        for each, median, wrong in judged.measured
    ]
    if rows:
        yield table([heads, *rows])
    for finding in judged.findings:
        yield wrapped("", f"FAIL {finding.text}", indent="  ")
    yield "wrong" if judged.findings else "right"


def _table_of(recording: Recording, differences: Differences) -> Iterator[str]:
    counted = differences.compared
    columns = {"difference": differences.whole} | {name: differences.parts[name] for name in PARTS}
    yield f"log_prob of {len(counted)} tokens: the rollout's less that of {recording.path}"
    shape = recording.rows_shape
    for why, these in differences.left_out():
        count = "1 token is" if len(these) == 1 else f"{len(these)} tokens are"
        names = ", ".join(row_name(shape, int(row)) for row in these[:_NAMED])
        more = f" and {len(these) - _NAMED} more" * (len(these) > _NAMED)
        yield wrapped("", f"{count} {why} ({names}{more}). Means and tables are without them")
    if not len(counted):
        return
    rows: list[Sequence[Cell]] = [
        [name, float(part.mean()), float(size.mean()), float(size.max()), where if size.any() else None]
        for name, every in columns.items()
        for part in [every[counted]]
        for size in [np.abs(part)]
        for where in [row_name(shape, int(counted[size.argmax()]))]
    ]
    yield table([["part", "mean", "mean size", "largest size", "at"], *rows[1:], rows[0]])
    if differences.unknown_head:
        yield differences.unknown_head
    if text := differences.explanation():
        yield wrapped("", text)
    sizes = np.abs(differences.whole[counted])
    worst = counted[np.argsort(-sizes, kind="stable")[:_WORST]]
    lines: list[Sequence[Cell]] = [
        [name, int(differences.targets[row]), *(float(part[row]) for part in columns.values())]
        for row in worst
        for name in [row_name(shape, int(row))]
    ]
    yield f"the {len(lines)} tokens with the largest difference"
    yield table([["token", "target", *columns], *lines])

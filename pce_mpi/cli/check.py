"""check: hold this installation, at this number of ranks, against the dense float64 oracle."""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from pce_mpi import dense, loss
from pce_mpi.cli.arguments import natural
from pce_mpi.cli.output import Comm
from pce_mpi.comm.collectives import all_reduce
from pce_mpi.comm.tracing import cause, trace
from pce_mpi.conformance import Offer, Outcome, Tolerance, Verdict, cases, offers, run_case
from pce_mpi.conformance.candidates.fitting import problem_of
from pce_mpi.conformance.candidates.loading import ForwardAndBackward, ValueAndGrad
from pce_mpi.conformance.judging.comparing import allowed
from pce_mpi.conformance.problems.cases import OPTIONS
from pce_mpi.conformance.reports.summary import problem
from pce_mpi.distributed.placements import shard_range
from pce_mpi.kernels import kernel_text
from pce_mpi.text import Cell, table
from pce_mpi.ulps import ulp

_TOLERANCE = Tolerance(strict=True)
_PLAIN = "random-logits/float32"
_CASES = [
    *"random-logits reduction many-classes/float32 offset/1e4/float32 masked-shard uneven-shards empty-shard".split(),
    *"fewer-classes-than-ranks zero-rows/sum dims/1-D axis/3-D-* ignored/inside target-out-of-range/far".split(),
    *"probabilities/sum-to-1 probabilities/do-not-sum-to-1 pair/weight+label_smoothing all-options upstream".split(),
    *"same-on-every-rank same-in-every-run".split(),
    *(f"{option}/float32" for option in OPTIONS if option != "ignore_index"),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
It takes a few seconds. Start it with mpiexec to check that number of ranks.
Exit status: 0 if everything is as it should be, 1 if something is OFF."""
    parser.add_argument("--seed", type=natural, default=0, metavar="K", help="seed of the random logits")


def run(options: argparse.Namespace, comm: Comm) -> int:
    """Print one line per case; return 1 if anything is off, on every rank."""
    rows: list[list[Cell]] = []
    causes = []
    for way, (patterns, candidates) in _WAYS.items():
        for case in cases(pattern=patterns):
            name = f"{case}, {way}" if way else str(case)
            outcomes = {
                column: run_case(candidate, case, comm, tolerance=_TOLERANCE, seed=options.seed)
                for column, candidate in candidates.items()
            }
            rows.append(_row(name, outcomes))
            causes += [f"{name}: {problem(outcome)}" for outcome in outcomes.values() if outcome.failed]
    for name, passes in (
        ("class_statistics", _statistics_match(options.seed, comm)),
        ("one payload collective forward, none backward", None if comm is None else _sends_once(comm)),
        ("an error on one rank is raised on all", None if comm is None else _raises_together(comm)),
    ):
        rows.append([name, None, None, None, "not run: needs MPI" if passes is None else _everywhere(passes, comm)])
    size = 1 if comm is None else comm.size
    off = sum(row[-1] == "OFF" for row in rows)
    not_run = sum(str(row[-1]).startswith("not run") for row in rows)
    print(f"pce_mpi on {size} rank{'s' * (size > 1)}: errors in ulps, judged as conformance --strict does")
    print(f"kernel: {kernel_text()}\n")
    print(table([("case", "loss", "gradient", "two passes", "verdict"), *rows]))
    counts = f"\n{len(rows) - off - not_run} of {len(rows)} as they should be"
    print(counts + (f", {off} OFF" if off else "") + (f", {not_run} not run" if not_run else ""))
    print("".join(f"\n{text}" for text in causes), end="\n" * bool(causes))
    return int(off > 0)


def _row(name: str, outcomes: dict[str, Outcome]) -> list[Cell]:
    """The largest errors of a case, and its verdict; `outcomes` by the column that shows the gradient."""
    offered = [outcome for outcome in outcomes.values() if outcome.verdict is not Verdict.NOT_OFFERED]
    losses = [each.error for outcome in offered for each in outcome.accuracies if each.quantity == "loss"]
    gradients = [
        [each.error for each in outcomes[column].accuracies if each.quantity != "loss"] if column in outcomes else []
        for column in ("gradient", "two passes")
    ]
    verdict = "OFF" if any(outcome.failed for outcome in offered) else "ok"
    if not offered:
        verdict = "not run: " + next(iter(outcomes.values())).note
    return [name, *(max(errors, default=None) for errors in (losses, *gradients)), verdict]


def _everywhere(passes: bool, comm: Comm) -> str:
    if comm is not None:
        with cause("check", reason="pass on all ranks"):
            passes = bool(all_reduce(np.array(passes), comm, "min"))
    return "ok" if passes else "OFF"


def _against_rank_order(*arrays: Any, comm: Comm, **options: Any) -> tuple[Any, Any]:
    """The last rank of the communicator that the loss sees has the first classes."""
    reverse: Any = None if comm is None else comm.Split(0, -comm.rank)
    try:
        return loss.softmax_cross_entropy_value_and_grad(*arrays, comm=reverse, **options)
    finally:
        if reverse is not None:
            reverse.Free()


@offers(gradient="backward", reductions=("none",), overwrites_logits=True)
def _in_place(logits: Any, targets: Any, *, comm: Comm, **options: Any) -> tuple[Any, Any]:
    value, residuals = loss.softmax_cross_entropy_forward(logits, targets, comm=comm, reduction="none", **options)
    return value, lambda dloss: loss.softmax_cross_entropy_backward(dloss, residuals, out=logits)


def _rows_sharded(logits: Any, targets: Any, *, class_start: int, num_classes: int, comm: Comm) -> tuple[Any, Any]:
    """Solve the problem with the rows sharded over the ranks in place of the classes."""
    size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
    whole = logits if comm is None else np.concatenate(comm.allgather(logits), axis=-1)
    mine = slice(*shard_range(len(whole), size, rank))
    value, dlogits = loss.softmax_cross_entropy_value_and_grad(whole[mine], targets[mine], batch_comm=comm)
    gradient = dlogits if comm is None else np.concatenate(comm.allgather(dlogits))
    return value, gradient[:, class_start : class_start + logits.shape[-1]].copy()


# By what sets the call apart: cases, and the functions that are run, by the column that shows their gradient.
_WAYS: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
    "": (_CASES, {"gradient": ValueAndGrad(), "two passes": ForwardAndBackward()}),
    "compute_dtype float64": (
        (_PLAIN,),
        {"gradient": partial(loss.softmax_cross_entropy_value_and_grad, compute_dtype=np.float64)},
    ),
    "shards against the order of ranks": (("uneven-shards/any",), {"gradient": _against_rank_order}),
    "out=logits": (("upstream/each-row",), {"two passes": _in_place}),
    "rows sharded by batch_comm": ((_PLAIN,), {"gradient": _rows_sharded}),
}


def _statistics_match(seed: int, comm: Comm) -> bool:
    (case,) = cases(pattern=_PLAIN)
    size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
    whole = problem_of(case, Offer(), size, seed=seed)
    got = loss.class_statistics(whole.shard(rank).arrays["logits"], whole.targets, comm=comm)._asdict()
    return all(
        np.all(np.abs(got[name] - exact) <= allowed(_TOLERANCE, "float32") * ulp(exact, "float32"))
        for name, exact in dense.class_statistics(whole.logits, whole.targets)._asdict().items()
    )


def _sends_once(comm: Any) -> bool:
    with trace() as forward:
        _, residuals = loss.softmax_cross_entropy_forward(np.zeros((2, 3)), [0, 0], comm=comm)
    with trace() as backward:
        loss.softmax_cross_entropy_backward(1.0, residuals)
    return forward.count() == 1 and not backward.events


def _raises_together(comm: Any) -> bool:
    wrong_on_the_last = np.zeros((2, 3), np.int64 if comm.rank == comm.size - 1 else np.float32)
    try:
        loss.softmax_cross_entropy_forward(wrong_on_the_last, [0, 0], comm=comm)
    except TypeError:
        return True
    return False

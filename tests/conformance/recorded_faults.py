"""A program for 2 ranks: records what wrong candidates give, and what the kit says of them, in a folder."""

import json
from pathlib import Path
import sys

from mpi4py import MPI
from safetensors.numpy import save_file

from candidates.wild import megatron, unshifted
from candidates.wrong import numbers, options, probabilities, rows, special_values
from pce_mpi.conformance import cases, offer_of, run_case
from pce_mpi.conformance.candidates.fitting import problem_of
from pce_mpi.conformance.problems.kinds import KINDS
from pce_mpi.conformance.runs.procedures import PROCEDURES, Trial

# Each candidate with a case that shows its fault.
FAULTS = [
    (megatron.MegatronSmoothing, "label_smoothing/float32"),
    (unshifted.UnshiftedEntropy, "offset/1e4/float32"),
    (options.SmoothingOverLocalClasses, "label_smoothing/float32"),
    (options.SmoothedSumNotReduced, "label_smoothing/float32"),
    (numbers.OneSubtractedAfterRounding, "p-near-1/bfloat16"),
    (numbers.RoundedLogsumexp, "offset/1e4/float32"),
    (numbers.NoMaximum, "logits-of-1000/float32"),
    (numbers.ClippedAt64, "logits-of-1000/float32"),
    (numbers.LogProbabilitiesInHalf, "p-near-1/bfloat16"),
    (special_values.MaskedShardIsNan, "masked-shard/last"),
    (special_values.ZeroTimesInfinity, "masked-classes/every-third"),
    (rows.MeanOverAllRows, "ignore_index/float32"),
    (probabilities.GradientOfLogProbabilities, "probabilities/sum-to-1"),
]


def record(folder, problem, answer, comm):
    """Write the part of this rank, as the recorder for torch does."""
    shard = problem.shard(comm.rank)
    numbers = next(name for name, kind in KINDS.items() if kind is problem.kind)
    tensors = {"targets": problem.targets, **shard.arrays, numbers: answer.loss, "gradient": answer.dlogits}
    given = shard.options | {"rank": comm.rank, "ranks": comm.size, "smoothing": problem.conventions["smoothing"]}
    tensors |= {"weight": given.pop("weight")} if "weight" in given else {}
    assert given.pop("axis") == -1 and problem.dloss is None
    save_file(
        {name: tensor.copy() for name, tensor in tensors.items() if tensor is not None},
        folder / f"rank-{comm.rank}.safetensors",
        {name: str(value) for name, value in given.items()},
    )


def main(comm, folder):
    said = {}
    for kind, name in FAULTS:
        candidate = kind()
        offer = offer_of(candidate)
        (case,) = cases(candidate, pattern=name)
        problem = problem_of(case, offer, comm.size, seed=0)
        trial = Trial(candidate, offer, comm, lambda which, problem=problem: problem)
        PROCEDURES["plain"](trial)
        ((_, _, answer),) = trial.answers
        here = folder / kind.__name__
        here.mkdir(exist_ok=True)
        record(here, problem, answer, comm)
        said[kind.__name__] = run_case(candidate, case, comm).findings[0].text
    if comm.rank == 0:
        (folder / "said.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(MPI.COMM_WORLD, Path(sys.argv[1]))

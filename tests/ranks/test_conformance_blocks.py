"""One fault, one block of a report: its cause is chosen by all cases that fail, for each kind of candidates."""

import json

import pytest

from candidates.by_hand import ByHand
from candidates.wild import distillation
from candidates.wrong import options, rows, shards, steps, textbook
from pce_mpi.conformance.candidates.catalogue import cases
from pce_mpi.conformance.candidates.offers import offer_of
from pce_mpi.conformance.judging.outcomes import Outcome, Report, agree
from pce_mpi.conformance.problems import kinds
from pce_mpi.conformance.reports import summary
from pce_mpi.conformance.runs.running import run_case
from pce_mpi.conformance.serialization import from_json, to_json

FAMILIES = ["random-logits", "reduction", "p-near-1", "logits-of-1000", "ignored", "dims", "many-classes/more-than-65*"]
FAMILIES += ["targets-at-shard-borders", "targets-on-one-rank", "uneven-shards", "weight/float32"]


def blocks(candidate, comm, pattern):
    """Return the line of each block, and how many cases failed."""
    offer = offer_of(candidate)
    outcomes = [run_case(candidate, case, comm) for case in cases(offer, pattern=pattern)]
    outcomes = [
        from_json(Outcome, json.loads(json.dumps(to_json(outcome)))) for outcome in outcomes
    ]  # as the command has them from rank 0
    agree(outcomes)
    report = Report("candidate", offer, (comm.size,), {}, 0, False, 1.0, outcomes)
    return [summary.problem(failed[0]) for failed in summary.by_cause(report)], len(report.failed)


LOCAL = "the softmax is of each rank's own classes only: its sum is never reduced over the ranks ("
MAXIMA = "the ranks add sums of exponentials that are relative to maxima of their own ("
ADDED = "the ranks' logsumexps are added, where the logsumexp of all classes is due ("
WRAPPED = "a target of another rank is taken for a class of this one: its number is wrapped, and not masked ("
SOFTMAXES = {
    textbook.SoftmaxOfLocalClasses: LOCAL,
    textbook.SumsOfOtherMaxima: MAXIMA,
    textbook.SumsOfOtherMaximaAfterwards: MAXIMA,
    textbook.MaximaLeftIn: MAXIMA,
    textbook.LogsumexpsAdded: ADDED,
}
NUMBERS = {
    textbook.GlobalNumbersForLocal: "global class numbers are taken for numbers of each rank's own classes (",
    textbook.TargetClampedNotMasked: "a target of another rank is taken for a class of this one: it is clamped,",
    textbook.MaskEndsTooLate: "the first class of the next shard is taken for a class of this one: a mask ends",
    shards.FirstClassOfAShard: "the first class of each shard is taken for one of another: a mask begins a class too",
    shards.LastClassOfAShard: "the last class of each shard is taken for one of another: a mask ends a class too",
    textbook.TargetWrappedNotMasked: WRAPPED,
    textbook.GlobalNumberWrapped: WRAPPED,
    shards.EqualShardsAssumed: "class_start is taken for the rank times its number of classes, which is right where "
    'all shards are equal; where that is meant, declare it: @offers(shards="equal") (',
    shards.ShardsInReverse: "the shards are taken in the order of ranks 2, 1, 0 (",
    shards.FirstTwoShardsExchanged: "the shards are taken in the order of ranks 1, 0, 2 (",
    shards.PaddedTo64: "the softmax is of 192 columns, and the classes are 24: padding counts, with logits of 0 (",
    shards.PaddedTo128: "the softmax is of 384 columns, and the classes are 24: padding counts, with logits of 0 (",
    options.SoftcapOf30: "a softcap of 30 is applied, and none was given (",
    options.SoftcapOf15: "a softcap of 15 is applied, and none was given (",
    shards.GradientReducedTwice: "the gradient is 3 times too large: it is summed over the ranks once more (",
}
KINDS = {"loss": lambda loss: loss, "log_prob": textbook.LogProb, "linear": textbook.Head, "entropy": textbook.Entropy}


@pytest.mark.ranks(3)  # the number of rows is no multiple of some shards, and no power of the ranks
@pytest.mark.parametrize(
    ("fault", "kind"),
    # An entropy has no targets, and its gradient is not that of the loss.
    [(fault, kind) for fault in (*SOFTMAXES, *NUMBERS) for kind in KINDS if kind != "entropy" or fault in SOFTMAXES],
)
def test_textbook_fault_is_one_block(comm, fault, kind):
    found, failed = blocks(KINDS[kind](fault()), comm, FAMILIES)
    (line,) = found
    assert line.removeprefix(f"the ranks' {kinds.KINDS[kind].plural} differ: ").startswith(
        {**SOFTMAXES, **NUMBERS}[fault]
    )
    assert failed > 2


class ReducedTwiceWithNan(distillation.AutomodelKL, distillation.ZeroTimesInfinity):
    """Two faults: the gradient, and the divergence beside masked classes."""


ONCE_MORE = "the gradient is 3 times too large: it is summed over the ranks once more ("
APART = "each rank divides each micro-batch by its own count of valid tokens: "
NAN = "the gradient of micro-batch 0 of rank 0, which has no valid token, is nan"
OF_IGNORED = "label smoothing counts ignored rows too ("
PADDED = "the softmax is of 24 columns, and the classes are 23: padding counts, with logits of 0 ("
OTHERS = {
    "head-times-ranks": (textbook.HeadTimesRanks(ByHand()), ["dhidden is 3 times too large: it is summed over the"]),
    "head-over-ranks": (
        textbook.HeadOverRanks(ByHand()),
        ["dhidden is 3 times too small: it is divided by the number"],
    ),
    "kl": (distillation.AutomodelKL(), [ONCE_MORE]),
    "topk-kl": (distillation.ModelOptimizerTopK(), [ONCE_MORE]),
    "kl-of-two-faults": (ReducedTwiceWithNan(), [ONCE_MORE, "the divergence is wrong: nan"]),
    "mean-of-means": (steps.OwnCountOr1(), [APART]),
    "mean-of-means-or-nan": (steps.OwnCount(), [APART, NAN]),
    "means-of-chunks": (
        rows.MeansOfChunksAdded(),
        ["means of chunks of 4 rows are added up, and chunks count"],
        "random-logits",
        "reduction",
        "many-rows/float32",
        "p-near-1",
    ),
    "ignore-index": (rows.IgnoreIndexNotLookedAt(), ["ignore_index is not looked at ("], "ignored/[!w]*"),
    "smoothing-of-ignored-rows": (options.SmoothingOfIgnoredRows(), [OF_IGNORED], "*smooth*"),
    "mean-of-smoothing": (options.MeanOfSmoothingOverAllRows(), [OF_IGNORED], "*smooth*"),
    "padded-to-8": (shards.PaddedTo8(), [PADDED], "uneven*"),
    "padded-to-largest": (shards.PaddedToLargest(), [PADDED], "uneven*"),
    "softcap-twice": (options.SoftcapTwice(), ["softcap is applied twice ("], "*softcap*"),
    "targets-shifted-twice": (steps.TargetsShiftedTwice(), ["targets that were shifted are shifted once more: each"]),
    "rank-without-tokens": (steps.RankWithoutTokensIsOne(), ["a rank without valid tokens is counted as one token: "]),
    "micro-batch-without-tokens": (
        steps.MicroBatchWithoutTokensIsOne(),
        ["a micro-batch of a rank without valid tokens is counted as one token: the"],
    ),
    "constant-divisor": (steps.ConstantDivisor(), ["the divisor is the constant 24: every token counts "]),
    "context-ranks": (steps.HalvedByContext(), ["the trainer averages over the 3 context ranks, and nothing makes up"]),
}


@pytest.mark.ranks(3)  # the number of ranks is not that of micro-batches in all cases
@pytest.mark.parametrize("which", OTHERS)
def test_fault_of_other_kind_is_one_block(comm, which):
    candidate, words, *pattern = OTHERS[which]
    found, _ = blocks(candidate, comm, pattern or None)
    assert len(found) == len(words) and all(map(str.startswith, found, words)), found
